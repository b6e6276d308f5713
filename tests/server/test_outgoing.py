"""Answers as they stand on the wire."""

import asyncio

from tests.support.server_fixture import answer, eventually, house


async def test_an_answer_comes_back_byte_for_byte_with_its_headers_in_order():
    """Status, end-to-end headers (repeated, in order and spelling) and body are the upstream's; ours are added."""
    async with house() as at:
        at.stage.reply = answer(
            b'\x00\xff{"a": 1.10}',
            "Content-Type: application/json",
            "X-RateLimit-Remaining: 3",
            "Set-Cookie: a=1; Path=/",
            "set-cookie: b=2",
            "retry-after-ms: 7",
            "Keep-Alive: timeout=5",
            "X-Hop: gone",
            "Connection: X-Hop",
            status="429 Too Many Requests",
        )
        got = await at.chat()
        assert got.line == "HTTP/1.1 429 Too Many Requests"
        assert got.body == b'\x00\xff{"a": 1.10}'
        assert got.headers == [
            ("Content-Type", "application/json"),
            ("X-RateLimit-Remaining", "3"),
            ("Set-Cookie", "a=1; Path=/"),
            ("set-cookie", "b=2"),
            ("retry-after-ms", "7"),
            ("Content-Length", "13"),
            ("x-ullage-outcome", "verbatim"),
        ]


async def test_a_chunk_is_seen_before_the_next_one_is_sent():
    """A stream passes chunk by chunk: the upstream sends the next only after the client has seen the last."""
    async with house() as at:
        seen = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(5):
                text = b"data: %d\n\n" % number
                writer.write(b"%x\r\n%b\r\n" % (len(text), text))
                await asyncio.wait_for(seen.wait(), 5)
                seen.clear()
            writer.write(b"0\r\n\r\n")

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b"transfer-encoding: chunked" in head
        for number in range(5):
            assert await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5) == b"9\r\ndata: %d\n\n\r\n" % number
            seen.set()
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"0\r\n\r\n"
        writer.close()
        assert await eventually(lambda: at.reports)
        assert at.reports[0].stream


async def test_head_and_bodyless_answers():
    """HEAD keeps the content-length of the body it does not have; 204 and 304 have none."""
    async with house() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
        reader, writer = await at.connect()
        writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 1234\r\n" in head
        assert b"chunked" not in head
        at.stage.reply = b"HTTP/1.1 204 No Content\r\n\r\n"
        writer.write(b"DELETE /v1/files/x HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204")
        assert b"chunked" not in head
        writer.close()


async def test_http_1_0_gets_no_chunks():
    """A client of HTTP/1.0 reads a body of unknown length to the end of the connection."""
    async with house() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.endswith(b"\r\n\r\nabc")
        assert b"chunked" not in got
        writer.close()


async def test_pipelined_requests_are_answered_in_order():
    """Several requests sent at once on one connection get their answers one after the other."""
    async with house() as at:
        reader, writer = await at.connect()
        one = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        writer.write(one * 5)
        for _ in range(5):
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"{}"
        writer.close()
        assert len(at.stage.heard) == 5

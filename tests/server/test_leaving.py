"""Clients that leave, upstreams that break, readers that are slow."""

import asyncio
import socket

import pytest

from proxy.server import Limits, ServerConfig
from proxy.upstream import Timeouts
from tests.support.server_fixture import chunk, eventually, raw_answer, running_server

POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def read_to_end(reader):
    """Returns when the peer of *reader* has closed or reset the connection."""
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses"])
@pytest.mark.parametrize("moment", ["waiting", "after the head", "mid-stream"])
async def test_a_client_that_leaves_aborts_the_upstream_call(path, moment):
    """Whenever the client closes, the upstream sees its connection end within a second."""
    async with running_server() as at:
        reached, ended = asyncio.Event(), asyncio.Event()

        async def script(heard, reader, writer):
            if moment != "waiting":
                writer.write(SSE + (chunk(b"data: 1\n\n") if moment == "mid-stream" else b""))
            reached.set()
            await read_to_end(reader)
            ended.set()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % path)
        await asyncio.wait_for(reached.wait(), 60)
        if moment != "waiting":
            await asyncio.wait_for(reader.readuntil(b"\n\n" if moment == "mid-stream" else b"\r\n\r\n"), 60)
        writer.close()
        await asyncio.wait_for(ended.wait(), 60)
        assert await eventually(lambda: at.reports)
        report = at.reports[0]
        assert (report.status, report.reason) == (499 if moment == "waiting" else 200, "client_left")
        assert at.server.in_flight == 0


async def test_an_upload_that_is_not_read_is_given_up():
    """An upload that the upstream does not read ends on both sides after the pause allowed."""
    async with running_server(ServerConfig("up", limits=Limits(idle=0.4))) as at:
        ended = asyncio.Event()

        async def serve(reader, writer):
            reader._transport.pause_reading()
            await asyncio.wait_for(over.wait(), 60)
            reader._transport.resume_reading()
            await read_to_end(reader)
            ended.set()

        over = asyncio.Event()
        at.stage.serve = serve
        reader, writer = await at.connect()
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000\r\n\r\n" + b"x" * 40_000_000)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)) == b"HTTP/1.1 504 Gateway Timeout\r\n"
        writer.transport.abort()
        over.set()
        await asyncio.wait_for(ended.wait(), 60)
        assert await eventually(lambda: at.server.in_flight == 0)


@pytest.mark.parametrize("how", ["reset", "cut chunk", "bad chunk"])
async def test_a_broken_stream_ends_with_an_error_event(how):
    """All bytes so far arrive, then one error event, then an abnormal end; never ``[DONE]``."""
    seen = asyncio.Event()
    async with running_server() as at:

        async def script(heard, reader, writer):
            writer.write(SSE + chunk(b"data: 1\n\n"))
            await asyncio.wait_for(seen.wait(), 60)
            if how == "reset":
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                writer.write(b"ff\r\ndata: par" if how == "cut chunk" else b"zz\r\n")
            writer.close()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % b"/v1/chat/completions")
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 60)
        seen.set()
        text = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert (b"data: par" in text) == (how == "cut chunk")
        assert text.count(b"upstream_stream_error") == 1
        assert b"[DONE]" not in text
        assert not text.endswith(b"0\r\n\r\n")
        assert at.reports[0].reason == "upstream_stream_error"


async def test_a_broken_body_of_known_length_is_short():
    """A JSON answer that breaks is passed as far as it came, and the connection ends."""
    async with running_server() as at:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{123")
            await writer.drain()
            writer.close()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % b"/v1/chat/completions")
        assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"\r\n\r\n{123")
        writer.close()


async def ended_by_the_connection(head, body, *, reset, path=b"/v1/chat/completions", until=b""):
    """The bytes that a client reads, and the end of its connection, if the upstream's connection ends behind *body*.

    It ends when the client has read *until*, if that is empty *body*.
    """
    async with running_server() as at:
        read = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)
            await asyncio.wait_for(read.wait(), 60)
            if reset:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.close()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % path)
        got = [await asyncio.wait_for(reader.readuntil(until or body), 60)]
        read.set()
        ended = "closed"
        try:
            while more := await asyncio.wait_for(reader.read(2**16), 60):
                got.append(more)
                if more.endswith(b"0\r\n\r\n"):
                    ended = "complete"
                    break
        except ConnectionResetError:
            ended = "reset"
        writer.close()
        assert await eventually(lambda: at.reports)
        return b"".join(got), ended, at.reports[0].reason


EVENTS = b"Content-Type: text/event-stream"
JSON = b"Content-Type: application/json"


async def test_a_stream_that_simply_ends_lacks_its_last_chunk():
    """A clean end of the connection does not end a stream without its last event; no event is added."""
    text, ended, reason = await ended_by_the_connection(EVENTS, b"data: 1\n\n", reset=False)
    assert text.endswith(b"data: 1\n\n\r\n")
    assert (ended, reason) == ("closed", "upstream_truncated")


@pytest.mark.parametrize(
    "body",
    [
        b"data: 1\n\ndata: [DONE]\n\n",
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n',
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
        b'data: {"type":"response.completed","response":{}}\n\n',
        b'data: {"error": {"message": "no"}}\n\n',
    ],
)
async def test_a_stream_with_its_last_event_is_complete(body):
    """If only the connection ends a stream, its own last event makes it complete."""
    text, ended, reason = await ended_by_the_connection(EVENTS, body, reset=False)
    assert text.endswith(body + b"\r\n0\r\n\r\n")
    assert (ended, reason) == ("complete", "")


async def test_a_reset_is_no_end_of_a_stream():
    """A reset in the middle of a body that the connection ends is reported like any broken stream."""
    for body in (b"data: 1\n\n", b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'):
        text, ended, reason = await ended_by_the_connection(EVENTS, body, reset=True)
        assert text.count(b"upstream_stream_error") == 1
        assert not text.endswith(b"0\r\n\r\n")
        assert (ended, reason) == ("closed", "upstream_stream_error")


LAST_EVENTS = [
    (b"/v1/chat/completions", b"data: [DONE]\n\n"),
    (b"/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
    (b"/v1/responses", b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'),
    (b"/v1beta/models/m:streamGenerateContent?alt=sse", b'data: {"candidates": [{"finishReason": "STOP"}]}\r\n\r\n'),
]
ENDINGS = [(True, True), (False, True), (True, False)]


@pytest.mark.parametrize(("path", "last"), LAST_EVENTS)
@pytest.mark.parametrize(("is_chunked", "is_reset"), ENDINGS)
async def test_what_breaks_behind_the_last_event_is_complete(path, last, is_chunked, is_reset):
    """A connection that is reset or closed behind an API's last event has brought the whole answer: a clean end."""
    head, body = EVENTS, b"data: 1\n\n" + last
    if is_chunked:
        head, body = EVENTS + b"\r\nTransfer-Encoding: chunked", chunk(b"data: 1\n\n") + chunk(last)
    text, ended, reason = await ended_by_the_connection(head, body, reset=is_reset, path=path, until=last)
    assert text.endswith(last + b"\r\n0\r\n\r\n")
    assert (ended, reason) == ("complete", "")


@pytest.mark.parametrize("is_reset", [True, False])
async def test_a_last_event_that_is_cut_is_no_end(is_reset):
    """A stream that stops in the middle of its last event has lost a part of it: here, of the response."""
    cut = b'event: response.completed\ndata: {"type":"response.completed","response":{"output":['
    text, ended, reason = await ended_by_the_connection(EVENTS, cut, reset=is_reset, path=b"/v1/responses")
    assert not text.endswith(b"0\r\n\r\n")
    assert ended == "closed"
    assert reason == ("upstream_stream_error" if is_reset else "upstream_truncated")


async def test_a_body_without_a_length_ends_as_the_upstreams_did():
    """A body that is no stream lasts until the client's connection ends: in order, or by a reset."""
    text, ended, reason = await ended_by_the_connection(JSON, b'{"choices": []}', reset=False)
    assert text.endswith(b'\r\n\r\n{"choices": []}')
    assert b"connection: close" in text
    assert (ended, reason) == ("closed", "")
    text, ended, reason = await ended_by_the_connection(JSON, b'{"choices": [', reset=True)
    assert text.endswith(b'\r\n\r\n{"choices": [')
    assert (ended, reason) == ("reset", "upstream_stream_error")


async def test_an_upstream_that_hangs_up_is_called_once():
    """After the body was sent a lost connection is a 502; the request is not repeated."""
    async with running_server() as at:

        async def script(heard, reader, writer):
            writer.close()

        at.stage.script = script
        got = await at.chat()
        assert got.line == "HTTP/1.1 502 Bad Gateway"
        assert b"upstream_unreachable" in got.body
        assert len(at.stage.heard) == 1


async def test_an_upstream_that_stays_silent_is_a_504():
    """No first byte in time is a gateway timeout, and the call is aborted."""
    async with running_server(timeouts=Timeouts(first_byte=0.2)) as at:

        async def script(heard, reader, writer):
            await read_to_end(reader)

        at.stage.script = script
        got = await at.chat()
        assert got.line == "HTTP/1.1 504 Gateway Timeout"
        assert b"upstream_timeout" in got.body
        assert await eventually(at.stage.ended.is_set)


async def test_a_silent_stream_ends_with_an_error_event():
    """A stream that goes quiet for longer than allowed is ended with a word."""
    async with running_server(timeouts=Timeouts(idle=0.2)) as at:

        async def script(heard, reader, writer):
            writer.write(SSE + chunk(b"data: 1\n\n"))
            await read_to_end(reader)

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % b"/v1/chat/completions")
        assert b"upstream_stream_error" in await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_a_slow_reader_holds_the_upstream_back_and_is_dropped_in_the_end():
    """Bytes that a client does not read stay with the upstream, not in memory; a reader that never reads is cut."""
    sent = 0
    async with running_server(ServerConfig("up", limits=Limits(write=0.7))) as at:

        async def script(heard, reader, writer):
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            piece = chunk(b"x" * 65536)
            for _ in range(16_000):
                writer.write(piece)
                await writer.drain()
                sent += 65536

        at.stage.script = script
        _, writer = await at.connect()
        writer.transport.pause_reading()
        writer.write(POST % b"/v1/chat/completions")
        assert await eventually(lambda: sent)
        assert await eventually(lambda: at.reports)
        assert sent < 128 * 2**20, "the kernel's buffers hold some of a gigabyte, and nothing else does"
        assert at.reports[0].reason == "client_left"
        writer.transport.abort()


async def test_an_endless_answer_of_comments_ends_with_an_error_event():
    """A stream that shows signs of life and no end is broken off after its total time."""
    async with running_server(timeouts=Timeouts(total=0.3)) as at:

        async def script(heard, reader, writer):
            writer.write(SSE)
            while not writer.transport.is_closing():
                writer.write(chunk(b": still here\n\n"))
                await asyncio.sleep(0.01)

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % b"/v1/chat/completions")
        assert b"upstream_stream_error" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert await eventually(at.stage.ended.is_set)
        assert at.reports[0].reason == "upstream_stream_error"


async def test_a_switch_of_protocols_is_no_answer_to_a_post():
    """An upstream's 101 to a plain request is a 502: behind it a client would read whatever the upstream writes."""
    async with running_server() as at:
        at.stage.reply = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nsmuggled"
        for path in ("/v1/chat/completions", "/v1/files"):
            got = await at.ask("POST", path, b"{}", "Upgrade: x", "Connection: Upgrade")
            assert got.line == "HTTP/1.1 502 Bad Gateway"
            assert b"smuggled" not in got.body


async def test_only_our_own_headers_bear_our_name():
    """On every route, what an upstream says under the proxy's name does not stand beside what the proxy says."""
    async with running_server() as at:
        at.stage.reply = raw_answer(b'{"data": []}', "X-Ullage-Outcome: compacted", "x-ullage-mine: 1")
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/files"), ("GET", "/v1/models")):
            got = await at.ask(method, path, b"{}" if method == "POST" else b"")
            assert got.all("x-ullage-mine") == []
            assert got.all("x-ullage-outcome") == ["verbatim"]

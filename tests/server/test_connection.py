"""Connections that bring no request, or bring one slowly."""

import asyncio

import pytest

from proxy.server import Limits, ServerConfig
from tests.support.file_descriptors import few_descriptors
from tests.support.server_fixture import eventually, read_request, running_server


async def test_a_body_that_is_not_http_is_a_400():
    """A broken chunk is the client's mistake, and its bytes are not repeated to it."""
    async with running_server() as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        got = await at.raw(head + b"SECRET\r\n")
        assert got.line.split()[1] == "400"
        assert b"SECRET" not in got.body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-SECRET : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
        b"SECRET\r\n\r\n",
    ],
)
async def test_requests_that_could_be_read_in_two_ways_are_refused(request_bytes):
    """Ambiguous or malformed requests get a fixed 400 and the connection ends."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(request_bytes)
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.split(b"\r\n")[0] in (b"HTTP/1.0 400 Bad Request", b"HTTP/1.1 400 Bad Request")
        assert b"SECRET" not in got
        writer.close()
        assert at.stage.heard == []


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


def fields(count, size):
    return b"".join(b"X-%d: %b\r\n" % (number, b"a" * size) for number in range(count))


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + fields(5, 30_000) + b"\r\n",
        GET + fields(5, 30_000),
        GET + fields(100, 1) + b"\r\n",
        GET + fields(100, 1) + b"X-more: 1\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused(head):
    """One field, all of them or their number: above a limit the answer is a 431, whether the head ends or not."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(head)
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.split(b" ")[1] == b"431"
        assert b"server.limits.head" in got
        assert b"aaaa" not in got
        assert (at.stage.heard, at.server.refusals) == ([], {"head_too_large": 1})


@pytest.mark.parametrize(
    ("start", "status"), [(GET, b"431"), (b"", b"431"), (CHUNKED + b"0\r\n", b"400"), (CHUNKED + b"1;ext=", b"400")]
)
async def test_the_unread_part_of_a_request_is_bounded(start, status):
    """Heads, trailers and chunk extensions that never end are refused at the limit, however slowly they come."""
    async with running_server(ServerConfig("up", limits=Limits(head=20_000, header=10_000, fields=1000))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        answered = asyncio.ensure_future(reader.readuntil(b"\r\n"))
        sent = 0
        while not answered.done() and sent < 200_000:
            piece = b"a" * 1000 if b"ext" in start else b"X-%d: %b\r\n" % (sent, b"a" * 1000)
            writer.write(piece if start or sent else GET + piece)
            sent += len(piece)
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(answered, 5)).split()[1] == status
        assert sent < 100_000
        assert at.stage.heard == []


async def test_a_head_counts_anew_for_each_request_and_bodies_do_not_count():
    """A connection may carry any number of heads and bytes of bodies, as long as each head is within the limit."""
    async with running_server(ServerConfig("up", limits=Limits(head=20_000, header=10_000))) as at:
        reader, writer = await at.connect()
        body = b"x" * 100_000
        framed = b"".join(b"3e8\r\n" + b"x" * 1000 + b"\r\n" for _ in range(100)) + b"0\r\nX-Trailer: 1\r\n\r\n"
        post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + fields(15, 1000)
        for _ in range(3):
            for request in (
                post + b"Content-Length: 100000\r\n\r\n" + body,
                post + b"Transfer-Encoding: chunked\r\n\r\n" + framed,
            ):
                for start in range(0, len(request), 7000):
                    writer.write(request[start : start + 7000])
                    await asyncio.sleep(0.001)
                heard = await asyncio.wait_for(read_request(reader), 5)
                assert heard.line == "HTTP/1.1 200 OK"
        assert [len(heard.body) for heard in at.stage.heard] == [100_000] * 6
        assert at.server.refusals == {}


async def test_requests_in_one_go_are_all_answered_in_order():
    """Pipelined requests wait in the socket, not in memory, and none is lost."""
    async with running_server() as at:
        reader, writer = await at.connect()
        for number in range(200):
            writer.write(b"GET /v1/models/m%d HTTP/1.1\r\nHost: x\r\n\r\n" % number)
        for _ in range(200):
            heard = await asyncio.wait_for(read_request(reader), 5)
            assert heard.line == "HTTP/1.1 200 OK"
        assert [heard.line.split()[1] for heard in at.stage.heard] == [f"/v1/models/m{number}" for number in range(200)]


async def test_the_oldest_idle_connection_makes_room_for_a_new_one():
    """Connections on which no whole request ever comes cannot keep others out."""
    async with running_server(ServerConfig("up", limits=Limits(connections=3))) as at:
        idle = [await at.connect() for _ in range(3)]
        for _, writer in idle:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHos")
        for _ in range(5):
            assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"
        assert await asyncio.wait_for(idle[0][0].read(), 5) == b""
        assert at.server.refusals["made_room"] >= 1
        assert "full" not in at.server.refusals


async def test_a_connection_too_many_is_refused_readably():
    """While every connection has a request under way, a new one gets a 503, and is served once one of them ended."""
    async with running_server(ServerConfig("up", limits=Limits(connections=2))) as at:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            await reader.read()

        at.stage.script = script
        busy = [await at.connect() for _ in range(2)]
        for reader, writer in busy:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert (await asyncio.wait_for(reader.readuntil(b"data: 1"), 5)).startswith(b"HTTP/1.1 200")
        got = await at.ask("GET", "/health/live")
        assert (got.line.split()[1], got.all("retry-after"), got.all("connection")) == ("503", ["1"], ["close"])
        assert b"server.limits.connections" in got.body
        assert at.server.refusals == {"full": 1}
        busy[0][1].close()
        assert await eventually(lambda: at.server.in_flight == 1)
        assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1/models HTTP/1.1\r\nHos", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_idle_connections_and_trickled_headers_are_cut(start):
    """A connection on which no whole request arrives in time is closed, whether fresh, half sent or used before."""
    async with running_server(ServerConfig("up", limits=Limits(keep_alive=0.3))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        got = await asyncio.wait_for(reader.read(), 5)
        assert (got != b"") == start.endswith(b"\r\n\r\n")


async def test_long_headers_up_to_the_limit_pass():
    """A header field of 30 KB goes through, both ways."""
    async with running_server() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nX-Long: " + b"b" * 30_000 + b"\r\nContent-Length: 0\r\n\r\n"
        got = await at.chat(b"{}", "X-Long: " + "a" * 30_000)
        assert got.all("x-long") == ["b" * 30_000]
        assert at.stage.heard[0].all("x-long") == ["a" * 30_000]


async def test_a_client_that_comes_while_descriptors_run_out_gets_a_503():
    """While the last descriptors are left to running requests, new clients are refused, counted, and served later."""
    async with running_server() as at:
        with few_descriptors(16):
            reader, writer = await at.connect()
            got = await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in got
        assert b'"overloaded"' in got
        assert at.server.without_descriptor == 1
        assert (await at.chat()).line == "HTTP/1.1 200 OK"
        assert at.server.without_descriptor == 1

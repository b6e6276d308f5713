"""What arrives on a connection and is no request, or is none for long."""

import asyncio

import pytest

from proxy.server import Limits, ServerConfig
from tests.descriptors import few_descriptors
from tests.server.house import house


async def test_a_body_that_is_not_http_is_a_400():
    """A broken chunk is the client's mistake, and its bytes are not repeated to it."""
    async with house() as at:
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
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
        b"SECRET\r\n\r\n",
    ],
)
async def test_requests_that_could_be_read_in_two_ways_are_refused(request_bytes):
    """Ambiguous or malformed requests get a fixed 400 and the connection ends."""
    async with house() as at:
        reader, writer = await at.connect()
        writer.write(request_bytes)
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.split(b"\r\n")[0] in (b"HTTP/1.0 400 Bad Request", b"HTTP/1.1 400 Bad Request")
        assert b"SECRET" not in got
        writer.close()
        assert at.stage.heard == []


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1/models HTTP/1.1\r\nHos", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_idle_connections_and_trickled_headers_are_cut(start):
    """A connection on which no whole request arrives in time is closed, whether fresh, half sent or used before."""
    async with house(ServerConfig("up", limits=Limits(keep_alive=0.3))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        got = await asyncio.wait_for(reader.read(), 5)
        assert (got != b"") == start.endswith(b"\r\n\r\n")


async def test_long_headers_up_to_the_limit_pass():
    """A header field of 30 KB goes through, both ways."""
    async with house() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nX-Long: " + b"b" * 30_000 + b"\r\nContent-Length: 0\r\n\r\n"
        got = await at.chat(b"{}", "X-Long: " + "a" * 30_000)
        assert got.all("x-long") == ["b" * 30_000]
        assert at.stage.heard[0].all("x-long") == ["a" * 30_000]


async def test_a_client_that_comes_while_descriptors_run_out_gets_a_503():
    """While the last descriptors are left to running requests new clients are told, counted, and served later."""
    async with house() as at:
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

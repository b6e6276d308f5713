"""How many connections there may be, and which give way."""

import asyncio

import pytest

from proxy.server import Limits, ServerConfig
from tests.support.file_descriptors import few_descriptors
from tests.support.server_fixture import eventually, running_server


async def test_the_oldest_idle_connection_makes_room_for_a_new_one():
    """Connections on which no whole request ever comes cannot keep others out."""
    async with running_server(ServerConfig("up", limits=Limits(connections=3))) as at:
        idle = [await at.connect() for _ in range(3)]
        for _, writer in idle:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHos")
        for _ in range(5):
            assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"
        assert await asyncio.wait_for(idle[0][0].read(), 60) == b""
        assert at.server.refusals["made_room"] >= 1
        assert "full" not in at.server.refusals


async def dropped(reader, writer):
    """Send a request on a connection that has ended: a reset would raise an error."""
    assert await asyncio.wait_for(reader.read(), 60) == b""
    for _ in range(3):
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(writer.drain(), 60)
        await asyncio.sleep(0.02)
    return True


async def test_a_connection_that_makes_room_ends_in_order():
    """A request that its client sends at that moment is dropped, and the client sees the end of the connection."""
    async with running_server(ServerConfig("up", limits=Limits(connections=1))) as at:
        reader, writer = await at.connect()
        writer.write(b"GET /v1/models HTTP/1.1\r\nHos")
        await asyncio.sleep(0.05)
        assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"
        assert await dropped(reader, writer)
        assert at.server.refusals == {"made_room": 1}


async def test_many_connections_that_make_room_are_not_all_waited_for():
    """So many end in order at a time; the others are closed at once, however fast new ones come."""
    async with running_server(ServerConfig("up", limits=Limits(connections=1))) as at:
        clients = [await at.connect() for _ in range(400)]
        assert await eventually(lambda: at.server.refusals["made_room"] == 399)
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in clients[:-1]]
        assert await asyncio.wait_for(asyncio.gather(*ended), 60) == [b""] * 399
        assert await eventually(lambda: len(at.server._listener.connections) <= 257)


@pytest.mark.parametrize("start", [b"", b"GET /v1/models HTTP/1.1\r\nHos"])
async def test_a_connection_whose_time_is_over_ends_in_order(start):
    """A request that crosses with the end of an idle connection is dropped: nothing is reset."""
    async with running_server(ServerConfig("up", limits=Limits(first_request=0.2, keep_alive=0.2))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        assert await dropped(reader, writer)


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
            assert (await asyncio.wait_for(reader.readuntil(b"data: 1"), 60)).startswith(b"HTTP/1.1 200")
        got = await at.ask("GET", "/health/live")
        assert (got.line.split()[1], got.all("retry-after"), got.all("connection")) == ("503", ["1"], ["close"])
        assert b"server.limits.connections" in got.body
        assert at.server.refusals == {"full": 1}
        busy[0][1].close()
        assert await eventually(lambda: at.server.in_flight == 1)
        assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"


async def test_a_refused_client_reads_why_even_if_it_sends_first():
    """A client that sends a long request before it looks for an answer finds the 503, and so do the next hundreds."""
    async with running_server(ServerConfig("up", limits=Limits(connections=1))) as at:
        at.stage.script = lambda heard, reader, writer: reader.read()
        _, busy = await at.connect()
        busy.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert await eventually(lambda: at.server.in_flight == 1)
        reader, writer = await at.connect()
        assert await eventually(lambda: at.server.refusals)
        for _ in range(30):
            writer.write(b"x" * 100_000)
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(0.002)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 503 ")
        refused = [await at.connect() for _ in range(300)]
        for reader, writer in refused:
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 503 ")
            writer.close()
        assert at.server.refusals == {"full": 301}
        busy.close()


async def test_a_client_that_comes_while_descriptors_run_out_gets_a_503():
    """While the last descriptors are left to running requests, new clients are refused, counted, and served later."""
    async with running_server() as at:
        with few_descriptors(16):
            reader, writer = await at.connect()
            got = await asyncio.wait_for(reader.read(), 60)
            writer.close()
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in got
        assert b'"overloaded"' in got
        assert at.server.without_descriptor == 1
        assert (await at.chat()).line == "HTTP/1.1 200 OK"
        assert at.server.without_descriptor == 1

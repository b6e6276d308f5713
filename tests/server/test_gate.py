"""How much may be under way at once."""

import asyncio

import pytest

from proxy.core.errors import Overloaded
from proxy.server import Limits, ServerConfig
from proxy.server.gate import Gate
from tests.server.house import eventually, house

SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, held=300_000))


async def test_too_many_bytes_in_memory_are_refused_before_the_body_is_read():
    """Bodies of all requests together stay under one limit; the refused one may come back later."""
    async with house(SMALL) as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        waiting = []
        for _ in range(3):
            waiting.append(await at.connect())
            waiting[-1][1].write(head)
        assert await eventually(lambda: at.server.in_flight == 3)
        got = await asyncio.wait_for(at.raw(head), 5)
        assert got.line.split()[1] == "503"
        assert got.all("retry-after") == ["1"]
        for _, writer in waiting:
            writer.close()
        assert await eventually(lambda: at.server.in_flight == 0)
        assert (await at.chat()).line.split()[1] == "200"


async def test_a_stream_under_way_no_longer_holds_its_request():
    """Once an answer has begun its request's bytes are free for others, however long the stream lasts."""
    async with house(SMALL) as at:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            await reader.read()

        at.stage.script = script
        body = b"x" * 100_000
        for _ in range(5):
            reader, writer = await at.connect()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + body)
            assert (await asyncio.wait_for(reader.readuntil(b"data: 1"), 5)).startswith(b"HTTP/1.1 200")
        assert at.server.in_flight == 5


async def test_too_many_requests_at_once_are_refused():
    """Beyond the limit a request is told to come back, before its body is read."""
    async with house(ServerConfig("up", limits=Limits(in_flight=2))) as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        waiting = [await at.connect() for _ in range(2)]
        for _, writer in waiting:
            writer.write(head)
        assert await eventually(lambda: at.server.in_flight == 2)
        got = await asyncio.wait_for(at.raw(head), 5)
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert (await at.ask("GET", "/health/live")).line.split()[1] == "200"
        for _, writer in waiting:
            writer.close()


async def test_a_drain_waits_and_then_cuts():
    """Requests under way get their time; those that outlast it are cancelled, and new ones are refused meanwhile."""
    gate = Gate(Limits(in_flight=2))
    cut = asyncio.Event()

    async def request(seconds):
        task = gate.enter()
        try:
            gate.check()
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cut.set()
            raise
        finally:
            gate.leave(task)

    async with asyncio.TaskGroup() as group:
        short = group.create_task(request(0.05))
        long = group.create_task(request(60))
        await asyncio.sleep(0)
        assert len(gate) == 2
        with pytest.raises(Overloaded):
            await request(0)
        await gate.drain(0.3)
    assert (short.cancelled(), long.cancelled(), cut.is_set(), len(gate)) == (False, True, True, 0)
    with pytest.raises(Overloaded, match="shutting down"):
        gate.check()

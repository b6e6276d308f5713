"""Requests that come while as many are under way as may be."""

import asyncio
import contextlib
import json

import pytest

from proxy.core.errors import Overloaded
from proxy.server import Limits, ServerConfig
from proxy.server.admission import Drain
from tests.support.server_fixture import eventually, read_request, running_server

FULL = ServerConfig("up", origins=frozenset({"https://app.test"}), limits=Limits(in_flight=3))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
RUNNING = 3


@contextlib.asynccontextmanager
async def full_server(config=FULL):
    """A house with as many requests under way as may be; and the connections of those, whose bodies are to come."""
    async with running_server(config) as at:
        running = [await at.connect() for _ in range(RUNNING)]
        for _, writer in running:
            writer.write(HEAD)
        assert await eventually(lambda: at.server.in_flight == RUNNING)
        yield at, running


async def test_the_excess_is_refused_while_those_under_way_finish():
    """All of the excess gets 503 and Retry-After though nothing ends meanwhile; then those under way are answered."""
    async with full_server() as (at, running):
        refused = await asyncio.gather(*(at.chat() for _ in range(40)))
        assert {(got.line.split()[1], *got.all("retry-after")) for got in refused} == {("503", "1")}
        assert at.server.in_flight == RUNNING
        assert at.stage.heard == []
        for reader, writer in running:
            writer.write(b"{}")
            heard = await asyncio.wait_for(read_request(reader), 60)
            assert heard is not None
            assert heard.line.split()[1] == "200"
        assert await eventually(lambda: at.server.in_flight == 0)
        assert (await at.chat()).line.split()[1] == "200"


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/v1/embeddings", "relay"),
    ],
)
async def test_a_refusal_has_the_shape_of_its_api_and_is_reported_once(path, api):
    """Each client understands its refusal, and metrics and log get one report of it."""
    async with full_server() as (at, _):
        got = await at.ask("POST", path, b"{}", "Content-Type: application/json")
        error = json.loads(got.body)["error"]
        assert "server.limits.in_flight" in error["message"]
        assert error["type"] == ("overloaded_error" if api == "messages" else "server_error")
        assert got.all("x-ullage-outcome") == ["refused;overloaded"]
        assert [(each.api, each.status, each.outcome, each.reason) for each in at.reports] == [
            (api, 503, "refused", "overloaded")
        ]


async def test_a_refused_connection_is_good_for_the_next_request():
    """A client whose small body has arrived is refused and asks again on the same connection."""
    async with full_server() as (at, running):
        reader, writer = await at.connect()
        for _ in range(3):
            writer.write(HEAD + b"{}")
            heard = await asyncio.wait_for(read_request(reader), 60)
            assert heard is not None
            assert heard.line.split()[1] == "503"
        running[0][1].close()
        assert await eventually(lambda: at.server.in_flight == RUNNING - 1)
        writer.write(HEAD + b"{}")
        heard = await asyncio.wait_for(read_request(reader), 60)
        assert heard is not None
        assert heard.line.split()[1] == "200"


async def test_a_body_that_has_not_arrived_is_not_waited_for():
    """A refused request that only declares its body gets its answer, and the connection ends."""
    async with full_server() as (at, _):
        got = await asyncio.wait_for(at.raw(HEAD), 60)
        assert (got.line.split()[1], got.all("connection")) == ("503", ["close"])


async def test_a_web_page_can_read_its_refusal():
    """A browser's request is refused with the headers without which its page would see no status."""
    async with full_server() as (at, _):
        got = await at.chat(b"{}", "Origin: https://app.test")
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert got.all("access-control-allow-origin") == ["https://app.test"]
        preflight = ("Origin: https://app.test", "Access-Control-Request-Method: POST")
        assert (await at.ask("OPTIONS", "/v1/chat/completions", b"", *preflight)).line.split()[1] == "204"


async def test_strange_names_and_own_routes_are_treated_as_ever():
    """A name that a page may have pointed here is refused as such, and health is answered."""
    async with full_server() as (at, _):
        got = await at.chat(b"{}", "Host: rebound.example")
        assert got.line.split()[1] == "403"
        assert (await at.ask("GET", "/health/live")).line.split()[1] == "200"
        assert (await at.ask("POST", "/health/live", b"{}")).line.split()[1] != "503"


SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, in_flight_bytes=300_000))


async def holding(at, count, key, sent):
    """Open *count* requests of 100 KB with *key*, and send *sent* bytes of each; the writers."""
    fields = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 100000"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    writers = []
    before = at.server.in_flight
    for _ in range(count):
        _, writer = await at.connect()
        writer.write(head.encode() + b"x" * sent)
        writers.append(writer)
    assert await eventually(lambda: at.server.in_flight == before + count)
    await asyncio.sleep(0.1)
    return writers


async def test_bytes_that_were_only_declared_take_nothing_from_others():
    """Any number of requests that declare a large body and send none of it leave room for everybody's."""
    async with running_server(SMALL) as at:
        await holding(at, 20, "idle", 0)
        got = await asyncio.wait_for(at.chat(b"x" * 100_000, "Authorization: Bearer other"), 60)
        assert got.line.split()[1] == "200"
        got = await asyncio.wait_for(at.chat(b"x" * 100_000, "Authorization: Bearer idle"), 60)
        assert got.line.split()[1] == "200"


async def test_too_many_bytes_in_memory_are_refused():
    """Bodies of all requests together stay under one limit; the refused one may come back later."""
    async with running_server(SMALL) as at:
        waiting = [writer for key in ("a", "b", "c") for writer in await holding(at, 1, key, 99_000)]
        got = await asyncio.wait_for(at.chat(b"x" * 50_000, "Authorization: Bearer d"), 60)
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert b"server.limits.in_flight_bytes" in got.body
        for writer in waiting:
            writer.close()
        assert await eventually(lambda: at.server.in_flight == 0)
        assert (await at.chat(b"x" * 100_000)).line.split()[1] == "200"


async def test_one_caller_leaves_room_for_another():
    """A caller whose bodies fill its share is refused more, while another's largest body passes."""
    async with running_server(SMALL) as at:
        waiting = await holding(at, 6, "greedy", 24_000)
        got = await asyncio.wait_for(at.chat(b"x" * 50_000, "Authorization: Bearer greedy"), 60)
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert b"this caller" in got.body
        got = await asyncio.wait_for(at.chat(b"x" * 100_000, "Authorization: Bearer modest"), 60)
        assert got.line.split()[1] == "200"
        for writer in waiting:
            writer.close()
        assert await eventually(lambda: at.server.in_flight == 0)
        got = await asyncio.wait_for(at.chat(b"x" * 100_000, "Authorization: Bearer greedy"), 60)
        assert got.line.split()[1] == "200"


async def test_the_only_body_of_a_caller_may_be_as_large_as_bodies_may_be():
    """A share never stands against a single body, even if that takes all there is."""
    async with running_server(ServerConfig("up", limits=Limits(body=100_000, in_flight_bytes=100_000))) as at:
        assert (await at.chat(b"x" * 100_000)).line.split()[1] == "200"
        chunks = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await at.raw(head + chunks * 10 + b"0\r\n\r\n")).line.split()[1] == "200"
        # One byte more is too large, and no word of others' requests, however it arrives.
        assert (await at.raw(head + chunks * 10 + b"1\r\nx\r\n0\r\n\r\n")).line.split()[1] == "413"
        assert (await at.raw(head + chunks * 13)).line.split()[1] == "413"


async def test_a_stream_under_way_no_longer_holds_its_request():
    """Once an answer has begun its request's bytes are free for others, however long the stream lasts."""
    async with running_server(SMALL) as at:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            await reader.read()

        at.stage.script = script
        body = b"x" * 100_000
        for _ in range(5):
            reader, writer = await at.connect()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + body)
            assert (await asyncio.wait_for(reader.readuntil(b"data: 1"), 60)).startswith(b"HTTP/1.1 200")
        assert at.server.in_flight == 5


async def test_too_many_requests_at_once_are_refused():
    """Beyond the limit a request gets 503 with a time to come back, before its body is read."""
    async with running_server(ServerConfig("up", limits=Limits(in_flight=2))) as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        waiting = [await at.connect() for _ in range(2)]
        for _, writer in waiting:
            writer.write(head)
        assert await eventually(lambda: at.server.in_flight == 2)
        got = await asyncio.wait_for(at.raw(head), 60)
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert (await at.ask("GET", "/health/live")).line.split()[1] == "200"
        for _, writer in waiting:
            writer.close()


async def test_a_drain_waits_and_then_cuts():
    """Requests under way get their time; those that outlast it are cancelled, and new ones are refused meanwhile."""
    gate = Drain(Limits(in_flight=2))
    cut = asyncio.Event()

    async def request(seconds):
        gate.running.add(asyncio.current_task())
        try:
            if gate.draining or len(gate.running) > gate.limit:
                raise gate.refusal()
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cut.set()
            raise
        finally:
            gate.running.discard(asyncio.current_task())

    async with asyncio.TaskGroup() as group:
        short = group.create_task(request(0.05))
        long = group.create_task(request(60))
        await asyncio.sleep(0)
        assert len(gate.running) == 2
        with pytest.raises(Overloaded):
            await request(0)
        await gate.drain(0.3)
    assert (short.cancelled(), long.cancelled(), cut.is_set(), len(gate.running)) == (False, True, True, 0)
    with pytest.raises(Overloaded, match="shutting down"):
        await request(0)

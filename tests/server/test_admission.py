"""What becomes of requests while as many are under way as may be."""

import asyncio
import contextlib
import json

import pytest

from proxy.server import Limits, ServerConfig
from tests.support.server_fixture import eventually, house, read_request

FULL = ServerConfig("up", origins=frozenset({"https://app.test"}), limits=Limits(in_flight=3))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
RUNNING = 3


@contextlib.asynccontextmanager
async def full_house(config=FULL):
    """A house with as many requests under way as may be; and the connections of those, whose bodies are to come."""
    async with house(config) as at:
        running = [await at.connect() for _ in range(RUNNING)]
        for _, writer in running:
            writer.write(HEAD)
        assert await eventually(lambda: at.server.in_flight == RUNNING)
        yield at, running


async def test_the_excess_is_refused_while_those_under_way_finish():
    """All of the excess gets 503 and Retry-After though nothing ends meanwhile; then those under way are answered."""
    async with full_house() as (at, running):
        refused = await asyncio.gather(*(at.chat() for _ in range(40)))
        assert {(got.line.split()[1], *got.all("retry-after")) for got in refused} == {("503", "1")}
        assert at.server.in_flight == RUNNING
        assert at.stage.heard == []
        for reader, writer in running:
            writer.write(b"{}")
            heard = await asyncio.wait_for(read_request(reader), 5)
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
    async with full_house() as (at, _):
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
    async with full_house() as (at, running):
        reader, writer = await at.connect()
        for _ in range(3):
            writer.write(HEAD + b"{}")
            heard = await asyncio.wait_for(read_request(reader), 5)
            assert heard is not None
            assert heard.line.split()[1] == "503"
        running[0][1].close()
        assert await eventually(lambda: at.server.in_flight == RUNNING - 1)
        writer.write(HEAD + b"{}")
        heard = await asyncio.wait_for(read_request(reader), 5)
        assert heard is not None
        assert heard.line.split()[1] == "200"


async def test_a_body_that_has_not_arrived_is_not_waited_for():
    """A refused request that only declares its body gets its answer, and the connection ends."""
    async with full_house() as (at, _):
        got = await asyncio.wait_for(at.raw(HEAD), 5)
        assert (got.line.split()[1], got.all("connection")) == ("503", ["close"])


async def test_a_web_page_can_read_its_refusal():
    """A browser's request is refused with the headers without which its page would see no status."""
    async with full_house() as (at, _):
        got = await at.chat(b"{}", "Origin: https://app.test")
        assert (got.line.split()[1], got.all("retry-after")) == ("503", ["1"])
        assert got.all("access-control-allow-origin") == ["https://app.test"]
        preflight = ("Origin: https://app.test", "Access-Control-Request-Method: POST")
        assert (await at.ask("OPTIONS", "/v1/chat/completions", b"", *preflight)).line.split()[1] == "204"


async def test_strange_names_and_own_routes_are_treated_as_ever():
    """A name that a page may have pointed here is refused as such, and health is answered."""
    async with full_house() as (at, _):
        got = await at.chat(b"{}", "Host: rebound.example")
        assert got.line.split()[1] == "403"
        assert (await at.ask("GET", "/health/live")).line.split()[1] == "200"
        assert (await at.ask("POST", "/health/live", b"{}")).line.split()[1] != "503"

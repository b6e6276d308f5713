"""OpenAI's own client over a WebSocket: a conversation that outgrows its window is answered to its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from openai import AsyncOpenAI

from tests.conftest import StartProxy, StartStub
from tests.support.api_formats import request_body
from tests.support.sample_conversations import AGENT_TOOLS, agent_session

WINDOW = 8192


async def answered(connection: Any, **members: Any) -> Any:
    """Send one message; the response that its last event holds."""
    await connection.response.create(model="m", **members)
    async for event in connection:
        if event.type == "response.completed":
            return event.response
        assert event.type != "error", event
    raise AssertionError("the socket ended before the response")


def turns(items: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """*items* in pieces that end with the results of calls, as an agent sends them."""
    piece: list[dict[str, Any]] = []
    for item, after in pairwise([*items, {}]):
        piece.append(item)
        if item["type"] == "function_call_output" and after.get("type") != "function_call_output":
            yield piece
            piece = []


async def test_a_conversation_over_a_socket_stays_inside_its_window(stub: StartStub, proxy: StartProxy) -> None:
    """Only new items are sent to the proxy; what reaches the upstream is whole, fits, and is compacted when it must."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW)
    items = request_body("responses", agent_session(60, 300), AGENT_TOOLS)["input"]
    async with (
        AsyncOpenAI(base_url=front.url, api_key="sk-1", max_retries=0) as web,
        web.responses.connect() as connection,
    ):
        continued: dict[str, Any] = {}
        for new in turns(items):
            response = await answered(connection, input=new, store=False, **continued)
            continued = {"previous_response_id": response.id}
    assert response.status == "completed"
    bodies = [json.loads(seen.body) for seen in server.seen]
    assert len(bodies) == 60
    assert all("previous_response_id" not in body and body["stream"] for body in bodies)
    assert sum("[Summary of the earlier" in seen.body.decode() for seen in server.seen) > 5
    assert {seen.verdict for seen in server.seen} == {"ok"}


async def test_a_window_that_is_smaller_than_believed_is_found_over_a_socket(
    stub: StartStub, proxy: StartProxy
) -> None:
    """An overflow that the upstream reports is recovered before the client sees an event of it."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=4 * WINDOW)
    items = request_body("responses", agent_session(40, 300), AGENT_TOOLS)["input"]
    async with (
        AsyncOpenAI(base_url=front.url, api_key="sk-1", max_retries=0) as web,
        web.responses.connect() as connection,
    ):
        response = await answered(connection, input=items, store=False)
    assert response.status == "completed"
    assert [seen.verdict for seen in server.seen] == ["overflow", "ok"]

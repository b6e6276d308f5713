"""Compactions made without a model: what they hold, what they weigh, and how they are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.models import Route
from proxy.core.request import Request
from proxy.features.client_compaction.compact_endpoint import (
    CompactEndpoint,
    Kind,
    OwnCompaction,
    UpstreamCompaction,
    is_trigger,
)
from tests.e2e.test_client_compaction import asked
from tests.support.api_formats import text_of
from tests.support.engine_fixtures import TENANT, Replica, count_tokens
from tests.support.sample_conversations import AGENT_TASK, agent_session, chat_turn, log

WINDOW = 8192
TRIGGER = {"type": "compaction_trigger"}
ROUTE = Route("stub", "house-model", WINDOW, None, "o200k_base", "configured")


async def made(desk: Replica, body: dict[str, Any], kind: Kind = "trigger") -> OwnCompaction:
    """The compaction of *body*."""
    request, ours = desk.compacting.open_items(Request("responses", json.dumps(body).encode(), TENANT, "r"))
    located = desk.measurer.locate(request)
    measured = await desk.fitter.measure(request, located, ROUTE, WINDOW, 1.0, "configured")
    return await desk.compacting.make(measured, kind, ours)


async def test_a_compaction_holds_what_matters_and_is_small() -> None:
    """Instructions of the user, names and steps are in it; it fits its share whatever the size of the conversation."""
    desk = Replica()
    body = asked("responses", agent_session(60, 400))
    found = await made(desk, {**body, "input": [*body["input"], TRIGGER]})
    assert AGENT_TASK in found.text
    assert "read_file" in found.text
    assert found.kept == ()
    assert found.given < 0.4 * WINDOW
    assert found.taken > 2 * WINDOW
    assert found == await made(desk, {**body, "input": [*body["input"], TRIGGER]}), "the same on every replica"


async def test_on_its_own_path_the_users_messages_stay() -> None:
    """The newest messages of the user are kept as they are, what has no room among them is told in the text."""
    desk = Replica()
    talk = [message for turn in range(20) for message in chat_turn(turn, 150)]
    body = asked("responses", talk)
    found = await made(desk, body, "endpoint")
    kept = [json.loads(raw) for raw in found.kept]
    users = [item for item in body["input"] if item.get("role") == "user"]
    assert list(map(text_of, kept)) == list(map(text_of, users))[-len(kept) :]
    assert all(item["type"] == "message" and isinstance(item["content"], list) for item in kept)
    assert 3 < len(kept) < len(users)
    assert sum(count_tokens(text_of(item)) for item in kept) <= 0.2 * WINDOW
    assert "Question 3:" in found.text
    told, kind = desk.compacting.body(found, "endpoint", "m", stream=True)
    answer = json.loads(told)
    assert kind == "application/json"
    assert (answer["object"], answer["output"][:-1]) == ("response.compaction", kept)
    assert answer["output"][-1] == desk.compacting.item(found)
    assert answer["usage"]["total_tokens"] == found.taken + found.given


async def test_a_second_compaction_carries_the_first_on() -> None:
    """What the first one knew is in the second, as a summary and not as words of the user."""
    desk = Replica()
    first = await made(desk, asked("responses", [{"role": "user", "content": "The port is 50713, remember it."}]))
    item = desk.compacting.item(first)
    body = asked("responses", agent_session(30, 400)[1:])
    again = await made(desk, {**body, "input": [item, *body["input"], TRIGGER]}, "endpoint")
    assert "50713" in again.text
    assert not any(b"50713" in raw for raw in again.kept)
    third = await made(desk, {**body, "input": [desk.compacting.item(again), *body["input"], TRIGGER]})
    assert "50713" in third.text
    assert third.given < 0.5 * WINDOW


async def test_odd_conversations_are_compacted_too() -> None:
    """A single huge message, results only, nothing but a trigger, lone surrogates: an item comes of all of them."""
    desk = Replica()
    huge = {"role": "user", "content": log(3, 3 * WINDOW)}
    orphan = {"type": "function_call_output", "call_id": "c", "output": "x \ud83d y"}
    for items in ([huge], [orphan], [], [{"role": "user", "content": "half \ud83d"}]):
        found = await made(desk, {"model": "m", "input": [*items, TRIGGER]})
        opened, ours = desk.compacting.open_items(
            Request("responses", json.dumps({"input": [desk.compacting.item(found)]}).encode(), TENANT, "r")
        )
        assert ours == (0,)
        assert found.text in text_of(json.loads(opened.body)["input"][0])
        assert found.given < 0.5 * WINDOW


async def test_other_apis_are_not_opened() -> None:
    """An item is opened only where such items are."""
    desk = Replica()
    item = desk.compacting.item(await made(desk, asked("responses", chat_turn(1, 50))))
    for api in ("chat", "messages"):
        request = Request(api, json.dumps({"messages": [item], "input": [item]}).encode(), TENANT, "r")
        assert desk.compacting.open_items(request) == (request, ())


@pytest.mark.parametrize(
    ("serving", "endpoint", "trigger"),
    [
        (UpstreamCompaction(), True, False),
        (UpstreamCompaction(known=True), True, True),
        (UpstreamCompaction("relay"), True, True),
        (UpstreamCompaction("own", known=True), False, False),
    ],
)
def test_who_is_asked(serving: UpstreamCompaction, endpoint: bool, trigger: bool) -> None:
    """A path costs nothing to try; an item only goes to servers that know it, unless told otherwise."""
    assert (serving.asks("endpoint"), serving.asks("trigger")) == (endpoint, trigger)


class Status:
    """A reply of which only the status matters."""

    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("kind", "status", "head", "unable"),
    [
        ("endpoint", 404, b"", True),
        ("endpoint", 405, b"", True),
        ("endpoint", 501, b"", True),
        ("endpoint", 400, b"compaction", False),
        ("endpoint", 200, b"", False),
        ("endpoint", 429, b"", False),
        ("trigger", 404, b"", True),
        ("trigger", 400, b"Invalid value: 'compaction_trigger'", True),
        ("trigger", 422, b"unknown variant compaction_trigger", True),
        ("trigger", 400, b"model not found", False),
        ("trigger", 500, b"compaction_trigger", False),
    ],
)
def test_who_is_unable(kind: Kind, status: int, head: bytes, unable: bool) -> None:
    """A server is unable where it does not know the path or the item, not where it failed for another reason."""
    assert CompactEndpoint.is_unable(kind, Status(status), head) is unable


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b'{"type":"compaction_trigger"}', True),
        (b'{ "type" : "compaction_trigger", "x": 1 }', True),
        (b'{"role":"user","content":"compaction_trigger"}', False),
        (b'{"type":"message","content":"' + b"x" * 300 + b'compaction_trigger"}', False),
    ],
)
def test_what_asks_for_a_compaction(raw: bytes, found: bool) -> None:
    """The item itself, not words about it."""
    assert is_trigger(raw) is found

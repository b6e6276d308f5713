"""Compactions made without a model: their content, their size, and their response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.decisions import KnownRoute
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.features.client_compaction.compact_endpoint import (
    Kind,
    OwnCompaction,
    compact,
    compaction_item,
    is_trigger,
    response,
)
from proxy.features.client_compaction.compaction_item import OpenedBody, open_items
from tests.support.api_formats import next_request, text_of
from tests.support.engine_fixtures import TENANT, Replica, count_tokens
from tests.support.sample_conversations import AGENT_TASK, agent_session, chat_turn, log

WINDOW = 8192
TRIGGER = {"type": "compaction_trigger"}
ROUTE = Route("stub", "house-model", WINDOW, None, "o200k_base", "configured")


async def made(replica: Replica, body: dict[str, Any], kind: Kind = "trigger") -> OwnCompaction:
    """The compaction of *body*."""
    opened = opened_body(replica, body)
    request = Request("responses", opened.body, TENANT, "r")
    known = KnownRoute(ROUTE, WINDOW, "configured", None, 1.0)
    measured = await replica.measurer.count(request, replica.measurer.locate(request), known, WINDOW)
    return compact(measured, kind, frozenset(opened.ours), Shares(), count_tokens)


def opened_body(replica: Replica, body: dict[str, Any]) -> OpenedBody:
    return open_items(json.dumps(body).encode(), replica.book.item_key())


def item_of(replica: Replica, compaction: OwnCompaction) -> dict[str, str]:
    return compaction_item(compaction, replica.book.item_key())


async def test_a_compaction_holds_what_matters_and_is_small() -> None:
    """Instructions of the user, names and steps are in it; it fits its share whatever the size of the conversation."""
    replica = Replica()
    body = next_request("responses", agent_session(60, 400))
    found = await made(replica, {**body, "input": [*body["input"], TRIGGER]})
    assert AGENT_TASK in found.text
    assert "read_file" in found.text
    assert found.user_items == ()
    assert found.output_tokens < 0.4 * WINDOW
    assert found.input_tokens > 2 * WINDOW
    assert found == await made(replica, {**body, "input": [*body["input"], TRIGGER]}), "the same on every replica"


async def test_on_its_own_path_the_users_messages_stay() -> None:
    """The newest messages of the user stay as they are; older ones are in the text."""
    replica = Replica()
    talk = [message for turn in range(20) for message in chat_turn(turn, 150)]
    body = next_request("responses", talk)
    found = await made(replica, body, "endpoint")
    verbatim = [json.loads(raw) for raw in found.user_items]
    users = [item for item in body["input"] if item.get("role") == "user"]
    assert list(map(text_of, verbatim)) == list(map(text_of, users))[-len(verbatim) :]
    assert all(item["type"] == "message" and isinstance(item["content"], list) for item in verbatim)
    assert 3 < len(verbatim) < len(users)
    assert sum(count_tokens(text_of(item)) for item in verbatim) <= 0.2 * WINDOW
    assert "Question 3:" in found.text
    body, content_type = response(found, item_of(replica, found), "endpoint", b"{}", "m", 1_760_000_000, stream=True)
    answer = json.loads(body)
    assert content_type == "application/json"
    assert (answer["object"], answer["output"][:-1]) == ("response.compaction", verbatim)
    assert answer["output"][-1] == item_of(replica, found)
    assert answer["usage"]["total_tokens"] == found.input_tokens + found.output_tokens


@pytest.mark.parametrize("kind", ["endpoint", "trigger"])
async def test_no_two_requests_get_the_same_response(kind: Kind) -> None:
    """Ids of responses differ although the compaction is the same; the item, which is the same, keeps its id."""
    replica = Replica()
    found = await made(replica, next_request("responses", agent_session(6, 200)), kind)
    item = item_of(replica, found)
    answers = [
        json.loads(response(found, item, kind, request, "m", 1_760_000_000, stream=False)[0])
        for request in (b"a", b"b")
    ]
    assert answers[0]["id"] != answers[1]["id"]
    assert answers[0]["output"] == answers[1]["output"]


async def test_a_second_compaction_carries_the_first_on() -> None:
    """The content of the first one is in the second, as a summary and not as words of the user."""
    replica = Replica()
    first = await made(
        replica, next_request("responses", [{"role": "user", "content": "The port is 50713, remember it."}])
    )
    item = item_of(replica, first)
    body = next_request("responses", agent_session(30, 400)[1:])
    again = await made(replica, {**body, "input": [item, *body["input"], TRIGGER]}, "endpoint")
    assert "50713" in again.text
    assert not any(b"50713" in raw for raw in again.user_items)
    third = await made(replica, {**body, "input": [item_of(replica, again), *body["input"], TRIGGER]})
    assert "50713" in third.text
    assert third.output_tokens < 0.5 * WINDOW


async def test_odd_conversations_are_compacted_too() -> None:
    """A single huge message, results only, nothing but a trigger, lone surrogates: an item comes of all of them."""
    replica = Replica()
    huge = {"role": "user", "content": log(3, 3 * WINDOW)}
    orphan = {"type": "function_call_output", "call_id": "c", "output": "x \ud83d y"}
    for items in ([huge], [orphan], [], [{"role": "user", "content": "half \ud83d"}]):
        found = await made(replica, {"model": "m", "input": [*items, TRIGGER]})
        opened = opened_body(replica, {"input": [item_of(replica, found)]})
        assert opened.ours == (0,)
        assert found.text in text_of(json.loads(opened.body)["input"][0])
        assert found.output_tokens < 0.5 * WINDOW


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

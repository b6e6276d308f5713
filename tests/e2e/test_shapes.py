"""Conversations of any shape in all four APIs, through a running proxy: none is a fault, and pairs stay whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import StartProxy
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.sample_conversations import AGENT_TOOLS, agent_session
from tests.support.server_fixture import ScriptedServer, listening

WINDOW = 3000
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/m:generateContent",
}
LISTS = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}

WORDS = st.sampled_from(
    [
        *("", "x", "words " * 400, "\ud83d", "\0", "<memory>", "Observation: x", "data:image/png;base64,AAAA"),
        *("image", "text", "tool_use", "tool_result", "function_call", "thinking"),
        *("user", "assistant", "system", "tool", "model"),
    ]
)
KEYS = st.sampled_from(
    [
        *("type", "role", "content", "text", "source", "data", "image_url", "inlineData", "parts", "cache_control"),
        *("tool_calls", "function", "name", "id", "arguments", "input", "args", "functionCall", "thinking"),
        *("tool_call_id", "tool_use_id", "call_id", "output", "response", "functionResponse", "is_error"),
        *("signature", "encrypted_content", "summary"),
    ]
)
NUMBERS = st.sampled_from([0, -1, 5, 1.5, -0.0, 10**30])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 2**32), st.sampled_from(["replace", "remove", "insert", "add"]), KEYS, VALUES), max_size=5
)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and object inside *value*, with each of its indexes or keys."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                yield node, key
                waiting.append(node[key])


def edited(body: Any, edits: list[tuple[int, str, str, Any]]) -> Any:
    """*body* with each of *edits* made somewhere in it."""
    for number, act, name, value in edits:
        body = json.loads(json.dumps(body))  # no part stands in two places, nor in a constant of other tests
        places = list(nodes(body))
        holder, key = places[number % len(places)]
        if act == "remove":
            del holder[key]
        elif act == "insert" and isinstance(holder, list):
            holder.insert(key, value)
        elif act == "add" and isinstance(holder, dict):
            holder[name] = value
        else:
            holder[key] = value
    return body


def unpaired(api: str, body: Any) -> set[str]:
    """The names of results whose call is not in *body*, however odd that is."""
    calls: set[str] = set()
    results: set[str] = set()
    for node, key in nodes(body.get(LISTS[api])):
        if isinstance(key, str) and isinstance(node[key], str):
            is_call = key == "id" or (key == "call_id" and not str(node.get("type")).endswith("_output"))
            if is_call:
                calls.add(node[key])
            elif key in ("tool_call_id", "tool_use_id", "call_id"):
                results.add(node[key])
    return results - calls


@dataclass
class Bench:
    """A proxy with all that edits bodies, in front of an upstream that takes anything."""

    stage: ScriptedServer
    web: httpx.AsyncClient


@pytest.fixture
async def bench(proxy: StartProxy) -> AsyncIterator[Bench]:
    stage = ScriptedServer()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(stage))
        config = {
            "upstreams": [
                {"name": "any", "base_url": f"http://127.0.0.1:{port}/v1", "context_management": "own", "probe": False}
            ],
            "models": [{"name": "*", "context_window": WINDOW}],
            "store": {"url": "memory"},
            "compression": {
                "recall": {"enabled": True},
                "deferred_tools": {"enabled": True},
                "stages": {"truncate": {"always": True}},
            },
            "archive": {"enabled": True},
            "memories": {"enabled": True, "tools": ["*"], "extract": ["*"]},
        }
        front = await proxy("", config=config)
        web = await stack.enter_async_context(loopback_client(base_url=front.root, timeout=120))
        yield Bench(stage, web)


@given(
    api=st.sampled_from(list(PATHS)),
    rounds=st.sampled_from([2, 6, 16]),
    edits=EDITS,
    more=st.dictionaries(
        st.sampled_from(
            ["system", "tools", "metadata", "instructions", "context_management", "thinking", "n", "stream"]
        ),
        VALUES,
        max_size=2,
    ),
)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
async def test_a_body_of_any_shape_is_sent_or_refused_without_a_fault(
    bench: Bench, api: str, rounds: int, edits: list[tuple[int, str, str, Any]], more: dict[str, Any]
) -> None:
    """It is sent, or refused as the client's; what is sent is JSON, inside the window, with no pair taken apart."""
    members = {key: value for key, value in more.items() if key != "n" or api == "chat"}
    body = edited({**request_body(api, agent_session(rounds, 300), AGENT_TOOLS), **members}, edits)
    bench.stage.heard.clear()
    answer = await bench.web.post(PATHS[api], content=json.dumps(body).encode(), headers={"authorization": "Bearer k"})
    outcome = answer.headers["x-ullage-outcome"]
    assert "internal_error" not in outcome
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert outcome.startswith("refused")
        return
    sent = json.loads(bench.stage.heard[-1].body)
    assert unpaired(api, sent) <= unpaired(api, body)
    tokens = answer.headers["x-ullage-tokens"]
    if outcome == "compacted":
        assert int(tokens) <= int(answer.headers["x-ullage-window"])

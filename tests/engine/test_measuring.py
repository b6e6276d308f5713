"""Declared tools, smaller where they leave hardly any room; the client's own compactions, which end with its prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from proxy.core.errors import ContextTooLong
from proxy.core.overflow.kinds import Overflow
from proxy.core.request import Request
from proxy.core.tokens.allocation import Allocation
from tests.stub.tokens import count_json
from tests.support.engine_fixtures import (
    POLICY,
    TENANT,
    WINDOW,
    Replica,
    chat_body,
)
from tests.support.sample_conversations import agent_session, prose, tool

SCHEMA = {"type": "object", "properties": {f"member_{n}": {"type": "string"} for n in range(6)}}
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


async def test_tools_larger_than_the_window_lose_prose_only() -> None:
    """Tools above the window are cut the same way on every call, and the rest of the body stays."""
    tools = [tool(f"look_{at}", prose(at, 150), key=prose(at + 500, 40)) for at in range(30)]
    assert count_json(tools) > WINDOW
    replica, messages = Replica(), agent_session(3, 50)
    plans = [await replica.plan(chat_body(messages[:end], tools=tools), WINDOW) for end in (2, 4, 6, 8)]
    assert all(plan.error is None and "tools" in plan.report.stages for plan in plans)
    assert len({json.dumps(json.loads(plan.body)["tools"]) for plan in plans}) == 1
    cut = json.loads(plans[0].body)["tools"]
    assert [one["function"]["name"] for one in cut] == [f"look_{at}" for at in range(30)]


async def test_features_measure_against_what_was_learned_with_the_same_beta_flag() -> None:
    """A window that was learned for requests with a flag holds for what a feature measures of such a request, too."""
    replica, flag = Replica(), "context-1m-2025-08-07"
    request = Request("chat", chat_body([{"role": "user", "content": "hi"}]), TENANT, "r", window_variant=flag)
    route = replace(replica.catalogue.resolve("gpt-4o-mini"), variant=flag)
    replica.learned.learn_refusal(route, TENANT, Overflow("input", limit=WINDOW), 2 * WINDOW)
    assert (await replica.measurer.measure_anyway(request, 10 * WINDOW)).known.window == WINDOW
    plain = structs.replace(request, window_variant="")
    assert (await replica.measurer.measure_anyway(plain, 10 * WINDOW)).known.window is None


async def test_a_refusal_speaks_of_the_tools_as_small_as_they_could_be_made() -> None:
    """No region that the error names is larger than the whole that it says is too large."""
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "word " * 60, "parameters": SCHEMA}}
        for n in range(150)
    ]
    plan = await Replica().plan(chat_body([{"role": "user", "content": "hi"}], tools=tools), 4096)
    assert isinstance(plan.error, ContextTooLong)
    assert plan.error.largest == "tools"
    assert plan.error.largest_tokens < plan.error.tokens


async def test_tools_beyond_their_share_are_shrunk_before_messages_go() -> None:
    """Above the high mark tools come down to their share first, on every call alike; below it nobody touches them."""
    tools = [tool(f"tool_{n}", prose(n, 200), path="Path.") for n in range(8)]
    shares = Allocation(system=0.05, tools=0.15, summary=0.1, recent=0.2, older=0.1, reserve=0.4)
    replica = Replica(policy=structs.replace(POLICY, rules=replace(POLICY.rules, allocation=shares)))
    low = await replica.plan(chat_body(agent_session(6, 300), tools=tools), 8192)
    assert low.report.outcome == "verbatim"
    assert low.report.borrowed["tools"] > 0
    plans = [
        await replica.plan(chat_body(agent_session(rounds, 300), tools=tools), 8192, tenant=tenant)
        for rounds, tenant in ((16, b"a" * 32), (17, b"a" * 32))
    ]
    for plan in plans:
        assert plan.error is None
        assert plan.report.stages[-1:] == ("tools",)
        assert plan.report.regions["tools"] <= shares.for_tools(8192, 0)
    assert _tools_of(plans[0].body) == _tools_of(plans[1].body)
    assert [t["function"]["name"] for t in _tools_of(plans[0].body)] == [t["function"]["name"] for t in tools]
    without = await Replica().plan(chat_body(agent_session(16, 300), tools=tools), 8192)
    assert "tools" not in without.report.stages


async def test_only_what_ends_with_a_prompt_is_a_clients_own_compaction() -> None:
    """Under a summariser's system text too, a request that ends with a tool's result waits for the next step."""
    *messages, result = agent_session(3, 50)
    assert result["role"] == "tool"
    summariser = [{"role": "system", "content": "You are a context summarization agent."}, *messages[1:], result]
    waiting = await Replica().plan(chat_body(summariser), WINDOW)
    prompted = await Replica().plan(chat_body([*summariser, {"role": "user", "content": "Now."}]), WINDOW)
    assert waiting.report.client_compaction == ""
    assert prompted.report.client_compaction == "opencode"


def _tools_of(body: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(body)["tools"]
    return found

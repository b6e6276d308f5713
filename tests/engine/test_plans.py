"""What a request may use: its window, the limits beside it, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from proxy.core.tokens.budget import Marks
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import (
    POLICY,
    WINDOW,
    Replica,
    chat_body,
)
from tests.support.sample_conversations import agent_round, agent_session

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


async def test_the_factor_scales_the_window() -> None:
    """For a provider that counts twice what we count, the view takes half as many of our tokens."""
    body = chat_body(agent_session(30, 300))
    plan = await Replica().plan(body, WINDOW, factor=2.0)
    assert request_tokens(json.loads(plan.body), 2.0) + WINDOW // 32 <= WINDOW
    assert plan.report.window == WINDOW


async def test_an_input_limit_beside_the_window_is_kept() -> None:
    """Where inputs have a limit of their own, the view keeps it however much of the window is left for the answer."""
    body = chat_body(agent_session(30, 300), max_tokens=16)
    limit = WINDOW // 2
    plan = await Replica().plan(body, WINDOW, max_input=limit)
    assert plan.error is None
    assert plan.report.budget == limit
    assert limit // 4 < request_tokens(json.loads(plan.body)) <= limit
    assert request_tokens(json.loads((await Replica().plan(body, WINDOW)).body)) > limit // 4


async def test_economy_compacts_where_it_gets_dear() -> None:
    """Under the policy economy a session is compacted at half the window, deeper than by fit, and never refused."""
    messages, window = agent_session(60, 300), 32_768
    economy = replace(POLICY, rules=replace(POLICY.rules, marks=Marks(low=0.35)), economy=True)
    thrifty, fit = Replica(policy=economy), Replica()
    sizes = [
        ((await thrifty.plan(chat_body(messages[:end]), window)).tokens or 0)
        for end in range(2, len(messages), 2)
        if messages[end - 1]["role"] == "tool"
    ]
    assert max(sizes) <= 0.5 * window
    assert max(sizes) > 0.4 * window
    assert len((await fit.plan(chat_body(messages[:84]), window)).body) == len(chat_body(messages[:84]))
    big = chat_body([*messages[:2], *agent_round(777, 20_000)])
    plan = await thrifty.plan(big, window)
    assert plan.error is None
    assert plan.body == big

"""Passages: what is asked of a summariser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tokens.budget import rounded_down
from proxy.engine.summary_requests import MOST_SUMMARY, summary_request_of
from proxy.features.recall.tool import NAME
from tests.support.api_formats import request_body
from tests.support.engine_fixtures import Replica
from tests.support.sample_conversations import AGENT_TOOLS, agent_session


@given(st.integers(1, 10**7))
def test_a_step_is_near_and_seldom_moves(tokens: int) -> None:
    """A step is at most its figure and more than two thirds of it, and two in each doubling."""
    step = rounded_down(tokens)
    assert step <= tokens < step * 1.5 + 1
    assert rounded_down(step) == step
    assert rounded_down(MOST_SUMMARY) == MOST_SUMMARY


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_warm_prompt_has_the_tools_that_were_sent(api: str) -> None:
    """Where the view offers the recall tool, a prompt that is to be found in the provider's cache offers it too."""
    body = json.dumps(request_body(api, agent_session(30, 300), AGENT_TOOLS)).encode()
    plan = await Replica(recall=True).plan(body, 8192, api=api, model="gpt-4o-mini")
    assert plan.view is not None
    assert plan.view.layout is not None
    record, measured = plan.view.edits.record, plan.view.measured
    assert record is not None
    passage = summary_request_of(measured, plan.view.layout, record.compaction.boundary, record, 0.05)
    assert passage is not None
    warm = passage.cached_prompt(len(measured.parsed.items))
    assert warm is not None
    sent = json.loads(plan.body)
    assert json.loads(warm.envelope_json)["tools"] == sent["tools"]
    assert plan.body.count(warm.items) == 1
    assert NAME in warm.envelope_json

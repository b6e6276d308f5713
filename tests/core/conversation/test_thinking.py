"""Budgets for thinking: found wherever providers put them, lowered with the output figure, never raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation.thinking import LEAST, least_output, lowered


def nested(budget: Any) -> list[dict[str, Any]]:
    """Every form of a request that states *budget*."""
    google = {"google": {"thinking_config": {"thinking_budget": budget, "include_thoughts": True}}}
    return [
        {"thinking": {"type": "enabled", "budget_tokens": budget}},
        {"reasoning": {"max_tokens": budget}},
        {"thinking_budget": budget},
        {"extra_body": google},
        google,
    ]


@given(st.integers(1, 64_000), st.integers(2, 64_000), st.integers(2, 64_000), st.integers(0, 4))
def test_a_lowered_budget_is_below_the_figure_and_no_less_than_the_least(
    budget: int, requested: int, output: int, form: int
) -> None:
    """A budget only falls, never under 1,024, and is below every figure that is not below the least one."""
    members = nested(budget)[form]
    least = least_output(members)
    assert least == min(budget, LEAST) + 1
    output = max(least, min(output, requested))
    found = lowered(members, requested, output)
    after = {key: json.loads(found[key]) if key in found else value for key, value in members.items()}
    values = [text for text in json.dumps(after).replace("}", " ").replace(",", " ").split() if text.isdigit()]
    (now,) = map(int, values)
    assert min(budget, LEAST) <= now <= budget
    assert now < output
    assert (now == budget) == (found == {})


def test_a_budget_that_leaves_the_answer_half_stays() -> None:
    """Nothing changes that need not: another budget costs the prompt cache."""
    assert lowered({"thinking": {"budget_tokens": 4_000}}, 32_000, 9_000) == {}
    assert lowered({"thinking": {"budget_tokens": 4_000}}, 32_000, 7_000) == {"thinking": '{"budget_tokens": 1024}'}
    assert lowered({"thinking": {"budget_tokens": 31_999}}, 32_000, 31_449) == {"thinking": '{"budget_tokens": 24576}'}


@pytest.mark.parametrize("budget", [None, True, -1, 0, "8000", 1.5, {}])
def test_what_is_no_budget_is_left_alone(budget: Any) -> None:
    """Off, dynamic or malformed: the provider reads it as it came."""
    for members in (*nested(budget), {"thinking": budget}, {"reasoning": [budget]}, {"extra_body": {"google": budget}}):
        if members.get("thinking_budget") is None:
            assert least_output(members) == 0
            assert lowered(members, 32_000, 2_000) == {}

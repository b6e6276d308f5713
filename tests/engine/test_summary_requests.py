"""Passages: what is asked of a summariser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tokens.budget import rounded_down
from proxy.engine.summary_requests import MOST_SUMMARY


@given(st.integers(1, 10**7))
def test_a_step_is_near_and_seldom_moves(tokens: int) -> None:
    """A step is at most its figure and more than two thirds of it, and two in each doubling."""
    step = rounded_down(tokens)
    assert step <= tokens < step * 1.5 + 1
    assert rounded_down(step) == step
    assert rounded_down(MOST_SUMMARY) == MOST_SUMMARY

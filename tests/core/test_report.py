"""A report's derived figures and the response headers made of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.report import Report, response_headers


def headers(**facts: object) -> dict[str, str]:
    made = response_headers(Report("r", "chat", **facts))  # type: ignore[arg-type]
    assert len({name for name, _ in made}) == len(made)
    return dict(made)


def test_nothing_known_says_only_the_outcome() -> None:
    """A request of which nothing was counted gets no figures, not zeros."""
    assert headers() == {"x-ullage-outcome": "verbatim"}
    assert headers(outcome="degraded", reason="overflow") == {"x-ullage-outcome": "degraded;overflow"}


def test_everything_known_is_said() -> None:
    """A compaction shows figures, stages, what was removed, retries and the conversation's name."""
    found = headers(
        outcome="compacted",
        window=8000,
        budget=7000,
        tokens_before=9000,
        tokens_after=3500,
        stages=("fold", "clip"),
        retries=1,
        conversation="c1",
    )
    assert found == {
        "x-ullage-outcome": "compacted",
        "x-ullage-tokens": "3500",
        "x-ullage-window": "8000",
        "x-ullage-pressure": "0.50",
        "x-ullage-stages": "fold,clip",
        "x-ullage-tokens-removed": "5500",
        "x-ullage-retries": "1",
        "x-ullage-conversation": "c1",
    }


def test_a_bound_is_marked_as_one() -> None:
    """Where only the bytes were looked at, tokens and pressure are given as bounds."""
    found = headers(tokens_before=812, tokens_after=812, window=128_000, budget=112_000, bounded=True)
    assert found["x-ullage-tokens"] == "<812"
    assert found["x-ullage-pressure"] == "<0.01"
    assert "x-ullage-tokens-removed" not in found


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_bound_never_rounds_down(tokens: int, budget: int) -> None:
    """The pressure shown as a bound is at least the pressure there was, and at most a hundredth more."""
    shown = headers(tokens_after=tokens, budget=budget, bounded=True)["x-ullage-pressure"]
    assert shown.startswith("<")
    assert float(shown[1:]) >= tokens / budget - 1e-9 * max(1, tokens / budget)
    assert float(shown[1:]) <= max(0.01, math.ceil(100 * tokens / budget) / 100)


@pytest.mark.parametrize(("after", "budget"), [(None, 100), (5, None), (5, 0)])
def test_pressure_is_unknown_without_both_figures(after: int | None, budget: int | None) -> None:
    """No count or no budget means no pressure."""
    assert Report("r", "chat", tokens_after=after, budget=budget).pressure is None


@pytest.mark.parametrize(("before", "after", "removed"), [(9, 4, 5), (4, 9, 0), (None, 4, 0), (9, None, 0)])
def test_removed_tokens(before: int | None, after: int | None, removed: int) -> None:
    """What was removed is the difference where both sides are known, and never negative."""
    assert Report("r", "chat", tokens_before=before, tokens_after=after).tokens_removed == removed


def test_a_report_cannot_be_changed() -> None:
    """A report is a fact: another status makes another report, and no two share their regions."""
    report = Report("r", "chat", model="m")
    with pytest.raises(AttributeError):
        report.status = 200  # type: ignore[misc]
    later = report.with_(status=200)
    assert (report.status, later.status, later.model) == (0, 200, "m")
    assert Report("r", "chat").regions is not Report("r", "chat").regions

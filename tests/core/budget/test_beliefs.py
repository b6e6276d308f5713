"""What is believed of a window, for how long, and how it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget import beliefs
from proxy.core.budget.beliefs import (
    LEAST,
    MOST_STEPS,
    NOTHING,
    PROBE_SECONDS,
    REPEATED_SECONDS,
    STATED_SECONDS,
    LearnedWindow,
)

T = 1_000_000.0


@pytest.mark.parametrize(
    ("limit", "weight", "output", "believed"),
    [
        (8_192, 9_000, 0, True),
        (8_192, None, 0, True),
        (LEAST - 1, 9_000, 0, False),
        (10**9, None, 0, False),
        (200_000, 3_000, 0, False),
        (200_000, 3_000, 199_000, True),
    ],
)
def test_only_plausible_limits_are_learned(limit: int, weight: int | None, output: int, believed: bool) -> None:
    """A limit so small, or so far above what was sent, is misread."""
    assert beliefs.plausible(limit, weight, output) is believed


def test_a_stated_limit_holds_for_a_while() -> None:
    """The smallest that was stated holds, each time it is stated anew for another hour."""
    belief = beliefs.told(NOTHING, 8_192, None, T)
    assert beliefs.fresh(belief, T + STATED_SECONDS - 1) == 8_192
    assert beliefs.fresh(belief, T + STATED_SECONDS) is None
    assert beliefs.told(belief, 9_000, None, T + 10) is belief
    again = beliefs.told(belief, 8_192, None, T + 10)
    assert beliefs.fresh(again, T + STATED_SECONDS) == 8_192
    late = beliefs.told(belief, 9_000, None, T + STATED_SECONDS)
    assert beliefs.fresh(late, T + STATED_SECONDS) == 9_000
    assert beliefs.fresh(beliefs.told(belief, 9_000, 32_768, T + 10), T + 10) == 9_000


def test_refusals_without_a_figure_lower_it_step_by_step() -> None:
    """One says nothing; from the second on, what is believed goes below what was refused, and never up."""
    belief = beliefs.refused(NOTHING, 10_000, T)
    assert beliefs.level(belief, T) is None
    levels = []
    for weight in (9_000, 8_000, 12_000, 6_000):
        belief = beliefs.refused(belief, weight, T + 1)
        levels.append(beliefs.level(belief, T + 1))
    assert levels == [8_100, 7_200, 7_200, 5_400]
    far = beliefs.refused(beliefs.refused(NOTHING, 10_000, T), 9_000, T + REPEATED_SECONDS)
    assert beliefs.level(far, T + REPEATED_SECONDS) is None


@given(st.integers(LEAST, 10**6), st.lists(st.floats(0, 3 * PROBE_SECONDS), max_size=20))
def test_it_comes_back_by_probing(figure: int, waits: list[float]) -> None:
    """What was worked out rises with time, never falls by itself, and is forgotten in the end."""
    belief, now = beliefs.lowered(NOTHING, figure, T), T
    before: int | None = figure
    for wait in waits:
        now += wait
        level = beliefs.level(belief, now)
        assert level is None or (before is not None and level >= before)
        before = level
    assert beliefs.level(belief, T + PROBE_SECONDS) in (int(figure * 1.1), figure)
    assert beliefs.level(belief, T + (MOST_STEPS + 1) * PROBE_SECONDS) is None


def test_a_clock_that_went_back_changes_nothing() -> None:
    """Replicas' clocks differ: a belief from the future holds as it is."""
    assert beliefs.level(beliefs.lowered(NOTHING, 5_000, T), T - 9_999) == 5_000
    assert beliefs.fresh(beliefs.told(NOTHING, 5_000, None, T), T - 9_999) == 5_000


def test_an_answer_to_more_proves_it_wrong() -> None:
    """A prompt that was answered ends every belief that it could not be; a smaller one changes nothing."""
    belief = LearnedWindow(stated=4_000, stated_at=T, lowered=3_000, lowered_at=T)
    assert beliefs.answered(belief, 2_999, T) is belief
    more = beliefs.answered(belief, 3_500, T)
    assert (beliefs.fresh(more, T), beliefs.level(more, T)) == (4_000, 3_500)
    most = beliefs.answered(belief, 4_500, T)
    assert (beliefs.fresh(most, T), beliefs.level(most, T)) == (None, 4_500)


@pytest.mark.parametrize(
    ("reports", "level"),
    [([4_096], 4_096), ([4_080], 4_080), ([3_000], None), ([3_000, 3_100], 3_100), ([3_000, 900], None)],
)
def test_a_cut_teaches_where_it_shows_a_window(reports: list[int], level: int | None) -> None:
    """A figure just under a power of two, or two alike, is a window; others may be a cache's doing."""
    belief = NOTHING
    for reported in reports:
        belief = beliefs.cut(belief, reported, T)
    assert beliefs.level(belief, T) == level


@pytest.mark.parametrize("reported", [0, 9, 255, 1_000])
def test_a_server_that_does_not_count_shows_no_window(reported: int) -> None:
    """The same tiny figure for every prompt, however often it comes, lowers nothing."""
    belief = NOTHING
    for moment in range(5):
        belief = beliefs.cut(belief, reported, float(moment))
    assert beliefs.level(belief, 5.0) is None

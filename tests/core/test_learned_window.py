"""Learned windows: how they are inferred, how long they last, and how they rise again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import learned_window
from proxy.core.learned_window import (
    FASTEST_RISE,
    HIGHEST_RATIO,
    LEAST_PLAUSIBLE,
    LOWEST_RATIO,
    MOST_STEPS,
    NOTHING_LEARNED,
    PATIENCE,
    PROBE_SECONDS,
    REPEATED_SECONDS,
    STATED_SECONDS,
    STEP,
    Calibration,
    LearnedWindow,
    is_credible,
    is_truncated,
    prior_calibration,
    rounded_up,
    with_report,
)

T = 1_000_000.0


@pytest.mark.parametrize(
    ("limit", "weight", "output", "believed"),
    [
        (8_192, 9_000, 0, True),
        (8_192, None, 0, True),
        (LEAST_PLAUSIBLE - 1, 9_000, 0, False),
        (10**9, None, 0, False),
        (200_000, 3_000, 0, False),
        (200_000, 3_000, 199_000, True),
    ],
)
def test_only_plausible_limits_are_learned(limit: int, weight: int | None, output: int, believed: bool) -> None:
    """A limit so small, or so far above what was sent, is misread."""
    assert learned_window.is_plausible(limit, weight, output) is believed


def test_a_stated_limit_holds_for_a_while() -> None:
    """The smallest that was stated holds, each time it is stated anew for another hour."""
    belief = learned_window.with_stated_limit(NOTHING_LEARNED, 8_192, None, T)
    assert learned_window.stated_limit(belief, T + STATED_SECONDS - 1) == 8_192
    assert learned_window.stated_limit(belief, T + STATED_SECONDS) is None
    assert learned_window.with_stated_limit(belief, 9_000, None, T + 10) is belief
    again = learned_window.with_stated_limit(belief, 8_192, None, T + 10)
    assert learned_window.stated_limit(again, T + STATED_SECONDS) == 8_192
    late = learned_window.with_stated_limit(belief, 9_000, None, T + STATED_SECONDS)
    assert learned_window.stated_limit(late, T + STATED_SECONDS) == 9_000
    assert learned_window.stated_limit(learned_window.with_stated_limit(belief, 9_000, 32_768, T + 10), T + 10) == 9_000


def test_refusals_without_a_figure_lower_it_step_by_step() -> None:
    """One says nothing; from the second on, what is believed goes below what was refused, and never up."""
    belief = learned_window.with_refusal(NOTHING_LEARNED, 10_000, T)
    assert learned_window.inferred_window(belief, T) is None
    levels = []
    for weight in (9_000, 8_000, 12_000, 6_000):
        belief = learned_window.with_refusal(belief, weight, T + 1)
        levels.append(learned_window.inferred_window(belief, T + 1))
    assert levels == [8_100, 7_200, 7_200, 5_400]
    far = learned_window.with_refusal(
        learned_window.with_refusal(NOTHING_LEARNED, 10_000, T), 9_000, T + REPEATED_SECONDS
    )
    assert learned_window.inferred_window(far, T + REPEATED_SECONDS) is None


@given(st.integers(LEAST_PLAUSIBLE, 10**6), st.lists(st.floats(0, 3 * PROBE_SECONDS), max_size=20))
def test_it_comes_back_by_probing(figure: int, waits: list[float]) -> None:
    """An inferred window rises with time, never falls by itself, and is dropped in the end."""
    belief, now = learned_window.with_inferred_window(NOTHING_LEARNED, figure, T), T
    before: int | None = figure
    for wait in waits:
        now += wait
        level = learned_window.inferred_window(belief, now)
        assert level is None or (before is not None and level >= before)
        before = level
    assert learned_window.inferred_window(belief, T + PROBE_SECONDS) in (int(figure * 1.1), figure)
    assert learned_window.inferred_window(belief, T + (MOST_STEPS + 1) * PROBE_SECONDS) is None


def test_a_clock_that_went_back_changes_nothing() -> None:
    """Replicas' clocks differ: a belief from the future holds as it is."""
    assert (
        learned_window.inferred_window(learned_window.with_inferred_window(NOTHING_LEARNED, 5_000, T), T - 9_999)
        == 5_000
    )
    assert (
        learned_window.stated_limit(learned_window.with_stated_limit(NOTHING_LEARNED, 5_000, None, T), T - 9_999)
        == 5_000
    )


def test_an_answer_to_more_proves_it_wrong() -> None:
    """A prompt that was answered ends every belief that it could not be; a smaller one changes nothing."""
    belief = LearnedWindow(stated=4_000, stated_at=T, inferred=3_000, inferred_at=T)
    assert learned_window.with_answer(belief, 2_999, T) is belief
    more = learned_window.with_answer(belief, 3_500, T)
    assert (learned_window.stated_limit(more, T), learned_window.inferred_window(more, T)) == (4_000, 3_500)
    most = learned_window.with_answer(belief, 4_500, T)
    assert (learned_window.stated_limit(most, T), learned_window.inferred_window(most, T)) == (None, 4_500)


@pytest.mark.parametrize(
    ("reports", "level"),
    [([4_096], 4_096), ([4_080], 4_080), ([3_000], None), ([3_000, 3_100], 3_100), ([3_000, 900], None)],
)
def test_a_cut_teaches_where_it_shows_a_window(reports: list[int], level: int | None) -> None:
    """A figure just under a power of two, or two alike, is a window; others may be a cache's doing."""
    belief = NOTHING_LEARNED
    for reported in reports:
        belief = learned_window.with_silent_cut(belief, reported, T)
    assert learned_window.inferred_window(belief, T) == level


@pytest.mark.parametrize("reported", [0, 9, 255, 1_000])
def test_a_server_that_does_not_count_shows_no_window(reported: int) -> None:
    """The same tiny figure for every prompt, however often it comes, lowers nothing."""
    belief = NOTHING_LEARNED
    for moment in range(5):
        belief = learned_window.with_silent_cut(belief, reported, float(moment))
    assert learned_window.inferred_window(belief, 5.0) is None


@pytest.mark.parametrize(
    ("model", "exact", "factor"),
    [
        ("gpt-5-mini", False, 1.0),
        ("openai/gpt-4o", False, 1.0),
        ("o3-mini", False, 1.0),
        ("claude-sonnet-4-6", False, 1.5),
        ("anthropic/claude-opus-5", False, 1.5),
        ("claude-sonnet-4-6", True, 1.0),
        ("Qwen/Qwen3-32B", False, 1.1),
        ("some-model", False, 1.0),
    ],
)
def test_priors_go_by_family(model: str, exact: bool, factor: float) -> None:
    """A family begins with its shipped prior, OpenAI's own and a configured encoding with one."""
    assert prior_calibration(model, configured_encoding=exact).factor == factor


@pytest.mark.parametrize(
    ("ratio", "step"), [(1.0, 1.0), (1.019, 1.0), (1.03, 1.05), (1.5, 1.5), (1.49, 1.5), (0.9, 0.9)]
)
def test_factors_come_in_steps(ratio: float, step: float) -> None:
    """A ratio is taken up to the next step, but for the small tolerance that frames need."""
    assert rounded_up(ratio) == step


def test_it_rises_at_once() -> None:
    """One report of one and a half times our count is believed at once."""
    assert with_report(Calibration(1.0, 1.0), 1000, 1500).factor == 1.5


def test_one_lie_cannot_make_every_view_tiny() -> None:
    """A single report at the edge of the possible raises the factor by the fastest rise only; beyond it, not at all."""
    assert with_report(Calibration(1.0, 1.0), 1000, int(1000 * HIGHEST_RATIO)).factor == FASTEST_RISE
    assert with_report(Calibration(1.0, 1.0), 1000, 50_000) == Calibration(1.0, 1.0)


def test_it_falls_slowly() -> None:
    """It takes several lower reports in a row to fall by one step, and one high report starts the count again."""
    known = Calibration(1.5, 1.5)
    for _ in range(PATIENCE - 1):
        known = with_report(known, 1000, 1200)
    assert known.factor == 1.5
    assert with_report(known, 1000, 1200).factor == pytest.approx(1.5 - STEP)
    assert with_report(with_report(known, 1000, 1500), 1000, 1200).factor == 1.5


def test_small_prompts_teach_nothing() -> None:
    """A provider's frame weighs too much in a short prompt."""
    assert with_report(Calibration(1.0, 1.0), 100, 180) == Calibration(1.0, 1.0)


def test_a_cut_prompt_is_distinguished_from_a_coarser_vocabulary() -> None:
    """A report far below what was seen before means truncation, and moves no factor."""
    known = Calibration(1.5, 1.5)
    assert is_truncated(known, 10_000, 4_096)
    assert not is_truncated(known, 10_000, 14_000)
    assert with_report(known, 10_000, 4_096) == known


@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 2**40)), max_size=60))
def test_no_series_of_reports_leaves_the_possible(reports: list[tuple[int, int]]) -> None:
    """With any reports, the factor stays a step between the bounds."""
    known = prior_calibration("m", configured_encoding=False)
    for counted, reported in reports:
        known = with_report(known, counted, reported)
        assert 0.45 <= known.factor <= HIGHEST_RATIO + STEP
        assert abs(known.factor / STEP - round(known.factor / STEP)) < 1e-6


@given(st.floats(0.6, 3.9), st.integers(2_000, 100_000))
def test_an_honest_provider_is_soon_covered(ratio: float, counted: int) -> None:
    """After two honest reports the factor covers the provider's count."""
    known = Calibration(1.0, 1.0)
    for _ in range(2):
        known = with_report(known, counted, int(counted * ratio))
    assert known.factor * counted >= counted * (ratio - 0.021) - 1


@given(st.integers(1, 10**6), st.booleans())
def test_what_can_have_been_reported(counted: int, plain: bool) -> None:
    """Any ratio that the factor may take is credible, nothing is not, nor what is far beyond."""
    assert all(
        is_credible(counted, max(1, int(counted * ratio)), plain=plain) for ratio in (LOWEST_RATIO, 1.0, HIGHEST_RATIO)
    )
    assert not is_credible(counted, 0, plain=plain)
    assert not is_credible(counted, 20 * counted + 10_000, plain=plain)

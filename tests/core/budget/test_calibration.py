"""What reports of a provider's own count teach, and what they must not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget.calibration import (
    FASTEST_RISE,
    HIGHEST,
    LOWEST,
    PATIENCE,
    STEP,
    Calibration,
    is_credible,
    is_truncated,
    learn,
    prior,
    stepped,
)


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
    assert prior(model, exact=exact).factor == factor


@pytest.mark.parametrize(
    ("ratio", "step"), [(1.0, 1.0), (1.019, 1.0), (1.03, 1.05), (1.5, 1.5), (1.49, 1.5), (0.9, 0.9)]
)
def test_factors_come_in_steps(ratio: float, step: float) -> None:
    """A ratio is taken up to the next step, but for the small tolerance that frames need."""
    assert stepped(ratio) == step


def test_it_rises_at_once() -> None:
    """One report of one and a half times our count is believed at once."""
    assert learn(Calibration(1.0, 1.0), 1000, 1500).factor == 1.5


def test_one_lie_cannot_make_every_view_tiny() -> None:
    """A single report at the edge of the possible raises the factor by the fastest rise only; beyond it, not at all."""
    assert learn(Calibration(1.0, 1.0), 1000, int(1000 * HIGHEST)).factor == FASTEST_RISE
    assert learn(Calibration(1.0, 1.0), 1000, 50_000) == Calibration(1.0, 1.0)


def test_it_falls_slowly() -> None:
    """It takes several lower reports in a row to fall by one step, and one high report starts the count again."""
    known = Calibration(1.5, 1.5)
    for _ in range(PATIENCE - 1):
        known = learn(known, 1000, 1200)
    assert known.factor == 1.5
    assert learn(known, 1000, 1200).factor == pytest.approx(1.5 - STEP)
    assert learn(learn(known, 1000, 1500), 1000, 1200).factor == 1.5


def test_small_prompts_teach_nothing() -> None:
    """A provider's frame weighs too much in a short prompt."""
    assert learn(Calibration(1.0, 1.0), 100, 180) == Calibration(1.0, 1.0)


def test_a_cut_prompt_is_told_from_a_coarser_vocabulary() -> None:
    """A report far below what was seen before means truncation, and moves no factor."""
    known = Calibration(1.5, 1.5)
    assert is_truncated(known, 10_000, 4_096)
    assert not is_truncated(known, 10_000, 14_000)
    assert learn(known, 10_000, 4_096) == known


@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 2**40)), max_size=60))
def test_no_series_of_reports_leaves_the_possible(reports: list[tuple[int, int]]) -> None:
    """Whatever a provider reports, the factor stays a sane step."""
    known = prior("m")
    for counted, reported in reports:
        known = learn(known, counted, reported)
        assert 0.45 <= known.factor <= HIGHEST + STEP
        assert abs(known.factor / STEP - round(known.factor / STEP)) < 1e-6


@given(st.floats(0.6, 3.9), st.integers(2_000, 100_000))
def test_an_honest_provider_is_soon_covered(ratio: float, counted: int) -> None:
    """After two honest reports the factor covers the provider's count."""
    known = Calibration(1.0, 1.0)
    for _ in range(2):
        known = learn(known, counted, int(counted * ratio))
    assert known.factor * counted >= counted * (ratio - 0.021) - 1


@given(st.integers(1, 10**6), st.booleans())
def test_what_can_have_been_reported(counted: int, plain: bool) -> None:
    """Any ratio that the factor may take is credible, nothing is not, nor what is far beyond."""
    assert all(is_credible(counted, max(1, int(counted * ratio)), plain=plain) for ratio in (LOWEST, 1.0, HIGHEST))
    assert not is_credible(counted, 0, plain=plain)
    assert not is_credible(counted, 20 * counted + 10_000, plain=plain)

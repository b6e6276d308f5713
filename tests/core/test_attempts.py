"""The order in which things are tried, and what is never tried."""

from __future__ import annotations

import pytest

from proxy.core.attempts import fallback_cycle, is_news, lowering, retries_smaller
from proxy.core.compaction.schedule import LowerOutput
from proxy.core.decisions import KnownRoute
from proxy.core.models import COMPRESS, Route
from proxy.core.overflow.kinds import Overflow


@pytest.mark.parametrize(
    ("steps", "max_loss"),
    [((COMPRESS,), "any"), ((COMPRESS, "big"), "no_drop"), (("big", COMPRESS), "none"), (("big",), "none")],
)
def test_how_far_the_model_itself_goes_first(steps: tuple[str, ...], max_loss: str) -> None:
    """Alone it does all it can; before a fallback nothing is lost; behind one nothing is changed."""
    route = Route("stub", "m", None, None, "o200k_base", "unknown", steps=steps)
    assert KnownRoute(route, None, "unknown", None, 1.0).first_max_loss == max_loss


@pytest.mark.parametrize("lower", ["never", "last", "first"])
def test_what_is_sent_again(lower: LowerOutput) -> None:
    """Refusals for length are, a rate limit and a stop never, a cap of the output where figures go first."""
    assert all(retries_smaller(Overflow(kind), lower) for kind in ("input", "input_plus_output", "payload"))
    assert not any(retries_smaller(Overflow(kind, 100), lower) for kind in ("rate_limit", "stop"))
    assert retries_smaller(Overflow("output_cap", 4_096), lower) == (lower == "first")
    assert not retries_smaller(Overflow("output_cap"), lower)


def test_input_and_output_together() -> None:
    """Then the figure gives way first, unless it never may."""
    both, alone = Overflow("input_plus_output"), Overflow("input")
    assert [lowering(both, mode) for mode in ("never", "last", "first")] == ["never", "first", "first"]
    assert [lowering(alone, mode) for mode in ("never", "last", "first")] == ["never", "last", "first"]


def test_loops_are_found() -> None:
    """A way back to any model on it is a loop, however long; a tree is none."""
    steps = {"a": ("b", "c"), "b": ("c",), "c": (), "x": ("y",), "y": ("z",), "z": ("y",), "me": ("me",)}
    assert fallback_cycle("a", steps.__getitem__, set()) == ()
    assert fallback_cycle("x", steps.__getitem__, set()) == ("x", "y", "z", "y")
    assert fallback_cycle("me", steps.__getitem__, set()) == ("me", "me")


def test_many_paths_are_not_walked_one_by_one() -> None:
    """Forty models that each fall back to all behind them have 2**38 paths, and a way back at the end is found."""
    steps = {str(number): [str(other) for other in range(number + 1, 40)] for number in range(40)}
    assert fallback_cycle("0", steps.__getitem__, set()) == ()
    steps["39"] = ["7"]
    assert fallback_cycle("0", steps.__getitem__, set())[-1] == "7"


@pytest.mark.parametrize(
    ("status", "own", "rescue"),
    [(200, True, True), (400, False, False), (413, False, False), (422, False, False)]
    + [(status, True, False) for status in (401, 403, 429, 500, 503)],
)
def test_what_is_news_after_an_overflow(status: int, own: bool, rescue: bool) -> None:
    """Success is; another no of the model itself is not, nor is any failure of a fallback."""
    assert (is_news(status, is_fallback=False), is_news(status, is_fallback=True)) == (own, rescue)

"""Which figure of an error plays which role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.overflow.figures import LEAST_LIMIT, StatedFigures, assign_roles, stated_size

FIGURES = st.lists(st.integers(0, 2_000_000), max_size=3)
STATED = st.dictionaries(st.sampled_from(["limit", "prompt", "output", "requested", "cap"]), FIGURES)


def test_parts_are_added_up_where_the_whole_says_so() -> None:
    """Text, tools and schema are one prompt if they add up to what was requested less the output."""
    made = assign_roles({"limit": [8192], "prompt": [7000, 1500], "output": [500], "requested": [9000]})
    assert (made.prompt, made.output, made.are_too_many) == (8500, 500, True)
    assert assign_roles({"limit": [8192], "prompt": [7000, 400], "requested": [9999]}).prompt == 7000


def test_a_whole_may_hold_an_output() -> None:
    """One figure for the whole request is the prompt, unless the output may be a part of it."""
    made = assign_roles({"limit": [8192], "requested": [9000]})
    assert (made.prompt, made.whole, made.undivided().prompt) == (9000, True, None)
    assert made.undivided().are_too_many
    split = assign_roles({"limit": [8192], "prompt": [9000], "requested": [9000]})
    assert split.undivided().prompt == 9000


def test_of_two_limits_the_larger_is_what_was_sent() -> None:
    """Two figures in the place of a limit can only be the limit and what is above it."""
    assert assign_roles({"limit": [9000, 8192]}) == StatedFigures(8192, 9000, inferred=True)


def test_the_limit_is_one_that_is_exceeded() -> None:
    """Of several figures called a limit the one counts that the claim is above."""
    assert assign_roles({"limit": [200_000, 8192], "prompt": [9000]}).limit == 8192


def test_figures_that_do_not_complain() -> None:
    """Where the claim is far below the limit they are figures of something else."""
    assert assign_roles({"limit": [100_000], "prompt": [100]}) == StatedFigures()


@given(STATED)
def test_any_figures(stated: dict[str, list[int]]) -> None:
    """A limit is one of the figures that were stated as such, and never a small count."""
    made = assign_roles(stated)
    assert made.limit is None or (made.limit in stated["limit"] and made.limit >= LEAST_LIMIT)
    assert made.prompt is None or made.prompt >= 0
    assert not made.are_too_many or made.limit is not None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("(26214400) exceeded (26306794 bytes read)", 26_306_794),
        ("image exceeds 5 MB maximum: 6,500,712 bytes > 5242880 bytes", 6_500_712),
        ("4.5MB is the limit", 4_500_000),
        ("1.5 KiB", 1_500),
        ("2 GB", 2_000_000_000),
        ("最多 4000 字", 4_000),
        ("第 3 字段", None),
        ("8192 tokens, version 2.5", None),
        ("", None),
    ],
)
def test_a_size_has_a_unit(text: str, size: int | None) -> None:
    """The largest figure before a unit of bytes is the size that a text states; other figures are none."""
    assert stated_size(text) == size

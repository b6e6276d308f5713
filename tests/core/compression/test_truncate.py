"""Truncated texts: exact at their limits, whole characters, nothing twice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compression.truncate import MIDDLE, REST, Truncate, is_over, line_count, truncate, truncate_to
from tests.support.engine_fixtures import count_tokens

LINES = "".join(f"line {n}\n" for n in range(1, 3001))


def kept(text: str, shown: str) -> tuple[str, str]:
    """What is left before and after the marker; both stand in *text* so."""
    marker = MIDDLE if MIDDLE in shown else REST
    head, _, tail = shown.partition(marker)
    head, tail = head.removesuffix("\n"), tail.removeprefix("\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) < len(text)
    return head, tail


@pytest.mark.parametrize("tail", [True, False])
def test_at_the_limit_nothing_happens(tail: bool) -> None:
    """Exactly so many lines or bytes stay as they are, with and without a final line end; one more does not."""
    exact = "x\n" * 2000
    assert truncate(exact, 2000, 50_000, tail=tail) is exact
    assert truncate(exact[:-1], 2000, 50_000, tail=tail) == exact[:-1]
    assert truncate(exact + "y", 2000, 50_000, tail=tail) != exact + "y"
    assert truncate("x" * 50_000, 2000, 50_000, tail=tail) == "x" * 50_000
    assert truncate("x" * 50_001, 2000, 50_000, tail=tail) != "x" * 50_001


def test_commands_keep_both_ends_and_reads_their_head() -> None:
    """Lines before and after the marker are whole, and as many as the limit says with the marker's own."""
    head, tail = kept(LINES, truncate(LINES, 100, 50_000, tail=True))
    assert (line_count(head), line_count(tail)) == (50, 49)
    assert tail.endswith("line 3000\n")
    head, tail = kept(LINES, truncate(LINES, 100, 50_000, tail=False))
    assert (line_count(head), tail) == (99, "")


def test_one_giant_line_is_cut_inside() -> None:
    """A line of a megabyte keeps both its ends."""
    giant = "".join(chr(97 + n % 26) for n in range(1_000_000))
    head, tail = kept(giant, truncate(giant, 2000, 50_000, tail=True))
    assert 40_000 < len(head) + len(tail) <= 50_000


@given(
    st.text(alphabet="aé漢👩\n ", max_size=400),
    st.integers(1, 12),
    st.integers(1, 300),
    st.booleans(),
)
def test_whatever_the_text_the_limits_hold(text: str, lines: int, size: int, tail: bool) -> None:
    """Never over a limit but for the marker alone, never half a character, and the same when done again."""
    shown = truncate(text, lines, size, tail=tail)
    if not is_over(text, lines, size):
        assert shown == text
    elif shown in (MIDDLE, REST):
        assert lines < 3 or size < len(shown) + 16
    else:
        assert not is_over(shown, lines, size)
        kept(text, shown)
        assert truncate(shown, lines, size, tail=tail) == shown


@given(st.integers(40, 400), st.sampled_from([LINES, "word " * 4000, "漢字" * 4000]))
def test_tokens_are_a_limit_too(tokens: int, text: str) -> None:
    """The result takes at most so many tokens."""
    assert count_tokens(truncate_to(text, Truncate(), tokens, count_tokens, tail=True)) <= tokens


def test_markers_say_nothing_that_could_be_quoted_as_a_fact() -> None:
    """No long number, nothing like a path."""
    assert not re.search(r"\d{3}|[/\\]", MIDDLE + REST)

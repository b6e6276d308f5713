"""Cutting short: tool results and single texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compaction.truncate import (
    MARKER,
    MIDDLE,
    OMITTED,
    REST,
    SHORT_MARKER,
    Spared,
    clip,
    clip_levels,
    fair_level,
    is_over,
    line_count,
    truncate,
    truncate_to,
)
from tests.support.conversation_strategies import texts
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import log, prose

LINES = "".join(f"line {n}\n" for n in range(1, 3001))


def kept(text: str, shown: str) -> tuple[str, str]:
    """The parts before and after the marker, both as they are in *text*."""
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
    assert count_tokens(truncate_to(text, 2_000, 50_000, tokens, count_tokens)) <= tokens


@pytest.mark.parametrize("text", [LINES, "word " * 40_000, "漢字" * 20_000, "x" * 100_000])
@pytest.mark.parametrize("tokens", [200, 1_500, 7_000])
def test_no_more_is_lost_than_needed(text: str, tokens: int) -> None:
    """The result comes near the tokens that it may take: at most a 64th and two lines are missing."""
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(len(part))
        return count_tokens(part)

    whole = count_tokens(text)
    size = len(text.encode()) * tokens * 17 // (whole * 16)
    result = truncate_to(text, 100_000, size, tokens, count)
    line = 2 * count_tokens(text.split("\n")[0]) if "\n" in text else 0
    if whole > tokens:
        assert tokens - tokens // 64 - line <= count_tokens(result) <= tokens
    assert sum(counted) <= 6 * len(result)


@pytest.mark.parametrize("tokens", range(7_000, 8_000, 100))
def test_a_cut_that_a_smaller_size_leaves_the_same_goes_further(tokens: int) -> None:
    """Of long lines that take unequal tokens, two sizes may be cut at the same line end: only the marker stayed."""
    rows = [f"row {n} " + ("word " if n * n % 7 else '"a-1": 2.5, ') * (n * 37 % 150) for n in range(200)]
    text = "\n".join(rows)
    size = len(text) * tokens * 17 // (count_tokens(text) * 16)
    assert tokens * 2 // 3 <= count_tokens(truncate_to(text, 1_000, size, tokens, count_tokens)) <= tokens


def test_a_text_of_which_only_the_marker_is_left_is_cut_no_further() -> None:
    """Thousands of short results with no room for any of them cost two counts each."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return count_tokens(text)

    assert truncate_to("1\tdone, all of it", 2_000, 10, 1, count) == MIDDLE
    assert len(counted) <= 2


def test_markers_say_nothing_that_could_be_quoted_as_a_fact() -> None:
    """No long number, nothing like a path."""
    assert not re.search(r"\d{3}|[/\\]", MIDDLE + REST)


SIZES = st.dictionaries(st.integers(0, 9), st.integers(1, 5_000), min_size=1)


@given(SIZES, st.integers(0, 20_000))
def test_a_level_is_the_largest_that_fits(sizes: dict[int, int], room: int) -> None:
    """Cut to the level all of them fit the room, if their floors do; one token more would not."""
    floors = {i: min(size, 48) for i, size in sizes.items()}
    level = fair_level(sizes, floors, room)
    taken = [sum(max(floors[i], min(size, at)) for i, size in sizes.items()) for at in (level, level + 1)]
    assert taken[0] <= room or level == 0
    assert taken[1] > room or level >= max(sizes.values())


def test_what_is_older_gives_way_first() -> None:
    """Older items are cut for all that is wanted, then for what is needed; unread ones and users' words after them."""
    sizes, spared = {0: 500, 1: 2_000, 2: 2_000}, Spared({0}, {2})
    floors = dict.fromkeys(sizes, 48)
    assert clip_levels(sizes, floors, spared, 1_500, 1_000, 300) == {0: 500, 1: 500, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 1_900, 1_800, 300) == {0: 500, 1: 200, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 3_000, 2_800, 300) == {0: 500, 1: 600, 2: 600}
    assert clip_levels(sizes, floors, spared, 4_000, 3_900, 300) == {0: 200, 1: 200, 2: 200}
    assert clip_levels(sizes, floors, Spared({0}, ()), 4_000, 3_900, 300) == {0: 166, 1: 166, 2: 166}


SMALL = 3 * count_tokens(MARKER)
PATHOLOGICAL = {
    "letters": "a" * 1_000_000,
    "spaces": " " * 1_000_000,
    "lines": "\n" * 1_000_000,
    "base64": "QUFBQkJCQ0NDRERERUVFRg" * 40_000,
    "cjk": "不要修改数据库结构" * 100_000,
}


@settings(max_examples=300)
@given(texts(surrogates=False), st.integers(1, 40), st.integers(0, 400))
@pytest.mark.slow
def test_the_result_fits_and_both_ends_stay(text: str, times: int, tokens: int) -> None:
    """Whatever the text, the result takes at most the tokens asked for, is made of the text's ends, and not empty."""
    text = text * times
    result = clip(text, tokens, count_tokens)
    assert count_tokens(result) <= max(tokens, count_tokens(OMITTED))
    assert result.encode("utf-8")
    if count_tokens(text) <= max(tokens, count_tokens(OMITTED)):
        assert result == text
    else:
        pieces = [result.split(marker, 1) for marker in (MARKER, SHORT_MARKER) if marker in result]
        ends = [text.startswith(head) and text.endswith(tail) for head, *rest in pieces for tail in rest]
        assert any(ends) or text.startswith(result) or result == OMITTED


@pytest.mark.parametrize("tokens", [SMALL, 100, 400, 3000])
def test_the_marker_stands_once_between_whole_lines(tokens: int) -> None:
    """A log is cut at line ends, and one marker says so."""
    text = log(1, 5000)
    result = clip(text, tokens, count_tokens)
    head, tail = result.split(MARKER)
    assert count_tokens(result) > tokens * 0.6
    if tokens >= 400:
        assert set(head.split("\n")) | set(tail.split("\n")) <= set(text.split("\n"))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert tail


def test_what_keeps_little_still_keeps_both_ends() -> None:
    """Where the marker's words would be most of the text, a short one stands between head and tail."""
    text = prose(1, 500)
    result = clip(text, 12, count_tokens)
    head, tail = result.split(SHORT_MARKER)
    assert head
    assert tail
    assert MARKER not in result


@pytest.mark.parametrize("kind", PATHOLOGICAL)
def test_a_megabyte_takes_a_bounded_number_of_looks(kind: str) -> None:
    """A megabyte of anything is clipped by reading about a few times what is kept, not the whole text each time."""
    text, seen = PATHOLOGICAL[kind], [0, 0]

    def watched(piece: str) -> int:
        seen[0] += 1
        seen[1] += len(piece)
        return count_tokens(piece)

    result = clip(text, 1000, watched)
    assert count_tokens(result) <= 1000
    assert result.count(MARKER) == 1
    assert seen[0] <= 100
    assert seen[1] <= 6 * len(text)


def test_markers_state_no_facts() -> None:
    """A marker holds no number and nothing that looks like a path: a model would quote it."""
    for marker in (MARKER, SHORT_MARKER, OMITTED):
        assert not any(character.isdigit() or character in "/\\" for character in marker)


class CountsCharacters:
    """Counts tokens, and the characters that it read for that."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, text: str) -> int:
        self.read += len(text)
        return count_tokens(text)


@pytest.mark.parametrize("text", ["abcdefgh" * 40_000, prose(3, 60_000), log(1, 60_000), "汉字很多" * 40_000])
@pytest.mark.parametrize("tokens", [300, 5_000, 20_000])
def test_a_long_text_keeps_both_ends(text: str, tokens: int) -> None:
    """Nearly as much of it stays as may stay."""
    cut = clip(text, tokens, count_tokens)
    head, _, tail = cut.partition(MARKER)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert tokens * 0.8 - 10 < count_tokens(cut) <= tokens


@pytest.mark.parametrize("text", ["abcdefgh" * 40_000, prose(3, 60_000)])
def test_parts_of_a_long_text_are_not_counted_again_and_again(text: str) -> None:
    """The whole text is counted once, and of its ends mostly what the search adds or takes away (all: 11 times)."""
    count = CountsCharacters()
    cut = clip(text, 20_000, count)
    assert count.read <= len(text) + 7 * len(cut)

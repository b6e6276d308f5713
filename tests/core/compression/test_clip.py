"""Clipping: the middle goes, both ends stay, and the result is never larger than asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compression.clip import LEAST, MARKER, SHORT_MARKER, clip
from tests.support.conversation_strategies import texts
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import log, prose

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
def test_the_result_fits_and_both_ends_stay(text: str, times: int, tokens: int) -> None:
    """Whatever the text, the result takes at most the tokens asked for, is made of the text's ends, and not empty."""
    text = text * times
    result = clip(text, tokens, count_tokens)
    assert count_tokens(result) <= max(tokens, count_tokens(LEAST))
    assert result.encode("utf-8")
    if count_tokens(text) <= max(tokens, count_tokens(LEAST)):
        assert result == text
    else:
        pieces = [result.split(marker, 1) for marker in (MARKER, SHORT_MARKER) if marker in result]
        ends = [text.startswith(head) and text.endswith(tail) for head, *rest in pieces for tail in rest]
        assert any(ends) or text.startswith(result) or result == LEAST


@pytest.mark.parametrize("tokens", [SMALL, 100, 400, 3000])
def test_the_cut_is_said_once_and_stands_between_whole_lines(tokens: int) -> None:
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
    for marker in (MARKER, SHORT_MARKER, LEAST):
        assert not any(character.isdigit() or character in "/\\" for character in marker)

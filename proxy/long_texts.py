"""Counts the tokens of long texts by a function that counts short ones, each in a bounded time.

Long runs of one character are shortened first. What is still long is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

CHUNK: Final = 16_384
"""Most characters encoded at once: the encoder's time for one word grows faster than the word.

A longer text is cut before a space that follows a word. This changes no count, because no token reaches across such an
edge. If there is none within ``SEARCHED`` characters, the ``SEAM`` characters on both sides of the cut are counted
again, together and apart, to correct for it.
"""

SEARCHED: Final = 4_096
SEAM: Final = 512

RUN: Final = 3_072
"""A longer run of one character is shortened by multiples of this length, which is a whole number of its tokens.

Tokens of one character are 3 digits or a power of two long.
"""

_BLOCK: Final = 1_024
"""Step in characters in which runs are searched; ``RUN`` is a multiple of it."""

Count = Callable[[str], int]
"""Counts the tokens of a text."""


def encoded_length(count: Count, text: str) -> int:
    """Return the tokens of a long *text* by *count*, in parts; long runs of one character are shortened first."""
    # A megabyte of one character is a single word to the encoder, which takes most of a second for it.
    text, removed = shortened(text)
    runs = sum(times * count(letter * RUN) for letter, times in removed.items())
    if len(text) <= CHUNK:
        return runs + count(text)
    return runs + _count_in_pieces(text, count)


def _count_in_pieces(text: str, count: Count) -> int:
    """Return the count of *text* as a whole from the counts of its pieces, corrected where a cut split a word."""
    total = at = 0
    for piece in pieces(text):
        if at and not piece.startswith(" "):
            before, after = text[at - SEAM : at], text[at : at + SEAM]
            total += count(before + after) - count(before) - count(after)
        total += count(piece)
        at += len(piece)
    return total


def pieces(text: str) -> Iterator[str]:
    """Yield *text* in pieces of at most ``CHUNK`` characters, cut between words if it has any."""
    at = 0
    while len(text) - at > CHUNK:
        end = _edge(text, at + CHUNK - SEARCHED, at + CHUNK)
        yield text[at:end]
        at = end
    yield text[at:]


def _edge(text: str, start: int, end: int) -> int:
    """Return the last position from *start* to *end* of a space that follows a word; *end* if there is none."""
    at = text.rfind(" ", start, end)
    while at > start and text[at - 1].isspace():
        at = text.rfind(" ", start, at)
    if at <= start:
        return end
    return at


def shortened(text: str) -> tuple[str, dict[str, int]]:
    """Return *text* with long runs of a character cut by multiples of ``RUN``, and the multiples by character."""
    parts: list[str] = []
    removed: dict[str, int] = {}
    copied = at = 0
    while at < len(text):
        letter, end = text[at], at
        while text[end : end + _BLOCK] == letter * _BLOCK:
            end += _BLOCK
        times = (end - at) // RUN - 1
        if times > 0:
            parts.append(text[copied:at])
            copied = at + times * RUN
            removed[letter] = removed.get(letter, 0) + times
        at = max(end, at + _BLOCK)
    if not removed:
        return text, removed
    return "".join([*parts, text[copied:]]), removed

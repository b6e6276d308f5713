"""Cutting the middle out of a text that alone is too big, visibly, at line and word boundaries."""

from __future__ import annotations

from collections.abc import Callable

Count = Callable[[str], int]

MARKER = "\n[... middle left out to save room; ask for a narrower part if needed ...]\n"

SHORT_MARKER = " [...] "
"""For texts that keep so little that the words of the marker would be most of it."""

LEAST = "[...]"
"""What stands for a text of which nothing can be kept."""

HEAD_SHARE = 0.6
"""Share kept from the beginning: questions and headings stand there, results and errors at the end."""


def clip(text: str, tokens: int, count: Count) -> str:
    """*text* with its middle left out so that it takes at most *tokens*; unchanged where it fits already.

    Never empty and never less than ``LEAST``, whatever *tokens* says: providers refuse messages without text.
    """
    if count(text) <= max(tokens, count(LEAST)):
        return text
    marker = MARKER if tokens >= 3 * count(MARKER) else SHORT_MARKER
    room = tokens - count(marker)
    while room > 1:
        head = _beginning(text, int(room * HEAD_SHARE), count)
        tail = _ending(text, room - count(head), count)
        result = head.rstrip("\n") + marker + tail.lstrip("\n")
        if (excess := count(result) - tokens) <= 0:
            return result
        room -= excess  # the seams can cost a token that neither side does alone
    return _beginning(text, max(0, tokens), count) or LEAST


def _beginning(text: str, tokens: int, count: Count) -> str:
    size = _longest(lambda n: count(text[:n]) <= tokens, tokens, len(text))
    return text[: _boundary(text, size)]


def _ending(text: str, tokens: int, count: Count) -> str:
    size = _longest(lambda n: n == 0 or count(text[-n:]) <= tokens, tokens, len(text))
    if size == 0:
        return ""
    start = len(text) - size
    line = text.find("\n", start, start + size // 4 + 1)
    return text[line + 1 :] if line >= 0 else text[start:]


def _boundary(text: str, size: int) -> int:
    """The last line end in the last quarter of ``text[:size]``, else *size*."""
    line = text.rfind("\n", size - size // 4, size)
    return line if line > 0 else size


def _longest(fits: Callable[[int], bool], tokens: int, most: int) -> int:
    """The largest length that *fits*, found by doubling and halving around four characters a token."""
    low, high = 0, min(most, max(16, tokens * 4))
    while high < most and fits(high):
        low, high = high, min(most, high * 2)
    if fits(high):
        return high
    while high - low > 1 + tokens // 8:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low

"""Tool results cut to a number of lines, bytes and tokens: what a client's own tools do, where they did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[str], int]

MIDDLE = "[... the middle of this output was left out to save room; run a narrower command to see it ...]"
REST = "[... the rest was left out to save room; ask for a later or narrower part to see it ...]"

HEAD_ONLY = frozenset({"file_read", "grep", "glob", "list", "web_fetch", "web_search", "search_semantic"})
"""Kinds of tools whose results are read from the top; of all others the end says how it went."""

BYTES_PER_TOKEN = 4
"""So many bytes of a limit are one token when its weight is charged before its text is known."""

_TRIES = 12
_EDGES = (b"\n", b" ")
"""Where a text is cut if such an edge is near: between lines, else between words."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The most lines and bytes a tool result keeps, and the share of the room it may take when room is short."""

    lines: int = 2_000
    size: int = 50_000
    share: float = 0.10

    def tokens(self, room: int) -> int:
        """The tokens a result may keep where messages have *room* tokens."""
        return max(0, min(int(self.share * room), self.most))

    @property
    def most(self) -> int:
        """The tokens that so many bytes of plain text are."""
        return self.size // BYTES_PER_TOKEN


def line_count(text: str) -> int:
    """Lines of *text*; a final line end is no line of its own."""
    return text.count("\n") + bool(text and not text.endswith("\n"))


def is_over(text: str, lines: int, size: int) -> bool:
    """Whether *text* has more than so many lines or bytes."""
    return line_count(text) > lines or len(text.encode("utf-8", "surrogatepass")) > size


def truncate(text: str, lines: int, size: int, *, tail: bool) -> str:
    """*text* in at most so many lines and bytes, marker included; unchanged where it fits already.

    With *tail* head and end are kept, else the head. Cuts are between lines, inside one only where it is too long.
    """
    if not is_over(text, lines, size):
        return text
    marker = MIDDLE if tail else REST
    body = text.encode("utf-8", "surrogatepass")
    lines, size = lines - 1, size - len(marker) - 2
    if lines < 1 or size < 1:
        return marker
    kept = (lines - lines // 2, size - size // 2) if tail else (lines, size)
    head = body[: _head(body, *kept)]
    end = body[_tail(body, lines // 2, size // 2) :] if tail and lines > 1 else b""
    pieces = [_text(head).removesuffix("\n"), marker, *([_text(end)] if end else [])]
    return "\n".join(piece for piece in pieces if piece)


def truncate_to(text: str, limits: Truncate, tokens: int, count: Count, *, tail: bool) -> str:
    """*text* within *limits* and at most about *tokens*."""
    size = limits.size
    result = truncate(text, limits.lines, size, tail=tail)
    for _ in range(_TRIES):
        taken = count(result)
        if taken <= tokens:
            break
        size = min(size, len(result.encode("utf-8", "surrogatepass"))) * tokens * 31 // (taken * 32)
        result = truncate(text, limits.lines, size, tail=tail)
    return result


def _head(body: bytes, lines: int, size: int) -> int:
    """Where the head of *body* ends: after at most so many lines and bytes, between characters."""
    end = _after_lines(body, lines)
    if end <= size:
        return end
    for edge in _EDGES:
        if (at := body.rfind(edge, size * 3 // 4, size)) >= 0:
            return at + 1
    return _boundary(body, size, -1)


def _tail(body: bytes, lines: int, size: int) -> int:
    """Where the end of *body* starts: before at most so many lines and bytes, between characters."""
    start = _before_lines(body, lines)
    if len(body) - start <= size:
        return start
    start = len(body) - size
    for edge in _EDGES:
        if (at := body.find(edge, start, start + size // 4)) >= 0:
            return at + 1
    return _boundary(body, start, 1)


def _after_lines(body: bytes, lines: int) -> int:
    at = 0
    for _ in range(lines):
        found = body.find(b"\n", at)
        if found < 0:
            return len(body)
        at = found + 1
    return at


def _before_lines(body: bytes, lines: int) -> int:
    at = len(body) - body.endswith(b"\n")
    for _ in range(lines):
        found = body.rfind(b"\n", 0, at)
        if found < 0:
            return 0
        at = found
    return at + 1


def _boundary(body: bytes, at: int, step: int) -> int:
    """The nearest start of a character from *at* on in the direction of *step*."""
    while 0 < at < len(body) and body[at] & 0xC0 == 0x80:
        at += step
    return at


def _text(body: bytes) -> str:
    return body.decode("utf-8", "surrogatepass")

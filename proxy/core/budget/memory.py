"""Which parts of a text are memories that an agent injected: known by the headings and tags such blocks come under.

Nothing depends on it but what is reported. A block begins with a heading ``Memories`` or ``Memory`` of any level and
goes on to the next heading of that level or above, or stands between a pair of tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = re.compile(
    r"^(?P<level>#{1,6})[ \t]*(?:\w+[ \t]+)?memor(?:y|ies)[ \t]*:?[ \t]*$"
    r"|<(?P<tag>memory|memories|user_?memories|memory_blocks|relevant_memories)>",
    re.IGNORECASE | re.MULTILINE,
)
_WORD, _BEFORE = "memor", len("<relevant_")
"""What every opening has, and how far behind the beginning of a tag it stands at most."""

_LOWER = {ord(letter): letter.lower() for letter in "EMOR"}
_UNCLOSED = 64
"""Spellings of a tag that nobody closes, after which no tag is looked at: each costs a search to the text's end."""

_HEADING = re.compile(r"^(#{1,6})[ \t]*\S", re.MULTILINE)


def memories(text: str) -> str:
    """The injected memories in *text*, their headings and tags included; empty where there are none."""
    return "\n".join(text[start:end] for start, end in _blocks(text))


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    unclosed: set[str] = set()
    folded = text.lower()
    if len(folded) != len(text):
        folded = text.translate(_LOWER)
    while (opening := _opening(text, folded, at)) is not None:
        tag = opening["tag"]
        at = _closed(text, opening.end(), tag, unclosed) if tag else _ended(text, opening.end(), len(opening["level"]))
        yield opening.start(), at


def _opening(text: str, folded: str, at: int) -> re.Match[str] | None:
    """Return the first opening from *at* on; *folded* is *text* in lower case.

    It is looked for on the lines that have its word: one search by the pattern takes 16 ms for each MB.
    """
    while (word := folded.find(_WORD, at)) >= 0:
        line = text.rfind("\n", at, word) + 1 or at
        tag = text.rfind("<", max(line, word - _BEFORE), word)
        found = _OPENING.match(text, line) or (_OPENING.match(text, tag) if tag >= 0 else None)
        if found is not None:
            return found
        at = word + 1
    return None


def _closed(text: str, start: int, tag: str, unclosed: set[str]) -> int:
    """Where the block opened by *tag* ends; a tag that nobody closes opens nothing, and is kept in *unclosed*."""
    if tag in unclosed or len(unclosed) >= _UNCLOSED:
        return start
    closing = f"</{tag}>"
    end = text.find(closing, start)
    if end < 0:
        unclosed.add(tag)
        return start
    return end + len(closing)


def _ended(text: str, start: int, level: int) -> int:
    at = start
    while (at := text.find("\n#", at) + 1) > 0:
        heading = _HEADING.match(text, at)
        if heading is not None and len(heading[1]) <= level:
            return at
    return len(text)

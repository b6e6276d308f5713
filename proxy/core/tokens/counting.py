"""Totals of tokens by role and by region of a view; finds the memories that an agent injected into texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.conversation import Item, Role

REGIONS = ("system", "tools", "format", "memory", "summary", "user", "assistant", "tool", "reserve")
"""Every region; no two of them overlap.

``system``: system items and the members ``system`` and ``instructions``. ``memory``: texts that an agent injected into
these or into a user item. ``format``: the response format and the frame of the answer. ``summary``: the block.
"""

HISTORY: tuple[Role, ...] = ("user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RoleTotals:
    """Tokens of the first ``count`` items by role; ``media`` are those of images, sound and files.

    ``memories`` are the tokens of injected memories in system items and in user items; they are part of the role's.
    """

    count: int = 0
    system: int = 0
    user: int = 0
    assistant: int = 0
    tool: int = 0
    media: int = 0
    memories: tuple[int, int] = (0, 0)

    @property
    def history(self) -> int:
        """Tokens of all items but system ones."""
        return self.user + self.assistant + self.tool


NOTHING = RoleTotals()


def add_up(items: Sequence[Item], known: RoleTotals = NOTHING) -> RoleTotals:
    """Return the totals of *items*, continued from those of a prefix of them; costs O(new)."""
    roles: dict[Role, int] = {"system": known.system, "user": known.user, "assistant": known.assistant}
    roles["tool"], media = known.tool, known.media
    system_memories, user_memories = known.memories
    for item in items[known.count :]:
        roles[item.role] += item.tokens
        media += item.media
        if item.role == "system":
            system_memories += item.memory
        else:
            user_memories += item.memory
    memories = (system_memories, user_memories)
    return RoleTotals(len(items), roles["system"], roles["user"], roles["assistant"], roles["tool"], media, memories)


@dataclass(frozen=True, slots=True)
class Members:
    """Tokens of the members beside the items; ``memories`` are those of ``system`` that an agent injected."""

    tools: int = 0
    system: int = 0
    memories: int = 0


def regions(items: RoleTotals, members: Members, *, fixed: int, summary: int, reserve: int) -> dict[str, int]:
    """Return the tokens of a view with *items* by region; empty regions are left out.

    *fixed* are the tokens of all but the history: *members*, system items, the frame of the answer. Without the
    reserve, the regions add up to the view's tokens.
    """
    system_memories, user_memories = items.memories
    system_memories += members.memories
    tokens = {
        "system": items.system + members.system - system_memories,
        "tools": members.tools,
        "format": fixed - items.system - members.system - members.tools,
        "memory": system_memories + user_memories,
        "summary": summary,
        "user": items.user - user_memories,
        "assistant": items.assistant,
        "tool": items.tool,
        "reserve": reserve,
    }
    return {name: count for name, count in tokens.items() if count > 0}


def to_provider_tokens(regions: Mapping[str, int], factor: float) -> dict[str, int]:
    """Return *regions* in the tokens of a provider that counts *factor* times our count."""
    if factor == 1.0:
        return dict(regions)
    return {name: int(tokens * factor) for name, tokens in regions.items()}


# Blocks of memories are recognised by their headings and tags; only reports depend on them. A block extends from a
# heading ``Memories`` or ``Memory`` to the next heading of that level or above, or from an opening to a closing tag.
_OPENING = re.compile(
    r"^(?P<level>#{1,6})[ \t]*(?:\w+[ \t]+)?memor(?:y|ies)[ \t]*:?[ \t]*$"
    r"|<(?P<tag>memory|memories|user_?memories|memory_blocks|relevant_memories)>",
    re.IGNORECASE | re.MULTILINE,
)
_WORD = "memor"
"""A part of every opening."""

_BEFORE = len("<relevant_")
"""Characters between the beginning of a tag and the word, at most."""

_LOWER = {ord(letter): letter.lower() for letter in "EMOR"}

_UNCLOSED = 64
"""Spellings of tags without an end after which no further tag is read: each costs a search to the text's end."""

_HEADING = re.compile(r"^(#{1,6})[ \t]*\S", re.MULTILINE)


def injected_memories(text: str) -> str:
    """Return the injected memories in *text*, their headings and tags included; empty if there are none."""
    if _WORD not in text.lower():
        return ""
    return "\n".join(text[start:end] for start, end in _memory_blocks(text))


def _memory_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each block of memories."""
    at = 0
    unclosed: set[str] = set()
    folded = text.lower()
    if len(folded) != len(text):  # some letters have more characters in lower case
        folded = text.translate(_LOWER)
    while (opening := _opening(text, folded, at)) is not None:
        tag = opening["tag"]
        if tag:
            at = _end_of_tag(text, opening.end(), tag, unclosed)
        else:
            at = _end_of_section(text, opening.end(), len(opening["level"]))
        yield opening.start(), at


def _opening(text: str, folded: str, at: int) -> re.Match[str] | None:
    """Return the first opening from *at* on; *folded* is *text* in lower case.

    Only lines with its word are matched: a search by the pattern alone takes 16 ms for each MB.
    """
    while (word := folded.find(_WORD, at)) >= 0:
        line = text.rfind("\n", at, word) + 1 or at
        tag = text.rfind("<", max(line, word - _BEFORE), word)
        match = _OPENING.match(text, line)
        if match is None and tag >= 0:
            match = _OPENING.match(text, tag)
        if match is not None:
            return match
        at = word + 1
    return None


def _end_of_tag(text: str, start: int, tag: str, unclosed: set[str]) -> int:
    """Return the end of the block that *tag* opens; a tag without an end opens none and is added to *unclosed*."""
    if tag in unclosed or len(unclosed) >= _UNCLOSED:
        return start
    closing = f"</{tag}>"
    end = text.find(closing, start)
    if end < 0:
        unclosed.add(tag)
        return start
    return end + len(closing)


def _end_of_section(text: str, start: int, level: int) -> int:
    """Return the beginning of the next heading of *level* or above; the text's end if there is none."""
    at = start
    while (at := text.find("\n#", at) + 1) > 0:
        heading = _HEADING.match(text, at)
        if heading is not None and len(heading[1]) <= level:
            return at
    return len(text)

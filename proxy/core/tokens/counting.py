"""Totals of tokens by role and by region of a view, and which of them are memories that an agent injected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.conversation import Item, Role

REGIONS = ("system", "tools", "format", "memory", "summary", "user", "assistant", "tool", "reserve")
"""Every region: no two of them overlap. ``system`` are system items and the members ``system`` and ``instructions``,
``memory`` what an agent injected into those or into a user item, ``format`` the response format and the frame of the
answer, ``summary`` what stands for folded rounds."""

HISTORY: tuple[Role, ...] = ("user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RoleTotals:
    """Tokens of the first ``count`` items by role; ``memories`` are those of injected memories, ``media`` of images.

    ``memories`` are part of a role's tokens, the first of them of system items, the second of users'.
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
        """Tokens of all items that are no system items."""
        return self.user + self.assistant + self.tool


NOTHING = RoleTotals()


def add_up(items: Sequence[Item], known: RoleTotals = NOTHING) -> RoleTotals:
    """The totals of *items*, continued from those of a prefix of them; costs O(new)."""
    roles: dict[Role, int] = {"system": known.system, "user": known.user, "assistant": known.assistant}
    roles["tool"], media = known.tool, known.media
    system, user = known.memories
    for item in items[known.count :]:
        roles[item.role] += item.tokens
        media += item.media
        if item.memory:
            system, user = (system + item.memory, user) if item.role == "system" else (system, user + item.memory)
    return RoleTotals(
        len(items), roles["system"], roles["user"], roles["assistant"], roles["tool"], media, (system, user)
    )


@dataclass(frozen=True, slots=True)
class Members:
    """Tokens of the members beside the items: ``system`` those of system text, of which ``memories`` are memories."""

    tools: int = 0
    system: int = 0
    memories: int = 0


def regions(kept: RoleTotals, members: Members, *, fixed: int, summary: int, reserve: int) -> dict[str, int]:
    """Tokens by region of a view that keeps *kept*; *fixed* is all beside the history, *members* and system included.

    Without the reserve they add up to the view's tokens. Regions that are empty are left out.
    """
    system, user = kept.memories
    system += members.memories
    found = {
        "system": kept.system + members.system - system,
        "tools": members.tools,
        "format": fixed - kept.system - members.system - members.tools,
        "memory": system + user,
        "summary": summary,
        "user": kept.user - user,
        "assistant": kept.assistant,
        "tool": kept.tool,
        "reserve": reserve,
    }
    return {name: tokens for name, tokens in found.items() if tokens > 0}


def scaled_up(found: Mapping[str, int], factor: float) -> dict[str, int]:
    """The regions *found* in tokens of a provider that counts *factor* times what we count."""
    return dict(found) if factor == 1.0 else {name: int(tokens * factor) for name, tokens in found.items()}


# Memories that an agent injected, known by the headings and tags of such blocks; only reports depend on them. A block
# goes from a heading ``Memories`` or ``Memory`` to the next heading of that level or above, or stands between two tags.
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

"""The block of memories in a conversation: its entries, which are stored, and their text.

The same entries give the same text on every replica and in every release that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from proxy.features.memories.memory import Memory, shortened

HEADING: Final = "# Memories"
INTRODUCTION: Final = (
    "From earlier conversations of this project: a record for reference, given once. What is said below this section "
    "comes first."
)
END: Final = "<!-- end of memories -->"

SECTIONS: Final = (
    "Priority Context",
    "Project Knowledge",
    "User Preferences",
    "Key Decisions",
    "Working Memory",
    "Previous Sessions",
)
LONGEST: Final = (240, 220, 220, 220, 180, 220)
"""Characters of a line of each section."""

_DATED: Final = frozenset({"Project Knowledge", "Key Decisions", "Previous Sessions"})
_OF_TYPE: Final = {"project": 1, "user": 2, "decision": 3, "session": 5}
_WORKING: Final = 4
"""Indexes of ``SECTIONS``: by type, and that of working memories."""

VERSION: Final = 1


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One line of a block: the id of its memory, the index of its section, and its text."""

    id: str
    section: int
    line: str


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    """The block of a conversation, chosen at Unix time ``chosen_at``; without entries the conversation has none."""

    version: int
    chosen_at: int
    entries: tuple[Entry, ...] = ()


def entries_of(chosen: Sequence[Memory], most: int, count: Callable[[str], int]) -> tuple[Entry, ...]:
    """Return the entries of the first *chosen* memories whose text takes at most *most* tokens."""
    entries = [_entry(memory) for memory in chosen]
    while entries and count(text_of(entries)) > most:
        entries.pop()
    return tuple(entries)


def text_of(entries: Sequence[Entry]) -> str:
    """Return the text of a block; empty if it has no entry."""
    lines: list[str] = []
    for index, name in enumerate(SECTIONS):
        of_section = [entry.line for entry in entries if entry.section == index]
        if of_section:
            lines += ["", f"## {name}", *of_section]
    if not lines:
        return ""
    return "\n".join([HEADING, "", INTRODUCTION, *lines, "", END])


def encode(block: StoredBlock) -> bytes:
    """Return *block* as it is stored."""
    return msgspec.msgpack.encode(block)


def decode(value: bytes) -> StoredBlock | None:
    """Return the stored block; None if it is damaged, or of another version."""
    try:
        block = msgspec.msgpack.decode(value, type=StoredBlock)
    except (msgspec.DecodeError, UnicodeError):
        return None
    if block.version != VERSION or any(not 0 <= entry.section < len(SECTIONS) for entry in block.entries):
        return None
    return block


def one_line(memory: Memory, longest: int) -> str:
    """Return *memory* on one line of at most *longest* characters."""
    text = " ".join(f"{memory.title}: {memory.content}".split())
    if memory.content.startswith(memory.title.rstrip("…")):
        text = " ".join(memory.content.split())
    return shortened(text, longest)


def date_of(memory: Memory) -> str:
    """Return the day on which *memory* was stored, in UTC."""
    return datetime.fromtimestamp(memory.created_at, UTC).date().isoformat()


def _entry(memory: Memory) -> Entry:
    section = _OF_TYPE[memory.type]
    if memory.class_ == "priority":
        section = 0
    elif memory.class_ == "working" and memory.type != "session":
        section = _WORKING
    text = one_line(memory, LONGEST[section])
    if SECTIONS[section] in _DATED:
        text = f"[{date_of(memory)}] {text}"
    return Entry(memory.id, section, f"- {text}")

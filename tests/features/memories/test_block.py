"""The block of memories: its sections, its lines, and what is stored of it."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.features.memories.block import END, HEADING, Entry, StoredBlock, decode, encode, entries_of, text_of
from proxy.features.memories.memory import Memory
from tests.support.engine_fixtures import count_tokens, packaged_marks

NOW = 1_795_392_000


def memory(number: int, content: str = "It is so.", **fields: Any) -> Memory:
    values = {"type": "project", "title": f"T{number}", "content": content, "created_at": NOW, **fields}
    return Memory(f"{number}", **values)


ALL = (
    *(memory(1, class_="priority"), memory(2), memory(3, type="user"), memory(4, type="decision")),
    memory(5, class_="working"),
    memory(6, "T6", type="session", class_="working"),
)
TEXT = """\
# Memories

From earlier conversations of this project: a record for reference, given once. What is said below this section \
comes first.

## Priority Context
- T1: It is so.

## Project Knowledge
- [2026-11-23] T2: It is so.

## User Preferences
- T3: It is so.

## Key Decisions
- [2026-11-23] T4: It is so.

## Working Memory
- T5: It is so.

## Previous Sessions
- [2026-11-23] T6

<!-- end of memories -->"""


def test_the_text_of_every_section() -> None:
    """Byte for byte: replicas of all releases send the same. Empty sections are left out."""
    assert text_of(entries_of(ALL, 10_000, count_tokens)) == TEXT
    assert text_of([Entry("a", 2, "- x")]).count("##") == 1
    assert text_of([]) == ""


def test_it_is_counted_as_memories() -> None:
    """The section is what the figures of a request call injected memories."""
    text = f"{TEXT}\n\n# Task\nDo it."
    ((region, start, end),) = packaged_marks().parts(text)
    assert region == "memory"
    assert text[start:end].startswith(HEADING)
    assert "T5" in text[start:end]
    assert "Do it." not in text[start:end]


def test_a_line_is_cut_and_stays_one_line() -> None:
    """At the section's limit, with no break that could begin a section."""
    (entry,) = entries_of([memory(1, "a\n# Other\n" + "word " * 300)], 10_000, count_tokens)
    assert len(entry.line) <= 220 + len("- [2026-11-23] ")
    assert "\n" not in entry.line
    assert entry.line.endswith("…")


def test_as_much_as_fits_is_given() -> None:
    """What matters least is left out first; nothing if nothing fits."""
    whole = count_tokens(TEXT)
    for most in range(0, whole + 20, 5):
        entries = entries_of(ALL, most, count_tokens)
        assert count_tokens(text_of(entries)) <= most or not entries
        assert [entry.id for entry in entries] == [each.id for each in ALL[: len(entries)]]
    assert entries_of(ALL, 10, count_tokens) == ()
    assert text_of(entries_of(ALL, whole, count_tokens)).endswith(END)


def test_what_is_stored_is_read_and_what_is_damaged_is_not() -> None:
    """Another version, an unknown section and a torn value are no block."""
    stored = StoredBlock(1, NOW, entries_of(ALL, 10_000, count_tokens))
    assert decode(encode(stored)) == stored
    unknown = StoredBlock(1, NOW, (Entry("a", 9, ""),))
    for damaged in (b"", b"x", encode(stored)[:-1], encode(StoredBlock(2, NOW)), encode(unknown)):
        assert decode(damaged) is None
    later = msgspec.msgpack.encode([1, NOW, [["a", 1, "- x"]], "later"])
    assert decode(later) == StoredBlock(1, NOW, (Entry("a", 1, "- x"),))

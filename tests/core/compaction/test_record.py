"""Compactions as values and as stored records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.record import (
    VERSION,
    Compaction,
    CompactionRecord,
    Placeholder,
    dump,
    load,
)

EVENT = Compaction(9, 5, 300, 100, (1, 4), ((7, 50),), 900, ("fold", "clip"))
RECORD = CompactionRecord(VERSION, EVENT, "[Summary ...] 不要", {7: b'{"role":"tool"}'}, 8192, 1024, 200)

indexes = st.integers(0, 8)
records = st.builds(
    lambda cut, anchors, clips, block, edits: CompactionRecord(
        VERSION, Compaction(9, cut, 300, 10, tuple(anchors), tuple(clips), 1, ("fold",)), block, edits, 8192, 64, 100
    ),
    st.integers(0, 9),
    st.lists(indexes, max_size=2),
    st.lists(st.tuples(indexes, st.integers(0, 999)), max_size=3),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(indexes, st.binary(), max_size=3),
)


@given(records)
def test_a_record_comes_back_as_it_was(record: CompactionRecord) -> None:
    """Dumping and loading gives an equal record, for the conversation it was made for and any longer one."""
    assert load(dump(record), 9) == record
    assert load(dump(record), 400) == record


@pytest.mark.parametrize(
    "spoiled",
    [
        structs.replace(RECORD, version=VERSION + 1),
        structs.replace(RECORD, compaction=structs.replace(EVENT, boundary=11)),
        structs.replace(RECORD, compaction=structs.replace(EVENT, cut=10)),
        structs.replace(RECORD, compaction=structs.replace(EVENT, cut=-1)),
        structs.replace(RECORD, compaction=structs.replace(EVENT, anchors=(-1,))),
        structs.replace(RECORD, compaction=structs.replace(EVENT, anchors=(10,))),
        structs.replace(RECORD, compaction=structs.replace(EVENT, clips=((10, 5),))),
        structs.replace(RECORD, compaction=structs.replace(EVENT, truncations=((10, 5),))),
        structs.replace(RECORD, compaction=structs.replace(EVENT, placeholders=(Placeholder(10, "old"),))),
        structs.replace(RECORD, compaction=structs.replace(EVENT, stages=("fold", "a\r\nx-other: b"))),
        structs.replace(RECORD, block=""),
        structs.replace(RECORD, edits={10: b"{}"}),
        structs.replace(RECORD, edits={-1: b"{}"}),
    ],
)
def test_a_record_that_does_not_fit_is_none(spoiled: CompactionRecord) -> None:
    """Another version, an index outside the conversation, an unknown stage, a lost block: as good as no record."""
    assert load(dump(RECORD), 10) == RECORD
    assert load(dump(spoiled), 10) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        [],
        [VERSION],
        {"version": VERSION},
        [VERSION, None, "", {}, 1, 1, 1],
        [VERSION, {}, "", {}, 1, 1],
    ],
)
def test_another_shape_is_none(value: Any) -> None:
    """Well-formed values of another type are refused without an exception."""
    assert load(msgspec.msgpack.encode(value), 10) is None


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_garbage_is_none(value: bytes) -> None:
    """Whatever bytes the store holds, loading them raises nothing."""
    assert load(value, 10) is None


@settings(max_examples=200)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_record_is_sound_or_none(at: int, byte: int) -> None:
    """A flipped byte or a lost end gives no record, or one whose every index is inside the conversation."""
    raw = dump(RECORD)
    at %= len(raw)
    assert load(raw[:at], 10) is None
    found = load(raw[:at] + bytes([byte]) + raw[at + 1 :], 10)
    if found is not None:
        assert 0 <= found.compaction.cut <= found.compaction.boundary <= 10
        assert all(0 <= index < 10 for index in (*found.edits, *found.compaction.anchors))

"""An event that was sent, as a fact: its figures, its cut and the literal text of everything it put in."""

from __future__ import annotations

import msgspec

from proxy.core.compression.event import Compaction

VERSION = 1


class CompactionRecord(msgspec.Struct, frozen=True, array_like=True):
    """What every replica needs to send the same view again.

    ``block`` is the literal text that stands for the folded items (empty when nothing is folded); ``edits`` are the
    literal bytes of clipped items by index. ``window``, ``reserve`` and ``fixed`` are the figures that were used.
    ``spent`` are the tokens that went into the summaries by a model in it; ``by`` wrote the newest, of ``upto`` items.
    ``output`` is the output figure (in tokens of our count) if it was lowered with the event, else zero.
    """

    version: int
    compaction: Compaction
    block: str
    edits: dict[int, bytes]
    window: int
    reserve: int
    fixed: int
    spent: int = 0
    by: str = ""
    upto: int = 0
    output: int = 0

    def block_with(self, note: str) -> str:
        """The block with *note* as its last line; as it is if there is no block or no note."""
        if not self.block or not note:
            return self.block
        return f"{self.block}\n{note}"


def dump(record: CompactionRecord) -> bytes:
    """The bytes of *record*."""
    return msgspec.msgpack.encode(record)


def load(value: bytes, count: int) -> CompactionRecord | None:
    """The record in *value*; ``None`` where it is of another version or does not fit *count* items."""
    try:
        record = msgspec.msgpack.decode(value, type=CompactionRecord)
    except (msgspec.DecodeError, UnicodeError):
        return None
    event = record.compaction
    indexes = [*record.edits, *event.anchors, *(index for index, _ in (*event.clips, *event.trims))]
    indexes += [swap.index for swap in event.swaps]
    sound = 0 <= event.cut <= event.place <= count and all(0 <= i < count for i in indexes)
    return record if record.version == VERSION and sound else None

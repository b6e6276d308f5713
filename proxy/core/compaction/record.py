"""A compaction as a value, and its record: the compaction with the literal texts that it put into the view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec

PlaceholderReason = Literal["repeated", "reread", "included", "again", "old"]


class Placeholder(msgspec.Struct, frozen=True, order=True, rename={"reason": "why", "same_as": "by"}):
    """The results of item ``index`` give way to a line each.

    ``same_as`` is the index of the item whose result says the same, -1 if there is none.
    """

    index: int
    reason: PlaceholderReason
    same_as: int = -1


_STORED_NAMES = {
    "boundary": "place",
    "block_tokens": "block",
    "text_tokens": "text",
    "view_tokens": "after",
    "placeholders": "swaps",
    "truncations": "trims",
}
"""The names of a compaction's fields in stored records, if they differ."""


class Compaction(msgspec.Struct, frozen=True, rename=_STORED_NAMES):
    """A compaction at ``boundary``; items before ``cut`` are folded.

    ``block_tokens`` are charged for the block; ``text_tokens`` of them are for digest and steps. ``anchors`` are the
    folded user items whose text stays in full: the task, and the newest one at that time. ``placeholders`` are the
    other items whose results give way to a line each. ``truncations`` and ``clips`` are the tokens that truncated and
    clipped items may keep, by index, ``minified`` those of items whose JSON lost its white space. ``view_tokens`` are
    the tokens of the view's items at the boundary, without the fixed part. ``stages`` names the stages that were used,
    in order.
    """

    boundary: int
    cut: int
    block_tokens: int
    text_tokens: int = 0
    anchors: tuple[int, ...] = ()
    clips: tuple[tuple[int, int], ...] = ()
    view_tokens: int = 0
    stages: tuple[str, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    truncations: tuple[tuple[int, int], ...] = ()
    minified: tuple[tuple[int, int], ...] = ()


NO_COMPACTION: Final = Compaction(0, 0, 0)
"""The compaction of a view in which every item stands as the client sent it."""

VERSION = 1

STAGES = frozenset({"minify", "dedup", "prune", "truncate", "clip", "fold", "drop"})
"""The stages that a compaction names. They become headers and labels of metrics."""


def stages_of_edits(compaction: Compaction) -> dict[int, str]:
    """The stage that made each edited item smaller, by the item's index; without those that were clipped."""
    stages = {index: "minify" for index, _ in compaction.minified}
    stages.update((each.index, "prune" if each.reason == "old" else "dedup") for each in compaction.placeholders)
    stages.update((index, "truncate") for index, _ in compaction.truncations)
    return stages


class CompactionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A stored compaction: all that a replica needs to send the same view again.

    ``block`` is the literal text that stands for the folded items (empty when nothing is folded); ``edits`` are the
    literal bytes of clipped items by index. ``window``, ``reserve`` and ``fixed`` are the figures that were used.
    ``summary_spent`` are the tokens that its summaries by a model cost; the model ``summary_by`` wrote the newest, of
    the first ``summary_length`` items. ``lowered_output`` is the output figure if it was lowered with the
    compaction (in tokens of our count), else zero.
    """

    version: int
    compaction: Compaction
    block: str
    edits: dict[int, bytes]
    window: int
    reserve: int
    fixed: int
    summary_spent: int = 0
    summary_by: str = ""
    summary_length: int = 0
    lowered_output: int = 0


dump: Callable[[CompactionRecord], bytes] = msgspec.msgpack.Encoder().encode
"""Returns the bytes that store a record."""


def load(value: bytes, count: int) -> CompactionRecord | None:
    """The record in *value*; None if it is of another version or does not fit *count* items."""
    try:
        record = msgspec.msgpack.decode(value, type=CompactionRecord)
    except (msgspec.DecodeError, UnicodeError):
        return None
    if record.version != VERSION or not _fits(record, count):
        return None
    return record


def _fits(record: CompactionRecord, count: int) -> bool:
    """True if every index in *record* is one of *count* items, folded items have a block, and all stages are known."""
    compaction = record.compaction
    if not 0 <= compaction.cut <= compaction.boundary <= count:
        return False
    has_block = compaction.cut > 0 and compaction.block_tokens > 0
    if (has_block and not record.block) or not STAGES.issuperset(compaction.stages):
        return False
    indexes = [*record.edits, *compaction.anchors]
    indexes += [index for index, _ in (*compaction.clips, *compaction.truncations, *compaction.minified)]
    indexes += [placeholder.index for placeholder in compaction.placeholders]
    return all(0 <= index < count for index in indexes)

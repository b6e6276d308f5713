"""A compaction as a value, and its record: the compaction with the literal texts that it put into the view."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from proxy.core.conversation import Item

PlaceholderReason = Literal["repeated", "reread", "included", "again", "old"]

FRAME = 40
LINE = 56
"""Tokens charged for an item of placeholders: for its ids and separators, and for the line of each result."""

NAMES = 10
"""One token in so many of an old result stays, as names, errors and figures: later steps refer to them.

Measured: the share of what later steps refer to is .875 with and .858 without them in a view of half the conversation's
size, .583 and .579 in a quarter (decision 3).
"""

WORDS: dict[PlaceholderReason, str] = {
    "repeated": "[Left out: a later call of the same tool gave the same result.]",
    "reread": "[Left out: {target} was changed and read again later.]",
    "included": "[Left out: a later reading of {target} includes this.]",
    "again": "[Left out: {target} was read again later.]",
}
OLD = "[Old {name} output left out to save room{target}; the call {outcome}. Call it again if you need it.{line}]"


class Placeholder(msgspec.Struct, frozen=True, order=True, rename={"reason": "why", "same_as": "by"}):
    """The results of item ``index`` give way to a line each.

    ``same_as`` is the index of the item whose result says the same, -1 if there is none.
    """

    index: int
    reason: PlaceholderReason
    same_as: int = -1


def placeholder_tokens(item: Item) -> int:
    """Tokens that *item* is charged once its results are placeholders; never more than it takes."""
    whole = item.user_tokens + item.sealed
    lines = LINE * max(1, len(item.answers))
    names = (item.tokens - whole) // NAMES
    return min(item.tokens, FRAME + lines + names + whole)


def placeholder_text(reason: PlaceholderReason, name: str, target: str, *, ok: bool, error: str) -> str:
    """The line for one result of the tool *name*: why it is left out, what it was about, how the call ended.

    *target* is what the call was about, in the client's own words; *error* is the result's first line about an error.
    """
    if reason != "old":
        return WORDS[reason].format(target=target or "it")
    outcome, error_line = "succeeded", ""
    if not ok:
        outcome = "failed"
        if error:
            error_line = f" It said: {error}"
    about = ""
    if target:
        about = f", of {target}"
    return OLD.format(name=name, target=about, outcome=outcome, line=error_line)


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

    @property
    def shortened(self) -> set[int]:
        """The indexes of items of which only a part stands in the view."""
        replaced = {placeholder.index for placeholder in self.placeholders}
        return replaced | {index for index, _ in (*self.truncations, *self.clips)}


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


def dump(record: CompactionRecord) -> bytes:
    """The bytes that store *record*."""
    return msgspec.msgpack.encode(record)


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

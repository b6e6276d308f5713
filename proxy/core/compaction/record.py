"""A compaction as a value, and as a stored fact with the literal texts that it put into the view."""

from __future__ import annotations

from typing import Literal

import msgspec

from proxy.core.conversation import Item

PlaceholderReason = Literal["repeated", "reread", "included", "again", "old"]

FRAME = 40
LINE = 56
"""Tokens charged for an item of placeholders: its ids and separators, and the line of each result."""

NAMES = 10
"""One token in ten of an old result stays, as names, errors and figures: later steps refer to them.

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
    """The most tokens that *item* is charged for once its results are placeholders."""
    kept = item.user_tokens + item.sealed
    return min(item.tokens, FRAME + LINE * max(1, len(item.answers)) + (item.tokens - kept) // NAMES + kept)


def placeholder_text(why: PlaceholderReason, name: str, target: str, *, ok: bool, line: str = "") -> str:
    """The line for one result of the tool *name*: why it is gone, what it was about, how the call ended.

    *target* is what the call was about in the client's own words; *line* is the result's first line about an error.
    """
    if why != "old":
        return WORDS[why].format(target=target or "it")
    outcome = "succeeded" if ok else "failed"
    about = f", of {target}" if target else ""
    return OLD.format(name=name, target=about, outcome=outcome, line=f" It said: {line}" if line and not ok else "")


_STORED_NAMES = {
    "boundary": "place",
    "block_tokens": "block",
    "text_tokens": "text",
    "view_tokens": "after",
    "placeholders": "swaps",
    "truncations": "trims",
}
"""What the fields of a compaction are called in a stored record, if not by their names."""


class Compaction(msgspec.Struct, frozen=True, rename=_STORED_NAMES):
    """A compaction at ``boundary``; items before ``cut`` are folded.

    ``block_tokens`` are charged for the block, of which ``text_tokens`` are meant for digest and steps. ``anchors`` are
    the folded user items that stay verbatim all the same: the task, and the newest one at that time. ``placeholders``
    are the kept items whose results gave way to a line each. ``truncations`` and ``clips`` are the tokens that
    truncated and clipped items may keep, by index. ``view_tokens`` is the size of the view's items at the boundary,
    the fixed part aside. ``stages`` names the stages that were used, in order.
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


VERSION = 1


class CompactionRecord(msgspec.Struct, frozen=True, array_like=True):
    """What every replica needs to send the same view again.

    ``block`` is the literal text that stands for the folded items (empty when nothing is folded); ``edits`` are the
    literal bytes of clipped items by index. ``window``, ``reserve`` and ``fixed`` are the figures that were used.
    ``summary_spent`` are the tokens that its summaries by a model cost; ``summary_by`` wrote the newest, of the first
    ``summary_length`` items. ``lowered_output`` is the output figure (in tokens of our count) if it was lowered with
    the compaction, else zero.
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

    def block_with(self, note: str) -> str:
        """The block with *note* as its last line; the block itself if there is no block or no note."""
        if not self.block or not note:
            return self.block
        return f"{self.block}\n{note}"


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
    """True if every index in *record* is one of *count* items."""
    compaction = record.compaction
    if not 0 <= compaction.cut <= compaction.boundary <= count:
        return False
    indexes = [*record.edits, *compaction.anchors]
    indexes += [index for index, _ in (*compaction.clips, *compaction.truncations)]
    indexes += [placeholder.index for placeholder in compaction.placeholders]
    return all(0 <= index < count for index in indexes)

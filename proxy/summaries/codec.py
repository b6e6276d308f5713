"""A summary as the store has it, and what people are told of one."""

from __future__ import annotations

from typing import Literal

import msgspec

from proxy.engine.ports import Summary, SummaryRequest
from proxy.summaries.model_call import Summariser

VERSION = 1
NOTE_VERSION = 1

SummaryState = Literal["pending", "ready", "failed", "skipped"]


class SummaryNote(msgspec.Struct, frozen=True, array_like=True):
    """A summary of the first ``cut`` items, wanted since the event at ``since``: what has become of it.

    ``policy`` and ``chain`` name the text; ``until`` is when a failed one may be tried again (Unix time).
    """

    version: int
    made: int
    route: str
    policy: bytes
    since: bytes
    chain: bytes
    cut: int
    state: SummaryState
    by: str
    upstream: str
    reason: str = ""
    taken: int = 0
    left: int = 0
    until: int = 0


class StoredSummary(msgspec.Struct, frozen=True, array_like=True):
    """A summary as the store has it: the text of ``cut`` items, what it took, who wrote it and when (Unix time)."""

    version: int
    text: str
    cut: int
    spent: int
    model: str
    made: int


def dump(text: str, cut: int, spent: int, model: str, made: int) -> bytes:
    """The bytes of a summary."""
    return msgspec.msgpack.encode(StoredSummary(VERSION, text, cut, spent, model, made))


def load(value: bytes, cut: int) -> Summary | None:
    """The summary in *value*; ``None`` where it is of another version or of another number of items than *cut*."""
    try:
        kept = msgspec.msgpack.decode(value, type=StoredSummary)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return Summary(kept.text, kept.cut, kept.spent, kept.model) if kept.version == VERSION and kept.cut == cut else None


def note_for(
    wanted: SummaryRequest,
    summariser: Summariser,
    policy: bytes,
    state: SummaryState,
    now: int,
    *,
    reason: str = "",
    left: int = 0,
    patience: int = 0,
) -> SummaryNote:
    """What has become of the summary of *wanted*; a failed one is tried again after *patience* seconds."""
    prefix = wanted.prefix
    return SummaryNote(
        version=NOTE_VERSION,
        made=now,
        route=wanted.route.name,
        policy=policy,
        since=wanted.last_compaction,
        chain=prefix.prefix_hash,
        cut=prefix.length,
        state=state,
        by=summariser.model,
        upstream=summariser.upstream,
        reason=reason,
        taken=int(prefix.tokens * wanted.token_ratio),
        left=left,
        until=now + patience if state == "failed" else 0,
    )

"""A summary as the store has it, and what people are told of one."""

from __future__ import annotations

import msgspec

from proxy.engine.ports import Summary, SummaryRequest
from proxy.summaries.calling import Summariser
from proxy.summaries.contracts import NOTE_VERSION, SummaryNote, SummaryState

VERSION = 1


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A summary as the store has it: the text of ``cut`` items, what it took, who wrote it and when (Unix time)."""

    version: int
    text: str
    cut: int
    spent: int
    model: str
    made: int


def dump(text: str, cut: int, spent: int, model: str, made: int) -> bytes:
    """The bytes of a summary."""
    return msgspec.msgpack.encode(Kept(VERSION, text, cut, spent, model, made))


def load(value: bytes, cut: int) -> Summary | None:
    """The summary in *value*; ``None`` where it is of another version or of another number of items than *cut*."""
    try:
        kept = msgspec.msgpack.decode(value, type=Kept)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return Summary(kept.text, kept.cut, kept.spent, kept.model) if kept.version == VERSION and kept.cut == cut else None


def note_on(
    passage: SummaryRequest,
    summariser: Summariser,
    policy: bytes,
    state: SummaryState,
    now: int,
    *,
    reason: str = "",
    left: int = 0,
    patience: int = 0,
) -> SummaryNote:
    """What has become of the summary of *passage*; a failed one is tried again after *patience* seconds."""
    wanted = passage.prefix
    return SummaryNote(
        version=NOTE_VERSION,
        made=now,
        route=passage.route.name,
        policy=policy,
        since=passage.last_compaction,
        chain=wanted.prefix_hash,
        cut=wanted.length,
        state=state,
        by=summariser.model,
        upstream=summariser.upstream,
        reason=reason,
        taken=int(wanted.tokens * passage.token_ratio),
        left=left,
        until=now + patience if state == "failed" else 0,
    )

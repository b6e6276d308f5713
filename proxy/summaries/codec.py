"""Summaries as the store holds them, and the notes on them that owners of conversations are shown.

Both are arrays in msgpack: fields may get other names, but a change of their order or number needs a new version.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from proxy.engine.ports import Summary, SummaryRequest
from proxy.summaries.model_call import Summariser

VERSION: Final = 1
NOTE_VERSION: Final = 1

SummaryState = Literal["pending", "ready", "failed", "skipped"]


class StoredSummary(msgspec.Struct, frozen=True, array_like=True):
    """A summary of the first ``length`` items by ``model``; ``written_at`` is Unix time."""

    version: int
    text: str
    length: int
    tokens_spent: int
    model: str
    written_at: int


class SummaryNote(msgspec.Struct, frozen=True, array_like=True):
    """The state of a summary of the first ``length`` items, needed since ``last_compaction`` (a prefix hash).

    ``policy`` and ``prefix_hash`` name its text. ``tokens_in`` are those of the items, ``tokens_out`` those of the
    text. ``written_at`` is the time of the note, ``retry_at`` the time from which a failed summary may be tried again
    (Unix time).
    """

    version: int
    written_at: int
    route: str
    policy: bytes
    last_compaction: bytes
    prefix_hash: bytes
    length: int
    state: SummaryState
    model: str
    upstream: str
    reason: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    retry_at: int = 0


def dump(text: str, length: int, tokens_spent: int, model: str, written_at: int) -> bytes:
    """Return the bytes of a summary."""
    return msgspec.msgpack.encode(StoredSummary(VERSION, text, length, tokens_spent, model, written_at))


def load(value: bytes, length: int) -> Summary | None:
    """Return the summary in *value*; None if it is of another version, or not of *length* items."""
    try:
        stored = msgspec.msgpack.decode(value, type=StoredSummary)
    except (msgspec.DecodeError, UnicodeError):
        return None
    if stored.version != VERSION or stored.length != length:
        return None
    return Summary(stored.text, stored.length, stored.tokens_spent, stored.model)


def note_for(
    request: SummaryRequest,
    summariser: Summariser,
    policy: bytes,
    state: SummaryState,
    now: int,
    *,
    reason: str,
    tokens_out: int,
    refused_for: int,
) -> SummaryNote:
    """Return the note that a summary is in *state*; a failed one is tried again after *refused_for* seconds."""
    prefix, retry_at = request.prefix, 0
    if state == "failed":
        retry_at = now + refused_for
    return SummaryNote(
        version=NOTE_VERSION,
        written_at=now,
        route=request.route.name,
        policy=policy,
        last_compaction=request.last_compaction,
        prefix_hash=prefix.prefix_hash,
        length=prefix.length,
        state=state,
        model=summariser.model,
        upstream=summariser.upstream,
        reason=reason,
        tokens_in=int(prefix.tokens * request.token_ratio),
        tokens_out=tokens_out,
        retry_at=retry_at,
    )

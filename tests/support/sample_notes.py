"""Notes on a conversation, one of each kind."""

from __future__ import annotations

from proxy.features.history.notes import CompactionNote, RequestNote
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote, SummaryState

ROUTE = "up,model"


def compaction(
    boundary: int, cut: int, summary_by: str = "", summary_length: int = 0, route: str = ROUTE
) -> CompactionNote:
    """A note on a compaction at *boundary* that folded the items before *cut*."""
    return CompactionNote(
        VERSION,
        1_000_000,
        route,
        bytes([boundary]) * 16,
        boundary,
        0,
        cut,
        900,
        90,
        summary_by,
        summary_length,
        ("fold",),
        0,
        8192,
        1024,
        300,
    )


def summary(length: int, state: SummaryState, retry_at: int = 0) -> SummaryNote:
    """A note on the summary of the first *length* items."""
    return SummaryNote(
        VERSION, 1_000_000, ROUTE, b"p" * 8, b"s" * 16, b"c" * 16, length, state, "m", "up", "", 900, 90, retry_at
    )


def last_request(boundary: int) -> RequestNote:
    """A note on a request whose view has the compaction at *boundary*."""
    prefix_hash = bytes([boundary]) * 16
    return RequestNote(
        VERSION,
        1_000_000,
        ROUTE,
        "chat",
        30,
        8192,
        7168,
        9000,
        3584,
        "compacted",
        ("fold",),
        boundary,
        prefix_hash,
        0,
        7,
    )

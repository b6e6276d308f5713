"""Notes on conversations as their callers see them: JSON with ages, states and the provider's names."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.features.history.notes import CompactionNote, RequestNote
from proxy.summaries.codec import SummaryNote


def request_json(note: RequestNote, now: float) -> dict[str, object]:
    """Return the last request as callers see it. *now* is Unix time."""
    upstream, _, model = note.route.partition(",")
    pressure = None
    if note.budget:
        pressure = round(note.tokens_after / note.budget, 2)
    return {
        "upstream": upstream,
        "model": model,
        "api": note.api,
        "age_seconds": _age_seconds(note.written_at, now),
        "items": note.items,
        "tokens_before": note.tokens_before,
        "tokens_after": note.tokens_after,
        "window": note.window,
        "pressure": pressure,
        "outcome": note.outcome,
        "stages": list(note.stages),
        "summary_tokens": note.summary_tokens,
        "epoch": note.epoch,
    }


def compaction_json(
    note: CompactionNote, last_requests: Sequence[RequestNote], now: float, *, is_stored: bool
) -> dict[str, object]:
    """Return a compaction as callers see it. *is_stored* is True if the store has its record. *now* is Unix time.

    Its state is ``active`` if the last view uses it, ``past`` if that uses another one, ``lost`` without a record.
    """
    upstream, _, model = note.route.partition(",")
    state = "past"
    if not is_stored:
        state = "lost"
    elif any(last.route == note.route and last.prefix_hash == note.prefix_hash for last in last_requests):
        state = "active"
    return {
        "from": 0,
        "to": note.cut,
        "new_from": note.new_from,
        "at": note.boundary,
        "tokens_in": note.tokens_in,
        "tokens_out": note.tokens_out,
        "by": note.summary_by or "heuristic",
        "summary_to": note.summary_length,
        "age_seconds": _age_seconds(note.written_at, now),
        "state": state,
        "stages": list(note.stages),
        "shortened": note.shortened,
        "upstream": upstream,
        "model": model,
        "figures": {"window": note.window, "reserve": note.reserve, "fixed": note.fixed},
        "archive": note.archive or None,
    }


def summary_json(
    note: SummaryNote,
    compactions: Sequence[CompactionNote],
    now: float,
    *,
    has_text: bool,
    has_lease: bool,
    has_failure: bool,
) -> dict[str, object]:
    """Return a summary as callers see it. *now* is Unix time.

    The flags state what the store has: its text, the lease of a worker that writes it, the mark of a failure after
    which the model is not called again for some time.
    """
    retry = None
    if has_failure and note.state == "failed" and not has_text:
        retry = max(0, note.retry_at - int(now))
    return {
        "from": 0,
        "to": note.length,
        "tokens_in": note.tokens_in,
        "tokens_out": note.tokens_out,
        "by": note.model,
        "upstream": note.upstream,
        "age_seconds": _age_seconds(note.written_at, now),
        "state": _summary_state(note, compactions, has_text=has_text, has_lease=has_lease),
        "reason": note.reason,
        "retry_in_seconds": retry,
    }


def _summary_state(note: SummaryNote, compactions: Sequence[CompactionNote], *, has_text: bool, has_lease: bool) -> str:
    """Return the state of a summary: that of its note, corrected by what the store has."""
    if has_text:
        return _use_of_text(note, [compaction for compaction in compactions if compaction.route == note.route])
    if note.state == "pending" and has_lease:
        return "pending"
    if note.state in ("pending", "ready"):
        return "lost"
    return note.state


def _use_of_text(note: SummaryNote, compactions: Sequence[CompactionNote]) -> str:
    """Return ``used`` if a compaction has the text, ``unused`` if one folded as much without it, else ``ready``."""
    if any(compaction.summary_length == note.length and compaction.summary_by for compaction in compactions):
        return "used"
    if any(compaction.cut >= note.length for compaction in compactions):
        return "unused"
    return "ready"


def _age_seconds(written_at: int, now: float) -> int:
    return max(0, int(now) - written_at)

"""Builds requests for summaries of a measured conversation: prefix, cap, and the prompt that may be cached."""

from __future__ import annotations

import hashlib
from bisect import bisect_right

from proxy.core.apis.envelope import splice
from proxy.core.compaction.record import CompactionRecord
from proxy.core.compaction.view import AssembledItems, OriginalItems, assemble, with_present_marks
from proxy.core.conversation import Layout, lay_out
from proxy.core.decisions import NO_ADDITION, MeasuredRequest
from proxy.core.tokens.budget import rounded_down
from proxy.engine.ports import CachedPrompt, SummaryPrefix, SummaryRequest

LEAST_SUMMARY = 96
"""Tokens of the smallest cap for a summary: below it the digest, which needs no model, holds more facts."""

MOST_SUMMARY = 8_192
"""Tokens of the largest cap, in any window: models write no longer useful summary in one answer."""

MOST_CUTS = 2_048
"""The longest prefixes for which an existing summary is searched: four times the boundaries of one look-up."""


def summary_request_of(
    measured: MeasuredRequest, layout: Layout, cut: int, record: CompactionRecord | None, share: float
) -> SummaryRequest | None:
    """Return a request for a summary of the first *cut* items; None if the window leaves no room for one.

    *record* is the newest compaction's, *share* the part of the budget that a summary may take.
    """
    budget, hashes, ratio = measured.budget, measured.prefix_hashes, measured.known.token_ratio
    original = measured.original(layout)
    step = rounded_down(min(MOST_SUMMARY, int(share * ratio * budget.baseline)))
    cuts = layout.cuts[max(0, bisect_right(layout.cuts, cut) - MOST_CUTS) :]
    cap = int(step / max(1.0, ratio))
    if cap < LEAST_SUMMARY or not cut:
        return None
    last_compaction, folded = measured.root_hash, 0
    if record is not None:
        last_compaction, folded = hashes[record.compaction.boundary - 1], record.compaction.cut
    return SummaryRequest(
        client_request=measured.request,
        route=measured.known.route,
        root_hash=measured.root_hash,
        last_compaction=last_compaction,
        prefixes=tuple(SummaryPrefix(at, hashes[at - 1], layout.sums[at]) for at in cuts if 0 < at <= cut),
        folded=folded,
        cap=cap,
        quantised_cap=step,
        fixed_digest=_fixed_digest(measured, layout),
        window=budget.window,
        token_ratio=ratio,
        read_entries=lambda start, stop: [original.text(i) for i in range(start, stop)],
        cached_prompt=lambda length: _cached_prompt(measured, original, record, length),
    )


def _fixed_digest(measured: MeasuredRequest, layout: Layout) -> bytes:
    """Return a digest of what precedes the conversation: system items and every counted member."""
    parsed = measured.parsed
    parts = [parsed.items[i].digest for i in layout.systems]
    parts += [value.encode("utf-8", "surrogatepass") for _, value in sorted(parsed.envelope.counted().items())]
    return hashlib.sha256(b"\0".join(parts)).digest()[:8]


def _cached_prompt(
    measured: MeasuredRequest, whole: OriginalItems, record: CompactionRecord | None, length: int
) -> CachedPrompt:
    """Return the prompt of the first *length* items as they last went upstream: the provider may have it cached."""
    spans, items, envelope = whole.spans[:length], whole.items[:length], measured.parsed.envelope
    raw = OriginalItems(whole.body, spans, items, lay_out(items), whole.api)
    if record is None:
        addition = NO_ADDITION
        view = AssembledItems(whole.body[spans[0][0] : spans[-1][1]], sum(item.tokens for item in items))
    else:
        addition = measured.addition
        edits = with_present_marks(raw, {i: value for i, value in record.edits.items() if i < length})
        view = assemble(raw, record.compaction, record.block, edits, measured.read_item, addition.note)
    text = envelope.text
    if addition.tokens:
        tools = addition.added_to(measured.tools_json or envelope.value_or_nothing("tools"))
        text = splice(envelope, 0, b"", {"tools": tools}).decode()
    return CachedPrompt(text, view.content, measured.budget.fixed + view.tokens)

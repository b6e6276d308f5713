"""Writes notes on conversations after their answers: for people to read, never for decisions."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Final

from msgspec import structs

from proxy.core.compaction.record import CompactionRecord
from proxy.core.conversation import Layout
from proxy.core.decisions import CountedView
from proxy.core.report import Report
from proxy.engine.features import Feature
from proxy.features.history.archive import Archive, items_removed
from proxy.features.history.notes import CompactionNote, RequestNote, encode_note, note_name
from proxy.store.conversation_table import MOST_LISTED, ConversationTable
from proxy.summaries.codec import NOTE_VERSION, SummaryNote

NOTE_SECONDS: Final = 60.0
"""Seconds between two notes on one summary that is skipped."""

OTHERS_SAVED: Final = MOST_LISTED // 2
"""Other conversations of a tenant after which one is saved again: half of those after which it is listed no more.

The other half are those that other replicas may save meanwhile.
"""


class HistoryRecorder(Feature):
    """Writes notes on answered requests, and archives the items that left the view unless *archive* is None.

    *recent* has, for the last ``NOTE_SECONDS``, the number of conversations that each tenant saved, that number when a
    conversation was saved, and the skipped summaries that got a note. *now* returns Unix time.
    """

    def __init__(
        self,
        conversations: ConversationTable,
        recent: MutableMapping[tuple[object, ...], int],
        now: Callable[[], float],
        archive: Archive | None = None,
    ) -> None:
        self._conversations = conversations
        self._recent = recent
        self._now = now
        self._archive = archive

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Write a note on *view*, which was sent."""
        del status
        layout = view.layout
        if layout is None or not layout.count or not report.conversation or report.observed:
            return
        root_hash, record = view.measured.root_hash(layout), view.edits.record
        now, tenant, long_lived = self._now(), view.request.tenant, record is not None
        key = (report.conversation, root_hash, long_lived)
        saved, count = self._recent.get(key), self._recent.get((tenant,), 0)
        if report.event or saved is None or count - saved >= OTHERS_SAVED:
            self._recent[key] = self._recent[(tenant,)] = count + 1
            forget = partial(self._recent.pop, key, None)
            self._conversations.save_conversation(
                tenant, report.conversation, root_hash, now, long_lived=long_lived, on_failure=forget
            )
        last = _request_note(report, view, layout, int(now))
        self._conversations.save_note(tenant, root_hash, note_name(last), encode_note(last), long_lived=long_lived)
        if record is None or not report.event:
            return
        note = _compaction_note(report, view, layout, record, int(now))
        if self._archive is not None:
            removed = items_removed(record.compaction, view.edits.previous, view.measured.parsed.items)
            archived = self._archive.add(view, root_hash, removed)
            # Folded user items whose text stays in the view: later conversations find them, too.
            anchors = self._archive.add(view, root_hash, record.compaction.anchors)
            note = structs.replace(note, archive=archived, anchors=anchors)
        self._conversations.save_note(tenant, root_hash, note_name(note), encode_note(note), long_lived=True)

    def note_summary(self, tenant: bytes, root_hash: bytes, note: SummaryNote) -> None:
        """Write *note*; at most one in ``NOTE_SECONDS`` for a summary that is skipped again and again."""
        if note.state == "skipped":
            key = (note.reason, root_hash + note.last_compaction)
            if key in self._recent:
                return
            self._recent[key] = True
        self._conversations.save_note(tenant, root_hash, note_name(note), encode_note(note), long_lived=True)


def _request_note(report: Report, view: CountedView, layout: Layout, now: int) -> RequestNote:
    boundary, prefix_hash = 0, b""
    if view.edits.record is not None:
        boundary = view.edits.record.compaction.boundary
        prefix_hash = view.measured.prefix_hashes[boundary - 1]
    return RequestNote(
        version=NOTE_VERSION,
        written_at=now,
        route=view.measured.known.route.name,
        api=report.api,
        items=layout.count,
        window=report.window or 0,
        budget=report.budget or 0,
        tokens_before=report.tokens_before or 0,
        tokens_after=report.tokens_after or 0,
        outcome=report.outcome,
        stages=report.stages,
        boundary=boundary,
        prefix_hash=prefix_hash,
        epoch=report.epoch,
        summary_tokens=report.summary_tokens,
    )


def _compaction_note(
    report: Report, view: CountedView, layout: Layout, record: CompactionRecord, now: int
) -> CompactionNote:
    measured, compaction, previous = view.measured, record.compaction, view.edits.previous
    ratio, tokens_in, new_from = measured.known.token_ratio, 0, 0
    if previous is not None:
        new_from = previous.cut
    if compaction.cut:
        anchored = sum(measured.parsed.items[index].tokens for index in compaction.anchors)
        tokens_in = int((layout.sums[compaction.cut] - anchored) * ratio)
    return CompactionNote(
        version=NOTE_VERSION,
        written_at=now,
        route=measured.known.route.name,
        prefix_hash=measured.prefix_hashes[compaction.boundary - 1],
        boundary=compaction.boundary,
        new_from=new_from,
        cut=compaction.cut,
        tokens_in=tokens_in,
        tokens_out=report.regions.get("summary", 0),
        summary_by=record.summary_by,
        summary_length=record.summary_length,
        stages=compaction.stages,
        shortened=len(compaction.shortened),
        window=int(record.window * ratio),
        reserve=int(record.reserve * ratio),
        fixed=int(record.fixed * ratio),
        project=view.request.options.project,
    )

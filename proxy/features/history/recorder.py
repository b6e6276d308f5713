"""Writes down what becomes of conversations, behind their answers: for people, never for decisions."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from proxy.core.compaction.record import Compaction, CompactionRecord
from proxy.core.conversation import Layout
from proxy.core.decisions import CountedView
from proxy.core.report import Report
from proxy.engine.features import Feature
from proxy.features.history.archive import Archive
from proxy.features.history.notes import CompactionNote, RequestNote, dump, name_of
from proxy.store.conversation_table import ConversationTable
from proxy.summaries.codec import NOTE_VERSION, SummaryNote

LEAST_SECONDS = 60.0
"""Seconds between two notes on requests of one conversation, compactions aside."""


class HistoryRecorder(Feature):
    """Notes what was answered.

    *recent* remembers for ``LEAST_SECONDS`` which conversations were noted; *now* gives Unix time. *archive* keeps what
    left the view, if that is configured.
    """

    def __init__(
        self,
        register: ConversationTable,
        recent: MutableMapping[tuple[str, bytes], bool],
        now: Callable[[], float],
        archive: Archive | None = None,
    ) -> None:
        self._archive = archive
        self._register = register
        self._recent = recent
        self._now = now

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Note that *view* was sent: a compaction always, other views now and then."""
        del status
        request = view.request
        if view.layout is None or not view.layout.count or not report.conversation:
            return
        if report.observed or report.client_compaction:
            return
        root, route, record = view.measured.root_hash(view.layout), view.measured.known.route.name, view.edits.record
        fresh = report.event and record is not None
        key = (route, root)
        if not fresh and key in self._recent:
            return
        self._recent[key] = True
        now, lasting = self._now(), record is not None
        self._register.save_conversation(request.tenant, report.conversation, root, now, long_lived=lasting)
        last = _last(report, view, view.layout, int(now))
        self._register.save_note(request.tenant, root, name_of(last), dump(last), long_lived=lasting)
        if fresh and record is not None:
            archive = self._archive.keep(view, root, record.compaction) if self._archive else ""
            event = _event(report, view, view.layout, record, int(now), archive)
            self._register.save_note(request.tenant, root, name_of(event), dump(event), long_lived=True)

    def note_summary(self, tenant: bytes, root: bytes, note: SummaryNote) -> None:
        """Note what has become of a summary; that it was passed over again, only now and then."""
        key = (note.reason, root + note.last_compaction)
        if note.state == "skipped":
            if key in self._recent:
                return
            self._recent[key] = True
        self._register.save_note(tenant, root, name_of(note), dump(note), long_lived=True)


def _last(report: Report, view: CountedView, layout: Layout, now: int) -> RequestNote:
    place = view.edits.record.compaction.boundary if view.edits.record else 0
    return RequestNote(
        version=NOTE_VERSION,
        made=now,
        route=view.measured.known.route.name,
        api=report.api,
        items=layout.count,
        window=report.window or 0,
        budget=report.budget or 0,
        before=report.tokens_before or 0,
        after=report.tokens_after or 0,
        outcome=report.outcome,
        stages=report.stages,
        place=place,
        chain=view.measured.prefix_hashes[place - 1] if place else b"",
        epoch=report.epoch,
        spent=report.summary_tokens,
    )


def _event(
    report: Report, view: CountedView, layout: Layout, record: CompactionRecord, now: int, archive: str
) -> CompactionNote:
    measured, event, previous = view.measured, record.compaction, view.edits.previous
    factor = measured.known.token_ratio
    kept = sum(measured.parsed.items[i].tokens for i in event.anchors)
    return CompactionNote(
        version=NOTE_VERSION,
        made=now,
        route=measured.known.route.name,
        chain=measured.prefix_hashes[event.boundary - 1],
        place=event.boundary,
        since=previous.cut if previous else 0,
        cut=event.cut,
        taken=int((layout.sums[event.cut] - kept) * factor) if event.cut else 0,
        left=report.regions.get("summary", 0),
        by=record.summary_by,
        upto=record.summary_length,
        stages=event.stages,
        shortened=len(_shortened(event)),
        window=int(record.window * factor),
        reserve=int(record.reserve * factor),
        fixed=int(record.fixed * factor),
        archive=archive,
    )


def _shortened(event: Compaction) -> set[int]:
    """The items that stand in the view of *event* with less than they said."""
    swapped = {swap.index for swap in event.placeholders}
    return swapped | {index for index, _ in (*event.truncations, *event.clips)}

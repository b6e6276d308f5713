"""Notes on conversations: what they say, how they are stored, and when one is written.

They are written after answers, for people to read and never for decisions. They hold figures and names, never a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import structs

from proxy.core.compaction.record import CompactionRecord
from proxy.core.compaction.view import items_in_part
from proxy.core.conversation import Layout
from proxy.core.decisions import CountedView
from proxy.core.report import Report
from proxy.engine.features import Feature
from proxy.features.history.archive import Archive, items_removed
from proxy.store.conversation_table import MOST_LISTED, ConversationTable
from proxy.summaries.codec import NOTE_VERSION, SummaryNote

NOTE_SECONDS: Final = 60.0
"""Seconds between two notes on one summary that is skipped."""

OTHERS_SAVED: Final = MOST_LISTED // 2
"""Other conversations of a tenant after which one is saved again: half of those after which it is listed no more.

The other half are those that other replicas may save meanwhile.
"""


class CompactionNote(msgspec.Struct, frozen=True, array_like=True):
    """A compaction that was sent, at ``boundary``.

    Items before ``cut`` are folded, those from ``new_from`` on by this compaction. The folded items had ``tokens_in``
    tokens; the block in their place has ``tokens_out``. ``summary_by`` is the model that summarised the first
    ``summary_length`` items, empty if none did. ``archive`` is the reference of the originals, empty if they are not
    archived. ``written_at`` is Unix time. ``project`` is the label in ``x-ullage-project`` and ``anchors`` the
    reference of folded user items that stayed in the view; both are empty in notes of earlier releases.
    """

    version: int
    written_at: int
    route: str
    prefix_hash: bytes
    boundary: int
    new_from: int
    cut: int
    tokens_in: int
    tokens_out: int
    summary_by: str
    summary_length: int
    stages: tuple[str, ...]
    shortened: int
    window: int
    reserve: int
    fixed: int
    archive: str = ""
    project: str = ""
    anchors: str = ""


class RequestNote(msgspec.Struct, frozen=True, array_like=True):
    """The last request with a note: its tokens before and after, and the compaction that its view uses.

    ``boundary`` is 0 and ``prefix_hash`` empty if it uses none.
    """

    version: int
    written_at: int
    route: str
    api: str
    items: int
    window: int
    budget: int
    tokens_before: int
    tokens_after: int
    outcome: str
    stages: tuple[str, ...]
    boundary: int
    prefix_hash: bytes
    epoch: int
    summary_tokens: int


Note = CompactionNote | SummaryNote | RequestNote
SomeNote = TypeVar("SomeNote", CompactionNote, SummaryNote, RequestNote)

_MARKS: Final[Mapping[type[Note], str]] = {CompactionNote: "e", SummaryNote: "j", RequestNote: "z"}
"""The part of a note's name that states its kind. Names of stored notes never change."""


def note_name(note: Note) -> str:
    """Return the name under which *note* is stored; a later note on the same thing has the same name.

    Names begin with a boundary, since the store drops the note whose name sorts first. Those of requests sort last.
    """
    mark = _MARKS[type(note)]
    route = hashlib.sha256(note.route.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    match note:
        case CompactionNote():
            return f"{note.boundary:08d}:{mark}:{route}"
        case SummaryNote():
            return f"{note.length:08d}:{mark}:{route}:{note.last_compaction.hex()[:8]}"
        case RequestNote():
            return f"{mark}:{route}"


encode_note: Callable[[Note], bytes] = msgspec.msgpack.Encoder().encode
"""Returns the bytes of a note."""


def read_notes(values: Mapping[str, bytes], kind: type[SomeNote]) -> list[SomeNote]:
    """Return the notes of one *kind* in the order of their names. *values* are all notes by name.

    A note that is damaged, or of another version, is left out.
    """
    notes: list[SomeNote] = []
    for name in sorted(values):
        if f":{_MARKS[kind]}:" not in f":{name}:":
            continue
        try:
            note = msgspec.msgpack.decode(values[name], type=kind)
        except (msgspec.DecodeError, UnicodeError):
            continue
        if note.version == NOTE_VERSION:
            notes.append(note)
    return notes


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
        archive: Archive | None,
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
        root_hash, record = view.measured.root_hash, view.edits.record
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
        shortened=len(items_in_part(compaction)),
        window=int(record.window * ratio),
        reserve=int(record.reserve * ratio),
        fixed=int(record.fixed * ratio),
        project=view.request.options.project,
    )

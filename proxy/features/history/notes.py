"""Notes on a conversation's compactions, summaries and last requests: how they are stored, and how callers see them.

Notes hold figures and names, never a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from proxy.summaries.codec import NOTE_VERSION, SummaryNote


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


def encode_note(note: Note) -> bytes:
    """Return the bytes of *note*."""
    return msgspec.msgpack.encode(note)


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

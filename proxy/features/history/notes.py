"""What is told of a conversation: notes on its events, its summaries and its last request, and how people see them.

Notes hold figures and names, never a text. Each stands under a name of its own; those of the oldest places sort first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from proxy.summaries.codec import NOTE_VERSION, SummaryNote


class CompactionNote(msgspec.Struct, frozen=True, array_like=True):
    """A compaction that was sent: at ``place``, items before ``cut`` folded, those from ``since`` on by this one.

    ``taken`` are the tokens of what it folded, ``left`` those of what stands for it. ``by`` is who summed up the first
    ``upto`` items, empty where no model did. ``archive`` names the originals, where they are kept. ``made``: Unix time.
    """

    version: int
    made: int
    route: str
    chain: bytes
    place: int
    since: int
    cut: int
    taken: int
    left: int
    by: str
    upto: int
    stages: tuple[str, ...]
    shortened: int
    window: int
    reserve: int
    fixed: int
    archive: str = ""


class RequestNote(msgspec.Struct, frozen=True, array_like=True):
    """The last request that was noted: its size before and after, in tokens, and the event its view comes from."""

    version: int
    made: int
    route: str
    api: str
    items: int
    window: int
    budget: int
    before: int
    after: int
    outcome: str
    stages: tuple[str, ...]
    place: int
    chain: bytes
    epoch: int
    spent: int


Note = CompactionNote | SummaryNote | RequestNote
N = TypeVar("N", CompactionNote, SummaryNote, RequestNote)


def name_of(note: Note) -> str:
    """Under what name *note* stands: a second one of the same thing takes its place."""
    route = hashlib.sha256(note.route.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    match note:
        case CompactionNote():
            return f"{note.place:08d}:e:{route}"
        case SummaryNote():
            return f"{note.length:08d}:j:{route}:{note.last_compaction.hex()[:8]}"
        case RequestNote():
            return f"z:{route}"


def dump(note: Note) -> bytes:
    """The bytes of *note*."""
    return msgspec.msgpack.encode(note)


def load(notes: Mapping[str, bytes], kind: type[N], mark: str) -> list[N]:
    """The notes of one *kind*, whose names carry *mark*, in the order of their names, less what cannot be read."""
    found: list[N] = []
    for name in sorted(name for name in notes if f":{mark}:" in f":{name}:"):
        try:
            note = msgspec.msgpack.decode(notes[name], type=kind)
        except (msgspec.DecodeError, UnicodeError):
            continue
        if note.version == NOTE_VERSION:
            found.append(note)
    return found


def show_request(note: RequestNote, now: float) -> dict[str, object]:
    """The last request, for people."""
    upstream, _, model = note.route.partition(",")
    return {
        "upstream": upstream,
        "model": model,
        "api": note.api,
        "age_seconds": _age(note.made, now),
        "items": note.items,
        "tokens_before": note.before,
        "tokens_after": note.after,
        "window": note.window,
        "pressure": round(note.after / note.budget, 2) if note.budget else None,
        "outcome": note.outcome,
        "stages": list(note.stages),
        "summary_tokens": note.spent,
        "epoch": note.epoch,
    }


def show_compaction(note: CompactionNote, last: Sequence[RequestNote], now: float, *, there: bool) -> dict[str, object]:
    """An event, for people: *there* says whether its record is in the store.

    It is ``active`` when the last view came from it, ``past`` when another one's did, ``lost`` without its record.
    """
    upstream, _, model = note.route.partition(",")
    active = any(each.route == note.route and each.chain == note.chain for each in last)
    return {
        "from": 0,
        "to": note.cut,
        "new_from": note.since,
        "at": note.place,
        "tokens_in": note.taken,
        "tokens_out": note.left,
        "by": note.by or "heuristic",
        "summary_to": note.upto,
        "age_seconds": _age(note.made, now),
        "state": _event_state(there=there, active=active),
        "stages": list(note.stages),
        "shortened": note.shortened,
        "upstream": upstream,
        "model": model,
        "figures": {"window": note.window, "reserve": note.reserve, "fixed": note.fixed},
        "archive": note.archive or None,
    }


def show_summary(
    note: SummaryNote, events: Sequence[CompactionNote], now: float, *, text: bool, lease: bool, refused: bool
) -> dict[str, object]:
    """A summary, for people; *text*, *lease* and *refused* say what the store has of it.

    ``ready`` until an event comes; then it was ``used``, or the event went past it and it is ``unused``.
    """
    retry = None
    if refused and note.state == "failed" and not text:
        retry = max(0, note.retry_at - int(now))
    return {
        "from": 0,
        "to": note.length,
        "tokens_in": note.tokens_in,
        "tokens_out": note.tokens_out,
        "by": note.model,
        "upstream": note.upstream,
        "age_seconds": _age(note.written_at, now),
        "state": _job_state(note, events, text=text, lease=lease),
        "reason": note.reason,
        "retry_in_seconds": retry,
    }


def _event_state(*, there: bool, active: bool) -> str:
    if not there:
        return "lost"
    return "active" if active else "past"


def _job_state(note: SummaryNote, events: Sequence[CompactionNote], *, text: bool, lease: bool) -> str:
    """Return what has become of a summary, by what the store has of it."""
    if text:
        return _use_of_text(note, [event for event in events if event.route == note.route])
    if note.state == "pending":
        return "pending" if lease else "lost"
    return "lost" if note.state == "ready" else note.state


def _use_of_text(note: SummaryNote, events: Sequence[CompactionNote]) -> str:
    if any(event.upto == note.length and event.by for event in events):
        return "used"
    if any(event.cut >= note.length for event in events):
        return "unused"
    return "ready"


def _age(made: int, now: float) -> int:
    return max(0, int(now) - made)

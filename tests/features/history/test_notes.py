"""Notes on conversations: kept by name, read back, shown."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.features.history.notes import (
    CompactionNote,
    RequestNote,
    dump,
    load,
    name_of,
    show_compaction,
    show_request,
    show_summary,
)
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote, SummaryState

ROUTE, NOW = "up,model", 1_000_100.0


def event(place: int, cut: int, by: str = "", upto: int = 0, route: str = ROUTE) -> CompactionNote:
    return CompactionNote(
        VERSION,
        1_000_000,
        route,
        bytes([place]) * 16,
        place,
        0,
        cut,
        900,
        90,
        by,
        upto,
        ("fold",),
        0,
        8192,
        1024,
        300,
    )


def job(cut: int, state: SummaryState, until: int = 0) -> SummaryNote:
    return SummaryNote(
        VERSION, 1_000_000, ROUTE, b"p" * 8, b"s" * 16, b"c" * 16, cut, state, "m", "up", "", 900, 90, until
    )


def last(place: int) -> RequestNote:
    chain = bytes([place]) * 16
    return RequestNote(
        VERSION, 1_000_000, ROUTE, "chat", 30, 8192, 7168, 9000, 3584, "compacted", ("fold",), place, chain, 0, 7
    )


def test_notes_come_back_by_kind_in_order_of_their_places() -> None:
    """Each kind is read back as it was, oldest place first; what cannot be read is passed over."""
    notes = [event(200, 100), event(20, 10), job(15, "ready"), last(200)]
    kept = {name_of(note): dump(note) for note in notes}
    assert len(kept) == 4
    kept["00000001:e:broken"] = b"\xc1"
    kept["00000001:j:newer"] = dump(structs.replace(job(1, "ready"), version=VERSION + 1))
    assert load(kept, CompactionNote, "e") == [notes[1], notes[0]]
    assert load(kept, SummaryNote, "j") == [notes[2]]
    assert load(kept, RequestNote, "z") == [notes[3]]
    assert sorted(kept)[-1].startswith("z:"), "the last request goes last when there are too many"


@pytest.mark.parametrize(
    ("place", "there", "state"), [(20, True, "active"), (20, False, "lost"), (10, True, "past"), (10, False, "lost")]
)
def test_an_event_is_active_past_or_lost(place: int, there: bool, state: str) -> None:
    """Active is the one that the last view came from; without its record it is lost."""
    shown = show_compaction(event(place, 5), [last(20)], NOW, there=there)
    assert (shown["state"], shown["by"], shown["age_seconds"]) == (state, "heuristic", 100)
    assert (shown["from"], shown["to"], shown["at"], shown["tokens_in"], shown["tokens_out"]) == (0, 5, place, 900, 90)
    assert show_compaction(event(20, 5, "m", 4), [], NOW, there=True)["by"] == "m"


@pytest.mark.parametrize(
    ("noted", "text", "lease", "refused", "events", "state"),
    [
        ("pending", False, True, False, [], "pending"),
        ("pending", False, False, False, [], "lost"),
        ("pending", True, False, False, [], "ready"),
        ("ready", True, False, False, [], "ready"),
        ("ready", True, False, False, [event(30, 8)], "ready"),
        ("ready", True, False, False, [event(30, 10, "m", 10)], "used"),
        ("ready", True, False, False, [event(30, 12, "m", 10)], "used"),
        ("ready", True, False, False, [event(30, 10)], "unused"),
        ("ready", True, False, False, [event(30, 12, route="up,other")], "ready"),
        ("ready", False, False, False, [], "lost"),
        ("failed", False, False, True, [], "failed"),
        ("failed", False, False, False, [], "failed"),
        ("skipped", False, False, False, [], "skipped"),
    ],
)
def test_a_summary_is_what_the_store_has_of_it(
    noted: SummaryState, text: bool, lease: bool, refused: bool, events: list[CompactionNote], state: str
) -> None:
    """What was noted counts as far as the store bears it out."""
    until = 1_000_130 if noted == "failed" else 0
    shown = show_summary(job(10, noted, until), events, NOW, text=text, lease=lease, refused=refused)
    assert shown["state"] == state
    assert shown["retry_in_seconds"] == (30 if refused else None)


def test_the_last_request_is_shown_with_its_pressure() -> None:
    """Sizes, window and pressure are those of its view."""
    shown = show_request(last(20), NOW)
    assert (shown["upstream"], shown["model"], shown["pressure"], shown["items"]) == ("up", "model", 0.5, 30)

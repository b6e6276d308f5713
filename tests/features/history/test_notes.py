"""Notes on conversations: values by name, read back, shown."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.features.history.notes import (
    CompactionNote,
    RequestNote,
    compaction_json,
    encode_note,
    note_name,
    read_notes,
    request_json,
    summary_json,
)
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote, SummaryState

ROUTE, NOW = "up,model", 1_000_100.0


def compaction(
    boundary: int, cut: int, summary_by: str = "", summary_length: int = 0, route: str = ROUTE
) -> CompactionNote:
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
    return SummaryNote(
        VERSION, 1_000_000, ROUTE, b"p" * 8, b"s" * 16, b"c" * 16, length, state, "m", "up", "", 900, 90, retry_at
    )


def last_request(boundary: int) -> RequestNote:
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


def test_notes_come_back_by_kind_in_order_of_their_places() -> None:
    """Each kind is read back as it was, oldest boundary first; what cannot be read is passed over."""
    notes = [compaction(200, 100), compaction(20, 10), summary(15, "ready"), last_request(200)]
    values = {note_name(note): encode_note(note) for note in notes}
    assert len(values) == 4
    values["00000001:e:broken"] = b"\xc1"
    values["00000001:j:newer"] = encode_note(structs.replace(summary(1, "ready"), version=VERSION + 1))
    assert read_notes(values, CompactionNote) == [notes[1], notes[0]]
    assert read_notes(values, SummaryNote) == [notes[2]]
    assert read_notes(values, RequestNote) == [notes[3]]
    assert sorted(values)[-1].startswith("z:"), "the last request goes last when there are too many"


@pytest.mark.parametrize(
    ("boundary", "is_stored", "state"),
    [(20, True, "active"), (20, False, "lost"), (10, True, "past"), (10, False, "lost")],
)
def test_an_event_is_active_past_or_lost(boundary: int, is_stored: bool, state: str) -> None:
    """Active is the one that the last view came from; without its record it is lost."""
    shown = compaction_json(compaction(boundary, 5), [last_request(20)], NOW, is_stored=is_stored)
    assert (shown["state"], shown["by"], shown["age_seconds"]) == (state, "heuristic", 100)
    assert (shown["from"], shown["to"], shown["at"], shown["tokens_in"], shown["tokens_out"]) == (
        0,
        5,
        boundary,
        900,
        90,
    )
    assert compaction_json(compaction(20, 5, "m", 4), [], NOW, is_stored=True)["by"] == "m"


@pytest.mark.parametrize(
    ("noted", "has_text", "has_lease", "has_failure", "compactions", "state"),
    [
        ("pending", False, True, False, [], "pending"),
        ("pending", False, False, False, [], "lost"),
        ("pending", True, False, False, [], "ready"),
        ("ready", True, False, False, [], "ready"),
        ("ready", True, False, False, [compaction(30, 8)], "ready"),
        ("ready", True, False, False, [compaction(30, 10, "m", 10)], "used"),
        ("ready", True, False, False, [compaction(30, 12, "m", 10)], "used"),
        ("ready", True, False, False, [compaction(30, 10)], "unused"),
        ("ready", True, False, False, [compaction(30, 12, route="up,other")], "ready"),
        ("ready", False, False, False, [], "lost"),
        ("failed", False, False, True, [], "failed"),
        ("failed", False, False, False, [], "failed"),
        ("skipped", False, False, False, [], "skipped"),
    ],
)
def test_a_summary_is_what_the_store_has_of_it(
    noted: SummaryState,
    has_text: bool,
    has_lease: bool,
    has_failure: bool,
    compactions: list[CompactionNote],
    state: str,
) -> None:
    """The noted state holds as far as the store agrees with it."""
    retry_at = 1_000_130 if noted == "failed" else 0
    shown = summary_json(
        summary(10, noted, retry_at), compactions, NOW, has_text=has_text, has_lease=has_lease, has_failure=has_failure
    )
    assert shown["state"] == state
    assert shown["retry_in_seconds"] == (30 if has_failure else None)


def test_the_last_request_is_shown_with_its_pressure() -> None:
    """Sizes, window and pressure are those of its view."""
    shown = request_json(last_request(20), NOW)
    assert (shown["upstream"], shown["model"], shown["pressure"], shown["items"]) == ("up", "model", 0.5, 30)

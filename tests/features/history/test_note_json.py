"""Notes on conversations as callers see them."""

from __future__ import annotations

import pytest

from proxy.features.history.note_json import compaction_json, request_json, summary_json
from proxy.features.history.notes import CompactionNote
from proxy.summaries.codec import SummaryState
from tests.support.sample_notes import compaction, last_request, summary

NOW = 1_000_100.0


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

"""Counts of writes: each process's own, and what it sees of the others'."""

from __future__ import annotations

from pathlib import Path

from proxy.store.write_counts import WriteCounts


def test_what_others_count_is_seen_and_what_a_process_counts_itself_is_not(tmp_path: Path) -> None:
    """Each of several sees every count of the others, also beside one of its own."""
    several = [WriteCounts(tmp_path / "lock") for _ in range(3)]
    before = [each.changes_by_others() for each in several]
    several[1].add()
    several[0].add()
    after = [each.changes_by_others() for each in several]
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, True, True]
    several[2].add()
    assert several[2].changes_by_others() == after[2]
    assert several[0].changes_by_others() > after[0]


def test_one_that_nobody_else_writes_beside_sees_nothing(tmp_path: Path) -> None:
    """Its own counts change nothing, nor do the starts of others."""
    own = WriteCounts(tmp_path / "lock")
    before = own.changes_by_others()
    assert own.changes_by_others() == before
    for _ in range(3):
        own.add()
        WriteCounts(tmp_path / "lock")
    assert own.changes_by_others() == before


def test_a_file_of_many_starts_stays_small(tmp_path: Path) -> None:
    """A figure is used again at last, and goes on from what it was: each count is seen as a change."""
    other = WriteCounts(tmp_path / "lock")
    latest = WriteCounts(tmp_path / "lock")
    for _ in range(1_200):
        latest = WriteCounts(tmp_path / "lock")
        latest.add()
        before = other.changes_by_others()
    latest.add()
    assert other.changes_by_others() > before
    assert (tmp_path / "lock").stat().st_size == 8 * 513

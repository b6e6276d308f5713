"""One connection: what a transaction promises, and what is removed when the file is full."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.store.operations import Add, Claim, ReadFields, ScoreMember, SetField, TopMembers
from proxy.store.sqlite_entries import SqliteEntries, is_damage, prepare, primary_code
from proxy.store.sqlite_file import StoreFile

KB = 1024


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The time of day."""
    return Clock()


@pytest.fixture
def entries(tmp_path: Path, clock: Clock) -> Iterator[SqliteEntries]:
    """An open, empty file."""
    opened = StoreFile(tmp_path, lambda event, facts: None, clock).open()
    yield opened
    opened.close()


def fill(entries: SqliteEntries, clock: Clock, count: int, seconds: float | None = 3600.0) -> None:
    """Claim *count* values of 8 KB, one a second."""
    for number in range(count):
        clock.now += 1
        entries.transact([Claim(f"k{number}", bytes(8 * KB), seconds).on_entries])


def test_the_least_recently_used_goes_first(entries: SqliteEntries, clock: Clock) -> None:
    """Above the bound the oldest go, but not one that was renewed or never expires, and it ends below the bound."""
    entries.transact([Claim("secret", b"for ever", None).on_entries])
    fill(entries, clock, 1000)
    entries.transact([lambda file: file.refresh("k0", 3600)])
    bound = entries.bytes_used() // 2
    while entries.evict(bound):
        continue
    assert entries.bytes_used() <= bound
    assert entries.read(["secret", "k0", "k1", "k999"]) == [b"for ever", bytes(8 * KB), None, bytes(8 * KB)]


def test_a_file_within_its_bound_is_left_alone(entries: SqliteEntries, clock: Clock) -> None:
    """Nothing is evicted before the bound."""
    fill(entries, clock, 10)
    assert not entries.evict(KB * KB)
    assert None not in entries.read([f"k{number}" for number in range(10)])


def test_what_never_expires_is_never_evicted(entries: SqliteEntries, clock: Clock) -> None:
    """If only such entries are left, eviction ends above its bound."""
    fill(entries, clock, 50, None)
    assert not entries.evict(KB)
    assert None not in entries.read([f"k{number}" for number in range(50)])


def test_what_expired_is_removed_and_its_room_used_again(entries: SqliteEntries, clock: Clock) -> None:
    """A purge frees the room of what expired, in steps."""
    fill(entries, clock, 450, 1000.0)
    used = entries.bytes_used()
    clock.now += 2000
    assert [entries.purge(), entries.purge(), entries.purge()] == [True, True, False]
    assert entries.bytes_used() < used / 10


def test_a_transaction_is_all_or_nothing(entries: SqliteEntries) -> None:
    """An error of the file undoes the whole batch, and the connection goes on."""

    def broken(file: SqliteEntries) -> None:
        raise sqlite3.OperationalError("the disk is gone")

    with pytest.raises(sqlite3.OperationalError):
        entries.transact([Claim("a", b"1", 60).on_entries, broken])
    assert entries.transact([Claim("a", b"2", 60).on_entries]) == [None]


def test_a_value_of_another_kind_spoils_its_own_operation_only(entries: SqliteEntries) -> None:
    """What is no hash, no scores and no number is an error of that operation; the batch goes on."""
    outcomes = entries.transact(
        [
            Claim("k", b"\xc1 text", 60).on_entries,
            SetField("k", "f", b"1", 3, 60).on_entries,
            ScoreMember("k", b"m", 1.0, 3, 60).on_entries,
            Add("k", 1, 60).on_entries,
            Claim("other", b"1", 60).on_entries,
        ]
    )
    assert [isinstance(each, ValueError) for each in outcomes] == [False, True, True, True, False]
    assert entries.read(["k", "other"]) == [b"\xc1 text", b"1"]


@pytest.mark.parametrize("foreign", ["5", "2.5", "'a text'"])
def test_a_value_that_is_no_bytes_is_none(tmp_path: Path, entries: SqliteEntries, clock: Clock, foreign: str) -> None:
    """A number or a text that another program put under one of our keys is missing, and gives way to what is ours."""
    other = sqlite3.connect(tmp_path / "store.db")
    for key in ("value", "hash", "scores"):
        other.execute(f"INSERT INTO entries VALUES ('{key}', {foreign}, {clock.now + 60}, 0)")
    other.commit()
    other.close()
    assert entries.read(["value"]) == [None]
    assert (ReadFields("hash").on_entries(entries), TopMembers("scores", 9).on_entries(entries)) == ({}, [])
    assert Claim("value", b"ours", 60).on_entries(entries) is None
    assert entries.read(["value"]) == [b"ours"]


@pytest.mark.slow
def test_a_writer_waits_for_another(tmp_path: Path, entries: SqliteEntries) -> None:
    """While another connection writes, a transaction waits; then it is refused as busy, and nothing is lost."""
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as refused:
        entries.transact([Claim("a", b"1", 60).on_entries])
    assert primary_code(refused.value) == sqlite3.SQLITE_BUSY
    assert entries.read(["a"]) == [None], "reading waits for nobody"
    other.execute("COMMIT")
    other.close()
    assert entries.transact([Claim("a", b"1", 60).on_entries]) == [None]


def test_a_checkpoint_empties_the_log_into_the_file(tmp_path: Path, entries: SqliteEntries, clock: Clock) -> None:
    """After it the file itself has what was written."""
    fill(entries, clock, 10)
    before = (tmp_path / "store.db").stat().st_size
    entries.checkpoint()
    assert (tmp_path / "store.db").stat().st_size > before


def test_a_file_system_without_shared_memory_is_refused() -> None:
    """A database that cannot have a write-ahead log is an error with the reason."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="share memory"):
        prepare(connection)
    connection.close()


def test_only_damage_is_damage() -> None:
    """A full disk or a lock is none."""
    assert not is_damage(sqlite3.OperationalError("database is locked"))
    assert not is_damage(OSError("no space left on device"))

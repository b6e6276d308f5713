"""The file: whose it is, and what happens to one that is damaged, deleted, or of another version."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.operations import Claim
from proxy.store.sqlite_file import StoreFile, has_data, refuse_unwritable


class Directory:
    """A data directory and the warnings about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warned: list[tuple[str, dict[str, object]]] = []
        self.file = StoreFile(path, lambda event, facts: self.warned.append((event, facts)))

    @property
    def events(self) -> list[str]:
        """Names of the warnings, in order."""
        return [event for event, _ in self.warned]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """A directory that does not exist yet."""
    return Directory(tmp_path / "data")


def store(directory: Directory, value: bytes) -> None:
    """Open the file, claim one value, and close it."""
    entries = directory.file.open()
    entries.transact([Claim("k", value, 60).on_entries])
    entries.close()


def stored(directory: Directory) -> bytes | None:
    """The value that is there."""
    entries = directory.file.open()
    (value,) = entries.read(["k"])
    entries.close()
    return value


def test_everything_is_its_owners_alone(directory: Directory) -> None:
    """The directory has mode 0700, and every file in it, the log and its index among them, 0600."""
    assert not has_data(directory.path)
    entries = directory.file.open()
    entries.transact([Claim("k", b"1", 60).on_entries])
    assert has_data(directory.path)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.path.iterdir()}
    assert modes == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm", "store.lock"), 0o600)
    entries.close()


def _garbled(path: Path) -> None:
    path.write_bytes(b"nonsense" * 1000)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _header_only(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(len(content) - 100))


def _a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()


def _of_a_later_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def _with_another_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("DROP TABLE entries; CREATE TABLE entries (other TEXT)")
    connection.close()


@pytest.mark.parametrize(
    "spoil", [_garbled, _cut_short, _header_only, _a_directory, _of_a_later_version, _with_another_table]
)
def test_damaged_data_is_moved_aside_and_begun_anew(directory: Directory, spoil: Callable[[Path], None]) -> None:
    """A file that cannot be read is moved, in place of an older one, and a new one is empty and lasts."""
    aside = directory.path / "store.db.damaged"
    for damaged in (1, 2):
        store(directory, b"old")
        spoil(directory.file.path)
        assert stored(directory) is None
        assert directory.events == ["store.begun_anew"] * damaged
        assert directory.warned[-1][1]["moved_to"] == str(aside)
        assert aside.exists()
        store(directory, b"new")
        assert stored(directory) == b"new"
        shutil.rmtree(directory.path / "store.db", ignore_errors=True)
        directory.file.path.unlink(missing_ok=True)


def test_damage_is_moved_once(directory: Directory) -> None:
    """Of two that find the same damage, the second finds the file replaced and leaves it alone."""
    first, second = directory.file.open(), directory.file.open()
    cause = sqlite3.DatabaseError("malformed")
    directory.file.begin_anew(first, cause)
    assert directory.file.is_replaced(first)
    store(directory, b"new")
    directory.file.begin_anew(second, cause)
    assert stored(directory) == b"new"
    assert directory.events == ["store.begun_anew"]
    first.close()
    second.close()


def test_a_deleted_file_is_noticed(directory: Directory) -> None:
    """A connection knows that its file is gone, and that the one in its place is another."""
    entries = directory.file.open()
    assert not directory.file.is_replaced(entries)
    shutil.rmtree(directory.path)
    assert directory.file.is_replaced(entries)
    store(directory, b"new")
    assert directory.file.is_replaced(entries)
    assert entries.identity != directory.file.identity
    entries.close()


def test_the_data_of_an_earlier_version_is_left_alone_with_a_note(directory: Directory) -> None:
    """The private server's files stay, and one warning says that nothing reads them."""
    former = directory.path / "appendonlydir"
    former.mkdir(parents=True)
    (former / "appendonly.aof").write_bytes(b"*3")
    store(directory, b"new")
    store(directory, b"again")
    assert directory.events == ["store.former_data"]
    assert (former / "appendonly.aof").read_bytes() == b"*3"


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Below a file no directory can be."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        Directory(tmp_path / "file" / "data").file.open()


def test_a_place_where_nothing_can_be_written_is_refused_before_it_is_used(directory: Directory) -> None:
    """A directory that is there, or can be created, is accepted and stays as it is; one that cannot be is named."""
    refuse_unwritable(directory.path)
    refuse_unwritable(directory.path / "deep" / "down")
    assert not directory.path.exists()
    store(directory, b"1")
    refuse_unwritable(directory.path)
    with pytest.raises(EmbeddedUnavailable, match=r"store\.db is not a directory"):
        refuse_unwritable(directory.path / "store.db")
    with pytest.raises(EmbeddedUnavailable, match=r"store\.db is not a directory"):
        refuse_unwritable(directory.path / "store.db" / "below")
    with pytest.raises(EmbeddedUnavailable, match=r"/proc/1 cannot be written"):
        refuse_unwritable(Path("/proc/1/data"))

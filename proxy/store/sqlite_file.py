"""The file of the embedded store: created, opened, replaced if it was deleted, and moved aside if it is damaged.

Several processes may open one directory. Each locks ``store.lock`` while it opens the file, moves it aside or copies
the log into it, so that none opens a file that another one is moving. ``store.lock`` also has the figures of
``WriteCounts``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.sqlite_entries import SqliteEntries, is_damage, prepare
from proxy.store.write_counts import WriteCounts
from proxy.tasks import Warn

FILE: Final = "store.db"
"""The name of the embedded store's file."""

LOCK: Final = "store.lock"
"""The name of the file that processes lock."""

_ASIDE: Final = "store.db.damaged"
_FORMER_DATA: Final = "appendonlydir"
"""The directory of the private Redis server that earlier versions ran."""

_PARTS: Final = ("-wal", "-shm", "")
"""Suffixes of the files that SQLite writes: https://www.sqlite.org/tempfiles.html. The file itself is moved last: if
the process ends before, the next one finds it damaged and moves the rest.
"""

_BUSY_FOR: Final = 1.0
"""Seconds that SQLite waits for another connection's recovery."""

_MOUNTS: Final = Path("/proc/self/mountinfo")
"""https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html"""

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.glusterfs"}
)
"""Types of file systems that several machines may share. SQLite's write-ahead log needs memory that all its processes
share, and machines share none: https://www.sqlite.org/wal.html
"""


class StoreFile:
    """The file in *directory*; any thread may use it. *warn* is called in that thread."""

    def __init__(self, directory: Path, warn: Warn, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory.absolute()
        self.path = self.directory / FILE
        self.identity = (0, 0)
        """Device and inode of the file that was opened last."""

        self._warn = warn
        self._clock = clock
        self._lock, self._log = self.directory / LOCK, self.directory / f"{FILE}-wal"
        self._writes: WriteCounts | None = None

    def open(self, busy_for: float = _BUSY_FOR) -> SqliteEntries:
        """Open the file; create it if it is missing, and move it aside before if it is damaged.

        Raises ``sqlite3.Error`` and ``OSError``.
        """
        private_directory(self.directory)
        with self._exclusive():
            try:
                return self._opened(busy_for)
            except sqlite3.Error as error:
                if not is_damage(error) and not self.path.is_dir():
                    raise
                self._move_aside(error)
            return self._opened(busy_for)

    def is_replaced(self, entries: SqliteEntries) -> bool:
        """True if the file that *entries* has open is not the one in the directory any more. Raises ``OSError``."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != entries.identity

    def begin_anew(self, entries: SqliteEntries, cause: sqlite3.Error) -> None:
        """Move the damaged file of *entries* aside, unless another thread or process did. Raises ``OSError``."""
        with self._exclusive():
            if not self.is_replaced(entries):
                self._move_aside(cause)

    def checkpoint(self, entries: SqliteEntries) -> None:
        """Copy the write-ahead log into the file; one process at a time. Raises ``sqlite3.Error`` and ``OSError``."""
        with self._exclusive():
            entries.checkpoint()

    def log_bytes(self) -> int:
        """Bytes of the write-ahead log, 0 if there is none. Raises ``OSError``."""
        try:
            return self._log.stat().st_size
        except FileNotFoundError:
            return 0

    def _opened(self, busy_for: float) -> SqliteEntries:
        self._create()
        # Without an isolation level the module begins no transactions of its own: ``SqliteEntries`` does.
        # https://docs.python.org/3/library/sqlite3.html#sqlite3-controlling-transactions
        # The connection that reads in place is opened in a thread and used on the event loop, never at the same time.
        connection = sqlite3.connect(self.path, timeout=busy_for, isolation_level=None, check_same_thread=False)
        try:
            prepare(connection)
            status = self.path.stat()
        except BaseException:
            connection.close()
            raise
        if self._writes is None or self.identity != (status.st_dev, status.st_ino):
            self._writes = WriteCounts(self._lock)
        self.identity = (status.st_dev, status.st_ino)
        return SqliteEntries(connection, self.identity, self._clock, self._writes)

    def _create(self) -> None:
        """Create the file, readable by its owner only; SQLite gives its log the same mode.

        Never opens one that exists: closing it would end SQLite's locks on it in this process
        (https://www.sqlite.org/howtocorrupt.html).
        """
        if self.path.exists():
            return
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        former = self.directory / _FORMER_DATA
        if former.exists():
            advice = "nothing reads them any more: texts are written again; remove the directory when you have seen it"
            self._warn("store.former_data", {"file": str(former), "advice": advice})

    def _move_aside(self, cause: sqlite3.Error) -> None:
        aside = self.directory / _ASIDE
        for part in _PARTS:
            source, target = Path(f"{self.path}{part}"), Path(f"{aside}{part}")
            _discard(target)
            if source.exists():
                source.rename(target)
        advice = (
            "no request fails because of this: texts are written again; remove the moved data when you have seen it"
        )
        facts: dict[str, object] = {
            "cause": f"its data cannot be read: {cause}",
            "moved_to": str(aside),
            "advice": advice,
        }
        self._warn("store.begun_anew", facts)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the directory against other processes and other threads of this one."""
        # Each call opens the file anew, and a lock of flock belongs to the open file: so threads exclude each other,
        # too. Closing it, as the end of the process does, releases the lock.
        # https://man7.org/linux/man-pages/man2/flock.2.html
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def has_data(directory: Path) -> bool:
    """True if *directory* has an embedded store. Creates nothing."""
    try:
        return (directory / FILE).exists()
    except OSError:
        return False


def refuse_unwritable(directory: Path) -> None:
    """Raise ``EmbeddedUnavailable`` if this user could not create or change the files in *directory*.

    Nothing is created, so a full disk is not noticed.
    """
    place = directory.absolute()
    # What is missing would be created below the first directory that is there.
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    obstacle = ""
    if not place.is_dir():
        obstacle = f"{place} is not a directory"
    elif not os.access(place, os.W_OK | os.X_OK):
        obstacle = f"{place} cannot be written"
    for file in (directory / FILE, directory / LOCK):
        if not obstacle and file.exists() and not os.access(file, os.R_OK | os.W_OK):
            obstacle = f"{file} cannot be written"
    if obstacle:
        raise EmbeddedUnavailable(f"store.path {directory} cannot be used: {obstacle}")


def _discard(path: Path) -> None:
    """Remove *path*, a file or a directory, if it is there. Raises ``OSError``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def private_directory(directory: Path) -> None:
    """Create *directory*, readable by its owner only; another user's directory is left as it is.

    Raises ``OSError``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def refuse_network_file_system(directory: Path, mounts: Path = _MOUNTS) -> None:
    """Raise ``EmbeddedUnavailable`` if *directory* is on a network file system; *mounts* is Linux's list of mounts."""
    kind = file_system(directory.absolute(), mounts)
    if kind in _NETWORK:
        raise EmbeddedUnavailable(
            f"store.path {directory} is on a network file system ({kind}): name a directory on a local disk, or set "
            "store.url to a Redis"
        )


def file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that holds *path*; empty if that is not known.

    Only the table of mounts is read: a system call on the path itself would hang if its file server is unreachable.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    kind, longest = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount on the same point hides an earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = after.split(" ")[0], len(point.parts)
    return kind


def _unescaped(text: str) -> str:
    # The kernel writes space, tab, line feed and backslash as octal codes:
    # https://man7.org/linux/man-pages/man3/getmntent.3.html
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text

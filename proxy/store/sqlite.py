"""The embedded store: one SQLite file on a local disk, shared by every process that opens the same data directory.

Theory of operation
===================

Three connections to the file are open in a process:

    connection    used by                    for
    ------------  -------------------------  ----------------------------------------------------------------------
    ``_reader``   the event loop             reads in place: one takes 10 to 20 µs, a thread's hop several times that
    ``_slow``     the thread "store reader"  reads if the disk may be slow, checkpoints, opening and closing ``_reader``
    ``_writer``   the thread "store writer"  writes: all that wait in one transaction, answered after its commit

A read goes through the thread if the disk may be slow: the first one of a process, the first one after a pause of
``IDLE`` seconds, and all for some seconds after one that took ``SLOW_READ``. A caller waits for a thread no longer than
for a server (``deadlines``).

Writers in other processes are kept apart by SQLite's own lock (``SqliteEntries.transact``), opening and moving the file
by a lock file (``StoreFile``). No thread waits for the lock file inside a transaction.
"""

from __future__ import annotations

import asyncio
import math
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from proxy.store import deadlines
from proxy.store.backend import BREAKING, EmbeddedUnavailable, SharedBackend
from proxy.store.breaker import Breaker, Patience, State
from proxy.store.key_names import TRIAL
from proxy.store.operations import Operation, Read, Unavailable
from proxy.store.sqlite_entries import MAX_BYTES, SqliteEntries, primary_code
from proxy.store.sqlite_file import StoreFile
from proxy.store.sqlite_worker import FAULTS, Worker
from proxy.tasks import Warn

T = TypeVar("T")

SLOW_READ: Final = 0.010
"""Seconds from which a read in place was slow: a seek of a disk. The largest look-up, 512 keys, takes 1.3 ms."""

_IN_PLACE: Final = Patience(failures=1, within=None, first_pause=2.0, longest_pause=60.0)
"""The seconds for which reads go through the thread after a slow one."""

IDLE: Final = 10.0
"""Seconds without a read after which the system may have removed the file's pages from its cache."""

LOOK_AGAIN: Final = 1.0
"""Seconds after which the file is asked whether anything wrote to it that does not count its writes: an earlier version
of Ullage, or a person.
"""

STALLED: Final = 1.0
"""Seconds that one batch of writes may take before the disk counts as hanging."""

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Bytes written from which the write-ahead log is copied into the file; SQLite's own bound is 1,000 pages:
https://www.sqlite.org/wal.html
"""

_LOG_BYTES_PER_WRITE: Final = 8192
"""Bytes that a write takes in the log beside its value, about: two pages."""

_CLOSING: Final = 2.0
"""Seconds for each thread to end."""

_KINDS: Final = {
    sqlite3.SQLITE_FULL: "disk",
    sqlite3.SQLITE_READONLY: "disk",
    sqlite3.SQLITE_BUSY: "slow",
    sqlite3.SQLITE_LOCKED: "slow",
}
"""Kinds of SQLite's primary result codes; every other one is ``down``: https://www.sqlite.org/rescode.html"""

_WRITE_ERRORS: Final = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_SHMSIZE)
"""A quota that is used up, or a log that cannot grow: https://www.sqlite.org/rescode.html"""


class SqliteBackend(SharedBackend):
    """The ``Backend`` in the file of *directory*; opens it with ``open``.

    *warn* takes events for the log, *clock* gives monotonic seconds.
    """

    def __init__(self, directory: Path, *, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        loop = asyncio.get_running_loop()

        def warn_on_loop(event: str, facts: Mapping[str, object]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(warn, event, facts)

        self._directory = directory
        self._file = StoreFile(directory, warn_on_loop)
        self._writer = Worker("store writer", self._file, MAX_BYTES)
        self._slow = Worker("store reader", self._file)
        self._reader: SqliteEntries | None = None
        self._readers = 0
        self._breaker = Breaker(clock, random.random)
        self._in_place = Breaker(clock, random.random, _IN_PLACE)
        self._last_read = -math.inf
        self._data_version, self._looked_at = 0, -math.inf
        self._closing = False
        self._written = 0

    @property
    def breaker(self) -> State:
        """``open``, ``half-open`` or ``closed``."""
        return self._breaker.state

    async def open(self) -> None:
        """Open the file. Raises ``EmbeddedUnavailable``; not if the disk is slow or a process has the file locked.

        ``connect`` reports that, and opens the file once it can be.
        """
        try:
            await self._open()
        except TimeoutError:
            return
        except FAULTS as error:
            if kind_of(error) == "slow":
                return
            reason = str(error)
            if isinstance(error, OSError):
                reason = error.strerror or reason
            raise EmbeddedUnavailable(f"store.path {self._directory} cannot be used: {reason}") from error

    async def connect(self) -> None:
        """Open the file if it is not open. Raises ``Unavailable``."""
        try:
            await self._open()
        except TimeoutError:
            raise Unavailable("slow") from None
        except FAULTS as error:
            raise Unavailable(kind_of(error)) from error

    async def probe(self) -> None:
        """Read once if the breaker allows it, so that no request has to."""
        if self.breaker != "closed":
            with suppress(Unavailable):
                await super().run(Read([TRIAL]))

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation*: a read in place if that does not wait for the disk. Raises ``Unavailable``."""
        if isinstance(operation, Read):
            present = self._read_in_place(operation)
            if present is not None:
                return cast("T", present)
        began = self._clock()
        result = await super().run(operation)
        if isinstance(operation, Read):
            self._last_read = self._clock()
            if self._last_read - began < SLOW_READ:
                self._open_reader()
        return result

    def version(self) -> tuple[int, ...] | None:
        """The connection that reads in place, and two numbers; None if it cannot be used.

        The first changes with what another process writes, the other at most once a second, with what anybody writes.
        """
        reader, now = self._usable_reader(), self._clock()
        if reader is None:
            return None
        try:
            if now - self._looked_at >= LOOK_AGAIN:
                self._data_version, self._looked_at = reader.version(), now
            return self._readers, reader.writes.changes_by_others(), self._data_version
        except FAULTS:
            self._retire_reader()
            return None

    async def close(self) -> None:
        """Wait until running operations have ended, and close the file."""
        self._closing = True
        self._retire_reader()
        # One after the other: only the last connection to be closed copies the log into the file and removes it.
        # https://www.sqlite.org/wal.html#the_wal_file
        await self._slow.close(_CLOSING)
        await self._writer.close(_CLOSING)

    async def _open(self) -> None:
        """Make both threads read once, which opens their connections. Raises ``TimeoutError`` and ``FAULTS``."""
        async with asyncio.timeout(deadlines.CONNECT):
            for worker in (self._slow, self._writer):
                await worker.submit(lambda file: file.read([TRIAL]))
        self._last_read = self._clock()
        self._open_reader()

    def _open_reader(self) -> None:
        """Open the connection that reads in place, in the thread. After a failure the next slow read tries again."""
        if self._reader is not None and self._reader.identity == self._file.identity:
            return
        self._retire_reader()
        # It reads on the event loop, so it must never wait for a lock: a read that meets one goes through the thread.
        opened = self._slow.submit(lambda _: self._file.open(busy_for=0.0))
        opened.add_done_callback(self._reader_opened)

    def _reader_opened(self, opened: asyncio.Future[SqliteEntries]) -> None:
        if opened.exception() is not None:
            return
        self._retire_reader()
        if self._closing:
            opened.result().close()
        else:
            self._reader = opened.result()
            self._readers += 1

    def _retire_reader(self) -> None:
        """Close the connection that reads in place, in the thread: closing may write."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._slow.submit(lambda _: reader.close())

    def _usable_reader(self) -> SqliteEntries | None:
        """The connection that reads in place. Return None if what it tells may be old, or wait for the disk."""
        reader = self._reader
        if reader is None or reader.identity != self._file.identity or self.breaker != "closed":
            return None
        if self._clock() - self._last_read > IDLE or self._is_stalled():
            return None
        return reader

    def _read_in_place(self, operation: Read) -> Sequence[bytes | None] | None:
        """The result of *operation*. Return None if the thread has to read."""
        reader, began = self._usable_reader(), self._clock()
        if reader is None or not self._in_place.admit():
            return None
        try:
            values = reader.read(operation.keys)
        except sqlite3.Error:
            self._retire_reader()
            return None
        self._last_read = self._clock()
        if self._last_read - began > SLOW_READ:
            self._in_place.failed()
        elif self._in_place.state != "closed":
            self._in_place.succeeded()
        return values

    def _is_stalled(self) -> bool:
        since = self._writer.busy_since
        return since is not None and time.monotonic() - since > STALLED

    async def _attempt(self, operation: Operation[T], node: str, seconds: float) -> T:
        """Run *operation* in its thread; what it wrote is in the file once this returns. Raises ``Unavailable``."""
        del node
        if not self._breaker.admit():
            raise Unavailable("open")
        worker = self._slow
        if operation.writes:
            worker = self._writer
        future = worker.submit(operation.on_entries)
        future.add_done_callback(self._count)
        done, _ = await asyncio.wait({future}, timeout=seconds)
        if not done:
            # The operation goes on for its full time, so that the breaker learns if the disk answers at all.
            asyncio.get_running_loop().call_later(deadlines.OPERATION - seconds, self._count_late, future)
            raise Unavailable("slow")
        error = future.exception()
        if error is not None:
            raise Unavailable(kind_of(error)) from error
        if operation.writes:
            self._count_written(len(getattr(operation, "value", b"")))
        result: T = future.result()
        return result

    def _count_written(self, value_bytes: int) -> None:
        """Count what one write adds to the log; copy the log into the file once it is long."""
        self._written += _LOG_BYTES_PER_WRITE + value_bytes
        if self._written > CHECKPOINT_BYTES:
            self._written = 0
            # Its failure is read and ignored: the log is copied at the next occasion.
            self._slow.submit(self._file.checkpoint).add_done_callback(asyncio.Future.exception)

    def _count(self, future: asyncio.Future[Any]) -> None:
        error = future.exception()
        if error is not None and kind_of(error) in BREAKING:
            self._breaker.failed()
        else:
            self._breaker.succeeded()

    def _count_late(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            self._breaker.failed()


def kind_of(error: BaseException) -> str:
    """The kind of *error*, for metrics and the log."""
    if isinstance(error, ValueError):
        return "wrongtype"
    if getattr(error, "sqlite_errorcode", 0) in _WRITE_ERRORS:
        return "disk"
    return _KINDS.get(primary_code(error), "down")

"""A thread that works on the embedded store's file, so that a slow disk does not block the event loop.

It runs the waiting jobs, delivers their outcomes to the event loop, and removes entries that expired. Its connection is
opened for the first job. It is closed, and opened again for the next job, in these cases:

==================================================  ===========================================================
the directory has another file of that name         that one is opened; the operations run there
SQLite reports damage                               the file is moved aside; the operations run once in a new one
SQLite or the disk reports another fault            the operations fail; the next ones open the file again
the disk is full, or another process writes         the operations fail; the connection stays
==================================================  ===========================================================
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final

from proxy.store.sqlite_entries import SqliteEntries, Work, is_damage, primary_code
from proxy.store.sqlite_file import StoreFile

_BATCH: Final = 256
"""Operations in one transaction at most."""

_PURGE_EVERY: Final = 60.0
"""Seconds between two removals of expired entries."""

_MAX_LOG: Final = 16 * 1024 * 1024
"""Bytes of the write-ahead log from which the writer itself copies it into the file. The log is reused from its start
only after all of it was copied, which another thread cannot achieve while this one continues to write:
https://www.sqlite.org/wal.html#avoiding_excessively_large_wal_files
"""

_HARMLESS: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
"""Errors after which the connection stays open."""

FAULTS: Final = (sqlite3.Error, OSError)
"""Errors of the file or its disk."""

_Job = tuple[Work, "asyncio.Future[Any]"]


class Worker:
    """A thread with a connection of its own; its event loop is the one that runs now.

    With *max_bytes* it writes: all waiting operations run in one transaction, and the file is bounded. Without, it runs
    every operation alone and outside a transaction.
    """

    def __init__(self, name: str, file: StoreFile, max_bytes: int | None = None) -> None:
        self.file = file
        self.busy_since: float | None = None
        """The monotonic second since which the thread works on something; None if it waits."""

        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._entries: SqliteEntries | None = None
        self._purge_at = 0.0
        # A daemon thread, because a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> asyncio.Future[Any]:
        """Run *work* in the thread; return a future with its result, or with the error of the file."""
        future = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    async def close(self, seconds: float) -> None:
        """Wait up to *seconds* until the thread has run all waiting jobs and closed its connection."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, seconds)

    def _run(self) -> None:
        while batch := self._next_batch():
            self.busy_since = time.monotonic()
            outcomes = self._perform([work for work, _ in batch])
            self.busy_since = None
            with suppress(RuntimeError):  # the loop has ended, and with it every waiter
                self._loop.call_soon_threadsafe(_deliver, batch, outcomes)
            self._tidy()
        self._drop()

    def _next_batch(self) -> list[_Job]:
        """Return the waiting jobs, at least one; none if the thread is to end."""
        batch: list[_Job] = []
        most = 1
        if self._max_bytes is not None:
            most = _BATCH
        while not batch or (len(batch) < most and not self._jobs.empty()):
            job = self._jobs.get()
            if job is None:
                if batch:
                    self._jobs.put(None)  # so that the thread ends after this batch
                break
            batch.append(job)
        return batch

    def _perform(self, works: Sequence[Work]) -> Sequence[object]:
        """The outcomes of *works*, one for each: results and errors."""
        try:
            try:
                return self._attempt(works)
            except sqlite3.Error as error:
                if self._entries is None or not is_damage(error):
                    raise
                self.file.begin_anew(self._entries, error)
                return self._attempt(works)
        except FAULTS as error:
            if primary_code(error) not in _HARMLESS:
                self._drop()
            return [error] * len(works)

    def _attempt(self, works: Sequence[Work]) -> Sequence[object]:
        entries = self._current()
        if self._max_bytes is not None:
            return entries.transact(works)
        try:
            return [work(entries) for work in works]
        except ValueError as error:
            return [error] * len(works)

    def _current(self) -> SqliteEntries:
        """Return the connection to the file that the directory has now."""
        if self._entries is not None and self.file.is_replaced(self._entries):
            self._drop()
        if self._entries is None:
            self._entries = self.file.open()
        return self._entries

    def _drop(self) -> None:
        if self._entries is not None:
            self._entries.close()
            self._entries = None

    def _tidy(self) -> None:
        """Limit the sizes of log and file, in steps while no job waits; after an error the next batch tries again."""
        if self._max_bytes is None or self._entries is None:
            return
        with suppress(*FAULTS):
            if self.file.log_bytes() > _MAX_LOG:
                self.file.checkpoint(self._entries)
            if time.monotonic() >= self._purge_at:
                while self._entries.purge() and self._jobs.empty():
                    continue
                self._purge_at = time.monotonic() + _PURGE_EVERY
            while self._entries.evict(self._max_bytes) and self._jobs.empty():
                continue


def _deliver(batch: Sequence[_Job], outcomes: Sequence[object]) -> None:
    for (_, future), outcome in zip(batch, outcomes, strict=True):
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

"""The operations of the embedded store on one open SQLite connection. They block, so threads run them.

A row holds one key: its value, the second of the epoch it expires at, and the second it was last written or renewed.
Hashes and scored members are rows as well, packed as MessagePack: they have 64 and 200 entries at most.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from proxy.store.write_counts import WriteCounts

MAX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the file in use at most; above, the least recently used entries that expire are evicted."""

_REMOVED_AT_ONCE: Final = 200
"""Most entries removed in one transaction, because other processes wait for its end."""

_LOCKED_FOR: Final = 1.0
"""Seconds to wait while another process writes."""

_LOCK_POLL: Final = 0.0005
"""Seconds between two attempts to write. The waits of SQLite's own busy handler grow to 100 ms, more than an operation
may take: https://www.sqlite.org/c3ref/busy_timeout.html
"""

_SCHEMA_VERSION: Final = 1
"""The version of the tables, as ``user_version``: https://www.sqlite.org/pragma.html#pragma_user_version"""

_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, expires REAL, used REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_expiry ON entries (expires) WHERE expires IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_use ON entries (used) WHERE expires IS NOT NULL;
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""

_PUT: Final = """
INSERT INTO entries (key, value, expires, used) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (key) DO UPDATE SET value = ?2, expires = ?3, used = ?4
"""

_EVICT: Final = """
DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE expires IS NOT NULL ORDER BY used LIMIT ?)
"""

_PURGE: Final = "DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE expires <= ? LIMIT ?)"

Work = Callable[["SqliteEntries"], Any]
"""One operation, run by a thread on its connection."""


class LaterVersion(sqlite3.DatabaseError):
    """A later version of Ullage wrote the file."""


class SqliteEntries:
    """The entries of one open file; *clock* gives seconds of the epoch, which all processes share.

    Every method raises ``sqlite3.Error``. *writes* counts the transactions.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        identity: tuple[int, int],
        clock: Callable[[], float],
        writes: WriteCounts,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self.writes = writes
        self.identity = identity
        """Device and inode of the file."""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values under *keys*, in order; None for each that is missing.

        A value that is not bytes counts as missing: nothing here writes one, but a column of SQLite takes values of any
        type (https://www.sqlite.org/flextypegood.html).
        """
        marks = ",".join("?" * len(keys))
        rows = self._connection.execute(
            f"SELECT key, value FROM entries WHERE key IN ({marks}) AND (expires IS NULL OR expires > ?)",  # noqa: S608
            (*keys, self._clock()),
        )
        values = {key: value for key, value in rows.fetchall() if isinstance(value, bytes)}
        return [values.get(key) for key in keys]

    def version(self) -> int:
        """A number that changes when another connection writes: https://www.sqlite.org/pragma.html#pragma_data_version"""
        return self._pragma("data_version")

    def put(self, key: str, value: bytes, seconds: float | None) -> None:
        """Store *value* for *seconds* (None: for ever), in the place of an earlier one."""
        now, expires = self._clock(), None
        if seconds is not None:
            expires = now + seconds
        self._connection.execute(_PUT, (key, value, expires, now))

    def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now; does nothing if it is missing."""
        now = self._clock()
        self._connection.execute(
            "UPDATE entries SET expires = ?, used = ? WHERE key = ? AND (expires IS NULL OR expires > ?)",
            (now + seconds, now, key, now),
        )

    def remove(self, key: str) -> None:
        """Delete *key*."""
        self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))

    def seconds_left(self, key: str) -> float:
        """Seconds until *key* expires; zero or less if it is missing or never does."""
        row = self._connection.execute("SELECT expires FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return 0.0
        return (row[0] or 0.0) - self._clock()

    def transact(self, works: Sequence[Work]) -> list[object]:
        """Run *works* in one transaction and return their results, or the ``ValueError`` that one raised.

        Once it returns, all results are in the file, whatever happens to this process.
        """
        self._begin()
        try:
            outcomes = [_outcome(self, work) for work in works]
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk has rolled back already: https://www.sqlite.org/lang_transaction.html
            with suppress(sqlite3.Error):
                self._connection.rollback()
            raise
        # The transaction is in the file already. Where it cannot be counted, others see it when they look at the file.
        with suppress(OSError):
            self.writes.add()
        return outcomes

    def purge(self) -> bool:
        """Remove some expired entries. Return True if there may be more."""
        removed = self.transact([lambda _: self._delete(_PURGE, self._clock(), _REMOVED_AT_ONCE)])
        return removed == [_REMOVED_AT_ONCE]

    def evict(self, max_bytes: int) -> bool:
        """Remove the least recently used entries if *max_bytes* are exceeded. Return True if they may still be."""
        if self.bytes_used() <= max_bytes:
            return False
        return self.transact([lambda _: self._delete(_EVICT, _REMOVED_AT_ONCE)]) != [0]

    def bytes_used(self) -> int:
        """Bytes of the file that hold something."""
        pages, free, size = (self._pragma(name) for name in ("page_count", "freelist_count", "page_size"))
        return (pages - free) * size

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the file as far as readers allow; no other connection waits for it.

        https://www.sqlite.org/pragma.html#pragma_wal_checkpoint
        """
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the connection."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def _begin(self) -> None:
        """Begin a transaction that writes. Wait up to ``_LOCKED_FOR`` seconds while another connection writes."""
        # IMMEDIATE takes the write lock now. A transaction that first reads and then writes could fail in the middle,
        # without any waiting, if another one had written meanwhile: https://www.sqlite.org/isolation.html
        until = time.monotonic() + _LOCKED_FOR
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(_LOCK_POLL)
            else:
                return

    def _delete(self, statement: str, *arguments: float) -> int:
        return self._connection.execute(statement, arguments).rowcount

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])


def prepare(connection: sqlite3.Connection) -> None:
    """Create the table if it is missing, and set how the file is written. Raises ``sqlite3.Error``."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > _SCHEMA_VERSION:
        raise LaterVersion(f"schema {version} is newer than {_SCHEMA_VERSION}")
    # The log's index is shared memory: https://www.sqlite.org/wal.html
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError("the file system cannot share memory, which the write-ahead log needs")
    # A commit survives the end of the process; after a power cut the last ones may be missing, the file is whole:
    # https://www.sqlite.org/pragma.html#pragma_synchronous
    connection.execute("PRAGMA synchronous = NORMAL")
    # SQLite would copy the log in whichever thread commits, and requests wait for that one: another thread does it.
    # https://www.sqlite.org/wal.html#automatic_checkpoint
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # The log's file is not made smaller otherwise: https://www.sqlite.org/pragma.html#pragma_journal_size_limit
    connection.execute("PRAGMA journal_size_limit = 16777216")
    if version < _SCHEMA_VERSION:
        connection.executescript(_SCHEMA)
    # A file with other columns is refused here, as damaged, and not at the first request.
    connection.execute("SELECT key, value, expires, used FROM entries LIMIT 1").fetchall()
    # From here on ``_begin`` waits for locks itself, and readers need none.
    connection.execute("PRAGMA busy_timeout = 0")


def primary_code(error: BaseException) -> int:
    """SQLite's primary result code of *error*, 0 if it has none: https://www.sqlite.org/rescode.html"""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def is_damage(error: BaseException) -> bool:
    """True if *error* says that the file cannot be read, by this version at least."""
    damaged = primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return damaged or isinstance(error, LaterVersion) or "no such column" in str(error)


def _outcome(entries: SqliteEntries, work: Work) -> object:
    try:
        return work(entries)
    except ValueError as error:
        return error

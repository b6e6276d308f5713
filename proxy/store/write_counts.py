"""Counts of each process's writes to the embedded store: a process detects the writes of others without a query.

SQLite's ``data_version`` changes with every other connection's writes, also with those of this process's own thread:
https://www.sqlite.org/pragma.html#pragma_data_version. So each process counts its transactions in a file that all read,
a figure of eight bytes for each process::

    figure      content
    ----------  --------------------------------------------------------------
    0           number of processes that have been started
    1 to 512    transactions of the process that was started as that number, modulo 512

Reading all figures is one system call. A change of any figure but the own one is a write of another process.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Final

_FIGURE: Final = 8
"""Bytes of one figure in the file of write counts."""

_FIGURES: Final = 512
"""Processes with a figure of their own. A later one shares the figure of the process that started 512 before it."""


class WriteCounts:
    """The counts in the file at *path*. A process counts a transaction after its commit.

    The caller holds the lock of the store's directory while it creates an instance.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Not at the end of the process, which closes it anyway: the thread that writes may still be at work then.
        weakref.finalize(self, os.close, self._file).atexit = False
        os.ftruncate(self._file, _FIGURE * (1 + _FIGURES))
        started = self._figure(0) + 1
        os.pwrite(self._file, started.to_bytes(_FIGURE), 0)
        self._at = _FIGURE * (1 + started % _FIGURES)
        self._own = self._figure(self._at)
        self._figures = b""
        self._changes = 0

    def add(self) -> None:
        """Count a transaction of this process. Raises ``OSError``."""
        self._own += 1
        os.pwrite(self._file, self._own.to_bytes(_FIGURE), self._at)

    def changes_by_others(self) -> int:
        """Return a number that changes when another process has written. Not thread-safe. Raises ``OSError``."""
        figures = os.pread(self._file, _FIGURE * _FIGURES, _FIGURE)
        if figures != self._figures:
            before, self._figures = self._figures, figures
            own = slice(self._at - _FIGURE, self._at)
            if before[: own.start] != figures[: own.start] or before[own.stop :] != figures[own.stop :]:
                self._changes += 1
        return self._changes

    def _figure(self, at: int) -> int:
        return int.from_bytes(os.pread(self._file, _FIGURE, at))

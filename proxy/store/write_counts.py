"""How often each process wrote to the embedded store, so that one knows without a query that no other one did."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Final

_FIGURE: Final = 8
"""Bytes of one figure in the file of write counts."""

_FIGURES: Final = 512
"""Processes that have a figure of their own. One more shares that of a process that was started so many before it."""


class WriteCounts:
    """How often each process wrote to the store: a figure for each, in the file at *path*, which all of them read.

    SQLite tells only that another connection wrote, and the thread that writes for this process is one. So a process
    counts its transactions once they are in the store. *path* is locked while this is made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _FIGURE * (1 + _FIGURES))
        started = self._figure(0) + 1
        os.pwrite(self._file, started.to_bytes(_FIGURE), 0)
        self._at = _FIGURE * (1 + started % _FIGURES)
        self._own = self._figure(self._at)
        self._seen = (b"", b"")
        self._changes = 0

    def add(self) -> None:
        """Count a transaction of this process. Raises ``OSError``."""
        self._own += 1
        os.pwrite(self._file, self._own.to_bytes(_FIGURE), self._at)

    def changes_by_others(self) -> int:
        """A number that changes when another process has written; for one thread. Raises ``OSError``."""
        figures = os.pread(self._file, _FIGURE * _FIGURES, _FIGURE)
        others = figures[: self._at - _FIGURE], figures[self._at :]
        if others != self._seen:
            self._seen = others
            self._changes += 1
        return self._changes

    def _figure(self, at: int) -> int:
        return int.from_bytes(os.pread(self._file, _FIGURE, at))

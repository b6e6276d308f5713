"""The budget log: what fills each request's context, as JSON Lines in a file that is rotated.

A line has figures and names only. There are three kinds: ``context_budget`` for every request,
``context_overflow_warning`` for one whose view takes more than 80 % of its budget, and ``context_recovery`` for one
that was sent again after an overflow, or untouched after a fault of ours.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from proxy.core.advice import NEARLY_FULL
from proxy.core.report import INTERNAL_ERROR, Report

APIS: Final = frozenset({"chat", "messages", "responses", "gemini"})
"""APIs whose requests have a context. All others are relayed, or only ask for a count."""

MOST_WAITING: Final = 10_000
"""Lines that wait for the disk; further ones are dropped."""

BATCH_SECONDS: Final = 0.2
"""Seconds between two writes: one record for each line would cost as much as a small request."""

BATCH_BYTES: Final = 65_536
"""Bytes of one write at most, and half of a file: the handler rotates between two writes only."""


class BudgetLog:
    """Writes lines to *path*, on a thread of its own, and keeps *files* older ones of *max_bytes* each.

    ``dropped`` counts the lines that were not written because the disk was too slow, or full. Raises ``OSError`` if
    the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dropped = 0
        self._file = _File(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8")
        self._batch = min(BATCH_BYTES, max_bytes // 2)
        self._lines: deque[str] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="budget log", daemon=True)
        self._thread.start()

    def observe(self, report: Report, duration: float) -> None:
        """Write the lines of one finished request."""
        del duration
        if report.api not in APIS:
            return
        now = datetime.now(UTC)
        for kind in kinds_of(report):
            if len(self._lines) < MOST_WAITING:
                self._lines.append(json.dumps(line_of(report, kind, now)))
            else:
                self.dropped += 1

    def close(self) -> None:
        """Write the lines that wait and close the file."""
        self._closing.set()
        self._thread.join()
        with suppress(OSError):  # a full disk: the lines were counted
            self._file.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(BATCH_SECONDS)
            while self._lines:
                self._write_batch()

    def _write_batch(self) -> None:
        """Write lines that wait as one record, so that the file is rotated between two lines."""
        batch = [self._lines.popleft()]
        size = len(batch[0])
        while self._lines and size + len(self._lines[0]) < self._batch:
            batch.append(self._lines.popleft())
            size += len(batch[-1]) + 1
        self._file.handle(logging.makeLogRecord({"msg": "\n".join(batch)}))
        if self._file.failed:
            self._file.failed = False
            self.dropped += len(batch)


class _File(RotatingFileHandler):
    """A rotated file that notes a failed write; its base would print a traceback for each."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        """Note that *record* was not written."""
        del record
        self.failed = True


def kinds_of(report: Report) -> Iterator[str]:
    """Yield the kinds of lines that *report* makes."""
    yield "context_budget"
    if (report.pressure or 0.0) > NEARLY_FULL:
        yield "context_overflow_warning"
    if report.overflows or report.reason == INTERNAL_ERROR:
        yield "context_recovery"


def line_of(report: Report, kind: str, now: datetime) -> dict[str, object]:
    """Return the line of *kind*. Tokens are the provider's; None stands for what is not known.

    ``issue`` is the client's label of its project, else the conversation. ``checkpoint_entries`` is 1 if a block stands
    for folded rounds. ``pruned`` are the tokens that did not go upstream.
    """
    ratio = None
    if report.pressure is not None:
        ratio = round(report.pressure, 2)
    return {
        "ts": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": kind,
        "agent": report.agent,
        "issue": report.project or report.conversation,
        "context_loaded": report.tokens_after,
        "context_available": report.budget,
        "context_ratio": ratio,
        "files_loaded": report.files_read,
        "checkpoint_entries": int("summary" in report.regions),
        "pruned": report.tokens_removed,
    }

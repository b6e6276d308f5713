"""The budget log: what fills each request's context, as JSON Lines in a file that is rotated.

A line has figures and names only. There are three kinds: ``context_budget`` for every request,
``context_overflow_warning`` for one whose view takes more than 80 % of its budget, and ``context_recovery`` for one
that was sent again after an overflow, or untouched after a fault of ours.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Final

from proxy.core.report import INTERNAL_ERROR, Report

NEARLY_FULL: Final = 0.8
"""Share of the budget above which a warning is written."""

APIS: Final = frozenset({"chat", "messages", "responses"})
"""Requests that are not for one of these have no context: they are relayed, or only ask for a count."""

MOST_WAITING: Final = 10_000
"""Lines that wait for the disk; further ones are dropped."""


class BudgetLog:
    """Writes lines to *path*, on a thread of its own, and keeps *files* older ones of *max_bytes* each.

    Raises ``OSError`` if the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8")
        queue: Queue[logging.LogRecord] = Queue(MOST_WAITING)
        self._handler = _Handler(queue)
        self._listener = QueueListener(queue, file)
        self._file = file
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Number of lines that were dropped because the disk was too slow, or full."""
        return self._handler.dropped + self._file.dropped

    def observe(self, report: Report, duration: float) -> None:
        """Write the lines of one finished request."""
        del duration
        if report.api not in APIS:
            return
        now = datetime.now(UTC)
        for kind in kinds_of(report):
            self._handler.write(json.dumps(line_of(report, kind, now)))

    def close(self) -> None:
        """Write the lines that wait and close the file."""
        self._listener.stop()
        with suppress(OSError):  # a full disk: the lines were counted
            self._file.close()


class _File(RotatingFileHandler):
    """Counts the lines that cannot be written."""

    dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        """Count a line that was not written."""
        del record
        self.dropped += 1


class _Handler(QueueHandler):
    """Puts lines into the queue, and counts those that find it full."""

    dropped = 0

    def write(self, line: str) -> None:
        """Queue *line*, or drop it."""
        self.handle(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        """Count a line that found the queue full."""
        del record
        self.dropped += 1


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
    ratio = None if report.pressure is None else round(report.pressure, 2)
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

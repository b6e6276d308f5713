"""The budget log: what fills each request's context, as JSON Lines in a file that is rotated.

A line has figures and names only. There are three kinds: ``context_budget`` for every request,
``context_overflow_warning`` for one whose view takes more than 80 % of its budget, and ``context_recovery`` for one
that was sent again after an overflow, or untouched after a fault of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

import msgspec

from proxy.core.advice import NEARLY_FULL
from proxy.core.decisions import API_FORMATS
from proxy.core.report import INTERNAL_ERROR, Report
from proxy.telemetry.logs import ascii_json

MOST_WAITING: Final = 10_000
"""Most requests whose lines wait for the disk; lines of further requests are dropped."""

BATCH_SECONDS: Final = 1.0
"""Seconds between two writes: one record for each line would cost as much as a small request, and this thread wakes up
without requests, too."""

BATCH_BYTES: Final = 65_536
"""Bytes of one write, and half of a file: the handler rotates between two writes only."""


class BudgetLog:
    """Writes lines to *path*, in a thread of its own; *files* older files of *max_bytes* each stay beside it.

    ``dropped`` counts the lines that were not written because the disk was too slow, or full. Raises ``OSError`` if
    the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dropped = 0
        self._file = _File(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8")
        self._batch = min(BATCH_BYTES, max_bytes // 2)
        self._waiting: deque[tuple[Report, float]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="budget log", daemon=True)
        self._thread.start()

    def observe(self, report: Report, duration: float) -> None:
        """Write the lines of one finished request, soon."""
        del duration
        if report.api not in API_FORMATS:  # relayed, or only a count of tokens
            return
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((report, time.time()))
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
            while self._waiting:
                self._write_batch()

    def _write_batch(self) -> None:
        """Write waiting lines as one record, so that the file is rotated between two lines."""
        batch: list[bytes] = []
        size = 0
        while self._waiting and size < self._batch:
            lines = lines_of(*self._waiting.popleft())
            batch += lines
            size += sum(map(len, lines))
        self._file.handle(logging.makeLogRecord({"msg": b"\n".join(batch).decode()}))
        if self._file.failed:
            self._file.failed = False
            self.dropped += len(batch)


class _File(RotatingFileHandler):
    """A rotated file that remembers a failed write; its base would print a traceback for each."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        """Remember that *record* was not written."""
        del record
        self.failed = True


class Line(msgspec.Struct, gc=False):
    """A line of the log. Tokens are the provider's; None stands for an unknown figure.

    ``issue`` is the client's label of its project, else the conversation. ``checkpoint_entries`` is 1 if a block stands
    for folded rounds. ``pruned`` are the tokens that did not go upstream.
    """

    ts: str
    event: str
    agent: str
    issue: str
    context_loaded: int | None
    context_available: int | None
    context_ratio: float | None
    files_loaded: int | None
    checkpoint_entries: int
    pruned: int


def lines_of(report: Report, at: float) -> list[bytes]:
    """Return the lines of the *report* of a request that ended *at* this Unix time, its ``context_budget`` first."""
    pressure = report.pressure
    issue, ratio = report.project or report.conversation, None
    if pressure is not None:
        ratio = round(pressure, 2)
    line = Line(
        ts=f"{datetime.fromtimestamp(at, UTC).isoformat(timespec='milliseconds').removesuffix('+00:00')}Z",
        event="context_budget",
        agent=report.agent,
        issue=issue,
        context_loaded=report.tokens_after,
        context_available=report.budget,
        context_ratio=ratio,
        files_loaded=report.files_read,
        checkpoint_entries=int("summary" in report.regions),
        pruned=report.tokens_removed,
    )
    encode: Callable[[Line], bytes] = msgspec.json.encode
    if not (report.agent.isprintable() and issue.isprintable()):
        # Clients choose these names. U+2028, which some readers take for a line end, is escaped, and so are lone
        # surrogates, which msgspec refuses.
        encode = ascii_json
    lines = [encode(line)]
    if pressure is not None and pressure > NEARLY_FULL:
        line.event = "context_overflow_warning"
        lines.append(encode(line))
    if report.overflows or report.reason == INTERNAL_ERROR:
        line.event = "context_recovery"
        lines.append(encode(line))
    return lines

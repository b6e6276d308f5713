"""Structured logs that cannot carry content: fields by allow-list, exceptions by type and place, never by message."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter, itemgetter
from select import PIPE_BUF
from types import TracebackType
from typing import Any, Literal

import msgspec
import structlog

from proxy.core import report as core_report
from proxy.core.errors import Overloaded
from proxy.core.report import DURATION, Report, SummaryReport
from proxy.telemetry.console import Console, uses_colors

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]
Fields = MutableMapping[str, Any]
Line = Fields | msgspec.Struct

LONGEST_TEXT = 200
"""Characters of a text in the log."""

_NOT_LOGGED = frozenset({"budget", "elsewhere", "paused", "breaker", "refused_before"})
"""Reasons of summary jobs that end before they begin, as often as once a second: counted, not logged."""

MOST_REFUSALS = 10
"""Lines a second for requests that are refused because too many are under way: a line costs more than a refusal."""

DEEPEST_STACK = 8
"""Frames of an exception or of a thread, the innermost ones."""

# The table of fields, prepared at import: for each request a few calls into compiled code remain.

_LOGGED = tuple(field for field in core_report.FIELDS if field.log)
_KEYS = tuple(field.log for field in _LOGGED)
_NAMES = [field.name for field in _LOGGED]

_DURATION_AT = _NAMES.index(DURATION)
"""The index of the duration, which is no part of a report: the status has its place until it is replaced."""

_VALUES = attrgetter(*_NAMES[:_DURATION_AT], "status", *_NAMES[_DURATION_AT + 1 :])
"""Reads the values of a report."""

_FOREIGN_AT = tuple(index for index, field in enumerate(_LOGGED) if field.foreign)
_FOREIGN = itemgetter(*_FOREIGN_AT)
"""Reads the texts that clients and providers chose."""

_CONVERTED_AT = tuple((index, field.logged) for index, field in enumerate(_LOGGED) if field.logged is not None)
"""The indices of values that are logged in another form, with the functions that convert them."""

_RequestLine = msgspec.defstruct(
    "_RequestLine",
    [*((key, Any) for key in _KEYS), ("event", str), ("level", str), ("timestamp", datetime)],
)
"""The line of a finished request as a structure: msgspec encodes a dictionary in twice the time."""

ALLOWED = frozenset(_KEYS) | frozenset(
    {
        # set by structlog and by this module
        "event", "level", "timestamp", "error", "frames", "dropped_fields", "logger", "where", "template",
        # one summary job
        "tenant", "calls",
        # the process
        "version", "host", "port", "pid", "worker", "workers", "signal", "exit_code", "seconds", "count", "limit",
        "kind", "state", "task", "store", "file", "line", "key", "remedy", "problem", "code", "attempt", "in_flight",
        "observed_window", "operation", "share", "cause", "moved_to", "advice", "bytes", "node", "models", "windows",
        "budget", "consumed", "tokens_removed", "connections", "generation", "changed",
    }
)  # fmt: skip
"""The keys that may appear in the log."""


class Logs:
    """The logger of a process. Build one, pass it to all parts, and close it last.

    Lines go to the file descriptor *fd*.
    """

    def __init__(self, level: Level, style: Format, fd: int) -> None:
        self.writer = LineWriter(fd)
        self._render: Callable[[Line], bytes] = msgspec.json.encode
        if style == "console" or (style == "auto" and os.isatty(fd)):
            self._render = Console(fd, colors=uses_colors(fd))
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self.log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            _Sink(self.writer),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                only_facts,
                self._rendered,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(self._level),
            cache_logger_on_first_use=True,
        )
        self._handler: _Library | None = None
        self._refusals = 0

    def warn(self, event: str, facts: Mapping[str, object]) -> None:
        """Write a warning called *event* with its *facts*."""
        self.log.warning(event, **facts)

    def request_done(self, report: Report, duration: float) -> None:
        """Write the one line of a finished request; *duration* in seconds.

        Of requests that are refused because too many are under way, ``MOST_REFUSALS`` get a line in a second.
        """
        if report.outcome == "refused" and report.reason == Overloaded.code:
            self._refusals += 1
            if self._refusals > MOST_REFUSALS:
                return
        if report.large_result:
            self.log.warning(
                "proxy.large_result",
                request_id=report.request_id,
                model=report.model,
                conversation=report.conversation,
                share=report.large_result,
                advice="one fresh tool result takes this share of the room left",
            )
        if self._level > logging.INFO:
            return
        values = list(_VALUES(report))
        values[_DURATION_AT] = duration
        foreign = "".join(_FOREIGN(values))
        if len(foreign) > LONGEST_TEXT or not foreign.isprintable():
            for index in _FOREIGN_AT:
                values[index] = _plain(values[index])
        for index, convert in _CONVERTED_AT:
            values[index] = convert(values[index])
        # Not through structlog's logger: every key of this line is in ``ALLOWED`` and every text was shortened above.
        line = _RequestLine(*values, "proxy.request_done", "info", datetime.now(UTC))
        try:
            rendered = self._render(line)
        except _NOT_ENCODED:
            rendered = ascii_json(line)
        self.writer.write(rendered + b"\n")

    def _rendered(self, _logger: object, _method: str, fields: Fields) -> bytes:
        """Return the line of *fields*; structlog's last processor."""
        try:
            return self._render(fields)
        except _NOT_ENCODED:
            return ascii_json(fields)

    def log_refusals(self) -> None:
        """Write the number of refused requests without a line since the last call, if any. Call it every second."""
        more, self._refusals = self._refusals - MOST_REFUSALS, 0
        if more > 0:
            advice = "raise server.limits if the machine and the upstreams can take more, or run more replicas"
            self.log.warning("proxy.refused_more", count=more, reason=Overloaded.code, advice=advice)

    def summary_done(self, report: SummaryReport) -> None:
        """Write the line of a summary job that called a model, or could not."""
        if report.reason in _NOT_LOGGED:
            return
        self.log.info(
            "summary.done",
            outcome=report.outcome,
            reason=report.reason,
            tenant=report.tenant,
            model=_plain(report.model),
            upstream=report.upstream,
            calls=report.calls,
            input_tokens=report.input_tokens,
            output_tokens=report.output_tokens,
            duration_ms=round(report.seconds * 1000, 1),
        )

    def noticed(self, event: str, facts: Mapping[str, object]) -> None:
        """Write *event* with its *facts*, as a warning if they name a remedy."""
        write = self.log.info
        if "remedy" in facts:
            write = self.log.warning
        write(event, **facts)

    def task_failed(self, name: str, error: BaseException) -> None:
        """Write that the background task *name* failed."""
        self.log.error("proxy.task_failed", task=name, exc_info=error)

    def loop_lagged(self, seconds: float, frames: Sequence[str]) -> None:
        """Write the *seconds* by which the event loop was late, and the *frames* that ran meanwhile."""
        self.log.warning("proxy.loop_lagged", seconds=round(seconds, 3), frames=list(frames))

    def loop_failed(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Write an error of the event loop, without the text of an exception. It is the loop's exception handler."""
        del loop
        error = context.get("exception")
        # The message is a fixed text of asyncio's, except that of a callback, which quotes its arguments. The rest of
        # the context has objects whose repr quotes data.
        # https://docs.python.org/3/library/asyncio-eventloop.html#asyncio.loop.call_exception_handler
        problem = str(context.get("message", ""))
        if "handle" in context:
            problem = "Exception in callback"
        self.log.error("proxy.loop_error", problem=problem, exc_info=error)

    def fault(self, where: str, request_id: str, fault: Exception) -> None:
        """Write a fault of ours that cost no request; *where* names the part of the request."""
        self.log.error("proxy.internal_error", where=where, request_id=request_id, exc_info=fault)

    def adopt_libraries(self) -> None:
        """Pass warnings and errors of libraries to this logger, without the data in their texts."""
        if self._handler is None:
            self._handler = _Library(self.log)
            logging.getLogger().addHandler(self._handler)
            logging.getLogger().setLevel(logging.WARNING)
            # A level of their own, because these libraries' debug records quote requests.
            for name in ("aiohttp", "aiohttp.server", "aiohttp.client", "aiohttp.access", "asyncio"):
                logging.getLogger(name).setLevel(logging.WARNING)

    def close(self) -> None:
        """Detach from the libraries and write the lines that wait, for a second at most."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler = None
        if self.writer.dropped:
            self.log.warning("log.lines_dropped", count=self.writer.dropped)
        self.writer.close()


def only_facts(_logger: object, _method: str, fields: Fields) -> Fields:
    """Drop every field that is not in ``ALLOWED``, shorten texts, and reduce an exception to its type and frames."""
    error = fields.pop("exc_info", None)
    unknown = fields.keys() - ALLOWED
    if unknown:
        for name in unknown:
            del fields[name]
        fields["dropped_fields"] = sorted(unknown)
    if error and not isinstance(error, BaseException):
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        fields["error"] = type(error).__name__
        fields["frames"] = frames(error.__traceback__)
    for name, value in fields.items():
        fields[name] = _plain_value(value)
    return fields


def _plain_value(value: Any) -> object:
    """Return *value* if it is a number or a boolean, a text or list of texts by ``_plain``, else its type's name."""
    kind = type(value)
    if kind is str:
        return _plain(value)
    if kind in (tuple, list):
        return [_plain(str(item)) for item in value]
    if value is None or kind in (int, float, bool):
        return value
    return kind.__name__


def frames(trace: TracebackType | None) -> list[str]:
    """Return the innermost frames of *trace* as ``file:line function``: no source text, no values."""
    summary = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    return [location_of(frame) for frame in summary[-DEEPEST_STACK:]]


def location_of(frame: traceback.FrameSummary) -> str:
    """Return *frame* as ``file:line function``."""
    return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno} {frame.name}"


def _plain(text: str) -> str:
    """Return *text* on one line, short, without control characters: model names come from clients."""
    short = text[:LONGEST_TEXT]
    if short.isprintable():
        return short
    return short.encode("unicode_escape").decode("ascii")[: 2 * LONGEST_TEXT]


_NOT_ENCODED = (UnicodeEncodeError, OverflowError)
"""Raised by msgspec for lone surrogates and integers above 64 bits, which only the standard library can write."""


def ascii_json(line: Line) -> bytes:
    """Return *line* as JSON in which every character beyond ASCII is escaped."""
    return json.dumps(msgspec.to_builtins(line)).encode()


class _Sink:
    """The logger under structlog's: every level writes the rendered line."""

    def __init__(self, writer: LineWriter) -> None:
        self._write = writer.write

    def msg(self, line: bytes) -> None:
        self._write(line + b"\n")

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


class _Library(logging.Handler):
    """Logs of a library's record only its logger, its place in the code, and the type of its error.

    aiohttp puts header lines and parts of URLs into its messages, asyncio the repr of a failed task. So only the
    template of a message is logged, and only if it has arguments: without arguments the text may already have the data.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        template = error = None
        if record.args and isinstance(record.msg, str):
            template = record.msg
        if record.exc_info:
            error = record.exc_info[1]
        write = self._log.warning
        if record.levelno >= logging.ERROR:
            write = self._log.error
        where = f"{record.filename}:{record.lineno} {record.funcName}"
        write("library.log", logger=record.name, where=where, template=template, exc_info=error)


MOST_BYTES = 4 * 1024 * 1024
"""Bytes of lines that wait to be written."""

LARGEST_PIECE = 2**16
"""Bytes of lines that are written at once, at most."""

BATCH_SECONDS = 0.1
"""Pause of the writing thread between two batches, because waking it costs more than rendering a line.

At 400 lines a second the thread takes 6 us of CPU for each, and 24 us with a fifth of the pause. A process that is
killed loses the lines of at most one pause.
"""


class LineWriter:
    """Lines for a file descriptor, written by a thread of its own.

    ``write`` never blocks: when the reader is gone or stuck and *most_bytes* wait, further lines are dropped and
    counted in ``dropped``. Safe to call from any thread.

    Lines wait in pieces, each for one system call. Workers share one pipe, and writes of more than ``PIPE_BUF`` bytes
    to it could interleave (https://pubs.opengroup.org/onlinepubs/9799919799/functions/write.html), so a piece has at
    most so many bytes. A longer line is a piece of its own. Writes to a file do not interleave.
    """

    def __init__(self, fd: int, most_bytes: int = MOST_BYTES) -> None:
        self.dropped = 0
        self._fd = fd
        self._most = most_bytes
        self._piece = PIPE_BUF
        if stat.S_ISREG(os.fstat(fd).st_mode):
            self._piece = LARGEST_PIECE
        self._pieces: list[bytearray] = []
        self._size = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue *line* (with its line end) for writing, or drop it."""
        with self._lock:
            if self._size + len(line) > self._most:
                self.dropped += 1
                return
            self._size += len(line)
            pieces = self._pieces
            if pieces and len(pieces[-1]) + len(line) <= self._piece:
                pieces[-1] += line
            else:
                pieces.append(bytearray(line))
        if not self._wake.is_set():
            self._wake.set()

    def close(self, seconds: float = 1.0) -> None:
        """Write the lines that wait, for *seconds* at most."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            with self._lock:
                pieces, self._pieces = self._pieces, []
            if not all(map(self._put, pieces)) or closing:
                return
            if pieces:
                self._closing.wait(BATCH_SECONDS)

    def _put(self, piece: bytearray) -> bool:
        """Write *piece*. Return False if the reader is gone."""
        rest = memoryview(piece)
        while rest:
            try:
                written = os.write(self._fd, rest)
            except BlockingIOError:
                # Another process that shares the pipe has set O_NONBLOCK, which belongs to the open file and so holds
                # here, too. The reader has to read first.
                time.sleep(BATCH_SECONDS)
                continue
            except OSError:
                # The reader is gone for good. From here on every line counts as dropped.
                with self._lock:
                    self.dropped += 1
                    self._most = 0
                return False
            rest = rest[written:]
            with self._lock:
                self._size -= written
        return True

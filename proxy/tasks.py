"""Work that does not run in line with a request: named tasks in the background, and large work on threads.

A failure of a task and a fault of our own are reported, and cost no request.

Work that grows with a body runs on the event loop while it is small, and on a thread of a pool of its own if it is
large. A thread does not run pure Python beside the loop, because both share the interpreter's lock. It makes the work
interruptible: the loop gets the lock back after ``SWITCH_SECONDS``, unless the thread is in one long call into C. Each
such call must therefore be bounded by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
OnFailure = Callable[[str, BaseException], None]

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
"""Starts a background task under a name: ``Tasks.spawn``."""


def ignore_failure(name: str, error: BaseException) -> None:
    """Ignore the failure of a background task: for commands, whose output shows that a result is missing."""
    del name, error


Warn = Callable[[str, Mapping[str, object]], None]
"""Writes a warning to the log: an event and its facts."""


def ignore_warning(event: str, facts: Mapping[str, object]) -> None:
    """Drop a warning: for commands, which have no log."""
    del event, facts


class Tasks:
    """Starts background tasks by name, reports their failures, and ends them together.

    The event loop has weak references only, so a task that is not stored may be collected while it runs:
    https://docs.python.org/3/library/asyncio-task.html#asyncio.create_task
    """

    def __init__(self, on_failure: OnFailure) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start *work* and return its task. A failure is reported under *name*."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, seconds: float) -> None:
        """Wait *seconds* for running tasks, then cancel the rest and wait until these have ended."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def __len__(self) -> int:
        """The number of running tasks."""
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(task.get_name(), error)


_LOG: Final = logging.getLogger(__name__)

FaultPhase = Literal["request", "answer", "after"]
"""The work that a fault interrupted: planning a request, watching its answer, or the work after the answer."""

ReportFault = Callable[[FaultPhase, str, Exception], None]
"""Logs or counts a fault: its phase, the request's id, the exception. Never its text, which may quote the request."""


def log_fault(phase: FaultPhase, request_id: str, fault: Exception) -> None:
    """Write *fault* to the library log, whose lines hold its type and frames only."""
    _LOG.error("internal error in %s of %s", phase, request_id, exc_info=fault)


class Faults:
    """Faults of our own that cost no request: each is passed to all of *reports*, or to the library log."""

    def __init__(self, *reports: ReportFault) -> None:
        self._reports = reports or (log_fault,)

    def report(self, phase: FaultPhase, request_id: str, fault: Exception) -> None:
        """Report *fault*."""
        for report in self._reports:
            report(phase, request_id, fault)

    def attempt(self, phase: FaultPhase, request_id: str, work: Callable[[], T], default: T) -> T:
        """Return the result of *work*; after a fault report it and return *default*."""
        try:
            return work()
        except Exception as fault:  # noqa: BLE001 - an optional part of an answer must not cost the answer
            self.report(phase, request_id, fault)
            return default


# Large work.

LARGE: Final = 65_536
"""Bytes from which work goes to a thread: smaller work takes up to 10 ms, and the use of a thread costs 0.1 ms."""

ITEM: Final = 500
"""Bytes of text that take as long as one more item, however small it is."""

THREADS: Final = 2
"""Threads of the pool. Each one that wants the interpreter's lock may delay the loop by one more turn.

The default executor resolves names and reads files, which must not wait behind a large body: so it is not used here.
"""

SWITCH_SECONDS: Final = 0.001
"""Time after which a thread gives up the interpreter's lock if the loop wants it; Python's default is 5 ms.

A small request waits for the lock some ten times. Switching at 1 ms costs a busy thread about 1 % of its time. See
https://docs.python.org/3/library/sys.html#sys.setswitchinterval
"""

UNCOLLECTED_SECONDS: Final = 10.0
"""Time without a collection after which the garbage collector runs even during large work."""

_POOL: Final = ThreadPoolExecutor(THREADS, "offload")

_BACKGROUND: Final = ThreadPoolExecutor(1, "background")
"""One thread for work beside requests: several that want the interpreter's lock would each delay the loop."""


def load_of(size: int, items: int) -> int:
    """Return the weight for ``offload`` of work on *items* items of *size* bytes together."""
    return size + ITEM * items


async def offload(size: int, work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """Return the result of *work*, run on a thread if *size* (bytes, or ``load_of``) is ``LARGE`` or more."""
    if size < LARGE:
        return work(*arguments)
    with _COLLECTOR.paused():
        return await asyncio.get_running_loop().run_in_executor(_POOL, work, *arguments)


async def in_background(work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """Return the result of *work*, which no other client's request waits for, run on a thread after what is due before.

    Work of summaries grows with a conversation as that of requests does, and there may be many at a time.
    """
    with _COLLECTOR.paused():
        return await asyncio.get_running_loop().run_in_executor(_BACKGROUND, work, *arguments)


class _Collector:
    """Pauses the garbage collector during large work, because a collection visits every object in one go.

    8 MB of nested objects are a million objects: each collection takes 0.5 s and finds no cycle among them.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause collections in this context, unless there has been none for ``UNCOLLECTED_SECONDS``."""
        if not self._running:
            self._since = time.monotonic()
            gc.disable()
        elif time.monotonic() - self._since > UNCOLLECTED_SECONDS:
            gc.enable()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                gc.enable()


_COLLECTOR: Final = _Collector()

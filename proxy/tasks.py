"""Named background tasks, and faults of our own: a failure of either is reported and costs no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")
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

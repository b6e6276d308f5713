"""Background tasks that are named, kept until they end, and never fail silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Protocol, TypeVar

T = TypeVar("T")
OnFailure = Callable[[str, BaseException], None]


class Tasks:
    """Owns background tasks: starts them by name, keeps them alive, reports failures, ends them together."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """The running task; its failure is reported under *name*."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, seconds: float) -> None:
        """Give running tasks *seconds* to end, then cancel what is left and wait for it."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def __len__(self) -> int:
        """How many tasks are under way."""
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(task.get_name(), error)


_LOG: Final = logging.getLogger(__name__)

Where = Literal["request", "answer", "after"]
"""What a fault was met in: making a request smaller, watching its answer, or the work behind the answer."""


class ReportFault(Protocol):
    """Takes notice of a fault."""

    def __call__(self, where: Where, request_id: str, fault: Exception) -> None:
        """Log the type and the frames of *fault*, and count it. Its text may quote the request."""


def log_fault(where: Where, request_id: str, fault: Exception) -> None:
    """Write *fault* to the library log, whose lines carry type and frames only."""
    _LOG.error("internal error in %s of %s", where, request_id, exc_info=fault)


class Faults:
    """Takes notice of faults, and runs what an answer can do without. Every fault goes to each of *reports*."""

    def __init__(self, *reports: ReportFault) -> None:
        self._reports = reports or (log_fault,)

    def report(self, where: Where, request_id: str, fault: Exception) -> None:
        """Take notice of *fault*."""
        for each in self._reports:
            each(where, request_id, fault)

    def attempt(self, where: Where, request_id: str, work: Callable[[], T], instead: T) -> T:
        """Return what *work* returns, or *instead* after a fault."""
        try:
            return work()
        except Exception as fault:  # noqa: BLE001 - an optional part of an answer must not cost the answer
            self.report(where, request_id, fault)
            return instead

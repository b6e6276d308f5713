"""Background tasks that are named, kept until they end, and never fail silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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

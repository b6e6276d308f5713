"""Deadlines of the store, so that a store that hangs delays no request by more than ``REQUEST`` seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

OPERATION: Final = 0.060
"""Seconds that a caller waits for one operation. It may wait as long for a free connection before that."""

REQUEST: Final = 0.150
"""Seconds that a caller waits in all for operations that get no answer."""

FULL_AGAIN: Final = 1.0
"""Seconds after which a caller has its full time again: the task of a connection serves many requests."""

CONNECT: Final = 2.0
"""Seconds to connect to a server at start and in the background, where no request waits."""

SOCKET: Final = 1.0
"""Seconds after which the client's socket gives up, for operations whose caller no longer waits."""


class WaitBudget:
    """The time that each caller may still wait. A caller is a task; *clock* gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: WeakKeyDictionary[asyncio.Task[Any], tuple[float, float]] = WeakKeyDictionary()
        """By task: the time of its first wait without a reply (monotonic), and the seconds of all such waits since.

        The keys are weak references: an entry disappears with its task.
        """

    def remaining(self, most: float) -> float:
        """Return the seconds that the running task may wait for its next operation, at most *most*."""
        if not self._spent:
            return most
        _, spent = self._of_this_task()
        return max(0.0, min(most, REQUEST - spent))

    def spend(self, seconds: float) -> None:
        """Subtract *seconds*, which the running task waited without a reply, from its budget."""
        task = asyncio.current_task()
        if task is not None:
            since, spent = self._of_this_task()
            self._spent[task] = (since, spent + seconds)

    def _of_this_task(self) -> tuple[float, float]:
        task, now = asyncio.current_task(), self._clock()
        if task is None:
            return now, 0.0
        since, spent = self._spent.get(task, (now, 0.0))
        if now - since >= FULL_AGAIN:
            return now, 0.0
        return since, spent

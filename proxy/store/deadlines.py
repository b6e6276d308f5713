"""Deadlines of the store, for an operation, a request and a connection: no request pays for a store that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

OPERATION: Final = 0.060
"""Seconds that a caller waits for one operation, and at most as long again for its turn."""

REQUEST: Final = 0.150
"""Seconds that a caller waits in vain at most, over all its operations."""

FORGOTTEN: Final = 1.0
"""Seconds after which a caller's waits are forgotten: a connection's task serves one request after the other."""

CONNECT: Final = 2.0
"""Seconds to connect to a server at start and in the background, where no request waits."""

SOCKET: Final = 1.0
"""Seconds after which the client's socket gives up: for operations whose caller has stopped waiting."""


class WaitBudget:
    """The time that each caller, known by its task, may still wait; *clock* gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: WeakKeyDictionary[asyncio.Task[Any], tuple[float, float]] = WeakKeyDictionary()
        """By task: since when (monotonic), and seconds waited in vain."""

    def left(self, most: float) -> float:
        """Seconds that the running task may wait for its next operation: *most*, or what is left to it."""
        if not self._spent:
            return most
        _, spent = self._of_this_task()
        return max(0.0, min(most, REQUEST - spent))

    def spend(self, seconds: float) -> None:
        """Take *seconds* that the running task waited in vain off its budget."""
        task = asyncio.current_task()
        if task is not None:
            since, spent = self._of_this_task()
            self._spent[task] = (since, spent + seconds)

    def _of_this_task(self) -> tuple[float, float]:
        task, now = asyncio.current_task(), self._clock()
        if task is None:
            return now, 0.0
        since, spent = self._spent.get(task, (now, 0.0))
        return (since, spent) if now - since < FORGOTTEN else (now, 0.0)

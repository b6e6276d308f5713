"""How long each caller has waited for the store in vain: no request pays for every operation of a store that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

REQUEST = 0.150
"""Seconds that a caller waits in vain at most, over all its operations."""

FORGOTTEN = 1.0
"""Seconds after which a caller is as patient again: a connection's task serves one request after the other."""


class WaitBudget:
    """Counts by task; *clock* gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._vain: WeakKeyDictionary[asyncio.Task[Any], tuple[float, float]] = WeakKeyDictionary()

    def left(self, most: float) -> float:
        """Seconds the running task may wait for its next operation: *most*, or what is left to it."""
        if not self._vain:
            return most
        return max(0.0, min(most, REQUEST - self._spent()[1]))

    def note(self, seconds: float) -> None:
        """The running task waited so long and got nothing."""
        task = asyncio.current_task()
        if task is not None:
            since, spent = self._spent()
            self._vain[task] = (since, spent + seconds)

    def _spent(self) -> tuple[float, float]:
        task, now = asyncio.current_task(), self._clock()
        since, spent = self._vain.get(task, (now, 0.0)) if task is not None else (now, 0.0)
        return (since, spent) if now - since < FORGOTTEN else (now, 0.0)

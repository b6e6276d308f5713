"""How many requests are under way, and whether new ones are welcome."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from proxy.core.errors import Overloaded
from proxy.server.body import BodyBytes
from proxy.server.config import Limits

# How long a cut request may take to say goodbye.
_GOODBYE: Final = 2.0


class Gate:
    """Requests of one process: counted on the way in, waited for and then cut when it drains."""

    FULL: Final = "The proxy handles as many requests as it may (server.limits.in_flight). Try again soon."

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.in_flight
        self._running: set[asyncio.Task[Any]] = set()
        self.body_bytes = BodyBytes(limits.in_flight_bytes)
        self.ready = False
        self.draining = False
        self.cutting = False

    def __len__(self) -> int:
        """How many requests are under way."""
        return len(self._running)

    @property
    def full(self) -> bool:
        """Whether one more request would be too many."""
        return len(self._running) >= self._limit and not self.draining

    def enter(self) -> asyncio.Task[Any]:
        """The running request's task, to be handed to ``leave``. Count it first, then ask ``check``."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are handled inside tasks")
        self._running.add(task)
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """The request of *task* is over."""
        self._running.discard(task)

    def check(self) -> None:
        """Raises ``Overloaded`` when there are too many requests or the process is going away."""
        if self.draining:
            raise Overloaded("The proxy is shutting down. Try again: another one will answer.")
        if len(self._running) > self._limit:
            raise Overloaded(self.FULL)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give running ones *seconds*, then end them."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._running and (left := end - loop.time()) > 0:
            await asyncio.wait(self._running, timeout=left)
        self.cutting = True
        late = list(self._running)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_GOODBYE)

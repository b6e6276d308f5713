"""The signals that end a process: the first asks for a drain, a second for an end at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Ending:
    """``asked`` is set when the process shall end, ``at_once`` when it shall not wait for anything."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """Heed signals from now on, until the running loop is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        # Under nohup it is ignored from the start, and has to stay so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.hang_up)

    def stop(self) -> None:
        """Ask for an end; called again: for one at once."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def hang_up(self) -> None:
        """Ask for an end. A terminal that is closed tells so twice, by its shell and by the kernel."""
        self.asked.set()

    async def unless_at_once(self, work: Coroutine[Any, Any, None]) -> None:
        """Await *work* unless, or until, the end shall be at once."""
        async with asyncio.TaskGroup() as group:
            job = group.create_task(work, name="drain")
            alarm = group.create_task(self.at_once.wait(), name="second signal")
            await asyncio.wait({job, alarm}, return_when=asyncio.FIRST_COMPLETED)
            job.cancel()
            alarm.cancel()

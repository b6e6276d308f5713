"""Measures the lag of the event loop, and names what ran meanwhile.

A timer on the loop, the beat, measures how late it runs. A thread watches it: when the beat is overdue, it notes the
frames of the loop's thread and of those that read large bodies. Afterwards they are gone.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from proxy.telemetry.logs import DEEPEST_STACK, location_of

BEAT: Final = 0.05
"""Seconds between two beats."""

TOO_LATE: Final = 0.2
"""Seconds of lag from which a line is logged."""

WORKERS: Final = "offload"
"""The beginning of the names of threads that read large bodies."""

Observe = Callable[[float], None]
Warn = Callable[[float, Sequence[str]], None]


class LagWatch:
    """Watches the running loop from ``start`` to ``stop``.

    *observe* gets the seconds of lag of each beat; *warn* those of a beat that is too late, and the innermost frames
    of what ran, as ``file:line function``.
    """

    def __init__(self, observe: Observe, warn: Warn, too_late: float = TOO_LATE) -> None:
        self._observe = observe
        self._warn = warn
        self._too_late = too_late
        self._stopped = threading.Event()
        self._due = 0.0
        self._worst = 0.0
        self._ran: tuple[str, ...] = ()
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch the loop of the calling thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._due = self._loop.time() + BEAT
        self._beat = self._loop.call_at(self._due, self._on_beat)
        threading.Thread(target=self._watch_beat, name="loop lag", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; harmless when called again."""
        self._stopped.set()
        if self._beat is not None:
            self._beat.cancel()

    def pop_worst(self) -> float:
        """Return the longest lag since the last call, in seconds."""
        worst, self._worst = self._worst, 0.0
        return worst

    def _on_beat(self) -> None:
        """Measure how late this beat is, and plan the next one. One call: it runs twenty times a second."""
        lag = max(0.0, self._loop.time() - self._due)
        self._observe(lag)
        if lag > self._worst:
            self._worst = lag
        if lag >= self._too_late:
            self._warn(lag, self._ran)
        self._ran = ()
        self._due = self._loop.time() + BEAT
        self._beat = self._loop.call_at(self._due, self._on_beat)

    def _watch_beat(self) -> None:
        """Note the frames once for each beat that is overdue. Runs in the thread."""
        # The first look at an overdue beat counts: its frames have run for most of the lag.
        while not self._stopped.wait(BEAT):
            if not self._ran and self._loop.time() - self._due >= self._too_late / 2:
                self._ran = self._frames()

    def _frames(self) -> tuple[str, ...]:
        """Return the innermost frames of the loop's thread, then of each thread that reads a large body."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = sys._current_frames()
        workers = [ident for ident in stacks if (names.get(ident) or "").startswith(WORKERS)]
        places: list[str] = []
        for ident in (self._thread, *workers):
            if frame := stacks.get(ident):
                summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
                places += [location_of(each) for each in summary[:DEEPEST_STACK]]
        return tuple(places)

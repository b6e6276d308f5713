"""Measures the lag of the event loop, and names the functions that ran meanwhile.

A thread schedules a callback, the beat, on the loop: every ``BEAT`` seconds while requests are under way, else every
``IDLE_BEAT``, so that an idle proxy takes no CPU. The lag is the time by which the callback runs late. While it is
overdue, the thread records the stack of the loop's thread and of those that read large bodies: when the callback runs
at last, these frames have returned.

asyncio's own debug mode measures each callback, which costs too much in production:
https://docs.python.org/3/library/asyncio-dev.html#debug-mode
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Final

from proxy.telemetry.logs import DEEPEST_STACK, location_of

BEAT: Final = 0.05
"""Seconds between two beats while requests are under way."""

IDLE_BEAT: Final = 1.0
"""Seconds between two beats while none is."""

TOO_LATE: Final = 0.2
"""Seconds of lag from which a line is logged."""

WORKERS: Final = "offload"
"""The prefix of the names of threads that read large bodies."""

Observe = Callable[[float], None]
"""Takes the seconds of lag of one beat."""

Warn = Callable[[float, Sequence[str]], None]
"""Takes the seconds of lag of a beat that was too late, and the frames that ran meanwhile."""


class LagWatch:
    """Watches the running loop from ``start`` to ``stop``.

    *under_way* are the requests under way. A frame is given as ``file:line function``, innermost frames only.
    """

    def __init__(self, under_way: Collection[object], observe: Observe, warn: Warn, too_late: float = TOO_LATE) -> None:
        self._under_way = under_way
        self._observe = observe
        self._warn = warn
        self._too_late = too_late
        self._stopped = threading.Event()
        self._is_beat_due = False
        self._due = 0.0
        self._worst = 0.0
        self._frames: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to watch the loop of the calling thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        threading.Thread(target=self._schedule_beats, name="loop lag", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; harmless when called again."""
        self._stopped.set()

    def pop_worst(self) -> float:
        """Return the longest lag since the last call, in seconds."""
        worst, self._worst = self._worst, 0.0
        return worst

    def _on_beat(self) -> None:
        """Measure how late this beat is."""
        if self._stopped.is_set():
            return
        lag = max(0.0, time.monotonic() - self._due)
        self._observe(lag)
        self._worst = max(self._worst, lag)
        if lag >= self._too_late:
            self._warn(lag, self._frames)
        self._is_beat_due = False

    def _schedule_beats(self) -> None:
        """Schedule one beat after the other; record the frames once for each that is overdue. Runs in the thread."""
        due = time.monotonic() + BEAT
        while not self._stopped.wait(BEAT):
            if self._is_beat_due:
                # Recorded early, at half the limit: the frames of that moment have run for most of the lag.
                if not self._frames and time.monotonic() - self._due >= self._too_late / 2:
                    self._frames = self._running_frames()
            elif self._under_way or due - self._due >= IDLE_BEAT:
                # Due at the time that this thread should have woken, not now: if the interpreter's lock delayed this
                # thread, it delayed the loop as well.
                self._due, self._frames, self._is_beat_due = due, (), True
                try:
                    self._loop.call_soon_threadsafe(self._on_beat)
                except RuntimeError:
                    return  # the loop was closed
            due = time.monotonic() + BEAT

    def _running_frames(self) -> tuple[str, ...]:
        """Return the innermost frames of the loop's thread, then of each thread that reads a large body."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = sys._current_frames()
        workers = [ident for ident in stacks if (names.get(ident) or "").startswith(WORKERS)]
        locations: list[str] = []
        for ident in (self._thread, *workers):
            if innermost := stacks.get(ident):
                stack = traceback.StackSummary.extract(traceback.walk_stack(innermost), lookup_lines=False)
                locations += [location_of(frame) for frame in stack[:DEEPEST_STACK]]
        return tuple(locations)

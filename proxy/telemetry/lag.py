"""Measures the lag of the event loop, and names what ran meanwhile.

A thread asks the loop for a beat while requests are under way, and once a second otherwise: a proxy that has nothing to
do is left alone. How late the beat runs is the lag. If it is overdue, the thread notes the frames of the loop's thread
and of those that read large bodies. Afterwards they are gone.
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
"""The beginning of the names of threads that read large bodies."""

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
        self._ran: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to watch the loop of the calling thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        threading.Thread(target=self._ask_for_beats, name="loop lag", daemon=True).start()

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
            self._warn(lag, self._ran)
        self._is_beat_due = False

    def _ask_for_beats(self) -> None:
        """Ask for one beat after the other, and note the frames once for each that is overdue. Runs in the thread."""
        due = time.monotonic() + BEAT
        while not self._stopped.wait(BEAT):
            if self._is_beat_due:
                # The first look at an overdue beat counts: its frames have run for most of the lag.
                if not self._ran and time.monotonic() - self._due >= self._too_late / 2:
                    self._ran = self._frames()
            elif self._under_way or due - self._due >= IDLE_BEAT:
                # Due when this thread meant to ask: what held it up holds up the loop as well, the interpreter's lock.
                self._due, self._ran, self._is_beat_due = due, (), True
                try:
                    self._loop.call_soon_threadsafe(self._on_beat)
                except RuntimeError:
                    return  # the loop was closed
            due = time.monotonic() + BEAT

    def _frames(self) -> tuple[str, ...]:
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

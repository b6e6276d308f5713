"""What the store tells its operator: changes of state at once, repetitions at most once a minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

Warn = Callable[[str, dict[str, object]], None]
EVERY = 60.0


class Notices:
    """Counts errors by kind and passes on what is worth a line; never sees keys or values."""

    def __init__(self, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn = warn
        self._clock = clock
        self._said: dict[str, float] = {}
        self._standing: dict[str, object] = {"store": True}
        self.counts: Counter[str] = Counter()

    def say(self, event: str, /, **facts: object) -> None:
        """Pass *event* on, now."""
        self._warn(event, facts)

    def change(self, subject: str, state: object, event: str, /, **facts: object) -> None:
        """Pass *event* on if *subject* was in another state before."""
        if self._standing.get(subject) != state:
            self._standing[subject] = state
            self._warn(event, facts)

    def count(self, kind: str, event: str = "", **facts: object) -> None:
        """Count one error of *kind*; pass *event* on unless it was within the last minute."""
        self.counts[kind] += 1
        now = self._clock()
        if event and now - self._said.get(event, -EVERY) >= EVERY:
            self._said[event] = now
            self._warn(event, {"kind": kind, **facts})

    def snapshot(self) -> Mapping[str, int]:
        """How many errors of each kind there were so far."""
        return dict(self.counts)

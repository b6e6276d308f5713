"""Decides whether a server is worth asking. Pure but for the clock and the dice it is given.

Closed: everything is let through. Five failures within ten seconds open it. Open: nothing passes until the pause is
over. Half-open: exactly one call passes; its success closes the breaker, its failure doubles the pause, 2 s up to 30 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES, WITHIN = 5, 10.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
_PROBE_LOST = 5.0  # a probe that never reported back stops blocking the next one


class Breaker:
    """One server's breaker; *clock* gives monotonic seconds, *dice* a number in [0, 1) to spread replicas apart."""

    def __init__(self, clock: Callable[[], float], dice: Callable[[], float]) -> None:
        self._clock = clock
        self._dice = dice
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self.state: State = "closed"

    def admit(self) -> bool:
        """Whether a call may go out now; in half-open state ``True`` is said once, and that call must report back."""
        if self.state == "closed":
            return True
        now = self._clock()
        if now < self._until:
            return False
        self.state = "half-open"
        self._until = now + _PROBE_LOST
        return True

    def succeeded(self) -> None:
        """The server answered."""
        if self.state == "open":
            return  # an answer that was under way when the others failed proves nothing yet
        if self.state == "half-open":
            self.state = "closed"
            self._pause = FIRST_PAUSE
            self._failures.clear()

    def failed(self) -> None:
        """The server did not answer, or only to say that it cannot serve."""
        now = self._clock()
        if self.state == "half-open":
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            self._open(now)
        elif self.state == "closed":
            self._failures.append(now)
            if len(self._failures) == FAILURES and now - self._failures[0] <= WITHIN:
                self._open(now)

    def _open(self, now: float) -> None:
        self.state = "open"
        self._failures.clear()
        self._until = now + self._pause * (0.75 + 0.5 * self._dice())

"""A circuit breaker: decides if a server may be called. It has no side effects: clock and random numbers are arguments.

https://learn.microsoft.com/en-us/azure/architecture/patterns/circuit-breaker describes the pattern.

================  ==============================  ======================  ==============================
state             ``admit``                       ``succeeded``           ``failed``
================  ==============================  ======================  ==============================
``closed``        True                            stays                   ``open`` after a few failures
``open``          False during the pause, then    ignored: the call       ignored: the call
                  True and ``half-open``          began before it opened  began before it opened
``half-open``     False; True again if no call    ``closed``, with the    ``open`` for twice as long
                  reports back for ``lost``       first pause again
================  ==============================  ======================  ==============================

The failures count if they come within a short time or, if ``Patience.within`` is None, with no success in between.
A half-open breaker admits one call, so that a server that recovers does not get all waiting calls at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

State = Literal["closed", "open", "half-open"]


class Patience(msgspec.Struct, frozen=True):
    """When a breaker opens and for how long; times in seconds.

    It opens after *failures* within *within*, or, if that is None, after that many without a success in between.
    *lost* is the time after which a half-open call that did not report back counts as lost, and another one may go out.
    """

    failures: int = 5
    within: float | None = 10.0
    first_pause: float = 2.0
    longest_pause: float = 30.0
    lost: float = 5.0


SERVER = Patience()
"""The patience with a server of the store."""


class Breaker:
    """One server's breaker; *clock* gives monotonic seconds, *dice* a number in [0, 1) to spread replicas apart."""

    def __init__(self, clock: Callable[[], float], dice: Callable[[], float], patience: Patience = SERVER) -> None:
        self._clock = clock
        self._dice = dice
        self._patience = patience
        self._failures: deque[float] = deque(maxlen=patience.failures)
        self._pause = patience.first_pause
        self._until = 0.0
        self.state: State = "closed"

    def admit(self) -> bool:
        """True if a call may go out now. If half-open, only one caller gets True, and must report back."""
        if self.state == "closed":
            return True
        now = self._clock()
        if now < self._until:
            return False
        self.state = "half-open"
        self._until = now + self._patience.lost
        return True

    def succeeded(self) -> None:
        """Count that the server answered."""
        if self.state == "open":
            return  # the call began before the breaker opened: its answer says nothing about the server now
        if self.state == "half-open":
            self.state = "closed"
            self._pause = self._patience.first_pause
            self._failures.clear()
        elif self._patience.within is None:
            self._failures.clear()

    def failed(self) -> None:
        """Count that the server did not answer, or only that it cannot serve."""
        now = self._clock()
        if self.state == "half-open":
            self._pause = min(self._pause * 2, self._patience.longest_pause)
            self._open(now)
        elif self.state == "closed":
            self._failures.append(now)
            within = self._patience.within
            full = len(self._failures) == self._patience.failures
            if full and (within is None or now - self._failures[0] <= within):
                self._open(now)

    def _open(self, now: float) -> None:
        self.state = "open"
        self._failures.clear()
        # Jitter of 25 % either way: replicas that lost the server together must not all probe it at the same moment.
        # https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
        self._until = now + self._pause * (0.75 + 0.5 * self._dice())

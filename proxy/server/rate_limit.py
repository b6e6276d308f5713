"""Limits how often one caller may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, MutableMapping
from typing import Final

from cachetools import LRUCache

from proxy.core.errors import TooManyRequests

MAX_CALLERS: Final = 10_000
"""Callers whose buckets are in memory; the one that called longest ago is dropped, and starts with a full one again."""


class RateLimit:
    """Limits each caller's requests: a bucket of *burst* tokens that is refilled with *rate* tokens a second.

    *subject* names the requests in the error.
    """

    def __init__(self, rate: float, burst: float, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._subject = subject
        self._clock = clock
        self._buckets: MutableMapping[bytes, tuple[float, float]] = LRUCache(MAX_CALLERS)

    def admit(self, caller: bytes) -> None:
        """Count one request of *caller*. Raises ``TooManyRequests``."""
        now = self._clock()
        tokens, counted_at = self._buckets.get(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - counted_at) * self._rate)
        if tokens < 1.0:
            seconds = 1 / self._rate
            error = TooManyRequests(f"Too many {self._subject}: in the long run at most one every {seconds:g} seconds.")
            error.retry_after = math.ceil(seconds)
            raise error
        self._buckets[caller] = (tokens - 1.0, now)

"""How the cost of some work grows with the size of what it is given."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

FACTOR = 4
MOST = 8
"""Linear work takes FACTOR times as long for FACTOR times as much, quadratic work 16 times."""

LEAST = 0.02
"""Seconds below which a figure tells nothing."""


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of *work*, the least of three, without the collector: it walks over all that tests have made."""
    times = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(times)


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """True if *work* of four times *size* takes less than eight times as long as that of *size*."""
    return cpu_seconds(lambda: work(FACTOR * size)) < MOST * max(LEAST, cpu_seconds(lambda: work(size)))

"""When garbage is collected. Imports nothing of Ullage, because it is there before all that a process imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (20_000, 10, 10)
"""New objects that start a collection (Python's default: 700), and collections before an older generation is visited.

Parsing a body makes some 100,000 objects and no cycle: with 700, collections are a third of the time it takes. See
https://docs.python.org/3/library/gc.html#gc.set_threshold
"""


def pause_collections() -> None:
    """Collect no garbage until ``resume_collections``."""
    gc.disable()


def resume_collections() -> None:
    """Collect garbage again, but never visit what is there already: what imports make stays.

    Visiting it is a tenth of a start while it is made, and a tenth while a process is built of it.
    """
    gc.freeze()
    gc.enable()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile, as between ``pause_collections`` and ``resume_collections``."""
    pause_collections()
    try:
        yield
    finally:
        resume_collections()


def collect_rarely() -> None:
    """Exempt the objects built at start-up from garbage collection, and collect less often.

    ``gc.freeze`` moves them to a permanent generation: https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)

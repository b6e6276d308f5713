"""Work that grows with a body: small work runs on the event loop, large work on a thread of a pool of its own.

A thread does not run pure Python beside the loop, because both share the interpreter's lock. It makes the work
interruptible: the loop gets the lock back after ``SWITCH_SECONDS``, unless the thread is in one long call into C. Each
such call must therefore be bounded by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LARGE: Final = 65_536
"""Bytes from which work goes to a thread: smaller work takes up to 10 ms, and the use of a thread costs 0.1 ms."""

ITEM: Final = 500
"""Bytes of text that take as long as one more item, however small it is."""

THREADS: Final = 2
"""Threads of the pool. Each one that wants the interpreter's lock may delay the loop by one more turn.

The default executor resolves names and reads files, which must not wait behind a large body: so it is not used here.
"""

SWITCH_SECONDS: Final = 0.001
"""Time after which a thread gives up the interpreter's lock if the loop wants it; Python's default is 5 ms.

A small request waits for the lock some ten times. Switching at 1 ms costs a busy thread about 1 % of its time. See
https://docs.python.org/3/library/sys.html#sys.setswitchinterval
"""

UNCOLLECTED_SECONDS: Final = 10.0
"""Time without a collection after which the garbage collector runs even during large work."""

_POOL: Final = ThreadPoolExecutor(THREADS, "offload")

_BACKGROUND: Final = ThreadPoolExecutor(1, "background")
"""One thread for work beside requests: several that want the interpreter's lock would each delay the loop."""


def load_of(size: int, items: int) -> int:
    """Return the weight for ``offload`` of work on *items* items of *size* bytes together."""
    return size + ITEM * items


async def offload(size: int, work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """Return the result of *work*, run on a thread if *size* (bytes, or ``load_of``) is ``LARGE`` or more."""
    if size < LARGE:
        return work(*arguments)
    with _COLLECTOR.paused():
        return await asyncio.get_running_loop().run_in_executor(_POOL, work, *arguments)


async def in_background(work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """Return the result of *work*, which no other client's request waits for, run on a thread after what is due before.

    Work of summaries grows with a conversation as that of requests does, and there may be many at a time.
    """
    with _COLLECTOR.paused():
        return await asyncio.get_running_loop().run_in_executor(_BACKGROUND, work, *arguments)


class _Collector:
    """Pauses the garbage collector during large work, because a collection visits every object in one go.

    8 MB of nested objects are a million objects: each collection takes 0.5 s and finds no cycle among them.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause collections in this context, unless there has been none for ``UNCOLLECTED_SECONDS``."""
        if not self._running:
            self._since = time.monotonic()
            gc.disable()
        elif time.monotonic() - self._since > UNCOLLECTED_SECONDS:
            gc.enable()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                gc.enable()


_COLLECTOR: Final = _Collector()

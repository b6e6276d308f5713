"""Work that grows with a body: done on the event loop while that is small, else on a thread of a pool of its own.

A thread does not make pure Python run beside the loop, since both share the interpreter's lock. It makes the work
interruptible: the loop gets the lock back after ``SWITCH_SECONDS``, whatever the thread is at, unless that is one long
call into C. So each such call has to be bounded by itself.
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
"""Bytes from which work on a body goes to a thread: below it takes some 10 ms, and a thread's turn costs 0.1 ms."""

ITEM: Final = 500
"""Bytes of text that take as long as one more item does, however small it is."""

THREADS: Final = 2
"""Each thread that wants the interpreter's lock may make the loop wait once more for its turn.

The default executor is another one: it resolves names and reads files, which must not wait behind a large body.
"""

SWITCH_SECONDS: Final = 0.001
"""How long a thread keeps the interpreter's lock while the loop waits for it. Python's own is 5 ms.

A small request waits for the lock some ten times. Switching at 1 ms costs a busy thread about 1 % of its time.
"""

UNCOLLECTED_SECONDS: Final = 10.0
"""How long large work may follow on large work before the garbage collector runs beside it all the same."""

_POOL: Final = ThreadPoolExecutor(THREADS, "offload")


def load_of(size: int, items: int) -> int:
    """What work on *items* that take *size* bytes together is about, as ``offload`` weighs it."""
    return size + ITEM * items


async def offload(size: int, work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """The result of *work*, done on a thread if it is about *size* bytes that are ``LARGE`` or more."""
    if size < LARGE:
        return work(*arguments)
    with _COLLECTOR.paused():
        return await asyncio.get_running_loop().run_in_executor(_POOL, work, *arguments)


class _Collector:
    """Pauses the garbage collector during large work, because a collection looks at every object in one go.

    8 MB of nested objects are a million: collecting takes 0.5 s again and again, and finds no cycle among them.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context without collections, unless there have been none for ``UNCOLLECTED_SECONDS``."""
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

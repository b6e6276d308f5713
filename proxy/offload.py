"""Work that grows with a body: done on the event loop while that is small, else on a thread of a pool of its own.

A thread does not make pure Python run beside the loop, since both share the interpreter's lock. It makes the work
interruptible: the loop gets the lock back after ``SWITCH_SECONDS``, whatever the thread is at, unless that is one long
call into C. So each such call has to be bounded by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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

_POOL: Final = ThreadPoolExecutor(THREADS, "offload")


def load_of(size: int, items: int) -> int:
    """What work on *items* that take *size* bytes together is about, as ``offload`` weighs it."""
    return size + ITEM * items


async def offload(size: int, work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """The result of *work*, done on a thread if it is about *size* bytes that are ``LARGE`` or more."""
    if size < LARGE:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_POOL, work, *arguments)

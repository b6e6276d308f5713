"""Memories bounded by what they take, for values whose size a client decides; and what the C library keeps."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from cachetools import LRUCache

from proxy.core.apis.envelope import Envelope
from proxy.core.compaction.record import CompactionRecord
from proxy.core.conversation import Item
from proxy.engine.ports import Summary
from proxy.engine.reading import CachedPrefix

PREFIX_BYTES, OUTLINE_BYTES, RECORD_BYTES, TEXT_BYTES = 128 * 2**20, 64 * 2**20, 64 * 2**20, 16 * 2**20
"""What a process remembers of bodies, of what stands around their items, of events, and of summaries."""

ITEM_BYTES = 256 * 2**20
"""What a process remembers of items: some 300,000 of the usual kind."""

ITEM = 900
"""Bytes of a prefix for each of its items, at most: 300 for where it stands and what it is called, the item itself."""

COLLECTED = (20_000, 10, 10)
"""New objects before a collection (Python's own: 700), and collections before an older generation is looked at.

A parsed body is some 100,000 objects at once and no cycle: with 700 a third of the time that it takes is collections.
"""

PLAIN, CALL = 700, 400
"""Bytes of an item with its name and a call or result or two, and of each call or result beside its id."""

_CALLS, _ANSWERS = attrgetter("calls"), attrgetter("answers")

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

K = TypeVar("K")
V = TypeVar("V")


class LockedCache(LRUCache[K, V]):
    """A mapping of so many values that threads may share; the longest unused go first."""

    def __init__(self, limit: int, size: Callable[[V], int] | None = None) -> None:
        self._lock = threading.RLock()
        super().__init__(limit, getsizeof=size)

    def __getitem__(self, key: K) -> V:
        with self._lock:
            return super().__getitem__(key)

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        with self._lock:
            super().__delitem__(key)

    def get(self, key: K, default: Any = None) -> Any:
        """The value of *key*, or *default*."""
        with self._lock:
            return super().get(key, default)


class SizedCache(LockedCache[K, V]):
    """A mapping of at most *limit* bytes, each value as large as *size* says; the longest unused go first.

    A value that alone is larger is not kept, and what stood under its name stays.
    """

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        super().__init__(limit, size)

    def __setitem__(self, key: K, value: V) -> None:
        if self.getsizeof(value) <= self.maxsize:
            super().__setitem__(key, value)


def items() -> SizedCache[bytes, Item]:
    """A memory of items. One message can hold any number of calls, with ids of any length."""
    return SizedCache(
        ITEM_BYTES, lambda item: PLAIN + len(item.facts.mentions if item.facts else b"") + _linked([item])
    )


def prefixes() -> SizedCache[bytes, CachedPrefix]:
    """A memory of bodies seen before."""
    return SizedCache(PREFIX_BYTES, lambda known: 1000 + ITEM * len(known.scan.spans) + _linked(known.items))


def _linked(read: Sequence[Item]) -> int:
    """Bytes of the calls and results of the items *read*, but for one of each. Runs in C: bodies have thousands."""
    named = [*chain.from_iterable(map(_CALLS, read)), *chain.from_iterable(map(_ANSWERS, read))]
    return CALL * max(0, len(named) - len(read)) + sum(map(len, named))


def envelopes() -> SizedCache[bytes, Envelope]:
    """A memory of what stood around items: tools and system texts, above all. A letter takes four bytes at most."""
    return SizedCache(
        OUTLINE_BYTES, lambda outline: 2000 + 4 * (len(outline.text) + sum(map(len, outline.said.values())))
    )


def records() -> SizedCache[tuple[str, bytes], CompactionRecord]:
    """A memory of events."""
    return SizedCache(RECORD_BYTES, lambda record: 512 + 4 * len(record.block) + sum(map(len, record.edits.values())))


def texts() -> SizedCache[tuple[bytes, bytes], Summary]:
    """A memory of summaries."""
    return SizedCache(TEXT_BYTES, lambda summary: 400 + 4 * len(summary.text))


def keep_large_blocks() -> None:
    """Let the C library keep buffers of a body's size: given back and mapped anew, each costs its page faults again."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option, value in ((M_MMAP_THRESHOLD, 2**26), (M_TRIM_THRESHOLD, 2**28), (M_TOP_PAD, 2**24)):
            library.mallopt(option, value)


def collect_rarely() -> None:
    """Let the garbage collector leave alone what start-up built, which stays, and look at new objects less often."""
    gc.freeze()
    gc.set_threshold(*COLLECTED)

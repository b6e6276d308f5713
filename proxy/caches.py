"""The bounds of a process's caches, and the settings of its memory allocator.

A client decides how large a cached value is. Therefore the caches of values parsed from bodies are bounded by bytes,
and the size of every value is estimated from above.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from cachebox import LRUCache

from proxy.core.compaction.record import CompactionRecord
from proxy.core.conversation import UNREAD, Item, linked_size
from proxy.engine.ports import Summary
from proxy.engine.reading import CachedEnvelope, CachedPrefix

PREFIX_BYTES, ENVELOPE_BYTES, RECORD_BYTES, TEXT_BYTES = 128 * 2**20, 64 * 2**20, 64 * 2**20, 16 * 2**20
"""Most bytes of the caches of parsed bodies, envelopes, compaction records and summaries."""

ITEM_BYTES = 256 * 2**20
"""Most bytes of the cache of items: some 300,000 usual ones."""

PREFIX_ITEM_SIZE = 960
"""Bytes of a cached prefix for each of its items, at most: 300 for its span and hash, the rest for the item itself."""

ITEM_SIZE = 700
"""Bytes of an item with its name and one or two calls or results."""

INJECTED_PART_SIZE = 150
"""Bytes of an injected part of an item."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of ``mallopt``: https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html"""

K = TypeVar("K")
V = TypeVar("V")


class SizedCache(LRUCache[K, V]):
    """A mapping of at most *limit* bytes as *size* weighs a key and its value, which threads may share.

    The least recently used are dropped first. A value above the limit is not stored, and the key keeps its former one.
    """

    def __init__(self, limit: int, size: Callable[[K, V], int]) -> None:
        super().__init__(limit, getsizeof=size)

    def __setitem__(self, key: K, value: V) -> None:
        try:
            self.insert(key, value)
        except OverflowError:
            return  # this value alone is above the limit

    def update(self, iterable: Any, *_: Any, **__: Any) -> None:
        """Store all that is in the mapping *iterable*, but for values that alone are above the limit."""
        # One after the other: the class itself would hold its lock for all of them, and the event loop waits for that.
        for key, value in iterable.items():
            self[key] = value


def items() -> SizedCache[bytes, Item]:
    """Return a cache of items. One message can hold any number of calls, with ids of any length."""
    return SizedCache(ITEM_BYTES, _item_size)


def _item_size(_: bytes, item: Item) -> int:
    # Runs twice for each of the thousands of items of a body: most have neither parts nor ids.
    size = ITEM_SIZE
    if item.injected:
        size += INJECTED_PART_SIZE * len(item.injected)
    if item.facts is not None and item.facts is not UNREAD:
        size += len(item.facts.mentions)
    if not item.calls and not item.answers:
        return size
    if len(item.calls) + len(item.answers) > 1:
        return size + linked_size([item])
    return size + sum(map(len, item.calls or item.answers))


def prefixes() -> SizedCache[bytes, CachedPrefix]:
    """Return a cache of the prefixes that bodies began with."""
    return SizedCache(PREFIX_BYTES, lambda _, prefix: 1000 + PREFIX_ITEM_SIZE * len(prefix.scan.spans) + prefix.linked)


def envelopes() -> SizedCache[bytes, CachedEnvelope]:
    """Return a cache of envelopes, which are mostly tools and system texts."""
    return SizedCache(ENVELOPE_BYTES, _envelope_size)


def _envelope_size(_: bytes, cached: CachedEnvelope) -> int:
    envelope = cached.envelope
    characters = len(envelope.text) + sum(map(len, envelope.texts.values()))
    # A character of a str takes one, two or four bytes: https://peps.python.org/pep-0393/
    return 2000 + 4 * characters


def records() -> SizedCache[tuple[str, bytes], CompactionRecord]:
    """Return a cache of compaction records."""
    return SizedCache(RECORD_BYTES, _record_size)


def _record_size(_: tuple[str, bytes], record: CompactionRecord) -> int:
    return 512 + 4 * len(record.block) + sum(map(len, record.edits.values()))


def texts() -> SizedCache[tuple[bytes, bytes], Summary]:
    """Return a cache of summaries."""
    return SizedCache(TEXT_BYTES, lambda _, summary: 400 + 4 * len(summary.text))


def keep_large_blocks() -> None:
    """Let the C library reuse buffers of a body's size: each newly mapped one costs its page faults again."""
    # By default blocks from 128 KiB on are mapped and unmapped one by one. Only glibc has mallopt: musl has none.
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option, value in ((M_MMAP_THRESHOLD, 2**26), (M_TRIM_THRESHOLD, 2**28), (M_TOP_PAD, 2**24)):
            library.mallopt(option, value)


def release_free_memory() -> None:
    """Return free memory to the operating system, which the C library retains after ``keep_large_blocks``.

    This takes some milliseconds: call it in a thread. See https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)

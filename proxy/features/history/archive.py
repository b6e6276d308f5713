"""Archives originals of items that left a view. This never delays a request: if too much waits, originals are dropped.

The originals of one compaction are one batch. Batches are written in the background, one after the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from proxy.core.compaction.record import Compaction
from proxy.core.compaction.view import items_in_part
from proxy.core.conversation import Item
from proxy.core.decisions import CountedView
from proxy.engine.ports import Clock
from proxy.features.history.pages import ITEM, Entry, encode_list, reference
from proxy.store.archive_table import ArchiveTable
from proxy.tasks import Spawn

QUEUE: Final = 16 * 2**20
"""Bytes of originals that wait for the store at most, in one process."""

PAUSE_SECONDS: Final = 10.0
"""Seconds for which nothing is archived after the store failed."""


class ArchiveLimits(msgspec.Struct, frozen=True):
    """Originals are stored for ``seconds``, up to ``max_item`` bytes each; ``queue`` bytes may wait."""

    seconds: float
    max_item: int
    queue: int = QUEUE


@dataclass(frozen=True, slots=True)
class _Batch:
    """The originals of one compaction by name, and the list of them; ``size`` is in bytes."""

    tenant: bytes
    root_hash: bytes
    originals: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    size: int


class Archive:
    """Writes originals in the background.

    *written* is a bounded mapping of originals that this process has written, by root hash and name. *observe* counts
    outcomes.
    """

    def __init__(
        self,
        originals: ArchiveTable,
        limits: ArchiveLimits,
        written: MutableMapping[tuple[bytes, bytes], bool],
        spawn: Spawn,
        observe: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        self._originals = originals
        self._limits = limits
        self._written = written
        self._spawn = spawn
        self._observe = observe
        self._clock = clock
        self._waiting: deque[_Batch] = deque()
        self._waiting_bytes = 0
        self._paused_until = 0.0
        self._writing: asyncio.Task[None] | None = None

    def add(self, view: CountedView, root_hash: bytes, indexes: Sequence[int]) -> str:
        """Archive the items at *indexes*; return the reference of the list of them.

        Return an empty text if there are none, if too much waits already, or if the store has just failed.
        """
        entries, originals = self._new_originals(view, root_hash, indexes)
        if not entries:
            return ""
        tenant = view.measured.request.tenant
        listing = encode_list(entries)
        name = self._originals.name(tenant, listing)
        originals.append((name, listing))
        size = sum(len(content) for _, content in originals)
        if self._waiting_bytes + size > self._limits.queue or self._clock() < self._paused_until:
            self._observe("dropped", len(entries))
            return ""
        self._waiting_bytes += size
        self._waiting.append(_Batch(tenant, root_hash, tuple(originals), size))
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write(), "archive")
        return reference(root_hash, name)

    def _new_originals(
        self, view: CountedView, root_hash: bytes, indexes: Sequence[int]
    ) -> tuple[list[Entry], list[tuple[bytes, bytes]]]:
        """Return an entry for each item at *indexes*, and the originals that were not written before."""
        tenant, parsed = view.measured.request.tenant, view.measured.parsed
        entries: list[Entry] = []
        originals: list[tuple[bytes, bytes]] = []
        for index in indexes:
            item, content = parsed.items[index], parsed.item(index)
            if len(content) > self._limits.max_item:
                entries.append(Entry(index, item.role, b"", len(content)))
                self._observe("too_big", 1)
                continue
            name = self._originals.name(tenant, item.digest)
            entries.append(Entry(index, item.role, name, len(content)))
            if (root_hash, name) not in self._written:
                originals.append((name, ITEM + content))
        return entries, originals

    async def finish(self, seconds: float) -> None:
        """Wait up to *seconds* until everything is written; drop the rest."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing}, timeout=seconds)
            self._writing.cancel()
        self._waiting.clear()

    async def _write(self) -> None:
        while self._waiting:
            batch = self._waiting.popleft()
            saved = 0
            try:
                saved = await self._save(batch)
            finally:
                self._waiting_bytes -= batch.size
            if saved < len(batch.originals):
                self._observe("failed", len(batch.originals) - saved)
                self._pause()

    async def _save(self, batch: _Batch) -> int:
        """Save the originals of *batch*; return how many the store accepted before it failed."""
        # One after the other: many writes at once would delay the operations of requests.
        for saved, (name, content) in enumerate(batch.originals):
            if not await self._originals.save(batch.tenant, batch.root_hash, name, content, self._limits.seconds):
                return saved
            self._written[batch.root_hash, name] = True
            self._observe("kept", 1)
        return len(batch.originals)

    def _pause(self) -> None:
        """Drop the waiting batches and archive nothing for ``PAUSE_SECONDS``: requests need the store more."""
        self._paused_until = self._clock() + PAUSE_SECONDS
        for batch in self._waiting:
            self._observe("dropped", len(batch.originals))
            self._waiting_bytes -= batch.size
        self._waiting.clear()


def items_removed(compaction: Compaction, previous: Compaction | None, items: Sequence[Item]) -> list[int]:
    """Return the indexes of those *items* that *compaction* removed from the view or shortened, and *previous* not."""
    folded = {index for index in range(compaction.cut) if items[index].role != "system"}.difference(compaction.anchors)
    shortened = items_in_part(compaction)
    if previous is not None:
        folded = {index for index in folded if index >= previous.cut or index in previous.anchors}
        shortened -= items_in_part(previous)
    return sorted(folded | shortened)

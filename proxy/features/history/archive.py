"""Keeps originals of what left a view, behind the answers: bounded, and dropped rather than waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.core.compaction.record import Compaction
from proxy.core.decisions import CountedView
from proxy.engine.ports import Clock
from proxy.features.history.pages import ITEM, Entry, dump, reference
from proxy.store.archive_table import ArchiveTable

Outcome = Literal["kept", "dropped", "too_big", "failed"]
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

QUEUE = 16 * 2**20
"""Bytes of originals that wait for the store at most, in one process."""

REST = 10.0
"""Seconds for which nothing is kept after the store failed."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """For how many ``seconds`` originals are kept, up to ``most`` bytes each; ``queue`` bytes may wait."""

    seconds: float
    most: int
    queue: int = QUEUE


@dataclass(frozen=True, slots=True)
class _Job:
    """What one compaction took out of the view, to be written."""

    tenant: bytes
    root: bytes
    originals: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    size: int


class Archive:
    """Writes originals in the background, one after the other.

    *known* remembers, bounded, what was written by this process; *observe* counts what became of how many.
    """

    def __init__(
        self,
        originals: ArchiveTable,
        terms: ArchiveLimits,
        known: MutableMapping[tuple[bytes, bytes], bool],
        spawn: Spawn,
        observe: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        self._originals = originals
        self._clock = clock
        self._rests = 0.0
        self._terms = terms
        self._known = known
        self._spawn = spawn
        self._observe = observe
        self._waiting: deque[_Job] = deque()
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    def keep(self, view: CountedView, root: bytes, event: Compaction) -> str:
        """Keep what *event* took out of the conversation's last view; the reference of the list of it.

        Empty where nothing went, where too much waits already, or where the store failed a moment ago.
        """
        tenant, parsed = view.measured.request.tenant, view.measured.parsed
        items, before = parsed.items, view.edits.previous
        entries: list[Entry] = []
        fresh: list[tuple[bytes, bytes]] = []
        for index in left_by(event, before, [item.role for item in items[: event.boundary]]):
            item, content = items[index], parsed.item(index)
            if len(content) > self._terms.most:
                entries.append(Entry(index, item.role, b"", len(content)))
                self._observe("too_big", 1)
                continue
            name = self._originals.name(tenant, item.digest)
            entries.append(Entry(index, item.role, name, len(content)))
            if (root, name) not in self._known:
                fresh.append((name, ITEM + content))
        if not entries:
            return ""
        listing = dump(entries)
        name = self._originals.name(tenant, listing)
        fresh.append((name, listing))
        size = sum(len(content) for _, content in fresh)
        if self._bytes + size > self._terms.queue or self._clock() < self._rests:
            self._observe("dropped", len(entries))
            return ""
        self._bytes += size
        self._waiting.append(_Job(tenant, root, tuple(fresh), size))
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write(), "archive")
        return reference(root, name)

    async def finish(self, seconds: float) -> None:
        """Give what waits *seconds* to be written; the rest is dropped."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing}, timeout=seconds)
            self._writing.cancel()
        self._waiting.clear()

    async def _write(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            done = 0
            try:
                done = await self._written(job)
            finally:
                self._bytes -= job.size
            if done < len(job.originals):
                self._observe("failed", len(job.originals) - done)
                self._give_up()

    async def _written(self, job: _Job) -> int:
        """How many originals of *job* the store took before it failed."""
        for done, (name, content) in enumerate(job.originals):
            if not await self._originals.save(job.tenant, job.root, name, content, self._terms.seconds):
                return done
            self._known[job.root, name] = True
            self._observe("kept", 1)
        return len(job.originals)

    def _give_up(self) -> None:
        """Leave a store alone that does not take large values in time: requests need it more."""
        self._rests = self._clock() + REST
        for job in self._waiting:
            self._observe("dropped", len(job.originals))
            self._bytes -= job.size
        self._waiting.clear()


def left_by(event: Compaction, before: Compaction | None, roles: Sequence[str]) -> list[int]:
    """The items that *event* took out of the view, or a part of them, which *before* had left in it."""
    since = before.cut if before else 0
    stayed = set(before.anchors) if before else set()
    folded = {i for i in range(event.cut) if roles[i] != "system" and i not in event.anchors}
    shortened = _shortened(event) - (_shortened(before) if before else set())
    return sorted({i for i in folded if i >= since or i in stayed} | shortened)


def _shortened(event: Compaction) -> set[int]:
    return {swap.index for swap in event.placeholders} | {index for index, _ in (*event.truncations, *event.clips)}

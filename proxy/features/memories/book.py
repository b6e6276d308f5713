"""Reads and changes the memories of one project at a time, for people, programs and models alike."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from proxy.core.errors import InvalidRequest, OtherVersion, StoreUnavailable
from proxy.features.memories.memory import (
    LONGEST_CONTENT,
    LONGEST_TITLE,
    Class,
    Memory,
    Origin,
    ProjectMemories,
    Type,
    decode,
    encode,
    expiry,
)
from proxy.features.memories.scanner import reason_to_refuse
from proxy.features.memories.selection import matching
from proxy.store.memories_table import MemoriesTable, StoredMemories

TRIES: Final = 8
"""Changes that are tried if other replicas change the same project's memories at once."""

ID: Final = re.compile(r"[0-9a-f]{12}")
"""Matches the id of a memory: six random bytes."""


class NewMemory(msgspec.Struct, frozen=True):
    """A memory to be stored; ``days`` until it expires, None for the usual ones."""

    type: Type
    title: str
    content: str
    class_: Class = "durable"
    days: int | None = None
    pinned: bool = False
    origin: Origin = "caller"


class MemoryBook:
    """The memories in *table*; *now* returns Unix time. Every method raises ``StoreUnavailable``.

    Memories of another version of Ullage are neither read nor changed, as if the store did not answer.
    """

    def __init__(self, table: MemoriesTable, now: Callable[[], float]) -> None:
        self._table = table
        self._now = now

    async def all(self, tenant: bytes, project: str) -> ProjectMemories:
        """Return everything that is stored of *project*."""
        return self._decoded(await self._table.read(tenant, project))

    async def valid(self, tenant: bytes, project: str) -> list[Memory]:
        """Return the memories of *project* that have not expired, the newest first."""
        memories = (await self.all(tenant, project)).valid(self._now())
        return sorted(memories, key=lambda memory: (-memory.created_at, memory.id))

    async def search(self, tenant: bytes, project: str, query: str) -> list[Memory]:
        """Return the memories of *project* with words of *query*, the best first."""
        return matching(await self.valid(tenant, project), query, self._now())

    async def add(self, tenant: bytes, project: str, new: NewMemory) -> Memory:
        """Store a *new* memory and return it. Raises ``InvalidRequest`` if it may not be stored, and ``Conflict``."""
        memory = self._checked(new)
        await self._change(tenant, project, lambda memories: memories.with_memory(memory, self._now()))
        return memory

    async def pin(self, tenant: bytes, project: str, name: str, *, pinned: bool) -> Memory | None:
        """Pin or unpin the memory called *name*; return it, or None if the project has none of that name."""
        changed = await self._change(tenant, project, lambda memories: memories.with_pin(name, pinned=pinned))
        return next((memory for memory in changed.memories if memory.id == name), None)

    async def forget(self, tenant: bytes, project: str, names: Sequence[str]) -> bool:
        """Forget the memories called *names*, also in the blocks that conversations have already.

        Return False if the project has none of them. Names that were forgotten before, or have expired, are added again
        to those that blocks must not have.
        """
        before = await self.all(tenant, project)
        present = {memory.id for memory in before.memories}
        await self._change(tenant, project, lambda memories: memories.without(names))
        return bool(present.intersection(names))

    async def _change(
        self, tenant: bytes, project: str, change: Callable[[ProjectMemories], ProjectMemories]
    ) -> ProjectMemories:
        """Store the memories of *project* as *change* returns them, and return them."""
        # Compare and swap: if another replica has changed the memories meanwhile, *change* is applied to its result.
        for _ in range(TRIES):
            stored = await self._table.read(tenant, project)
            before = self._decoded(stored)
            after = change(before)
            if after == before or await self._table.replace(tenant, project, stored, encode(after)):
                return after
        raise StoreUnavailable

    def _decoded(self, stored: StoredMemories) -> ProjectMemories:
        """Return the memories in *stored*. Raises ``OtherVersion``: they are left to the version that stored them."""
        try:
            return decode(stored.value)
        except OtherVersion as error:
            self._table.log_other_version(error.version)
            raise

    def _checked(self, new: NewMemory) -> Memory:
        title, content = " ".join(new.title.split()), new.content.strip()
        if not title or not content:
            raise InvalidRequest("A memory needs a title and a content.")
        if len(title) > LONGEST_TITLE or len(content) > LONGEST_CONTENT:
            limits = f"{LONGEST_TITLE} characters in its title and {LONGEST_CONTENT} in its content"
            raise InvalidRequest(f"A memory has at most {limits}: shorten it.")
        reason = reason_to_refuse(f"{title}\n{content}")
        if reason:
            raise InvalidRequest(f"This is not stored, since it reads as {reason}. Write down a fact instead.")
        now = self._now()
        return Memory(
            id=secrets.token_hex(6),
            type=new.type,
            title=title,
            content=content,
            class_=new.class_,
            pinned=new.pinned,
            origin=new.origin,
            created_at=int(now),
            expires_at=expiry(new.class_, new.days, now),
        )

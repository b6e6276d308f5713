"""What summaries need of the store: the texts, the right to write one, marks of failure, and counts of spending.

Nothing here raises. Where the store cannot say, nothing is found, no right is given and nothing is counted.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence

from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.records import MAX_PLACES, Records

SLOT, SLOTS = 600.0, 6
"""Spending is counted in slots of so many seconds; the last hour is the running slot and those before it."""


class Lease:
    """The right to write one summary, until it is given back or runs out."""

    __slots__ = ("_backend", "_name", "_records", "_value")

    def __init__(self, backend: Backend, records: Records, name: str, value: bytes) -> None:
        self._backend = backend
        self._records = records
        self._name = name
        self._value = value

    async def renew(self, seconds: float) -> bool:
        """Hold it for *seconds* from now; whether it is still ours. A store that does not answer leaves it at that."""
        try:
            return await self._records.timed(self._backend.extend(self._name, self._value, seconds))
        except Unavailable as error:
            self._records.failed(error)
            return True

    async def release(self) -> None:
        """Give it back."""
        try:
            await self._records.timed(self._backend.release(self._name, self._value))
        except Unavailable as error:
            self._records.failed(error)


class Shelf:
    """Summaries and what belongs to them, over *records* and their *backend*."""

    def __init__(self, backend: Backend, records: Records) -> None:
        self._backend = backend
        self._records = records

    async def newest(
        self, tenant: bytes, root: bytes, policy: bytes, chains: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The summary under the first of *chains* (the first 512 are looked at) that has one, with its index."""
        names = [keys.summary(root, policy, chain) for chain in chains[:MAX_PLACES]]
        return await self._records.find(tenant, names)

    async def keep(self, tenant: bytes, root: bytes, policy: bytes, chain: bytes, value: bytes) -> bytes:
        """Keep the summary *value* unless another replica was first; returns the one that holds from now on."""
        return await self._records.settle(tenant, keys.summary(root, policy, chain), value)

    async def lease(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> Lease | None:
        """The right to write, for *seconds*; ``None`` where somebody else has it or the store cannot say."""
        name, value = keys.lease(root, policy, chain), os.urandom(16)
        try:
            held = await self._records.timed(self._backend.claim(name, value, seconds))
        except Unavailable as error:
            self._records.failed(error)
            return None
        return Lease(self._backend, self._records, name, value) if held is None else None

    async def is_refused(self, root: bytes, policy: bytes, chain: bytes) -> bool:
        """Whether a summary failed here not long ago."""
        return bool(await self._read([keys.refused(root, policy, chain)]))

    def refuse(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> None:
        """Mark for *seconds* that a summary failed here, in the background."""
        name = keys.refused(root, policy, chain)
        self._records.behind(self._mark(name, seconds), "summary refusal")

    async def spending(self, tenant: bytes, now: float) -> tuple[int, int, bool]:
        """Tokens that *tenant* sent and that its summaries took in the last hour, and whether it is to pause.

        *now* are seconds of the wall clock, which replicas share well enough.
        """
        name, slot = self._name(tenant), int(now // SLOT)
        slots = range(slot, slot - SLOTS - 1, -1)
        wanted = [keys.pause(name), *(keys.bucket(name, kind, at) for kind in ("in", "out") for at in slots)]
        found = await self._read(wanted) or [None] * len(wanted)
        counts = [int(value) if value and value.lstrip(b"-").isdigit() else 0 for value in found[1:]]
        return sum(counts[: len(slots)]), sum(counts[len(slots) :]), found[0] is not None

    def count(self, tenant: bytes, kind: str, tokens: int, now: float) -> None:
        """Add *tokens* that *tenant* sent (``in``) or that its summaries took (``out``), in the background."""
        name = keys.bucket(self._name(tenant), kind, int(now // SLOT))
        self._records.behind(self._records.timed(self._backend.add(name, tokens, SLOT * (SLOTS + 1))), "spending")

    def pause(self, tenant: bytes, seconds: float) -> None:
        """Mark for *seconds* that nothing is to be asked on behalf of *tenant*, in the background."""
        self._records.behind(self._mark(keys.pause(self._name(tenant)), seconds), "summary pause")

    async def _mark(self, name: str, seconds: float) -> None:
        await self._records.timed(self._backend.claim(name, b"1", seconds))

    async def _read(self, names: Sequence[str]) -> list[bytes | None]:
        """The plain values under *names*; nothing at all where none is set or the store cannot say."""
        try:
            found = list(await self._records.timed(self._backend.read(names)))
        except Unavailable as error:
            self._records.failed(error)
            return []
        return found if any(value is not None for value in found) else []

    def _name(self, tenant: bytes) -> bytes:
        return hmac.digest(self._records.prefix_key(tenant), b"spending", "sha256")[:16]

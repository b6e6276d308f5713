"""Summaries in the store: texts, leases to write one, marks of failure, counts of spending.

No method raises. If the store does not answer, there is no summary and no lease, and nothing is counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from proxy.store.key_names import FAILED_SUMMARY, LEASE, SUMMARY, key_name, spending_name, summary_pause_name
from proxy.store.operations import Add, Claim, Extend, Read, Release, sum_of
from proxy.store.tables import MAX_HASHES, TableAccess

SLOT, SLOTS = 600.0, 6
"""Seconds of one slot in which spending is counted; the last hour is the running slot and the six before it."""

_MARK: Final = b"1"
"""The value of a key whose presence is all that counts."""


class Lease:
    """The right to write one summary, until it is released or expires."""

    __slots__ = ("_access", "_name", "_value")

    def __init__(self, access: TableAccess, name: str, value: bytes) -> None:
        self._access = access
        self._name = name
        self._value = value

    async def renew(self, seconds: float) -> bool:
        """Extend the lease to *seconds* from now. Return False if it is lost; True if the store does not answer."""
        # A lease only avoids paying twice. A summary half written is worth more than the certainty to be alone.
        return await self._access.run_or(True, Extend(self._name, self._value, seconds))

    async def release(self) -> None:
        """Release the lease."""
        await self._access.run_or(False, Release(self._name, self._value))


class SummaryTable:
    """Summaries, leases, failures and spending. *policy* (8 bytes) names all that a summary's text depends on."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access

    async def newest(
        self, tenant: bytes, root_hash: bytes, policy: bytes, prefix_hashes: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The summary under the first of *prefix_hashes* (512 are read) that has one, as ``(index, summary)``."""
        names = [key_name(root_hash, SUMMARY, policy, prefix_hash) for prefix_hash in prefix_hashes[:MAX_HASHES]]
        return await self._access.read_first(tenant, names)

    async def save(self, tenant: bytes, root_hash: bytes, policy: bytes, prefix_hash: bytes, value: bytes) -> bytes:
        """Store the summary *value* unless there is one; return the one that is valid from now on."""
        return await self._access.write(tenant, key_name(root_hash, SUMMARY, policy, prefix_hash), value)

    async def lease(self, root_hash: bytes, policy: bytes, prefix_hash: bytes, seconds: float) -> Lease | None:
        """A lease for *seconds*. Return None if another replica has it or the store does not answer."""
        name, value = key_name(root_hash, LEASE, policy, prefix_hash), os.urandom(16)
        if await self._access.run_or(b"", Claim(name, value, seconds)) is not None:
            return None
        return Lease(self._access, name, value)

    async def is_refused(self, root_hash: bytes, policy: bytes, prefix_hash: bytes) -> bool:
        """True if a summary since this prefix failed not long ago."""
        return bool(await self._read([key_name(root_hash, FAILED_SUMMARY, policy, prefix_hash)]))

    def refuse(self, root_hash: bytes, policy: bytes, prefix_hash: bytes, seconds: float) -> None:
        """Mark for *seconds* that a summary since this prefix failed, in the background."""
        name = key_name(root_hash, FAILED_SUMMARY, policy, prefix_hash)
        self._access.run_in_background(Claim(name, _MARK, seconds), "summary refusal")

    async def spending(self, tenant: bytes, now: float) -> tuple[int, int, bool]:
        """Tokens that *tenant* sent and that its summaries took in the last hour, and True if it is paused.

        *now* is Unix time, which replicas share well enough.
        """
        name, slot = self._name(tenant), int(now // SLOT)
        slots = range(slot, slot - SLOTS - 1, -1)
        sent = [spending_name(name, "in", at) for at in slots]
        spent = [spending_name(name, "out", at) for at in slots]
        values = await self._read([summary_pause_name(name), *sent, *spent])
        if not values:
            return 0, 0, False
        pause, *counts = values
        sums = list(map(sum_of, counts))
        return sum(sums[: len(slots)]), sum(sums[len(slots) :]), pause is not None

    def count(self, tenant: bytes, kind: str, tokens: int, now: float) -> None:
        """Add *tokens* that *tenant* sent (``in``) or that its summaries took (``out``), in the background."""
        name = spending_name(self._name(tenant), kind, int(now // SLOT))
        self._access.run_in_background(Add(name, tokens, SLOT * (SLOTS + 1)), "spending")

    def pause(self, tenant: bytes, seconds: float) -> None:
        """Pause summaries for *tenant* for *seconds*, in the background."""
        name = summary_pause_name(self._name(tenant))
        self._access.run_in_background(Claim(name, _MARK, seconds), "summary pause")

    async def _read(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """The plain values under *names*; empty if none is set or the store does not answer."""
        values = await self._access.run_or((), Read(names))
        if all(value is None for value in values):
            return ()
        return values

    def _name(self, tenant: bytes) -> bytes:
        return self._access.sealer.digest(tenant, b"spending")

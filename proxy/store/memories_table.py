"""The memories of a tenant's projects: one sealed value for each project, replaced as a whole.

Two replicas that change it at once cannot lose a change: a value is replaced only if it is still the one that was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cachetools import TTLCache

from proxy.store.key_names import MEMORIES, key_name
from proxy.store.operations import Claim, Read, Refresh, Swap
from proxy.store.tables import TableAccess

LIFETIME: Final = 365 * 24 * 3600.0
"""Seconds for which memories are stored after they were last read or changed."""

_RENEW_AFTER, _RENEWED = 24 * 3600.0, 8_192
"""Seconds after which memories in use are renewed again, and the projects that a process remembers to have renewed."""


@dataclass(frozen=True, slots=True)
class StoredMemories:
    """The memories of one project as bytes: ``value`` is None if there are none. ``sealed`` is the value as stored."""

    value: bytes | None = field(default=None, repr=False)
    sealed: bytes | None = field(default=None, repr=False)


class MemoriesTable:
    """Memories of every project."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access
        self._renewed: TTLCache[str, bool] = TTLCache(_RENEWED, _RENEW_AFTER)

    async def read(self, tenant: bytes, project: str) -> StoredMemories:
        """Return the stored memories of *project*. Raises ``StoreUnavailable``."""
        name = self._name(tenant, project)
        (sealed,) = await self._access.run_or_raise(Read([name]))
        value = self._access.sealer.open(tenant, name, sealed)
        if value is not None and name not in self._renewed:
            self._renewed[name] = True
            self._access.run_in_background(Refresh(name, LIFETIME), "memories")
        return StoredMemories(value, sealed)

    async def replace(self, tenant: bytes, project: str, before: StoredMemories, value: bytes) -> bool:
        """Store *value* in the place of *before*. Return False if that has changed meanwhile.

        Raises ``StoreUnavailable``.
        """
        name = self._name(tenant, project)
        sealed, former = self._access.sealer.seal(tenant, name, value), before.sealed
        if former is None:
            return await self._access.run_or_raise(Claim(name, sealed, LIFETIME)) is None
        return await self._access.run_or_raise(Swap(name, former, sealed, LIFETIME))

    def log_other_version(self, version: int) -> None:
        """Log, once, that memories of another *version* are left alone."""
        self._access.log_other_version("memories", version)

    def _name(self, tenant: bytes, project: str) -> str:
        message = b"memories\0" + project.encode("utf-8", "surrogatepass")
        return key_name(self._access.sealer.digest(tenant, message), MEMORIES)

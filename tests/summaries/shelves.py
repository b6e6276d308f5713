"""The smallest honest shelf: a dictionary that replicas of one test share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Name = tuple[bytes, bytes, bytes]


class Right:
    """A lease on a dictionary."""

    def __init__(self, leases: dict[Name, Right], name: Name) -> None:
        self._leases = leases
        self._name = name

    async def renew(self, seconds: float) -> bool:
        return self._leases.get(self._name) is self

    async def release(self) -> None:
        if self._leases.get(self._name) is self:
            del self._leases[self._name]


class Dictionary:
    """Implements ``proxy.summaries.contracts.Shelf``; nothing runs out by itself."""

    def __init__(self) -> None:
        self.texts: dict[tuple[bytes, Name], bytes] = {}
        self.leases: dict[Name, Right] = {}
        self.refusals: set[Name] = set()
        self.counts: Counter[tuple[bytes, str]] = Counter()
        self.paused: set[bytes] = set()

    async def newest(
        self, tenant: bytes, root: bytes, policy: bytes, chains: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        names = [(tenant, (root, policy, chain)) for chain in chains]
        return next(((i, self.texts[name]) for i, name in enumerate(names) if name in self.texts), None)

    async def save(self, tenant: bytes, root: bytes, policy: bytes, chain: bytes, value: bytes) -> bytes:
        return self.texts.setdefault((tenant, (root, policy, chain)), value)

    async def lease(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> Right | None:
        name = (root, policy, chain)
        if name in self.leases:
            return None
        right = self.leases[name] = Right(self.leases, name)
        return right

    async def is_refused(self, root: bytes, policy: bytes, chain: bytes) -> bool:
        return (root, policy, chain) in self.refusals

    def refuse(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> None:
        self.refusals.add((root, policy, chain))

    async def spending(self, tenant: bytes, now: float) -> tuple[int, int, bool]:
        return self.counts[tenant, "in"], self.counts[tenant, "out"], tenant in self.paused

    def count(self, tenant: bytes, kind: str, tokens: int, now: float) -> None:
        self.counts[tenant, kind] += tokens

    def pause(self, tenant: bytes, seconds: float) -> None:
        self.paused.add(tenant)

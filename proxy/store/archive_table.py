"""The archive: encrypted originals of items that left a view, under names that only their tenant can compute."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from proxy.store.encryption import MAX_PLAIN, pack
from proxy.store.key_names import ARCHIVED, key_name
from proxy.store.operations import Claim, Read, Refresh, Unavailable
from proxy.store.tables import PAUSES, TableAccess

THREAD_FROM: Final = 65_536
"""Bytes from which an original is compressed in a thread: on the event loop it would delay other requests."""


class ArchiveTable:
    """Archived originals of every conversation."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access

    def name(self, tenant: bytes, content: bytes) -> bytes:
        """Return the name (16 bytes) of an original by its *content* or a digest of that: equal content, equal name."""
        return self._access.sealer.digest(tenant, b"original\0" + content)

    async def save(self, tenant: bytes, root_hash: bytes, name: bytes, plain: bytes, seconds: float) -> bool:
        """Store *plain* for *seconds* from now. Return False if it is too long or the store does not answer."""
        if len(plain) > MAX_PLAIN:
            return False
        if len(plain) < THREAD_FROM:
            packed = pack(plain)
        else:
            packed = await asyncio.to_thread(pack, plain)
        key = key_name(root_hash, ARCHIVED, name)
        sealed = self._access.sealer.seal_packed(tenant, key, packed)
        try:
            present = await self._access.run(Claim(key, sealed, seconds), PAUSES)
            if present is not None:
                # ``claim`` leaves the expiry of a present value as it is; the original is needed *seconds* from now.
                await self._access.run(Refresh(key, seconds), PAUSES)
        except Unavailable as error:
            self._access.count_failure(error)
            return False
        return True

    async def read(self, tenant: bytes, root_hash: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        """The originals under *names*, in order; None for each that is missing or another tenant's.

        Raises ``StoreUnavailable``.
        """
        if not names:
            return []
        keys = [key_name(root_hash, ARCHIVED, name) for name in names]
        values = await self._access.run_or_raise(Read(keys), PAUSES)
        sealer = self._access.sealer
        return [sealer.open(tenant, key, value) for key, value in zip(keys, values, strict=True)]

"""Archived originals: what left a view, sealed, under names that only its tenant can form."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from proxy.core.errors import StoreUnavailable
from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.records import Records
from proxy.store.sealed import MAX_PLAIN, pack

OFF_LOOP = 65_536
"""Bytes from which an original is compressed in a thread."""


class Originals:
    """Keeps originals, over *records* and their *backend*."""

    def __init__(self, backend: Backend, records: Records) -> None:
        self._backend = backend
        self._records = records

    def name(self, tenant: bytes, content: bytes) -> bytes:
        """What an original with this *content*, or a digest of it, is called (16 bytes): equal content, equal name."""
        return hmac.digest(self._records.prefix_key(tenant), b"original\0" + content, "sha256")[:16]

    async def keep(self, tenant: bytes, root: bytes, name: bytes, plain: bytes, seconds: float) -> bool:
        """Keep *plain* for *seconds* from now; whether the store took it."""
        if len(plain) > MAX_PLAIN:
            return False
        packed = pack(plain) if len(plain) < OFF_LOOP else await asyncio.to_thread(pack, plain)
        key = keys.original(root, name)
        sealed = self._records.sealer.seal_packed(tenant, key, packed)
        try:
            if await self._records.patiently(lambda: self._backend.claim(key, sealed, seconds)) is not None:
                await self._records.patiently(lambda: self._backend.refresh(key, seconds))
        except Unavailable as error:
            self._records.failed(error)
            return False
        return True

    async def read(self, tenant: bytes, root: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        """The originals called *names*; ``None`` for what is not there or another tenant's.

        Raises ``StoreUnavailable``.
        """
        if not names:
            return []
        wanted = [keys.original(root, name) for name in names]
        try:
            found = await self._records.patiently(lambda: self._backend.read(wanted))
        except Unavailable as error:
            self._records.failed(error)
            raise StoreUnavailable from error
        sealer = self._records.sealer
        return [
            None if each is None else sealer.open(tenant, key, each) for key, each in zip(wanted, found, strict=True)
        ]

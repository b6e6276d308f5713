"""The store in the memory of this process: bounded by bytes, and gone when the process ends."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from proxy.store.breaker import State

MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all entries at most."""

_ENTRY = 200
"""Bytes that an entry takes beside its value, about: its key, its expiry, its place in the dictionary."""


class MemoryBackend:
    """A ``Backend`` of at most *max_bytes*; the least recently used key goes first. Never raises ``Unavailable``."""

    shared: bool = False
    breaker: State = "closed"
    refusal: str = ""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, tuple[bytes, float | None]] = OrderedDict()
        self._bytes = 0

    def version(self) -> None:
        """None: no other process writes here."""
        return

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, in order; None for each that is missing."""
        return [self._get(key) for key in keys]

    async def claim(self, key: str, value: bytes, seconds: float | None) -> bytes | None:
        """Store *value* unless *key* exists. Return the value that is there, or None if *value* was stored."""
        present = self._get(key)
        if present is not None:
            return present
        until = None
        if seconds is not None:
            until = self._clock() + seconds
        self._entries[key] = (value, until)
        self._bytes += _ENTRY + len(value)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))  # the least recently used: ``_get`` moves an entry to the end
        return None

    async def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now."""
        if (value := self._get(key)) is not None:
            self._entries[key] = (value, self._clock() + seconds)

    async def remove(self, key: str) -> None:
        """Delete *key*."""
        if key in self._entries:
            self._drop(key)

    async def extend(self, key: str, value: bytes, seconds: float) -> bool:
        """Have *key* expire *seconds* from now if it holds *value*. Return False if it does not."""
        if self._get(key) != value:
            return False
        self._entries[key] = (value, self._clock() + seconds)
        return True

    async def release(self, key: str, value: bytes) -> bool:
        """Delete *key* if it holds *value*. Return False if it did not."""
        if self._get(key) != value:
            return False
        self._drop(key)
        return True

    async def swap(self, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """Store *new* for *seconds* under *key* if it holds *old*. Return False if it did not."""
        if not await self.release(key, old):
            return False
        await self.claim(key, new, seconds)
        return True

    async def add(self, key: str, amount: int, seconds: float) -> None:
        """Add *amount* to the integer under *key*, which expires *seconds* from now."""
        total = int(self._get(key) or 0) + amount
        await self.remove(key)
        await self.claim(key, b"%d" % total, seconds)

    async def set_field(self, key: str, field: str, value: bytes, most: int, seconds: float) -> None:
        """Set *field* of the hash under *key*, which expires *seconds* from now at the earliest."""
        fields = {**await self.read_fields(key), field.encode(): value}
        if len(fields) > most:
            del fields[min(fields)]
        _, until = self._entries.get(key, (b"", 0.0))
        await self._put(key, fields, max(seconds, (until or 0.0) - self._clock()))

    async def read_fields(self, key: str) -> Mapping[bytes, bytes]:
        """All fields of the hash under *key*; empty if there is none."""
        value = self._get(key)
        if value is None:
            return {}
        return msgspec.msgpack.decode(value, type=dict[bytes, bytes])

    async def score_member(self, key: str, member: bytes, score: float, most: int, seconds: float) -> None:
        """Set the score of *member* under *key*, which expires *seconds* from now; only the *most* highest stay."""
        scores = {**dict(await self.top_members(key, most)), member: score}
        highest = sorted(scores.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)[:most]
        await self._put(key, dict(highest), seconds)

    async def top_members(self, key: str, most: int) -> Sequence[tuple[bytes, float]]:
        """The *most* members under *key* with the highest scores, the highest first."""
        value = self._get(key)
        if value is None:
            return []
        return list(msgspec.msgpack.decode(value, type=dict[bytes, float]).items())[:most]

    async def _put(self, key: str, value: object, seconds: float) -> None:
        await self.remove(key)
        await self.claim(key, msgspec.msgpack.encode(value), seconds)

    async def close(self) -> None:
        """Delete everything."""
        self._entries.clear()
        self._bytes = 0

    def _get(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, until = entry
        if until is not None and until <= self._clock():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return value

    def _drop(self, key: str) -> None:
        value, _ = self._entries.pop(key)
        self._bytes -= _ENTRY + len(value)

"""A store inside this process: the same contract, bounded by bytes, gone with the process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from proxy.store.breaker import State

MAX_BYTES = 64 * 1024 * 1024
_ENTRY = 200  # what a name, a deadline and the table's own slots take beside the value, roughly


class Memory:
    """Keeps at most *max_bytes* of values, the least recently used going first. Never raises ``Unavailable``."""

    breaker: State = "closed"
    refusal: str = ""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, tuple[bytes, float | None]] = OrderedDict()
        self._bytes = 0

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, in order; ``None`` where there is none."""
        return [self._get(key) for key in keys]

    async def claim(self, key: str, value: bytes, seconds: float | None) -> bytes | None:
        """Keep *value* unless *key* is taken: then what is there, else ``None``."""
        if (held := self._get(key)) is not None:
            return held
        self._entries[key] = (value, None if seconds is None else self._clock() + seconds)
        self._bytes += _ENTRY + len(value)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        return None

    async def refresh(self, key: str, seconds: float) -> None:
        """Let *key* live *seconds* from now."""
        if (value := self._get(key)) is not None:
            self._entries[key] = (value, self._clock() + seconds)

    async def remove(self, key: str) -> None:
        """Forget *key*."""
        if key in self._entries:
            self._drop(key)

    async def extend(self, key: str, value: bytes, seconds: float) -> bool:
        """Let *key* live *seconds* from now if it holds *value*; whether it does."""
        if self._get(key) != value:
            return False
        self._entries[key] = (value, self._clock() + seconds)
        return True

    async def release(self, key: str, value: bytes) -> bool:
        """Forget *key* if it holds *value*; whether it did."""
        if self._get(key) != value:
            return False
        self._drop(key)
        return True

    async def swap(self, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """Keep *new* for *seconds* under *key* if it holds *old*; whether it did."""
        if not await self.release(key, old):
            return False
        await self.claim(key, new, seconds)
        return True

    async def add(self, key: str, amount: int, seconds: float) -> None:
        """Add *amount* to the whole number under *key*, which lives *seconds* from now."""
        total = int(self._get(key) or 0) + amount
        await self.remove(key)
        await self.claim(key, b"%d" % total, seconds)

    async def note(self, key: str, field: str, value: bytes, most: int, seconds: float) -> None:
        """Set *field* of the table under *key*, which lives *seconds* from now at least."""
        fields = {**await self.table(key), field.encode(): value}
        if len(fields) > most:
            del fields[min(fields)]
        _, until = self._entries.get(key, (b"", 0.0))
        await self._put(key, fields, max(seconds, (until or 0.0) - self._clock()))

    async def table(self, key: str) -> Mapping[bytes, bytes]:
        """All fields of the table under *key*; empty where there is none."""
        held = self._get(key)
        return {} if held is None else msgspec.msgpack.decode(held, type=dict[bytes, bytes])

    async def rank(self, key: str, member: bytes, score: float, most: int, seconds: float) -> None:
        """Set the score of *member* under *key*, which lives *seconds* from now, and keep the *most* highest."""
        scores = {**dict(await self.ranked(key, most)), member: score}
        kept = sorted(scores.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)[:most]
        await self._put(key, dict(kept), seconds)

    async def ranked(self, key: str, most: int) -> Sequence[tuple[bytes, float]]:
        """The *most* members under *key* with the highest scores, the highest first."""
        held = self._get(key)
        return [] if held is None else list(msgspec.msgpack.decode(held, type=dict[bytes, float]).items())[:most]

    async def _put(self, key: str, value: object, seconds: float) -> None:
        await self.remove(key)
        await self.claim(key, msgspec.msgpack.encode(value), seconds)

    async def close(self) -> None:
        """Forget everything."""
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

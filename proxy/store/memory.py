"""The store in the memory of this process: bounded by bytes, and gone when the process ends."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from proxy.store.breaker import State
from proxy.store.operations import Operation

T = TypeVar("T")

MAX_BYTES: Final = 64 * 1024 * 1024
"""Bytes of all entries at most."""

_ENTRY: Final = 200
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
        """Values with the monotonic second at which each expires; the least recently used is the first."""

        self._bytes = 0

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation* at once."""
        return operation.on_entries(self)

    def version(self) -> None:
        """None: no other process writes here."""
        return

    async def close(self) -> None:
        """Delete everything."""
        self._entries.clear()
        self._bytes = 0

    def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, in order; None for each that is missing."""
        values: list[bytes | None] = []
        for key in keys:
            value, until = self._entries.get(key, (None, None))
            if until is not None and until <= self._clock():
                self.remove(key)
                value = None
            elif value is not None:
                self._entries.move_to_end(key)
            values.append(value)
        return values

    def put(self, key: str, value: bytes, seconds: float | None) -> None:
        """Store *value* for *seconds* (None: for ever), in the place of an earlier one."""
        self.remove(key)
        until = None
        if seconds is not None:
            until = self._clock() + seconds
        self._entries[key] = (value, until)
        self._bytes += _ENTRY + len(value)
        while self._bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now; does nothing if it is missing."""
        (value,) = self.read([key])
        if value is not None:
            self._entries[key] = (value, self._clock() + seconds)

    def remove(self, key: str) -> None:
        """Delete *key*."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _ENTRY + len(entry[0])

    def seconds_left(self, key: str) -> float:
        """Seconds until *key* expires; zero or less if it is missing or never does."""
        _, until = self._entries.get(key, (b"", None))
        return (until or 0.0) - self._clock()

"""What the records need from a place to keep bytes: a few operations, each bounded, each failing in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.store.breaker import State


class Backend(Protocol):
    """Keeps bytes under names. Every method raises ``Unavailable`` when it cannot say, within its deadline."""

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, all of one conversation, in order; ``None`` where there is none."""

    async def claim(self, key: str, value: bytes, seconds: float | None) -> bytes | None:
        """Keep *value* for *seconds* (``None``: for ever) unless *key* is taken: then what is there, else ``None``."""

    async def refresh(self, key: str, seconds: float) -> None:
        """Let *key* live *seconds* from now; nothing happens when it is gone."""

    async def remove(self, key: str) -> None:
        """Forget *key*."""

    async def extend(self, key: str, value: bytes, seconds: float) -> bool:
        """Let *key* live *seconds* from now if it holds *value*; whether it does."""

    async def release(self, key: str, value: bytes) -> None:
        """Forget *key* if it holds *value*."""

    async def add(self, key: str, amount: int, seconds: float) -> None:
        """Add *amount* to the whole number under *key*, which lives *seconds* from now."""

    @property
    def breaker(self) -> State:
        """``closed``, ``open`` or ``half-open``: the worst over all servers."""

    async def close(self) -> None:
        """Let go of every connection."""

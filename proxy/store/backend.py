"""What the records need from a place to keep bytes: a few operations, each bounded, each failing in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.store.breaker import State


class StoreError(Exception):
    """Anything this room raises."""


class StoreMisconfigured(StoreError):
    """The store's URL or key cannot be used as it stands; the text names the setting and never the secret."""


class StoreUnsupported(StoreError):
    """The server is too old; the text says which version it is and which is needed."""


class EmbeddedUnavailable(StoreError):
    """The private server cannot run here: no binary for the platform, no place to write, or it does not start."""


class Unavailable(StoreError):
    """One operation got no usable answer; ``kind`` is a short stable name to count it by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


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

    async def release(self, key: str, value: bytes) -> bool:
        """Forget *key* if it holds *value*; whether it did."""

    async def swap(self, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """Keep *new* for *seconds* under *key* if it holds *old*; whether it did."""

    async def add(self, key: str, amount: int, seconds: float) -> None:
        """Add *amount* to the whole number under *key*, which lives *seconds* from now."""

    async def note(self, key: str, field: str, value: bytes, most: int, seconds: float) -> None:
        """Set *field* of the table under *key*, which lives *seconds* from now at least.

        Of more than *most* fields the one whose name sorts first goes.
        """

    async def table(self, key: str) -> Mapping[bytes, bytes]:
        """All fields of the table under *key*; empty where there is none."""

    async def rank(self, key: str, member: bytes, score: float, most: int, seconds: float) -> None:
        """Set the score of *member* under *key*, which lives *seconds* from now, and keep the *most* highest."""

    async def ranked(self, key: str, most: int) -> Sequence[tuple[bytes, float]]:
        """The *most* members under *key* with the highest scores, the highest first."""

    @property
    def breaker(self) -> State:
        """``closed``, ``open`` or ``half-open``: the worst over all servers."""

    @property
    def refusal(self) -> str:
        """The kind of refusal if a server answers but does not do what it is asked, else an empty string."""

    async def close(self) -> None:
        """Let go of every connection."""

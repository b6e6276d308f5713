"""``Backend``, the interface between the tables and the server, file or memory with their bytes; errors of the store.

No error reaches a request. The tables handle ``Unavailable``; every other error stops the start of the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.store.breaker import State


class StoreError(Exception):
    """Base of all errors of the store."""


class StoreMisconfigured(StoreError):
    """The store's URL or key cannot be used; the text names the setting and never the secret."""


class StoreUnsupported(StoreError):
    """The server is too old; the text names its version and the one that is needed."""


class EmbeddedUnavailable(StoreError):
    """The embedded store cannot be used: its directory is not writable, or on a network file system."""


class Unavailable(StoreError):
    """One operation got no usable reply; ``kind`` is a short, fixed name under which it is counted."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Backend(Protocol):
    """Stores bytes under keys: servers, a file, or the memory of this process.

    Every method raises ``Unavailable`` if there is no reply within its deadline.
    """

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys* (of one conversation), in order; None for each that is missing."""

    async def claim(self, key: str, value: bytes, seconds: float | None) -> bytes | None:
        """Store *value* for *seconds* (None: for ever) unless *key* exists.

        Return the value that is there, or None if *value* was stored.
        """

    async def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now; does nothing if it is missing."""

    async def remove(self, key: str) -> None:
        """Delete *key*, of whatever type."""

    async def extend(self, key: str, value: bytes, seconds: float) -> bool:
        """Have *key* expire *seconds* from now if it holds *value*. Return False if it does not."""

    async def release(self, key: str, value: bytes) -> bool:
        """Delete *key* if it holds *value*. Return False if it did not."""

    async def swap(self, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """Store *new* for *seconds* under *key* if it holds *old*. Return False if it did not."""

    async def add(self, key: str, amount: int, seconds: float) -> None:
        """Add *amount* to the integer under *key*, which expires *seconds* from now."""

    async def set_field(self, key: str, field: str, value: bytes, most: int, seconds: float) -> None:
        """Set *field* of the hash under *key*, which expires *seconds* from now at the earliest.

        Of more than *most* fields the one whose name sorts first is removed.
        """

    async def read_fields(self, key: str) -> Mapping[bytes, bytes]:
        """All fields of the hash under *key*; empty if there is none."""

    async def score_member(self, key: str, member: bytes, score: float, most: int, seconds: float) -> None:
        """Set the score of *member* under *key*, which expires *seconds* from now; only the *most* highest stay."""

    async def top_members(self, key: str, most: int) -> Sequence[tuple[bytes, float]]:
        """The *most* members under *key* with the highest scores, the highest first."""

    @property
    def shared(self) -> bool:
        """True if other processes may write here."""

    def version(self) -> tuple[int, ...] | None:
        """A value that changes at least when another process writes; None if that would take a request to a server."""

    @property
    def breaker(self) -> State:
        """``closed``, ``open`` or ``half-open``: the worst over all servers."""

    @property
    def refusal(self) -> str:
        """The kind of refusal if a server answers but refuses operations, else an empty string."""

    async def close(self) -> None:
        """Close every connection and file."""

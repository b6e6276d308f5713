"""What summaries are handed, by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from proxy.core.report import SummaryReport
from proxy.engine import ports

NOTE_VERSION = 1

SummaryState = Literal["pending", "ready", "failed", "skipped"]


class SummaryNote(msgspec.Struct, frozen=True, array_like=True):
    """A summary of the first ``cut`` items, wanted since the event at ``since``: what has become of it.

    ``policy`` and ``chain`` name the text; ``until`` is when a failed one may be tried again (Unix time).
    """

    version: int
    made: int
    route: str
    policy: bytes
    since: bytes
    chain: bytes
    cut: int
    state: SummaryState
    by: str
    upstream: str
    reason: str = ""
    taken: int = 0
    left: int = 0
    until: int = 0


class Upstream(Protocol):
    """Sends requests to named upstreams."""

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        added: Mapping[str, str] = ...,
    ) -> ports.Reply:
        """The answer once its head is here; *added* headers win over all others. Raises ``UllageError``."""


class Lease(Protocol):
    """The right to write one summary."""

    async def renew(self, seconds: float) -> bool:
        """Hold it for *seconds* from now; whether it is still ours."""

    async def release(self) -> None:
        """Give it back."""


class Shelf(Protocol):
    """Where summaries are kept for every replica. Nothing raises; what cannot be said is not there."""

    async def newest(
        self, tenant: bytes, root: bytes, policy: bytes, chains: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The summary under the first of *chains* that has one, with its index."""

    async def save(self, tenant: bytes, root: bytes, policy: bytes, chain: bytes, value: bytes) -> bytes:
        """Keep *value* unless another replica was first; returns the one that holds."""

    async def lease(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> Lease | None:
        """The right to write, for *seconds*; ``None`` where somebody else has it."""

    async def is_refused(self, root: bytes, policy: bytes, chain: bytes) -> bool:
        """Whether a summary failed here not long ago."""

    def refuse(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> None:
        """Mark for *seconds* that a summary failed here."""

    async def spending(self, tenant: bytes, now: float) -> tuple[int, int, bool]:
        """Tokens sent by *tenant* and taken by its summaries in the last hour, and whether it is to pause."""

    def count(self, tenant: bytes, kind: str, tokens: int, now: float) -> None:
        """Add *tokens* of one *kind*: ``in`` for sent, ``out`` for taken by summaries."""

    def pause(self, tenant: bytes, seconds: float) -> None:
        """Mark for *seconds* that nothing is to be asked on behalf of *tenant*."""


class Breaker(Protocol):
    """Whether a summariser is worth asking."""

    state: Literal["closed", "open", "half-open"]

    def admit(self) -> bool:
        """Whether a call may go out now; one that may has to report back."""

    def succeeded(self) -> None:
        """It answered well."""

    def failed(self) -> None:
        """It did not."""


Observe = Callable[[SummaryReport], None]
Tell = Callable[[bytes, bytes, SummaryNote], None]
"""Takes a tenant, the root of a conversation and a note on one of its summaries."""


def untold(tenant: bytes, root: bytes, note: SummaryNote) -> None:
    """Nobody wants to know."""

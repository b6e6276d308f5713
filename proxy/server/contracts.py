"""What the server is handed, by shape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from proxy.core.errors import UllageError
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import Report, Usage
from proxy.core.request import Request
from proxy.engine import ports
from proxy.features.history.pages import Page


class Answer(Protocol):
    """What the engine decided and got. ``head`` are body bytes it already took from ``reply``."""

    @property
    def report(self) -> Report:
        """What is known so far."""

    @property
    def reply(self) -> ports.Reply | None:
        """The upstream's answer; ``None`` when the request was refused."""

    @property
    def head(self) -> bytes:
        """Bytes to send before the rest of the reply."""

    @property
    def error(self) -> UllageError | None:
        """Why it was refused."""

    @property
    def learn(self) -> Callable[[Usage], bool]:
        """Takes the usage of an answer that came to its end; says whether the provider silently cut the prompt."""

    @property
    def ending(self) -> LateOverflowDetector | None:
        """Watches what of the answer passes, where something is to be learned from it."""

    @property
    def told(self) -> Callable[[Report], Report] | None:
        """Adds to the report what happens until the answer's end, where the answer needs its request so long."""


class Engine(Protocol):
    """Handles managed requests."""

    async def exchange(self, request: Request, send: ports.Send) -> Answer:
        """The answer to *request*. Raises ``UllageError``."""

    async def count(self, request: Request, send: ports.Send) -> Answer:
        """The answer to a request for a count of tokens. Raises ``UllageError``."""

    async def compact(self, request: Request, send: ports.Send) -> Answer:
        """The answer to a request for a compaction of a conversation. Raises ``UllageError``."""

    async def untouched(self, request: Request, send: ports.Send) -> Answer:
        """The upstream's answer to the client's own bytes, after a fault of ours. Raises ``UllageError``."""


class Tunnel(Protocol):
    """An upgraded connection to an upstream."""

    async def next_chunk(self) -> bytes:
        """The next bytes; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Send *data*. Raises ``ConnectionError`` when the other side is gone."""

    def close(self) -> None:
        """End the connection."""


class Upgradable(ports.Reply, Protocol):
    """An answer that may have left HTTP."""

    def tunnel(self) -> Tunnel:
        """The connection, where ``status`` is 101."""


class Upstream(Protocol):
    """Sends requests to named upstreams."""

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterator[bytes] | None,
        added: Mapping[str, str] = ...,
    ) -> ports.Reply:
        """The answer once its head is here; *added* headers win over all others. Raises ``UllageError``."""

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> Upgradable:
        """The answer to a request to leave HTTP. Raises ``UllageError``."""


class Conversations(Protocol):
    """What is told of conversations, of one tenant's at a time. Raises ``StoreUnavailable``."""

    async def list(self, tenant: bytes) -> Mapping[str, object]:
        """The tenant's newest conversations."""

    async def show(self, tenant: bytes, conversation: str) -> Mapping[str, object] | None:
        """What became of one conversation; ``None`` where the tenant has none of that name."""

    async def compact(self, tenant: bytes, conversation: str) -> Mapping[str, object] | None:
        """Have its next request compact it; ``None`` where the tenant has none of that name. Raises ``Conflict``."""

    async def original(self, tenant: bytes, ref: str, page: Page) -> Mapping[str, object] | None:
        """One page of what was archived as *ref*; ``None`` where the tenant has no such thing."""


Route = Callable[[str], str]
Observe = Callable[[Report, float], None]
Metrics = Callable[[], tuple[bytes, str]]
Status = Callable[[], Mapping[str, object]]

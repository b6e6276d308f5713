"""All upstreams as one: straight to those that speak the client's API, over the bridge to those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.core.errors import NotFound
from proxy.upstream.direct import NOTHING, Body, DirectReply, DirectUpstream
from proxy.upstream.litellm import Bridge, BridgedReply


class Upstreams:
    """Sends requests to named upstreams, each in the way it understands."""

    def __init__(self, direct: DirectUpstream, bridge: Bridge) -> None:
        self._direct = direct
        self._bridge = bridge
        self._straight, self._bridged = frozenset(direct.names), frozenset(bridge.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The upstreams' names."""
        return tuple(dict.fromkeys((*self._direct.names, *self._bridge.names)))

    @property
    def without_descriptor(self) -> int:
        """How many connections could not be made because the process may open no more files."""
        return self._direct.without_descriptor

    def speaks(self, name: str) -> bool:
        """Whether the upstream can be asked for more than bridged chat completions."""
        return name in self._straight

    async def warm(self) -> None:
        """Load what bridged upstreams need, seconds of work, so that the first request does not wait for it."""
        if self._bridged:
            await self._bridge.warm()

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: Body,
        added: Mapping[str, str] = NOTHING,
    ) -> DirectReply | BridgedReply:
        """The answer as soon as its head is here; *added* headers win over all others. Raises ``UllageError``."""
        if target in self._bridged:
            path = path_qs.partition("?")[0]
            if method == "POST" and path.endswith("/chat/completions") and isinstance(body, bytes):
                return await self._bridge.send(target, headers, body, added)
            self._check(target, method, path)
        return await self._direct.send(target, method, path_qs, headers, body, added)

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> DirectReply:
        """The answer to a request for a WebSocket: with status 101 it has a ``tunnel``. Raises ``UllageError``."""
        self._check(target, "GET", path_qs.partition("?")[0])
        return await self._direct.upgrade(target, path_qs, headers)

    def _check(self, target: str, method: str, path: str) -> None:
        if target not in self._straight:
            raise NotFound(f"The upstream {target!r} answers POST /v1/chat/completions only, not {method} {path}.")

    async def close(self) -> None:
        """Close all connections; requests under way break."""
        await self._bridge.close()
        await self._direct.close()

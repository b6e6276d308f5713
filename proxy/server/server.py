"""The HTTP server of one process: construct, start, drain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from proxy.addresses import is_loopback
from proxy.engine.ports import Exchange, Upstream
from proxy.server.access import Access
from proxy.server.admin import OpenPage, OpenRoutes, OwnRoutes, no_routes
from proxy.server.admission import Drain
from proxy.server.config import Metrics, Observe, Route, ServerConfig, Status
from proxy.server.connection import Listener
from proxy.server.handler import Handler
from proxy.server.models import Models
from proxy.tasks import Faults


class Server:
    """Serves the API. ``route`` names a model's upstream; ``observers`` get each request's report and seconds.

    ``metrics`` returns the exposition and its content type (called in a thread; ``None``: no metrics are served).
    ``status`` returns what the admin API shows, ``models`` answers for all upstreams' models. ``open_routes`` opens
    the routes that features add. ``faults`` reports our own faults. ``before`` is the server that this one replaces
    after a reload: both count their requests together.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Exchange,
        upstream: Upstream,
        route: Route,
        observers: Sequence[Observe],
        metrics: Metrics | None,
        status: Status,
        models: Models,
        open_routes: OpenRoutes = no_routes,
        faults: Faults | None = None,
        before: Server | None = None,
    ) -> None:
        self._access = access = Access(config)
        self._drain = Drain(config.limits)
        if before is not None:
            self._drain = before._drain
        added = open_routes(access, config.limits)
        self._local = local = OwnRoutes(config.version, access, self._drain, metrics, status, added)
        self._limits = config.limits
        self._faults = faults = faults or Faults()
        self._handler = Handler(config, engine, upstream, route, observers, access, self._drain, local, models, faults)
        self._listener: Listener | None = None
        self._sockets: asyncio.Server | None = None
        self._before = before

    def take_over(self) -> set[asyncio.Task[Any]]:
        """Answer all requests from now on, on the sockets of the server before; return its requests under way."""
        before, self._before = self._before, None
        if before is None or before._listener is None:
            raise RuntimeError("there is no server to take over from")
        self._listener, self._sockets = before._listener, before._sockets
        self._access.loopback = before._access.loopback
        under_way = set(self._drain.running)
        self._listener.answer_with(self._handler)
        return under_way

    def show(self, open_page: OpenPage | None) -> None:
        """Serve the page for people that *open_page* opens, if it is not None."""
        if open_page is not None:
            self._local.page = open_page(self._access, self._limits)

    @property
    def under_way(self) -> Collection[object]:
        """The requests under way: one collection for as long as the process lives."""
        return self._drain.running

    @property
    def in_flight(self) -> int:
        """The number of requests under way."""
        return len(self._drain.running)

    @property
    def without_descriptor(self) -> int:
        """The number of connections that came when hardly any file descriptor was left."""
        if self._listener is None:
            return 0
        return self._listener.crowded

    @property
    def refusals(self) -> Mapping[str, int]:
        """The number of connections and unreadable requests refused so far, by reason."""
        if self._listener is None:
            return {}
        return self._listener.refusals

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen on *port*, or on a free one if it is 0, and return it. Raises ``OSError`` if it is taken."""
        self._listener = Listener(self._handler, self._limits, self._faults)
        self._sockets = await asyncio.get_running_loop().create_server(
            self._listener.connect, host, port, reuse_port=reuse_port, backlog=1024, start_serving=False
        )
        addresses = [socket.getsockname() for socket in self._sockets.sockets]
        self._access.loopback = all(is_loopback(address[0]) for address in addresses)
        await self._sockets.start_serving()
        actual: int = addresses[0][1]
        return actual

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for *seconds*, then end them with an error.

        The port stays open meanwhile, so that health checks get an answer and callers a readable 503.
        """
        self._drain.draining = True
        if self._listener is not None:
            self._listener.close_idle()
        await self._drain.drain(seconds)

    async def close(self) -> None:
        """Stop listening and end all connections, at once."""
        if self._sockets is not None:
            self._sockets.close()
        await self.drain(0)
        for close_socket in list(self._drain.socket_closers):
            close_socket()
        if self._listener is not None:
            await self._listener.shutdown(0.5)

"""The HTTP server of one process: construct, start, drain, close."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from proxy.addresses import BACKLOG, is_loopback
from proxy.engine.ports import Exchange, Upstream
from proxy.server.access import Access
from proxy.server.admin import OpenPage, OpenRoutes, OwnRoutes, no_routes
from proxy.server.admission import Drain
from proxy.server.config import Metrics, Observe, Route, ServerConfig, Status
from proxy.server.connection import Listener
from proxy.server.handler import Handler
from proxy.server.models import Models
from proxy.tasks import Faults

_EMPTY_ROUNDS: Final = 4
"""Rounds of the event loop without a new connection that show that none waits, and in which all waiting bytes are read.

uvloop accepts one connection a round, and asyncio takes three rounds before the first.
"""

_LAST_SECONDS: Final = 0.25
"""Seconds that the last connections have to bring a request; clients send it with the handshake's last packet."""

_UNUSED_SECONDS: Final = 0.25
"""Interval at which connections are looked at during the drain."""

_LOOKS: Final = 25
"""Number of times that these connections are looked at meanwhile."""


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
        self._sockets: list[asyncio.Server] = []
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

    async def start(self, host: str, port: int, shared: socket.socket | None = None) -> int:
        """Listen on *port*, or on a free one if it is 0, and return it. Raises ``OSError`` if it is taken.

        Workers share the port, and accept connections of the socket *shared*, too, on which their parent listens.
        """
        self._listener = Listener(self._handler, self._limits, self._faults)
        loop, connect = asyncio.get_running_loop(), self._listener.connect
        own = await loop.create_server(
            connect, host, port, reuse_port=shared is not None, backlog=BACKLOG, start_serving=False
        )
        self._sockets.append(own)
        addresses = [bound.getsockname() for bound in own.sockets]
        self._access.loopback = all(is_loopback(address[0]) for address in addresses)
        if shared is not None:
            self._sockets.append(await loop.create_server(connect, sock=shared, backlog=BACKLOG, start_serving=False))
        for sockets in self._sockets:
            await sockets.start_serving()
        actual: int = addresses[0][1]
        return actual

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for *seconds*, then end them with an error.

        The port stays open meanwhile, so that health checks get an answer and callers a readable 503. So do connections
        that were used a moment ago, on which a request may be on its way.
        """
        self._drain.draining = True
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(self._end_unused(), name="end unused connections")
            await self._drain.drain(seconds)
            ending.cancel()

    async def _end_unused(self) -> None:
        """End connections in order as soon as they are not used any more."""
        await _read_waiting()
        while self._listener is not None:
            for connection in list(self._listener.open):
                if not connection.expects_request:
                    connection.end_if_idle()
            await asyncio.sleep(_UNUSED_SECONDS)

    async def stop_listening(self) -> None:
        """Close the port so that no connection is reset: those that wait are accepted first, and answered with 503.

        The system completes handshakes before they are accepted, and resets such connections when the port is closed
        (https://man7.org/linux/man-pages/man2/listen.2.html). A client does not know then if its request was answered.
        """
        if self._listener is None:
            return
        await self._accept_waiting(self._listener)
        for sockets in self._sockets:
            sockets.close()
        for _ in range(_LOOKS):
            if not any(connection.expects_request for connection in self._listener.open):
                break
            await asyncio.sleep(_LAST_SECONDS / _LOOKS)
        await _read_waiting()
        self._listener.end_idle()
        await asyncio.sleep(_LAST_SECONDS / _LOOKS)

    async def _accept_waiting(self, listener: Listener) -> None:
        """Let the event loop accept the connections that wait, but not all that clients may go on to open."""
        accepted, empty_rounds = listener.accepted, 0
        most = accepted + BACKLOG
        while empty_rounds < _EMPTY_ROUNDS and listener.accepted < most:
            await asyncio.sleep(0)
            empty_rounds += 1
            if listener.accepted != accepted:
                accepted, empty_rounds = listener.accepted, 0

    async def close(self) -> None:
        """Stop listening and end all connections, at once."""
        for sockets in self._sockets:
            sockets.close()
        await self.drain(0)
        for close_socket in list(self._drain.socket_closers):
            close_socket()
        if self._listener is not None:
            for connection in list(self._listener.open):
                if connection.idle:
                    connection.force_close()
            await self._listener.shutdown(0.5)


async def _read_waiting() -> None:
    """Let the event loop read what has arrived."""
    for _ in range(_EMPTY_ROUNDS):
        await asyncio.sleep(0)

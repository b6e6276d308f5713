"""The HTTP server of one process: construct, start, drain, close."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from aiohttp import web

from proxy.addresses import BACKLOG, is_loopback
from proxy.engine.ports import Exchange, Upstream
from proxy.server.access import Access
from proxy.server.admin import OpenPage, OpenRoutes, OwnRoutes, no_routes
from proxy.server.admission import Drain
from proxy.server.closing_answers import FULL, OUT_OF_DESCRIPTORS
from proxy.server.config import Limits, Metrics, Observe, Route, ServerConfig, Status
from proxy.server.connection import Connection
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


# All connections of a process.

_LEAST_RESERVE: Final = 16
"""Descriptors that requests under way need at least, for their upstreams and the store."""

_MOST_ENDING: Final = 256
"""Refused connections that are open until their clients have read why, and as many that end in order to make room.

A flood of others is closed at once.
"""


def descriptors_short(descriptor: int) -> int:
    """Return how many connections must be closed if a new one got *descriptor*; 0 if enough descriptors are free.

    The requests under way need a reserve for their upstreams and the store. A new connection gets the lowest free
    number, so a number inside the reserve shows that all below it are in use. The whole reserve is freed then, because
    the next connections get low numbers again, which show nothing about the reserve.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserve = max(_LEAST_RESERVE, limit // 8)
    if limit < 0 or descriptor < limit - reserve:
        return 0
    return descriptor - (limit - reserve) + reserve


class Listener(web.Server):
    """Makes connections up to the limit, and counts those that it refuses.

    ``refusals`` counts by reason: ``head_too_large``, ``not_http``; ``full`` for a connection above the limit, and
    ``made_room`` for an idle one that was closed in its favour. ``crowded`` counts connections that came when hardly
    any descriptor was left, ``accepted`` all. ``open`` are those that are not refused, the oldest first.
    """

    def __init__(self, handler: Handler, limits: Limits, faults: Faults) -> None:
        super().__init__(
            cast("Any", handler),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.first_request,
            lingering_time=2.0,
            max_line_size=limits.header,
            max_field_size=limits.header,
            max_headers=limits.fields,
            auto_decompress=False,
        )
        self.refusals: Counter[str] = Counter()
        options = {"loop": asyncio.get_running_loop(), **self._kwargs}
        self._make = partial(Connection, self, faults=faults, refusals=self.refusals, limits=limits, **options)
        self._handler = handler
        self._most = limits.connections
        self.open: dict[Connection, None] = {}
        self._leaving: set[Connection] = set()
        self._refused: set[Connection] = set()
        self.accepted = 0
        self.crowded = 0

    def connect(self) -> Connection:
        """Return a new connection: the factory for the event loop. aiohttp's own makes another class."""
        return self._make(handle=self._handler)

    def answer_with(self, handler: Handler) -> None:
        """Have *handler* answer from now on, also on open connections, which check their next sender again."""
        self._handler = handler
        for connection in self.connections:
            cast("Connection", connection).answer_with(handler)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection. Above the limit the oldest idle one is closed, or else the new one is refused.

        The same holds for descriptors: without any left uvloop drops new connections silently, and asyncio tries to
        accept them again without end.
        """
        super().connection_made(handler, transport)
        self.accepted += 1
        short = descriptors_short(transport.get_extra_info("socket").fileno())
        crowded = short > 0
        self.crowded += crowded
        has_room = len(self.open) < self._most and not crowded
        if crowded:
            self._close_leaving()
        while not has_room or len(self._leaving) < short:
            if not self._make_room(crowded=crowded):
                break
            has_room = True
        if has_room:
            self.open[cast("Connection", handler)] = None
            return
        self.refusals["full"] += 1
        self._refuse(cast("Connection", handler), crowded=crowded)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Remove a connection."""
        self.open.pop(cast("Connection", handler), None)
        self._leaving.discard(cast("Connection", handler))
        self._refused.discard(cast("Connection", handler))
        super().connection_lost(handler, exc)

    def end_idle(self) -> None:
        """End in order all connections on which no request is under way."""
        for connection in list(self.open):
            connection.end_if_idle()

    def _refuse(self, connection: Connection, *, crowded: bool) -> None:
        """Answer a new connection with 503, and close it at once if it is *crowded* or if many have been refused."""
        answer = FULL
        if crowded:
            answer = OUT_OF_DESCRIPTORS
        connection.refuse(answer)
        if crowded or len(self._refused) >= _MOST_ENDING:
            connection.force_close()
        else:
            self._refused.add(connection)

    def _close_leaving(self) -> None:
        """Close the connections at once that are ending in order: their descriptors are needed."""
        for connection in list(self._leaving):
            connection.force_close()

    def _make_room(self, *, crowded: bool) -> bool:
        """End the oldest idle connection, at once if *crowded* or if many are ending. Return False if none is idle."""
        idle = next((connection for connection in self.open if connection.idle), None)
        if idle is None:
            return False
        del self.open[idle]
        self._leaving.add(idle)
        self.refusals["made_room"] += 1
        if crowded or len(self._leaving) > _MOST_ENDING or not idle.end_if_idle():
            idle.force_close()
        return True

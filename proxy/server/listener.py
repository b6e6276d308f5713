"""The connections of one process: how many there may be, which give way to a new one, and which end at a drain."""

from __future__ import annotations

import asyncio
import functools
import resource
from collections import Counter
from typing import Any, Final, cast

from aiohttp import web

from proxy.server.closing_answers import FULL, OUT_OF_DESCRIPTORS
from proxy.server.config import Limits
from proxy.server.connection import Connection, Handler
from proxy.tasks import Faults

_LEAST_RESERVE: Final = 16
"""Descriptors that requests under way need at least, for their upstreams and the store."""

_MOST_REFUSED: Final = 256
"""Refused connections that are open until their clients have read why. A flood of others is closed at once."""


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
    any descriptor was left, ``accepted`` all.
    """

    def __init__(self, handler: Handler, limits: Limits, faults: Faults) -> None:
        super().__init__(
            cast("Any", handler),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.keep_alive,
            lingering_time=2.0,
            max_line_size=limits.header,
            max_field_size=limits.header,
            max_headers=limits.fields,
            auto_decompress=False,
        )
        self.refusals: Counter[str] = Counter()
        options = {"loop": asyncio.get_running_loop(), **self._kwargs}
        self._make = functools.partial(
            Connection, self, faults=faults, refusals=self.refusals, limits=limits, **options
        )
        self._handler = handler
        self._most = limits.connections
        self._open: dict[Connection, None] = {}
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
        has_room = len(self._open) < self._most and not crowded
        while not has_room or len(self._leaving) < short:
            if not self._make_room():
                break
            has_room = True
        if has_room:
            self._open[cast("Connection", handler)] = None
            return
        self.refusals["full"] += 1
        self._refuse(cast("Connection", handler), crowded=crowded)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Remove a connection."""
        self._open.pop(cast("Connection", handler), None)
        self._leaving.discard(cast("Connection", handler))
        self._refused.discard(cast("Connection", handler))
        super().connection_lost(handler, exc)

    def end_unused(self) -> None:
        """End in order the connections that probably bring no request soon."""
        for connection in list(self._open):
            if not connection.expects_request:
                connection.end_if_idle()

    def end_idle(self) -> None:
        """End in order all connections on which no request is under way."""
        for connection in list(self._open):
            connection.end_if_idle()

    def close_idle(self) -> None:
        """Close at once all connections on which no request is under way."""
        for connection in list(self._open):
            if connection.idle:
                connection.force_close()

    def expects_requests(self) -> bool:
        """True if a request is under way on any connection, or may be on its way to one."""
        return any(connection.expects_request for connection in self._open)

    def _refuse(self, connection: Connection, *, crowded: bool) -> None:
        """Answer a new connection with 503, and close it at once if it is *crowded* or if many have been refused."""
        answer = FULL
        if crowded:
            answer = OUT_OF_DESCRIPTORS
        connection.refuse(answer)
        if crowded or len(self._refused) >= _MOST_REFUSED:
            connection.force_close()
        else:
            self._refused.add(connection)

    def _make_room(self) -> bool:
        """Close the oldest idle connection. Return False if none is idle."""
        idle = next((connection for connection in self._open if connection.idle), None)
        if idle is None:
            return False
        del self._open[idle]
        self._leaving.add(idle)
        self.refusals["made_room"] += 1
        idle.force_close()
        return True

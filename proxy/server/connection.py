"""Client connections: aiohttp's parser and loop, with static errors and an end that loses no request."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web

from proxy.core.errors import InvalidRequest, Overloaded, UllageError, error_body
from proxy.server.config import Limits
from proxy.server.outgoing import Outgoing

Handler = Callable[[web.BaseRequest], Awaitable[Outgoing]]

_UNREADABLE: Final = error_body(InvalidRequest("This is not a valid HTTP/1.1 request."), "chat")
_BROKEN: Final = error_body(UllageError(), "chat")
_LEAST_RESERVE: Final = 16


def _crowded() -> bytes:
    error = Overloaded("The proxy has as many connections as it may have (its limit of open files). Try again soon.")
    body = error_body(error, "chat")
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}retry-after: {error.retry_after}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


_CROWDED: Final = _crowded()


def limit_of_files() -> int:
    """How many files and connections this process may have open; -1: any number."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def is_crowded(descriptor: int) -> bool:
    """Whether so few descriptors are left that the requests under way need them for their upstreams and the store.

    A new connection gets the lowest number that is free, so its own number tells.
    """
    limit = limit_of_files()
    return limit >= 0 and descriptor >= limit - max(_LEAST_RESERVE, limit // 8)


class Connection(web.RequestHandler):
    """One client connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or answer 503 and close it while a descriptor is left to do so.

        Without any left uvloop drops new connections without a word, and asyncio tries again without end.
        """
        super().connection_made(transport)
        connected = cast("asyncio.Transport", transport)
        if is_crowded(connected.get_extra_info("socket").fileno()):
            cast("Listener", self._manager).crowded += 1
            connected.write(_CROWDED)
            connected.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,  # noqa: ARG002
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """A closing answer that repeats nothing of what was sent."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = web.Response(
            status=status, body=_UNREADABLE if status == 400 else _BROKEN, content_type="application/json"
        )
        response.force_close()
        return response

    def close_if_idle(self) -> None:
        """Close the connection if no request is being read, waiting or answered on it."""
        if self._current_request is None and not self._messages:
            self.force_close()


class Listener(web.Server):
    """Makes connections; knows those that are open."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        super().__init__(
            cast("Any", handler),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.keep_alive,
            lingering_time=2.0,
            max_line_size=limits.header,
            max_field_size=limits.header,
            max_headers=256,
            auto_decompress=False,
        )
        self._options = dict(self._kwargs)
        self.crowded = 0

    def __call__(self) -> Connection:
        """A new connection."""
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def close_idle(self) -> None:
        """Close the connections on which nothing is under way."""
        for connection in self.connections:
            cast("Connection", connection).close_if_idle()

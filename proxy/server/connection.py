"""Makes client connections: aiohttp's parser and loop, with limits, fixed error texts, and an end between requests."""

from __future__ import annotations

import asyncio
import functools
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD

from proxy.core.errors import InvalidRequest, Overloaded, UllageError, error_body
from proxy.server.access import Caller
from proxy.server.config import Limits
from proxy.server.response import ResponseWriter

Handler = Callable[[web.BaseRequest], Awaitable[ResponseWriter]]
Parsed = tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]

_PIPELINED: Final = 2
"""Requests that may wait on a connection for the one before them.

aiohttp's 32 (https://github.com/aio-libs/aiohttp/blob/master/aiohttp/web_protocol.py) would be 32 heads in memory.
"""
_MANY_FIELDS: Final = "Too many headers received"
"""The message of aiohttp's parsers, in C and in Python, for more than ``max_headers`` fields.

It is the only mark of that error: https://github.com/aio-libs/aiohttp/blob/master/aiohttp/http_parser.py.
"""


class HeadTooLarge(UllageError):
    """The request line and header fields together are too long, or too many.

    https://www.rfc-editor.org/rfc/rfc6585#section-5
    """

    status = 431
    code = "request_header_fields_too_large"
    kind = "invalid_request_error"


_UNREADABLE: Final = error_body(InvalidRequest("This is not a valid HTTP/1.1 request."), "chat")
_TOO_LARGE: Final = error_body(
    HeadTooLarge(
        "The request's header fields are too large or too many "
        "(server.limits.headers bounds one, server.limits.head all of them, server.limits.fields their number)."
    ),
    "chat",
)
_BROKEN: Final = error_body(UllageError(), "chat")
_LEAST_RESERVE: Final = 16


def _full(setting: str) -> bytes:
    """Return the answer to a connection for which *setting* leaves no room."""
    error = Overloaded(f"The proxy has as many connections as it may ({setting}). Try again soon.")
    body = error_body(error, "chat")
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


_FULL_ANSWER: Final = _full("server.limits.connections")
_CROWDED_ANSWER: Final = _full("the limit of open files of its process")


def descriptors_short(descriptor: int) -> int:
    """Return how many connections must be closed if a new one got *descriptor*; 0 if enough descriptors are free.

    The requests under way need a reserve for their upstreams and the store. A new connection gets the lowest number
    that is free, so a number inside the reserve says that all below it are in use. The whole reserve is freed then:
    the next connections get low numbers, which say nothing of the reserve.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserve = max(_LEAST_RESERVE, limit // 8)
    if limit < 0 or descriptor < limit - reserve:
        return 0
    return descriptor - (limit - reserve) + reserve


class HeadLimit:
    """aiohttp's parser, with a limit of bytes for a whole head and for trailers.

    aiohttp bounds one field and their number; the head may still be as large as both multiplied, and is in memory
    before any key is read. Bytes count until the parser makes a request or a part of its body of them. The others
    belong to a head, to trailers, or to the frames of chunks.
    """

    def __init__(self, parser: Any, limit: int) -> None:
        self._feed = parser.feed_data
        self._limit = limit
        self._size = 0
        self._payload: StreamReader = EMPTY_PAYLOAD
        self._body = 0
        self._refused = False
        # The other methods of a parser that aiohttp's connection calls.
        self.pause_reading: Callable[[], None] = parser.pause_reading
        self.message_consumed: Callable[[], None] = parser.message_consumed
        self.set_upgraded: Callable[[bool], None] = parser.set_upgraded

    def feed_data(self, data: bytes) -> Parsed:
        """Return the requests whose heads end in *data*. Raises ``HttpProcessingError`` once, for aiohttp to answer."""
        if self._refused:
            return (), False, b""
        try:
            parsed: Parsed = self._feed(data)
            size, self._size = self._size + len(data), 0
            if parsed[0]:
                self._payload = parsed[0][-1][1]
                if size > self._limit and any(_size_of(message) > self._limit for message, _ in parsed[0]):
                    raise self._too_large()
            elif self._payload.total_bytes == self._body:
                self._size = size
                if size > self._limit:
                    raise self._too_large()
        except HttpProcessingError:
            self._refused = True
            raise
        self._body = self._payload.total_bytes
        return parsed

    def _too_large(self) -> LineTooLong:
        """Return the error for aiohttp, and fail a body that is being read: its reader would wait for the trailers."""
        if not self._payload.is_eof():
            self._payload.set_exception(web.RequestPayloadError("the trailers are too large"))
        return LineTooLong(b"", self._limit)


class Connection(web.RequestHandler):
    """One client connection. ``caller`` is who sent its last head, if the same head may come again."""

    __slots__ = ("_refusals", "caller")

    def __init__(self, listener: Listener, head: int, **options: Any) -> None:
        super().__init__(listener, **options)
        self._refusals = listener.refusals
        self.caller: Caller | None = None
        # aiohttp has no setting for the size of a whole head, nor for how many parsed requests wait:
        # https://github.com/aio-libs/aiohttp/blob/master/aiohttp/web_protocol.py.
        self._parser = cast("Any", HeadLimit(self._parser, head))
        self._max_msg_queue_size = _PIPELINED
        self._msg_queue_resume_size = _PIPELINED - 1

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """Return an answer that closes the connection and repeats nothing of the request."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        body = _BROKEN
        if isinstance(exc, HttpProcessingError):
            # Its frames hold the connection's last 256 KiB, and aiohttp's hold it: a cycle until the next collection.
            exc.__traceback__ = None
            if isinstance(exc, LineTooLong) or exc.message == _MANY_FIELDS:
                self._refusals["head_too_large"] += 1
                status, body = HeadTooLarge.status, _TOO_LARGE
            else:
                self._refusals["not_http"] += 1
                status, body = 400, _UNREADABLE
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response

    @property
    def idle(self) -> bool:
        """True if no request is waiting or answered on it; one may be arriving.

        aiohttp has no public member for it.
        """
        return self._current_request is None and not self._messages

    def close_if_idle(self) -> None:
        """Close the connection if no request is being read, waiting or answered on it."""
        if self.idle:
            self.force_close()


class Listener(web.Server):
    """Makes connections up to the limit, and counts those that it refuses.

    ``refusals`` counts by reason: ``head_too_large``, ``not_http``; ``full`` for a connection above the limit, and
    ``made_room`` for an idle one that was closed in its favour. ``crowded`` counts connections that came when hardly
    any descriptor was left.
    """

    def __init__(self, handler: Handler, limits: Limits) -> None:
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
        # The factory of connections for the event loop, in place of aiohttp's own, which makes another class.
        loop = asyncio.get_running_loop()
        self.connect = functools.partial(Connection, self, limits.head, loop=loop, **self._kwargs)
        self._most = limits.connections
        self._open: dict[Connection, None] = {}
        self._leaving: set[Connection] = set()
        self.refusals: Counter[str] = Counter()
        self.crowded = 0

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection. Above the limit the oldest idle one is closed, or else the new one is refused.

        The same holds for descriptors: without any left uvloop drops new connections silently, and asyncio tries to
        accept them again without end.
        """
        super().connection_made(handler, transport)
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
        answer = _FULL_ANSWER
        if crowded:
            answer = _CROWDED_ANSWER
        transport.write(answer)
        handler.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Remove a connection."""
        self._open.pop(cast("Connection", handler), None)
        self._leaving.discard(cast("Connection", handler))
        super().connection_lost(handler, exc)

    def close_idle(self) -> None:
        """Close the connections on which no request is under way."""
        for connection in self.connections:
            cast("Connection", connection).close_if_idle()

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


def _size_of(message: RawRequestMessage) -> int:
    """Return the bytes of a head, without its line ends and spaces."""
    return len(message.path) + sum(len(name) + len(value) for name, value in message.raw_headers)

"""One client connection: aiohttp's parser and flow control, and a loop that answers its requests, one after the other.

aiohttp's connection parses, queues what is parsed, holds a fast sender back, closes an idle connection, and ends the
others at shut-down (https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py). Two parts of its work are
done here instead, since they cost most: the loop that answers requests, and the parsing of a head that comes again.

The loop is ``Connection.start``, the connection's only task. It waits, has the handler answer, and waits again;
aiohttp's own makes four objects and a task for each request. An exception ends the connection and no other; a client
that leaves cancels the task, and so the call of the upstream.

A client sends the same head all day, byte for byte but for the length of its body. Such a head need not be parsed
again: ``RepeatedHead`` compares it, and the body goes past the parser. The parser must stand between two requests then,
which it does not tell. So ``_due`` counts the bytes that it still needs for the request it has: 0 is between requests,
and ``_UNKNOWN`` is for ever, after a chunked body for example, or after requests that were sent without waiting.

==================== ====================== ======================== ===========================
event                idle                   a request is under way   the same, and its body still
                                                                     arrives past the parser
==================== ====================== ======================== ===========================
the same head again  under way, unparsed    parsed and queued        bytes of the body
other bytes          parsed: under way, or  parsed: its body, or     bytes of the body; those
                     a part of a head       a request that waits     behind it are parsed
the answer's end     --                     idle; the next request;  its rest is read for a while,
                                            or closed                then closed
the client leaves    closed                 cancelled                cancelled
the keep-alive time  closed                 nothing                  nothing
shut-down            closed                 see ``Drain``            see ``Drain``
==================== ====================== ======================== ===========================

Private names of aiohttp are used. They are those of one minor version, to which ``pyproject.toml`` pins it, and
``tests/server/test_connection.py`` holds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from msgspec import structs

from proxy.core.errors import InvalidRequest, UllageError, error_body
from proxy.server.access import Caller
from proxy.server.incoming import IncomingRequest, RepeatedHead, read_head
from proxy.server.request import RequestPath
from proxy.server.response import ResponseWriter

_LOG: Final = logging.getLogger(__name__)

Handler = Callable[[IncomingRequest], Awaitable[ResponseWriter]]
Parsed = tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]

_PIPELINED: Final = 2
"""Requests that may wait on a connection for the one before them.

aiohttp's 32 (https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py) would be 32 heads in memory.
"""

_UNKNOWN: Final = -1
"""The number of due bytes if it cannot be said where the parser stands."""

_BUFFER: Final = 2**16
"""Bytes of a body that wait to be read; twice as many pause the connection."""

_MANY_FIELDS: Final = "Too many headers received"
"""The message of aiohttp's parsers, in C and in Python, for more than ``max_headers`` fields.

It is the only mark of that error: https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/http_parser.py.
"""


class HeadTooLarge(UllageError):
    """The request line and header fields together are too long, or too many.

    https://www.rfc-editor.org/rfc/rfc6585#section-5
    """

    status = 431
    code = "request_header_fields_too_large"
    kind = "invalid_request_error"


def closing_answer(error: UllageError, fields: bytes = b"") -> bytes:
    """Return a whole answer with *error* and the header *fields*, behind which the connection is closed."""
    body = error_body(error, "chat")
    status = HTTPStatus(error.status)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n%b"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, status.phrase.encode(), fields, len(body), body)
    )


_UNREADABLE: Final = closing_answer(InvalidRequest("This is not a valid HTTP/1.1 request."))
_TOO_LARGE: Final = closing_answer(
    HeadTooLarge(
        "The request's header fields are too large or too many "
        "(server.limits.headers bounds one, server.limits.head all of them, server.limits.fields their number)."
    )
)


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
    """One client connection. *handle* answers its requests, *refusals* counts what is no request, by reason.

    ``request`` is the one under way; ``caller`` is who sent it, if its head is a repeated one.
    """

    __slots__ = (
        "_arriving",
        "_due",
        "_handle",
        "_head",
        "_missing",
        "_refusals",
        "_repeated",
        "caller",
        "request",
    )

    def __init__(self, server: web.Server, handle: Handler, refusals: Counter[str], head: int, **options: Any) -> None:
        super().__init__(server, **options)
        self._handle = handle
        self._refusals = refusals
        self.request: IncomingRequest | None = None
        self.caller: Caller | None = None
        self._head = b""
        self._due = 0
        self._repeated: tuple[RepeatedHead, Caller] | None = None
        self._arriving: StreamReader | None = None
        self._missing = 0
        # aiohttp has no setting for the size of a whole head, nor for how many parsed requests wait:
        # https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py.
        self._parser = cast("Any", HeadLimit(self._parser, head))
        self._max_msg_queue_size = _PIPELINED
        self._msg_queue_resume_size = _PIPELINED - 1

    @property
    def idle(self) -> bool:
        """True if no request is waiting or answered on it; one may be arriving."""
        return self.request is None and not self._messages

    def close_if_idle(self) -> None:
        """Close the connection if no request is being read, waiting or answered on it."""
        if self.idle:
            self.force_close()

    def remember(self, caller: Caller, path: RequestPath) -> None:
        """Take a request with the same head as the one for *path* under way for *caller*'s, if that is allowed."""
        if self._head and self.request is not None and caller.may_return(path):
            with contextlib.suppress(ValueError):
                self._repeated = RepeatedHead(self._head, self.request), caller

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """Begin a request with *data*, or go on with one. It is empty if reading goes on after a pause."""
        if self._arriving is not None:
            data = self._body_received(self._arriving, data)
        if data and self._due == 0:
            if self.request is not None or self._messages:
                self._due = _UNKNOWN
            elif self._begin_repeated(data):
                return
            else:
                self._head, size = read_head(data)
                self._due = size - len(data)
        elif self._due > 0:
            self._due -= len(data)
        super().data_received(data)

    def _begin_repeated(self, data: bytes) -> bool:
        """Wake the loop with the request that *data* begins. Return False if its head is not the repeated one."""
        waiter = self._waiter
        if self._repeated is None or waiter is None or waiter.done():
            return False
        head, caller = self._repeated
        found = head.match(data)
        if found is None:
            return False
        start, length = found
        body: bytes | None = data[start : start + length]
        content = EMPTY_PAYLOAD
        if len(data) < start + length:
            content = self._arriving = StreamReader(self, _BUFFER, loop=self._loop)
            content.feed_data(data[start:])
            self._missing = start + length - len(data)
            body = None
        self.caller = caller
        request = structs.replace(head.request, content=content, content_length=length, body=body)
        self._messages.append(cast("Any", (request, content)))
        waiter.set_result(None)
        if len(data) > start + length:
            self.data_received(data[start + length :])
        return True

    def _body_received(self, body: StreamReader, data: bytes) -> bytes:
        """Add *data* to the *body* that arrives past the parser. Return the bytes behind it."""
        part, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(part)
        body.feed_data(part)
        if not self._missing:
            self._arriving = None
            body.feed_eof()
        return rest

    def pause_reading(self) -> None:
        """Stop reading: the buffer of a body is full. The parser is told if it is the one that fills it."""
        if self._arriving is None:
            super().pause_reading()
            return
        self._reading_paused = True
        self._pause_transport_reading()

    # The loop.

    async def start(self) -> None:
        """Answer this connection's requests until it ends. aiohttp makes this its task."""
        try:
            while not self._force_close:
                if not self._messages:
                    # While there is a waiter, aiohttp closes the connection when the keep-alive time is over.
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    self._waiter = None
                request = self._next()
                if request is None or not await self._answered(request):
                    break
                self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
                if self._keepalive_handle is None:
                    closing = self._process_keepalive
                    self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, closing)
        except asyncio.CancelledError:
            self._waiter = None
            self.force_close()
            raise
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    async def _answered(self, request: IncomingRequest) -> bool:
        """Answer *request*. Return False if it was the connection's last."""
        self.request = request
        self._request_in_progress = True
        try:
            out = await self._handle(request)
        except Exception as error:  # noqa: BLE001 - the edge of a connection: a bug ends this one and no other
            _LOG.error("connection failed", exc_info=error)
            self.force_close()
            return False
        finally:
            self.request = None
            self._request_in_progress = False
            if self._handler_waiter is not None:
                self._handler_waiter.set_result(None)
        if self._upgraded:
            self._decline_upgrade()
        content = request.content
        if not content.is_eof():
            await self._discard(content)
        return out.keep_alive and content.is_eof() and not self._close

    def _next(self) -> IncomingRequest | None:
        """Return the next request, or None after an answer to bytes that are none."""
        message: Any
        message, content = self._messages.popleft()
        if isinstance(message, IncomingRequest):
            return message
        self.caller = None
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        if not isinstance(message, RawRequestMessage):
            self._refuse(message.exc)
            return None
        declared = message.headers.get("Content-Length")
        length = None
        if declared is not None:
            length = int(declared)
        return IncomingRequest(
            self,
            message.method,
            message.path,
            message.version,
            message.headers,
            message.raw_headers,
            not message.should_close,
            content,
            length,
        )

    def _refuse(self, error: HttpProcessingError) -> None:
        """Answer bytes that are no request, and repeat none of them."""
        # Its frames hold the connection's last 256 KiB, and aiohttp's hold it: a cycle until the next collection.
        error.__traceback__ = None
        reason, answer = "not_http", _UNREADABLE
        if isinstance(error, LineTooLong) or error.message == _MANY_FIELDS:
            reason, answer = "head_too_large", _TOO_LARGE
        self._refusals[reason] += 1
        if self.transport is not None:
            self.transport.write(answer)

    def _decline_upgrade(self) -> None:
        """Read on as HTTP behind a request for another protocol, which got an answer."""
        if self._messages or self._parser is None or self._payload_parser is not None:
            return
        self._parser.set_upgraded(False)
        self._upgraded = False
        tail, self._message_tail = self._message_tail, b""
        super().data_received(tail)
        if self._buffer_paused:
            self._resume_reading_if_drained()

    async def _discard(self, content: StreamReader) -> None:
        """Read the rest of a body for a while: closing at once would reset the connection, and its answer with it."""
        broken = (web.RequestPayloadError, HttpProcessingError, ConnectionError)
        with contextlib.suppress(TimeoutError, *broken):
            async with asyncio.timeout(self._lingering_time):
                while not content.is_eof():
                    await content.readany()


def _size_of(message: RawRequestMessage) -> int:
    """Return the bytes of a head, without its line ends and spaces."""
    return len(message.path) + sum(len(name) + len(value) for name, value in message.raw_headers)

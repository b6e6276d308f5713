"""A client's request as it arrives: its head under limits, parsed or recognised as a repeated one, and its body.

A body is read whole while it makes progress, or passed on as a stream. Its bytes in memory are counted for its sender.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDictProxy

from proxy.core.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout
from proxy.core.http_headers import MOST_DIGITS, around_length
from proxy.server.config import Limits

Parsed = tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]
RawHeaders = tuple[tuple[bytes, bytes], ...]

_MANY_FIELDS: Final = "Too many headers received"
"""The message of aiohttp's parsers, in C and in Python, for more than ``max_headers`` fields.

It is the only mark of that error: https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/http_parser.py.
"""


class IncomingRequest(msgspec.Struct):
    """A request whose head is complete.

    ``content`` is its body as it arrives. ``body`` is the whole body instead if the request bypassed the parser.
    ``raw_path`` is the target of the request line. ``content_length`` is the declared length of the body; of a repeated
    head the one in ``headers`` and ``raw_headers`` is that of the first request.
    """

    # A Struct and no dataclass: every request makes one, and msgspec builds it in C.

    protocol: web.RequestHandler
    method: str
    raw_path: str
    version: HttpVersion
    headers: CIMultiDictProxy[str]
    raw_headers: RawHeaders
    keep_alive: bool
    content: StreamReader
    content_length: int | None
    body: bytes | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection, or None once it is lost."""
        return self.protocol.transport


def parsed_request(
    connection: web.RequestHandler, message: RawRequestMessage, content: StreamReader
) -> IncomingRequest:
    """Return the request of *connection* that begins with the parsed *message*."""
    declared = message.headers.get("Content-Length")
    length = None
    if declared is not None:
        length = int(declared)
    return IncomingRequest(
        connection,
        message.method,
        message.path,
        message.version,
        message.headers,
        message.raw_headers,
        not message.should_close,
        content,
        length,
    )


class RepeatedHead(msgspec.Struct, frozen=True):
    """A head that its connection may repeat with another length of the body, and the first request with it.

    ``before`` and ``after`` are the bytes of the head around the digits of that length.
    """

    before: bytes
    after: bytes
    request: IncomingRequest

    def match(self, data: bytes) -> tuple[int, int] | None:
        """Return where the body begins in *data* and its length, or None if *data* begins with another head."""
        before, after = self.before, self.after
        if not data.startswith(before):
            return None
        at = len(before)
        end = data.find(b"\r", at, at + MOST_DIGITS + 1)
        digits = data[at : max(0, end)]
        # Spaces behind the digits belong to ``after``: there is no match then, and the parser reads the head.
        if not digits.isdigit() or not data.startswith(after, end):
            return None
        return end + len(after), int(digits)


def repeated_head(head: bytes, request: IncomingRequest) -> RepeatedHead | None:
    """Return *head* (from ``read_head``) with the *request* parsed from it; None unless it has one Content-Length."""
    parts = around_length(head, request.headers.getall("Content-Length", []))
    if parts is None:
        return None
    return RepeatedHead(*parts, request)


class HeadLimit:
    """aiohttp's parser, with a limit of bytes for a whole head and for trailers.

    aiohttp bounds one field and their number; a head may still be as large as both multiplied, and is in memory before
    any key is checked. So bytes are counted until the parser returns a request or adds to a body: those between belong
    to a head, to trailers, or to the frames of chunks.
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
        """Return the error for aiohttp, and fail a body that is being read: its reader would wait for trailers."""
        if not self._payload.is_eof():
            self._payload.set_exception(web.RequestPayloadError("the trailers are too large"))
        return LineTooLong(b"", self._limit)


def _size_of(message: RawRequestMessage) -> int:
    """Return the bytes of a head, without its line ends and spaces."""
    return len(message.path) + sum(len(name) + len(value) for name, value in message.raw_headers)


def is_head_too_large(error: HttpProcessingError) -> bool:
    """True if *error* is that of a head above one of its limits."""
    return isinstance(error, LineTooLong) or error.message == _MANY_FIELDS


# The body.

_BUFFER: Final = 2**16
"""Bytes of a body that are buffered; twice as many unread ones pause the connection."""

GRACE: Final = 0.02
"""Seconds to wait for the rest of a body before the handler is called: most bodies arrive whole within them."""


class ArrivingBody:
    """A body of *length* bytes that bypasses the parser, from its *first* bytes until ``missing`` is 0.

    *wake* is called once: with the whole body, if that arrives within ``GRACE``, else with its content, which is read
    as it arrives and may pause *connection*.
    """

    def __init__(
        self,
        first: memoryview,
        length: int,
        wake: Callable[[bytes | None, StreamReader], None],
        connection: BaseProtocol,
    ) -> None:
        self.missing = length - len(first)
        self._parts: list[bytes | memoryview] = [first]
        self._wake = wake
        self._connection = connection
        self._content: StreamReader | None = None
        self._grace = asyncio.get_running_loop().call_later(GRACE, self.stream)

    def add(self, data: bytes) -> bytes:
        """Add *data*. Return the bytes behind the body."""
        part, rest = data[: self.missing], data[self.missing :]
        self.missing -= len(part)
        if self._content is not None:
            self._content.feed_data(part)
        else:
            self._parts.append(part)
        if self.missing == 0:
            self._end()
        return rest

    def stream(self) -> None:
        """Have what is missing read as it arrives."""
        if self._content is not None:
            return
        self.cancel()
        self._content = StreamReader(self._connection, _BUFFER, loop=asyncio.get_running_loop())
        for part in self._parts:
            self._content.feed_data(bytes(part))
        self._parts.clear()
        self._wake(None, self._content)

    def cancel(self) -> None:
        """Wait no longer for the whole body."""
        self._grace.cancel()

    def _end(self) -> None:
        if self._content is not None:
            self._content.feed_eof()
            return
        self.cancel()
        self._wake(b"".join(self._parts), EMPTY_PAYLOAD)


class Progress:
    """Waits for a client that sends a body: at most *pause* seconds without a byte, and *rate* bytes a second.

    It is a budget of seconds: waiting uses it up, each byte adds to it, and it is never more than *pause*. So a body
    that stops is given up after *pause* seconds at most, however much of it came before.
    """

    def __init__(self, pause: float, rate: int) -> None:
        self._pause = self._left = pause
        self._rate = rate

    async def next(self, content: StreamReader) -> bytes:
        """Return the next bytes of *content*, empty at its end. Raises ``RequestTimeout`` and ``InvalidRequest``."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(self._left):
                chunk = await _next(content)
        except TimeoutError as error:
            raise RequestTimeout("The request body stopped coming, or came too slowly.") from error
        self._left = min(self._pause, self._left - (clock() - began) + len(chunk) / self._rate)
        return chunk


class BodyBytes(msgspec.Struct):
    """Bytes of request bodies in memory, of all requests together and of each tenant, under one limit.

    A caller may have at most as many bytes as are free, so that others always find some room: one caller gets half of
    the limit, two get a third each. A caller's only body may take all that is free: the largest allowed body must pass.
    """

    limit: int
    total: int = 0
    by_tenant: dict[bytes, int] = msgspec.field(default_factory=dict)


def check_declared(declared: int | None, limits: Limits) -> None:
    """Raise ``BodyTooLarge`` before a byte is read if the *declared* length of a body is above the limit."""
    if declared is not None and declared > limits.body:
        raise BodyTooLarge(limits.body)


class BodyReader(msgspec.Struct):
    """Reads one request's body. Bytes that have arrived are counted for the tenant until ``release``."""

    # A Struct and no dataclass: every request makes one, and msgspec builds it in C.

    content: StreamReader
    limits: Limits
    account: BodyBytes
    tenant: bytes
    counted: int = 0

    def count(self, size: int) -> None:
        """Count the body as *size* bytes, if that is more than before. Raises ``Overloaded``."""
        more = size - self.counted
        if more <= 0:
            return
        account, tenant = self.account, self.tenant
        if account.total + more > account.limit:
            raise Overloaded(
                "The proxy has as many request bytes in memory as it may (server.limits.in_flight_bytes). "
                "Try again soon."
            )
        of_tenant = account.by_tenant.get(tenant, 0)
        if of_tenant > self.counted and of_tenant + more > account.limit - account.total:
            raise Overloaded(
                "The requests of this caller have their share of the request bytes that the proxy has in memory "
                "(server.limits.in_flight_bytes). Try again soon."
            )
        account.by_tenant[tenant] = of_tenant + more
        account.total += more
        self.counted = size

    def release(self) -> None:
        """Stop counting this body. Does nothing if it is called again."""
        if not self.counted:
            return
        account, tenant = self.account, self.tenant
        account.total -= self.counted
        left = account.by_tenant.pop(tenant) - self.counted
        if left:
            account.by_tenant[tenant] = left
        self.counted = 0

    async def whole(self, declared: int | None) -> bytes:
        """Return the body, of *declared* bytes, as sent.

        Raises ``BodyTooLarge``, ``RequestTimeout``, ``Overloaded`` and ``InvalidRequest``.
        """
        limit = self.limits.body
        check_declared(declared, self.limits)
        if not self.content.is_eof() or self.content.exception() is not None:
            body, complete = await self._slowly(limit)
            if not complete:
                raise BodyTooLarge(limit)
            return body
        # All of it is here, as most bodies are: no timer is needed.
        body = self.content.read_nowait()
        if len(body) > limit:
            raise BodyTooLarge(limit)
        self.count(len(body))
        return body

    async def peek(self) -> tuple[bytes, bool]:
        """Return the body's first ``peek`` bytes or a little more, and True if that is all of it."""
        if self.content.is_eof() and self.content.exception() is None:
            first = self.content.read_nowait()
            complete = len(first) <= self.limits.peek
        else:
            first, complete = await self._slowly(self.limits.peek)
        self.count(len(first))
        return first, complete

    async def _slowly(self, limit: int) -> tuple[bytes, bool]:
        """Read to the body's end, or until more than *limit* bytes have come. The second value is True if it ended."""
        progress = Progress(self.limits.body_pause, self.limits.body_rate)
        parts: list[bytes] = []
        size = 0
        while chunk := await progress.next(self.content):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                return b"".join(parts), False
            self.count(size)
        return b"".join(parts), True


class Upload:
    """The rest of a client's body as a stream: the bytes already read, then every chunk as it arrives.

    Use it inside ``moving``: the receiver may not pause for more than *idle* seconds, and the sender must show
    *progress*.
    """

    def __init__(self, first: bytes, content: StreamReader, idle: float, progress: Progress) -> None:
        self._first = first
        self._content = content
        self._idle = idle
        self._progress = progress
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Return a context that raises ``TimeoutError`` if the receiver does not ask for the next chunk in time."""
        async with asyncio.timeout(self._idle) as deadline:
            self._deadline = deadline
            try:
                yield
            finally:
                self._deadline = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next chunk. Raises ``RequestTimeout`` if the client pauses for too long."""
        self._allow(None)
        chunk, self._first = self._first, b""
        if not chunk:
            chunk = await self._progress.next(self._content)
            if not chunk:
                raise StopAsyncIteration
        self._allow(asyncio.get_running_loop().time() + self._idle)
        return chunk

    def _allow(self, until: float | None) -> None:
        # There is no deadline any more if the answer came before the upload ended.
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(until)


async def _next(content: StreamReader) -> bytes:
    try:
        return await content.readany()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise InvalidRequest("The request body is not valid HTTP.") from error

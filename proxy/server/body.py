"""Request bodies: read whole under a limit and a deadline, inflated safely, or handed on as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.core.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout, UllageError
from proxy.server.config import Limits

_STEP: Final = 2**20
_OFF_LOOP: Final = 2**14


class UnsupportedEncoding(UllageError):
    """The request body is compressed in a way the proxy does not read."""

    status = 415
    code = "unsupported_content_encoding"
    kind = "invalid_request_error"


class Held:
    """Bytes of request bodies in memory, of all requests together, under one limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.bytes = 0

    def take(self, size: int) -> None:
        """Account for *size* more bytes. Raises ``Overloaded`` when they do not fit."""
        if self.bytes + size > self._limit:
            raise Overloaded("The proxy holds as many request bytes as it may (server.limits.held). Try again soon.")
        self.bytes += size

    def give(self, size: int) -> None:
        """Account for *size* bytes that are gone."""
        self.bytes -= size


class BodyReader:
    """Reads one request's body. ``taken`` bytes are on the account until ``release``."""

    __slots__ = ("_account", "_content", "_declared", "_limits", "taken")

    def __init__(self, content: StreamReader, declared: int | None, limits: Limits, account: Held) -> None:
        self._content = content
        self._declared = declared
        self._limits = limits
        self._account = account
        self.taken = 0

    def release(self) -> None:
        """Give the account back what this body took; harmless when called again."""
        self._account.give(self.taken)
        self.taken = 0

    def reserve(self) -> None:
        """Take the declared size on the account before a byte is read. Raises ``BodyTooLarge`` or ``Overloaded``."""
        if self._declared is not None:
            if self._declared > self._limits.body:
                raise BodyTooLarge(self._limits.body)
            self.take(self._declared)

    def take(self, size: int) -> None:
        """Take *size* bytes more on the account."""
        self._account.take(size)
        self.taken += size

    async def whole(self) -> bytes:
        """The body as sent. Raises ``BodyTooLarge``, ``RequestTimeout``, ``Overloaded`` or ``InvalidRequest``."""
        limit = self._limits.body
        if self._content.is_eof() and self._content.exception() is None:
            body = self._content.read_nowait()
            if len(body) > limit:
                raise BodyTooLarge(limit)
            return body
        parts, complete = await self._upto(limit)
        if not complete:
            raise BodyTooLarge(limit)
        return b"".join(parts)

    async def peek(self) -> tuple[bytes, bool]:
        """The body's first ``peek`` bytes or a little more, and whether that is all of it."""
        if self._content.is_eof() and self._content.exception() is None:
            return self._content.read_nowait(), True
        parts, complete = await self._upto(self._limits.peek)
        return b"".join(parts), complete

    async def _upto(self, limit: int) -> tuple[list[bytes], bool]:
        loop = asyncio.get_running_loop()
        limits = self._limits
        start = loop.time() + limits.body_seconds + (self._declared or 0) / limits.body_rate
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout_at(start) as deadline:
                while chunk := await _next(self._content):
                    parts.append(chunk)
                    size += len(chunk)
                    if size > self.taken:
                        self.take(size - self.taken)
                    if size > limit:
                        return parts, False
                    if self._declared is None:
                        # The allowance grows with what has come: the same floor speed as for a known length.
                        deadline.reschedule(start + size / limits.body_rate)
        except TimeoutError as error:
            raise RequestTimeout("The request body came too slowly.") from error
        return parts, True


class Upload:
    """The rest of a client's body as a stream: what was already read, then every chunk as it arrives.

    Use it inside ``moving``: neither the sender nor the receiver may pause for more than *idle* seconds.
    """

    def __init__(self, first: bytes, content: StreamReader, idle: float) -> None:
        self._first = first
        self._content = content
        self._idle = idle
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """A context that raises ``TimeoutError`` when nobody takes the next chunk."""
        async with asyncio.timeout(self._idle) as deadline:
            self._deadline = deadline
            try:
                yield
            finally:
                self._deadline = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """The next chunk. Raises ``RequestTimeout`` when the client pauses for too long."""
        self._allow(None)
        chunk, self._first = self._first, b""
        if not chunk:
            try:
                async with asyncio.timeout(self._idle):
                    chunk = await _next(self._content)
            except TimeoutError as error:
                raise RequestTimeout("The request body stopped coming.") from error
            if not chunk:
                raise StopAsyncIteration
        self._allow(asyncio.get_running_loop().time() + self._idle)
        return chunk

    def _allow(self, until: float | None) -> None:
        # An answer may come before the upload has ended: then nobody watches any more.
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(until)


async def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """*body* without its content coding, at most *limit* bytes: a bomb costs no more memory than that."""
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise UnsupportedEncoding(
            f"Request bodies in content-encoding {coding[:40]!r} are not read; send gzip, deflate or none."
        )
    if len(body) <= _OFF_LOOP:
        return _inflate(body, coding, limit)
    return await asyncio.to_thread(_inflate, body, coding, limit)


def _inflate(body: bytes, coding: str, limit: int) -> bytes:
    try:
        return _members(body, 31 if coding != "deflate" else 15, limit)
    except zlib.error as error:
        if coding == "deflate":
            try:
                return _members(body, -15, limit)
            except zlib.error:
                pass
        raise InvalidRequest(f"The request body is not valid {coding}.") from error


def _members(body: bytes, window: int, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while body:
        inflate = zlib.decompressobj(window)
        data = body
        while not inflate.eof:
            part = inflate.decompress(data, _STEP)
            data = inflate.unconsumed_tail
            size += len(part)
            if size > limit:
                raise BodyTooLarge(limit)
            parts.append(part)
            if not part and not data and not inflate.eof:
                raise zlib.error("the body ends early")
        body = inflate.unused_data
    return b"".join(parts)


async def _next(content: StreamReader) -> bytes:
    try:
        return await content.readany()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise InvalidRequest("The request body is not valid HTTP.") from error

"""Reads request bodies as they make progress, inflates them under limits, or passes them on as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.core.apis.json_scan import members
from proxy.core.errors import BodyTooLarge, InflatesTooFar, InvalidRequest, Overloaded, RequestTimeout, UllageError
from proxy.offload import offload
from proxy.server.config import Limits

_STEP: Final = 2**18
_ANY_RATIO: Final = 2**16
"""Bytes that any compressed body may inflate to, whatever the ratio: so few do no harm."""


_WINDOWS: Final = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
"""The ``wbits`` of each content coding, in the order in which they are tried.

Some clients send ``deflate`` without zlib's header: https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1.2. The numbers
are those of https://docs.python.org/3/library/zlib.html#zlib.decompress.
"""


class UnsupportedEncoding(UllageError):
    """The request body is compressed in a way the proxy does not read."""

    status = 415
    code = "unsupported_content_encoding"
    kind = "invalid_request_error"


class Progress:
    """Waits for a client that sends a body: at most *pause* seconds without a byte, and *rate* bytes a second.

    Bytes above the rate add time for later, but never more than *pause*: a body that stops is given up as soon after
    its first byte as after its last but one, whatever length it declared.
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


@dataclass(slots=True)
class BodyBytes:
    """Bytes of request bodies in memory, of all requests together and of each tenant, under one limit.

    A caller may have as much as is free beside it, so that others always find some room: one alone half of all, two a
    third each. A caller's only body may take what is left: the largest body that is allowed must pass.
    """

    limit: int
    total: int = 0
    by_tenant: dict[bytes, int] = field(default_factory=dict)


def check_declared(declared: int | None, limits: Limits) -> None:
    """Raise ``BodyTooLarge`` before a byte is read if the *declared* length of a body is above the limit."""
    if declared is not None and declared > limits.body:
        raise BodyTooLarge(limits.body)


class BodyReader(msgspec.Struct):
    """Reads one request's body. Bytes that have arrived are counted as the tenant's until ``release``.

    A Struct, since every request makes one and it is built in C.
    """

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
        """Count this body no longer; harmless when called again."""
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
        if declared is not None and declared > limit:
            raise BodyTooLarge(limit)
        if not self.content.is_eof() or self.content.exception() is not None:
            body, complete = await self._slowly(limit)
            if not complete:
                raise BodyTooLarge(limit)
            return body
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
        """Return a context that raises ``TimeoutError`` if the next chunk is not taken in time."""
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
        # An answer may come before the upload has ended: then the deadline is gone.
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(until)


async def inflated(body: bytes, encoding: str, limits: Limits) -> bytes:
    """Return *body* without its content coding. A bomb costs no more memory than *limits* allow.

    Raises ``BodyTooLarge`` above ``limits.body`` and ``InflatesTooFar`` above ``limits.inflation`` times its size.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in _WINDOWS:
        raise UnsupportedEncoding(
            f"Request bodies in content-encoding {coding[:40]!r} are not read; send gzip, deflate or none."
        )
    # It may inflate a hundredfold, and that takes the time.
    return await offload(min(limits.body, len(body) * limits.inflation), _inflate, body, coding, limits)


def _inflate(body: bytes, coding: str, limits: Limits) -> bytes:
    error: zlib.error | None = None
    for window in _WINDOWS[coding]:
        try:
            return _members(body, window, limits)
        except zlib.error as invalid:
            error = error or invalid
    raise InvalidRequest(f"The request body is not valid {coding}.") from error


def _members(body: bytes, window: int, limits: Limits) -> bytes:
    """Return all members of the compressed *body*, inflated and joined."""
    parts: list[bytes] = []
    size = 0
    most = max(limits.inflation * len(body), _ANY_RATIO)
    while body:
        inflate = zlib.decompressobj(window)
        data = body
        while not inflate.eof:
            part = inflate.decompress(data, _STEP)
            data = inflate.unconsumed_tail
            size += len(part)
            _refuse_too_large(size, most, limits)
            parts.append(part)
            if not part and not data and not inflate.eof:
                raise zlib.error("the body ends early")
        body = inflate.unused_data
    return b"".join(parts)


def _refuse_too_large(size: int, most: int, limits: Limits) -> None:
    """Raise if a body that inflates to *size* bytes or more is too large, or much larger than what was sent."""
    if size > limits.body:
        raise BodyTooLarge(limits.body)
    if size > most:
        raise InflatesTooFar(limits.inflation)


async def _next(content: StreamReader) -> bytes:
    try:
        return await content.readany()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise InvalidRequest("The request body is not valid HTTP.") from error


def renamed(body: bytes, name: str) -> bytes:
    """Return the JSON object *body* with *name* for its model and every other byte as it is; *body* if it names none.

    Of a member that occurs twice the last one counts, as it does for parsers.
    """
    try:
        text = body.decode()
        field = next((each for each in reversed(members(text)) if each.key == "model"), None)
    except (ValueError, RecursionError):
        return body
    if field is None:
        return body
    return b"".join([text[: field.start].encode(), json.dumps(name).encode(), text[field.end :].encode()])

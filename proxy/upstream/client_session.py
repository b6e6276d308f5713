"""Sessions of aiohttp's client that add nothing to a request and share nothing between callers but sockets.

Each class here prevents one thing that aiohttp does and has no setting for: adding a header, copying a body, leaving a
connection open, hiding a failure. Where a private member of aiohttp is used, the class names it and why.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from multidict import CIMultiDict

from proxy.imports import lacks_certificates, read_certificates
from proxy.upstream.connection_pool import MAX_LINE, READ_BUFFER


def open_session(keep_alive: float) -> aiohttp.ClientSession:
    """Return a session whose idle connections are closed after *keep_alive* seconds; 0 closes them at once."""
    pooling: dict[str, Any] = {"keepalive_timeout": keep_alive}
    if not keep_alive:
        pooling = {"force_close": True}
    # Each default that is overridden here would let one caller's state, or this machine's, reach another's request:
    # cookies by host name, 100 connections for all callers, proxies and netrc of the environment, decoded bodies.
    return aiohttp.ClientSession(
        connector=Connector(limit=0, ttl_dns_cache=30, **pooling),
        cookie_jar=aiohttp.DummyCookieJar(),
        request_class=VerbatimRequest,
        response_class=AbortingResponse,
        auto_decompress=False,
        trust_env=False,
        read_bufsize=READ_BUFFER,
        max_line_size=MAX_LINE,
        max_field_size=MAX_LINE,
    )


# Without this, aiohttp would add the Content-Type of the body object.
_SKIPPED: CIMultiDict[None] = CIMultiDict({"Content-Type": None})


class VerbatimRequest(aiohttp.ClientRequest):
    """A request to which no ``Accept``, ``Accept-Encoding``, ``User-Agent`` or ``Content-Type`` is added.

    Both methods override aiohttp's (https://github.com/aio-libs/aiohttp/blob/master/aiohttp/client_reqrep.py). Its
    public ``skip_auto_headers`` has the same effect, but builds and copies two mappings for each request.
    """

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:  # noqa: ARG002
        """Add no header."""
        # Private: aiohttp reads it when the body is attached, and would add its Content-Type then.
        self._skip_auto_headers = _SKIPPED

    def update_headers(self, headers: Any) -> None:
        """Set ``Host``, then *headers* in their order: one copy, made in C."""
        self.headers: CIMultiDict[str] = CIMultiDict((("Host", self.url.host_port_subcomponent or ""),))
        self.headers.extend(headers)


class AbortingResponse(aiohttp.ClientResponse):
    """A response whose connection is reset, not closed, if it is given up.

    aiohttp closes it (https://github.com/aio-libs/aiohttp/blob/master/aiohttp/client_reqrep.py), and a closed transport
    first sends its buffer: an upload would continue to an upstream whose answer has no reader.

    ``known`` and ``whole`` are members of a ``PooledResponse`` that ``DirectReply`` reads; they are never set here.
    """

    known: ClassVar[None] = None
    whole = b""

    def close(self) -> None:
        """Reset the connection if it is still in use. aiohttp calls this, too, if the wait for the head fails."""
        connection = self.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        super().close()


class FailingProtocol(ResponseHandler):
    """A connection whose failure also reaches the reader of its body, which would wait forever after broken framing.

    ``_payload`` is the body that is being read; aiohttp has no public name for it:
    https://github.com/aio-libs/aiohttp/blob/master/aiohttp/client_proto.py
    """

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail the body that is being read if the connection was reset."""
        body = self._payload
        if exc is not None and isinstance(body, aiohttp.StreamReader) and not body.is_eof():
            # aiohttp treats every end of a close-delimited body as a clean one, unless an exception is set before.
            body.set_exception(aiohttp.ClientPayloadError("the connection was reset"))
        super().connection_lost(exc)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail the connection and the body that is being read from it."""
        body = self._payload
        super().set_exception(exc, exc_cause or exc)
        if isinstance(body, aiohttp.StreamReader) and not body.is_eof() and body.exception() is None:
            if not isinstance(exc, aiohttp.SocketTimeoutError):
                exc = aiohttp.ClientPayloadError("the body's framing is broken")
            body.set_exception(exc)


class Connector(aiohttp.TCPConnector):
    """A pool of such connections, which has the certificates of authorities before one of them needs these.

    aiohttp has no setting for the class of connections, only the private ``_factory``. ``_create_connection`` is where
    it opens them: https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/connector.py
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = cast("functools.partial[ResponseHandler]", functools.partial(FailingProtocol, loop=self._loop))

    async def _create_connection(self, req: aiohttp.ClientRequest, *options: Any) -> ResponseHandler:
        """Return a new connection for *req*."""
        if req.is_ssl() and lacks_certificates():
            await asyncio.to_thread(read_certificates)
        return await super()._create_connection(req, *options)


class BytesBody(payload.Payload):
    """A body in memory, of any size, sent in one write.

    aiohttp's own payload of bytes warns about more than 1 MiB:
    https://github.com/aio-libs/aiohttp/blob/master/aiohttp/payload.py. ``_size``, ``_value`` and ``_autoclose`` are the
    members that every subclass there has to set or read.
    """

    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body."""
        await writer.write(self._value)

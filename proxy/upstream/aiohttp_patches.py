"""The places where aiohttp's client would add, copy or linger, and this proxy must not."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from multidict import CIMultiDict

# Only names a body object may not bring along; there is nothing else aiohttp would fill in.
_SKIPPED: CIMultiDict[None] = CIMultiDict({"Content-Type": None})


class VerbatimRequest(aiohttp.ClientRequest):
    """A request to which no ``Accept``, ``Accept-Encoding``, ``User-Agent`` or ``Content-Type`` is added."""

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:  # noqa: ARG002
        """Add nothing; what the client left out stays out."""
        self._skip_auto_headers = _SKIPPED

    def update_headers(self, headers: Any) -> None:
        """``Host``, then the given headers in their order; one copy at C speed."""
        self.headers: CIMultiDict[str] = CIMultiDict((("Host", self.url.host_port_subcomponent or ""),))
        self.headers.extend(headers)


class AbortingResponse(aiohttp.ClientResponse):
    """A response that resets its connection when given up, instead of flushing what nobody waits for."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """The response once its head is here; the connection is reset if the wait is cancelled or fails."""
        try:
            return await super().start(connection)
        except BaseException:
            _reset(connection)
            raise

    def abort_unfinished(self) -> None:
        """Reset the connection unless the body has been read to its end."""
        if self._connection is not None:
            _reset(self._connection)
        self.close()


class FailingProtocol(ResponseHandler):
    """A connection whose failure reaches the body's reader too: broken framing would leave that one waiting."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail the body that is being read if the connection was reset."""
        body = self._payload
        if exc is not None and isinstance(body, aiohttp.StreamReader) and not body.is_eof():
            # aiohttp takes every end of a close-delimited body for a clean one; the exception must be there before.
            body.set_exception(aiohttp.ClientPayloadError("the connection was reset"))
        super().connection_lost(exc)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail the connection and the body that is being read from it."""
        body = self._payload
        super().set_exception(exc, exc_cause or exc)
        if isinstance(body, aiohttp.StreamReader) and not body.is_eof() and body.exception() is None:
            silent = isinstance(exc, aiohttp.SocketTimeoutError)
            body.set_exception(exc if silent else aiohttp.ClientPayloadError("the body's framing is broken"))


class Connector(aiohttp.TCPConnector):
    """A pool of such connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = cast("functools.partial[ResponseHandler]", functools.partial(FailingProtocol, loop=self._loop))


class BytesBody(payload.Payload):
    """A body held in memory, of any size, sent in one write."""

    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body."""
        await writer.write(self._value)


def _reset(connection: Connection) -> None:
    transport = connection.transport
    if transport is not None:
        transport.abort()

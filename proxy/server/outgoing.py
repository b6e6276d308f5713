"""One answer to one client, written straight to its connection: nothing is added that the caller did not ask for."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from proxy.core.errors import UllageError

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_JOINED: Final = 2**14
_HTTP_1_1: Final = (1, 1)
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for an end by RST: on, for no second."""


class ClientLeft(Exception):
    """The client went away or stopped taking its answer."""


class UnfitHeader(UllageError):
    """A header that cannot be written without changing what the client reads after it."""

    status = 502
    code = "upstream_invalid_header"


class Outgoing:
    """What aiohttp's connection loop needs of a response, and a writer for the handler.

    ``status`` is 0 until the head is written. After ``finish`` or ``break_off`` nothing more can be written.
    """

    __slots__ = (
        "_chunked",
        "_close_delimited",
        "_ended",
        "_flush",
        "_head",
        "_patience",
        "_request",
        "_transport",
        "bodyless",
        "keep_alive",
        "status",
    )

    def __init__(self, request: web.BaseRequest, patience: float) -> None:
        self._request = request
        self._transport = request.transport
        self._patience = patience
        self._chunked = False
        self._close_delimited = False
        self._ended = False
        self._head = b""
        self._flush: asyncio.Handle | None = None
        self.bodyless = request.method == "HEAD"
        self.keep_alive = request.keep_alive
        self.status = 0

    def start(
        self, status: int, headers: Iterable[tuple[str, str]], *, sized: bool, close_delimited: bool = False
    ) -> None:
        """Write the head; *sized* says that *headers* hold a content-length. Raises ``UnfitHeader``.

        A body that is not sized is chunked, or if *close_delimited* lasts until the connection ends.
        """
        if status in (204, 304) or self._request.method == "HEAD":
            self.bodyless = True
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if not sized and not self.bodyless:
            if self._request.version >= _HTTP_1_1 and not close_delimited:
                self._chunked = True
                lines.append("transfer-encoding: chunked")
            else:
                self._close_delimited = True
                self.keep_alive = False
        if not self.keep_alive:
            lines.append("connection: close")
        elif self._request.version < _HTTP_1_1:
            lines.append("connection: keep-alive")
        text = "\r\n".join(lines)
        breaks = len(lines) - 1
        if (text.count("\n"), text.count("\r"), text.count("\0")) != (breaks, breaks, 0):
            raise UnfitHeader("A header of the upstream's answer holds a line break or a NUL.")
        self.status = status
        # Held until the handler waits for something: a body that is already here leaves in the same segment.
        self._head = text.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
        self._flush = asyncio.get_running_loop().call_soon(self._send_head)

    def switch(self, headers: Iterable[tuple[str, str]]) -> None:
        """Write the head of a 101: from here on the connection is no longer HTTP. Raises ``UnfitHeader``."""
        self.keep_alive = True
        self.start(101, headers, sized=True)

    def write(self, chunk: bytes) -> None:
        """Write body bytes; check ``paused`` afterwards."""
        if self.bodyless or not chunk:
            return
        if not self._chunked:
            self._send(chunk)
        elif len(chunk) <= _JOINED:
            self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        else:
            self._send(b"%x\r\n" % len(chunk))
            self._send(chunk)
            self._send(b"\r\n")

    @property
    def paused(self) -> bool:
        """Whether the client reads slower than it is written to: then ``drain`` before reading on."""
        return self._request.protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the client has read most of it. Raises ``ClientLeft`` when it takes too long or is gone."""
        try:
            async with asyncio.timeout(self._patience):
                await self._request.writer.drain()
        except (TimeoutError, ConnectionError) as error:
            self.abort()
            raise ClientLeft from error

    def finish(self) -> None:
        """The body is complete."""
        self._ended = True
        if self._chunked:
            self._send(b"0\r\n\r\n")
        elif self._head:
            self._send(b"")

    def break_off(self, last: bytes = b"") -> None:
        """End the connection so that the client sees the answer is incomplete, after what was written and *last*."""
        if last:
            self.write(last)
        elif self._head:
            self._send(b"")
        if self._close_delimited and not last:
            self._reset_at_close()
        self._ended = True
        self.keep_alive = False
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection and everything that waits to be sent."""
        self._ended = True
        self._take_head()
        self.keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or given up."""
        return self._ended

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing: the head is written by ``start``."""

    async def write_eof(self) -> None:
        """Nothing: the end is written by ``finish``."""

    def _reset_at_close(self) -> None:
        """Let the connection end by a reset: an orderly end would say that the body is complete."""
        held: socket.socket | None = self._transport.get_extra_info("socket") if self._transport is not None else None
        if held is not None and held.fileno() >= 0:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _send(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientLeft
        if self._head:
            data = self._take_head() + data
        transport.write(data)

    def _send_head(self) -> None:
        head = self._take_head()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(head)

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        return head

"""Writes one answer to a client, directly to its connection, with the given headers and no others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final, TypeVar

from proxy.core.apis.sse import NewestEvent, StreamEnd
from proxy.core.apis.usage import UsageTap
from proxy.core.errors import Overloaded, UllageError, error_body
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import INTERNAL_ERROR, NO_USAGE, Report, Usage, response_headers
from proxy.engine import ports
from proxy.engine.include_usage import UsageHider
from proxy.server.incoming import IncomingRequest
from proxy.tasks import Faults

T = TypeVar("T")

_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}
_JOINED: Final = 2**14
"""Bytes of the longest chunk that is copied into one write together with its frame; a larger one takes three writes."""

_HTTP_1_1: Final = (1, 1)
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for an end by RST: on, for 0 seconds (https://man7.org/linux/man-pages/man7/socket.7.html)."""


class ClientLeft(Exception):
    """The client went away or stopped reading its answer."""


class UnfitHeader(UllageError):
    """A header that cannot be written without changing what the client reads after it."""

    status = 502
    code = "upstream_invalid_header"


class ResponseWriter:
    """Writes one answer.

    ``status`` is 0 until the head is written. After ``finish`` or ``break_off`` nothing more can be written.
    """

    __slots__ = (
        "_chunked",
        "_close_delimited",
        "_ended",
        "_flush",
        "_head",
        "_patience",
        "_protocol",
        "_transport",
        "_version",
        "bodyless",
        "keep_alive",
        "status",
    )

    def __init__(self, request: IncomingRequest, patience: float) -> None:
        self._protocol = request.protocol
        self._version = request.version
        self._transport = request.protocol.transport
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
        self,
        status: int,
        headers: Iterable[tuple[str, str]],
        *,
        sized: bool,
        close_delimited: bool = False,
        is_followed: bool = False,
    ) -> None:
        """Write the head; *sized* says that *headers* hold a content-length. Raises ``UnfitHeader``.

        A body that is not sized is chunked, or if *close_delimited* lasts until the connection ends. With *is_followed*
        the head waits for ``write``, which comes next.
        """
        if status in (204, 304):
            self.bodyless = True
        lines = [_STATUS_LINES.get(status) or f"HTTP/1.1 {status} ", *map(": ".join, headers)]
        self._frame(lines, sized=sized, close_delimited=close_delimited)
        # A line break inside a header would begin another header, or another answer (response splitting). All headers
        # are searched at once.
        text = "\r\n".join(lines)
        breaks = len(lines) - 1
        if text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text:
            raise UnfitHeader("A header of the upstream's answer holds a line break or a NUL.")
        self.status = status
        # Sent when the loop runs next, so that a body that is already here goes into the same TCP segment.
        self._head = text.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
        if not is_followed:
            self._flush = asyncio.get_running_loop().call_soon(self._send_head)

    def _frame(self, lines: list[str], *, sized: bool, close_delimited: bool) -> None:
        """Add the headers to *lines* that state how the body ends, and whether the connection ends with it."""
        if not sized and not self.bodyless:
            if self._version >= _HTTP_1_1 and not close_delimited:
                self._chunked = True
                lines.append("transfer-encoding: chunked")
            else:
                self._close_delimited = True
                self.keep_alive = False
        if not self.keep_alive:
            lines.append("connection: close")
        elif self._version < _HTTP_1_1:
            lines.append("connection: keep-alive")

    def switch(self, headers: Iterable[tuple[str, str]]) -> None:
        """Write the head of a 101: from here on the connection is no longer HTTP. Raises ``UnfitHeader``."""
        self.keep_alive = True
        self.start(101, headers, sized=True)

    def write(self, chunk: bytes) -> bool:
        """Write body bytes. Return True if the client reads more slowly: then ``drain`` before reading on."""
        if chunk and not self.bodyless:
            if not self._chunked:
                self._send(chunk)
            elif len(chunk) <= _JOINED:
                self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            else:
                self._send(b"%x\r\n" % len(chunk))
                self._send(chunk)
                self._send(b"\r\n")
        elif self._head and self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._send_head)
        return self._protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the client has read most of it. Raises ``ClientLeft`` when it takes too long or is gone."""
        try:
            async with asyncio.timeout(self._patience):
                await self._protocol._drain_helper()
        except (TimeoutError, ConnectionError) as error:
            self.abort()
            raise ClientLeft from error

    def finish(self) -> None:
        """End a body that is complete."""
        self._ended = True
        if self._chunked:
            self._send(b"0\r\n\r\n")
        elif self._head:
            self._send(b"")

    def break_off(self, last: bytes = b"") -> None:
        """Write *last* and end the connection, so that the client sees that the answer is incomplete."""
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
        """Reset the connection and drop everything that waits to be sent."""
        self._ended = True
        self._head = b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self.keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def ended(self) -> bool:
        """True if the answer is complete or given up."""
        return self._ended

    def _reset_at_close(self) -> None:
        """Let the connection end by a reset: an orderly end would say that the body is complete."""
        if self._transport is None:
            return
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _send(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ClientLeft
        if self._head:
            data, self._head = self._head + data, b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._transport.write(data)

    def _send_head(self) -> None:
        with contextlib.suppress(ClientLeft):
            self._send(b"")


_REQUESTED_METHOD: Final = "access-control-request-method"


def is_preflight(request: IncomingRequest) -> bool:
    """True if a browser asks for permission instead of making its request.

    https://fetch.spec.whatwg.org/#http-cors-protocol
    """
    return request.method == "OPTIONS" and _REQUESTED_METHOD in request.headers


def cors_headers(origin: str) -> list[tuple[str, str]]:
    """Return the headers that let a page of *origin* read the answer and its headers."""
    return [
        ("access-control-allow-origin", origin),
        ("access-control-expose-headers", "*"),
        ("vary", "origin"),
    ]


def preflight_headers(request: IncomingRequest) -> list[tuple[str, str]]:
    """Return the headers that permit the requested method and headers for ten minutes."""
    headers = [("access-control-allow-methods", request.headers[_REQUESTED_METHOD]), ("access-control-max-age", "600")]
    requested = request.headers.get("access-control-request-headers")
    if requested:
        headers.append(("access-control-allow-headers", requested))
    return headers


class UpgradeRefused(UllageError):
    """A WebSocket was requested on a route that serves plain requests only.

    https://www.rfc-editor.org/rfc/rfc9110#section-15.5.22
    """

    status = 426
    code = "upgrade_refused"
    kind = "invalid_request_error"
    text = "This proxy does not speak WebSocket here; send POST /v1/responses with stream: true."


class ShuttingDown(UllageError):
    """The process ended before this answer was complete."""

    status = 503
    code = "server_shutting_down"
    text = "The proxy was shut down before this answer was complete. Try again."


class StreamBroken(UllageError):
    """The upstream went away in the middle of its answer."""

    status = 502
    code = "upstream_stream_error"
    text = "The upstream's stream broke before it was complete."


def without(headers: Sequence[tuple[str, str]], prefix: str) -> list[tuple[str, str]]:
    """Return *headers* without those whose name (in lower case) begins with *prefix*."""
    return [pair for pair in headers if not pair[0].lower().startswith(prefix)]


def own_headers(report: Report, faults: Faults) -> list[tuple[str, str]]:
    """Return the headers that *report* becomes; after a fault of ours only the outcome, so that there is an answer."""
    outcome = [("x-ullage-outcome", f"{report.outcome};{INTERNAL_ERROR}")]
    return faults.attempt("answer", report.request_id, partial(response_headers, report), outcome)


def refuse(
    out: ResponseWriter, error: UllageError, api: str, own: Sequence[tuple[str, str]], cors: Sequence[tuple[str, str]]
) -> None:
    """Write a whole answer with *error*, in the shape of *api*, and with the headers *own* and *cors*."""
    body = error_body(error, api)
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *own]
    if isinstance(error, Overloaded):
        headers.append(("retry-after", str(error.retry_after)))
    # Each of these statuses requires its header:
    # https://www.rfc-editor.org/rfc/rfc9110#section-15.5.2, https://www.rfc-editor.org/rfc/rfc9110#section-15.5.22
    if error.status == 401:
        headers.append(("www-authenticate", "Bearer"))
    if error.status == 426:
        headers.append(("upgrade", "HTTP/1.1"))
    out.start(error.status, [*headers, *cors], sized=True)
    out.write(body)
    out.finish()


def write_empty(out: ResponseWriter, status: int, headers: Sequence[tuple[str, str]]) -> None:
    """Write an answer without a body."""
    out.start(status, headers, sized=True)
    out.finish()


def last_event(error: UllageError, api: str) -> bytes:
    """Return the server-sent event that ends a stream which cannot be completed.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """
    # The blank line first ends an event that was cut in its middle.
    name = b"event: error\n"
    if api in ("chat", "gemini"):
        name = b""
    if api == "responses":
        body = json.dumps({"type": "error", "code": error.code, "message": error.message, "param": None}).encode()
    else:
        body = error_body(error, api)
    return b"\n\n" + name + b"data: " + body + b"\n\n"


class ReplyObserver:
    """Reads usage and late overflows of one answer, and hides usage from a client that did not request it.

    A fault in it is reported once and turns it off; the bytes still reach the client.
    """

    __slots__ = ("_end", "_ending", "_hider", "_is_on", "_newest", "_report", "_tap")

    def __init__(
        self,
        encoding: str,
        hider: UsageHider | None,
        ending: LateOverflowDetector | None,
        report: Callable[[Exception], None],
        *,
        is_events: bool,
        watches_end: bool,
    ) -> None:
        """*encoding* is the answer's content-encoding; *is_events*: it is a stream of events that can be read.

        *watches_end*: look for the last event of the stream, since only the connection's end shows where it ends.
        """
        self._hider = hider
        self._ending = ending
        self._report = report
        self._tap: UsageTap | None = None
        self._newest: NewestEvent | None = None
        self._end: StreamEnd | None = None
        self._is_on = True
        try:
            self._tap = UsageTap(encoding)
            if is_events:
                self._newest = NewestEvent()
            if watches_end:
                self._end = StreamEnd()
        except Exception as fault:  # noqa: BLE001 - observing an answer must not cost it
            self._turn_off(fault)

    @property
    def usage(self) -> Usage:
        """The newest figures of each kind; ``NO_USAGE`` after a fault."""
        if not self._is_on or self._tap is None:
            return NO_USAGE
        try:
            return self._tap.usage
        except Exception as fault:  # noqa: BLE001 - observing an answer must not cost it
            self._turn_off(fault)
            return NO_USAGE

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes for the client: *chunk* itself, or without the usage event that it did not request."""
        if not self._is_on or self._tap is None:
            return chunk
        pending: bytes | None = None
        try:
            if self._hider is not None:
                pending = self._hider.pending  # a fault in the middle of its work must not lose these bytes
            self._tap.feed(chunk)
            if self._ending is not None:
                self._ending.feed(chunk)
            if self._newest is not None:
                self._newest.feed(chunk)
            if self._end is not None:
                self._end.feed(chunk)
            if self._hider is None:
                return chunk
            return self._hider.feed(chunk)
        except Exception as fault:  # noqa: BLE001 - observing an answer must not cost it
            self._turn_off(fault)
            if pending is None:
                pending = self._hidden_rest()
            return pending + chunk

    def finish(self) -> tuple[bytes, bool]:
        """Return the bytes left at the end of the answer, and False if a watched stream came without its last event."""
        if not self._is_on:
            return b"", True
        rest = b""
        if self._hider is not None:
            rest = self._hidden_rest()
        end, newest = self._end, self._newest
        if end is None or newest is None or not self._is_on:
            return rest, True
        return rest, self._guarded(lambda: end.done and not newest.is_cut, otherwise=True)

    @property
    def has_final_event(self) -> bool:
        """True if the newest event of the stream is whole, and one that nothing follows."""
        newest = self._newest
        if not self._is_on or newest is None:
            return False
        return self._guarded(lambda: newest.is_final, otherwise=False)

    def _hidden_rest(self) -> bytes:
        hider = self._hider
        if hider is None:
            return b""
        return self._guarded(lambda: hider.pending, otherwise=b"")

    def _guarded(self, read: Callable[[], T], *, otherwise: T) -> T:
        """Return what *read* returns, or *otherwise* after a fault in it."""
        try:
            return read()
        except Exception as fault:  # noqa: BLE001 - observing an answer must not cost it
            self._turn_off(fault)
            return otherwise

    def _turn_off(self, fault: Exception) -> None:
        if self._is_on:
            self._report(fault)
        self._is_on = False


async def relay_body(
    reply: ports.Reply, out: ResponseWriter, observer: ReplyObserver, first: bytes, *, is_stream: bool
) -> str:
    """Pass *first* and the rest of *reply* through *observer* to the client.

    Return the reason for the report if a stream ended without its last event, else an empty string.
    """
    chunk = first or await reply.next_chunk()
    while chunk:
        if out.write(observer.feed(chunk)):
            await out.drain()
        # ``pour`` returns when the client reads too slowly, and at the end: then ``next_chunk`` continues.
        if is_stream and reply.pour is not None:
            await reply.pour(lambda chunk: out.write(observer.feed(chunk)))
        chunk = await reply.next_chunk()
    rest, is_complete = observer.finish()
    if rest:
        out.write(rest)
    if is_complete:
        out.finish()
        return ""
    out.break_off()
    return "upstream_truncated"


def end_broken(out: ResponseWriter, observer: ReplyObserver, api: str, *, is_stream: bool, is_sized: bool) -> str:
    """End a body whose connection broke. Return the reason for the report; empty if nothing follows its newest event.

    A client sees an incomplete body as such; a stream gets a last event in the shape of *api*. A body that *is_sized*
    lacks bytes in any case.
    """
    rest, _ = observer.finish()
    out.write(rest)
    if observer.has_final_event and not is_sized:
        out.finish()
        return ""
    last = b""
    if is_stream:
        last = last_event(StreamBroken(), api)
    out.break_off(last)
    return StreamBroken.code

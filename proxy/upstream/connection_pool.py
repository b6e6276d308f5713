"""Carries POST requests over pooled connections at a fraction of what aiohttp's client costs.

aiohttp's connector dials: names, addresses, TLS and their errors are its own. Then ``transport.set_protocol`` puts a
``PooledConnection`` in the place of aiohttp's protocol. It writes a request in one go, feeds what comes to aiohttp's
parser (llhttp, in C) and returns the answer as soon as its head is complete; the body follows in the ``StreamReader``
that the parser fills. aiohttp's protocol learns of the connection's end, so that its connector can count and close it.

A connection carries one exchange at a time. No request is sent twice: the other side may close an idle connection at
the moment of the next request, and then the caller gets an error, since a POST may have had its effect.

======================== =================== ======================= ==============================
event                    idle                head awaited            body being read
======================== =================== ======================= ==============================
``post``                 head awaited        never                   never
an interim answer (1xx)  closed              head awaited            closed at the end
an answer's head         closed              body being read         closed at the end
the body's last byte     --                  --                      idle, or closed (see below)
invalid HTTP             closed              closed, ``InvalidHttp`` closed, the body fails
the other side closes    closed              closed, error           the end, if the body has no
                                                                     other; else the body fails
a reset                  closed              closed, error           closed, the body fails
silence                  closed              closed, timeout         closed, timeout
``PooledResponse.close`` --                  closed                  closed
======================== =================== ======================= ==============================

At the body's last byte a connection goes back to the pool, unless the answer forbids it (``Connection: close``,
HTTP/1.0, an upgrade), more came than the answer, or a part of the request is still unsent. A parser does not report
that it has the beginning of one more head, which would stand before the next answer. So the bytes behind the head are
counted, and of a chunked answer the last ones are compared.

A body is read through its ``StreamReader``, or poured: ``PooledResponse.pour`` passes each chunk to a function as soon
as it arrives, and its caller wakes when there is something else to do.

Time. No request sets a timer. Each connection notes when it last received bytes, and the pool checks all of them
several times within the shortest of its limits. Only the upstream's silence counts: the clock stops while a request is
being written, and while the client reads slower than the upstream sends.

Back-pressure. A body is in memory already and is written at once; what the socket does not take waits in the
transport. A body that is not read fills its ``StreamReader``, which pauses the parser and the transport.

One parser serves all of a connection's exchanges, unless a pause left its marks in it.

An upstream that puts no date or request id into its answers' heads, as many local servers do, repeats the same head but
for the length of the body. Such an answer bypasses the parser if all of it came at once.

Private names of aiohttp are used because it has no public ones for this: ``_tail`` of its protocol (bytes that came
early), ``_reading_paused`` of ``BaseProtocol`` (back-pressure), the buffer of a ``StreamReader``.
``pyproject.toml`` pins its minor version, and ``tests/upstream/test_connection_pool.py`` checks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Final

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import HttpResponseParser, RawResponseMessage
from yarl import URL

from proxy.core.http_headers import around_length, read_head
from proxy.upstream.pooled_response import KnownHead, PooledResponse
from proxy.upstream.targets import Timeouts

_LOG: Final = logging.getLogger(__name__)

Messages = Sequence[tuple[RawResponseMessage, aiohttp.StreamReader]]

READ_BUFFER: Final = 2**17
"""Bytes of a body that are buffered; twice as many unread ones pause the connection."""

MAX_LINE: Final = 2**15
"""Bytes of the longest status line and of the longest header: four times aiohttp's default."""

_END_OF_HEAD: Final = b"\r\n\r\n"
"""The last bytes of a head, and of a chunked body with its trailers.

https://www.rfc-editor.org/rfc/rfc9112#section-7.1
"""

SWITCHING: Final = 101
"""The status of an upgraded connection (https://www.rfc-editor.org/rfc/rfc9110#section-15.2.2)."""

_INTERIM: Final = frozenset({100, *range(102, 200)})
"""Answers before the answer (https://www.rfc-editor.org/rfc/rfc9110#section-15.2); 101 is an answer."""

_MOST_INTERIM: Final = 1_000
"""Interim answers before one answer. Each restarts the wait for it: a server that works for hours sends a few."""

_CHECKS: Final = 4
"""Checks of all connections within the shortest of the pool's limits: a timeout comes at most a quarter too late."""

_SLOWEST_CHECK: Final = 1.0
"""Seconds between two checks at most: some limits are minutes."""

_CHANCES: Final = 3
"""Heads of a connection that are remembered without a match: most providers put a date or an id into each of them."""

_JOINED: Final = 2**14
"""Bytes of the longest body that is copied behind its head into one buffer; a larger one is sent as a second buffer."""

_BODYLESS: Final = frozenset({204, 304})
"""Statuses of answers without a body, whatever length they state."""


class InvalidHttp(aiohttp.ClientError):
    """The other side's bytes are no HTTP answer."""


class PooledConnection(BaseProtocol):
    """One connection.

    ``response`` is the exchange under way, ``early`` are bytes that came before the first one. Times are the loop's:
    ``received_at`` of the last bytes, ``written_at`` of the request, ``waits_since`` of the request or the last interim
    answer, from which the limit for a complete head counts, however slowly its bytes come.
    """

    __slots__ = (
        "_behind_head",
        "_chances",
        "_chunked",
        "_dialled",
        "_handler",
        "_interim",
        "_known",
        "_pool",
        "_previous",
        "_reusable",
        "_was_paused",
        "early",
        "received_at",
        "response",
        "waits_since",
        "written_at",
    )

    def __init__(self, pool: ConnectionPool, dialled: Connection, handler: ResponseHandler) -> None:
        super().__init__(asyncio.get_running_loop())
        self._pool = pool
        self._dialled = dialled
        self._handler = handler
        self.response: PooledResponse | None = None
        self._reusable = False
        self._chunked = False
        self._behind_head = self._interim = 0
        self._previous = b""
        self._known: KnownHead | None = None
        self._chances = _CHANCES
        self.received_at = self.written_at = self.waits_since = 0.0
        self._renew_parser()
        # Bytes that came before the request belong to its answer: a full server may refuse before it reads anything.
        self.early = handler._tail
        self.transport = handler.transport
        if self.transport is None:
            raise aiohttp.ServerDisconnectedError
        self.transport.set_protocol(self)
        if self.early:
            self._resume_transport_reading()  # aiohttp may have paused it for bytes without a request

    def _renew_parser(self) -> None:
        self._was_paused = False
        self._parser = HttpResponseParser(
            self,
            self._loop,
            READ_BUFFER,
            payload_exception=aiohttp.ClientPayloadError,
            read_until_eof=True,
            auto_decompress=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
        )

    def data_received(self, data: bytes) -> None:
        """Parse *data*; it is empty if the parser continues after a pause."""
        self.received_at = self._loop.time()
        response = self.response
        if response is None:
            self.close()
            return
        if self._known is not None and not response.status and self._is_known(self._known, response, data):
            return
        assert self._parser is not None
        messages: Messages
        try:
            messages, _, _ = self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - as in aiohttp: the parser may raise anything for invalid bytes
            messages = self._before_excess(response, data, error)
            if not messages:
                return
        self._behind_head += len(data)
        if messages:
            self._heads_received(response, messages, data)
        if response.sink is not None:
            response.flow(self.received_at)
        if response.connection is None:
            return  # its last bytes were in the paused parser, and ``flow`` has read them
        if response.status and response.content.is_eof():
            self._complete(response, data)
        elif data:
            self._previous = data

    def _is_known(self, known: KnownHead, response: PooledResponse, data: bytes) -> bool:
        """Return True if *data* is a whole answer with the *known* head, and end the exchange with it."""
        if self._previous:
            return False
        try:
            start = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
            length = len(data) - start
            if data[:start] != b"%b%d%b" % (known.before, length, known.after):
                return False
        except Exception as fault:  # noqa: BLE001 - fail open: the parser reads what was not recognised
            self._forget(fault)
            return False
        self._chances = _CHANCES
        response.status, response.headers, response.raw_headers = known.status, known.headers, known.raw_headers
        response.known, response.whole = known, data[start:]
        if not response.answered.done():
            response.answered.set_result(None)
        self._give_back(response, is_exact=True)
        return True

    def _remember(self, response: PooledResponse, data: bytes) -> None:
        """Remember the head of *data*, a whole answer, so that later answers with the same head bypass the parser."""
        self._chances -= 1
        self._known = None
        if response.status in _BODYLESS:
            return
        try:
            bytes_of_head, size = read_head(data)
            parts = around_length(bytes_of_head, response.headers.getall("Content-Length", []))
        except Exception as fault:  # noqa: BLE001 - fail open: the parser reads a head that is not remembered
            self._forget(fault)
            return
        if parts is not None and size == len(data):
            length = size - len(bytes_of_head)
            self._known = KnownHead(*parts, response.status, response.headers, response.raw_headers, length)

    def _forget(self, fault: Exception) -> None:
        """Let the parser read all further answers, after a *fault* of our own."""
        _LOG.error("an answer's head was not recognised", exc_info=fault)
        self._known, self._chances = None, 0

    def _before_excess(self, response: PooledResponse, data: bytes, error: Exception) -> Messages:
        """Return the answer with which *data* begins, if it is whole and only the bytes behind it are no HTTP.

        Other clients accept such an answer, but the parser drops it when it raises *error*. If there is none, the
        exchange ends.
        """
        _, size = read_head(data)
        if not response.status and not self._previous and 0 < size < len(data):
            self._renew_parser()
            assert self._parser is not None
            with contextlib.suppress(Exception):  # the error of the whole is reported below
                messages: Messages = self._parser.feed_data(data[:size])[0]
                return messages
        invalid = InvalidHttp()
        invalid.__cause__ = error
        self.end(invalid)
        return ()

    def _heads_received(self, response: PooledResponse, messages: Messages, data: bytes) -> None:
        """Complete *response* with the answer among *messages*, whose heads end in *data*."""
        end = 0
        for message, body in messages:
            at = data.find(_END_OF_HEAD, end)
            end = at + len(_END_OF_HEAD)
            if response.status:
                # A second answer to one request: the next one could be taken for that of the next request.
                self._reusable = False
            elif message.code not in _INTERIM:
                # If a head's last four bytes came in two pieces, the number of bytes behind it is unknown.
                self._interim = 0
                self._reusable = at >= 0 and not message.should_close and message.code != SWITCHING
                self._chunked = message.chunked
                self._behind_head = len(data) - end
                response.status = message.code
                response.headers = message.headers
                response.raw_headers = message.raw_headers
                response.content = body
                if not response.answered.done():
                    response.answered.set_result(None)
            else:
                self.waits_since = self.received_at
                self._interim += 1
                if self._interim > _MOST_INTERIM:
                    self.end(InvalidHttp())
                    return

    def _complete(self, response: PooledResponse, data: bytes) -> None:
        """Give the connection back to the pool, or close it if it cannot carry another exchange.

        *data* are the bytes that completed the answer, none if they were in the parser.
        """
        is_exact = self._behind_head == response.content.total_bytes
        if self._chunked:
            is_exact = (self._previous[-len(_END_OF_HEAD) :] + data).endswith(_END_OF_HEAD)
        elif self._chances and self._reusable and not self._previous:
            self._remember(response, data)
        self._previous = b""
        self._give_back(response, is_exact=is_exact)

    def _give_back(self, response: PooledResponse, *, is_exact: bool) -> None:
        """End the exchange of *response*. The connection can carry another if the answer was *is_exact*ly its bytes."""
        response.connection = None
        self.response = None
        assert self.transport is not None
        if self.transport.get_write_buffer_size():
            # The upstream answered before it read the whole body: the rest must not precede the next request.
            self.transport.abort()
        elif self._reusable and is_exact and self._pool.keeps_connections:
            if self._was_paused:
                # A pause leaves flags in the parser that would stop it in the next answer.
                self._renew_parser()
            self._pool.idle[self] = None
        else:
            self.transport.close()

    def end(self, error: Exception) -> None:
        """Reset the connection; an exchange under way fails with *error*, after the bytes that came before."""
        self._fail(error)
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, error: Exception) -> None:
        response, self.response = self.response, None
        if response is None:
            return
        response.connection = None
        if not response.answered.done():
            response.error = error
            response.answered.set_result(None)
        elif not response.content.is_eof() and response.content.exception() is None:
            response.content.set_exception(error)
        response.flow(self.received_at)

    def close(self) -> None:
        """Close the connection, which must be idle; reset it if it was closed before."""
        if self.transport is None:
            return
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self.transport.close()

    def check(self, now: float, timeouts: Timeouts) -> None:
        """End the exchange, or the idle connection, if the other side has been silent for too long."""
        response = self.response
        if response is None:
            if now - self.received_at > timeouts.keep_alive:
                self.close()
            return
        if response.status:
            if self._reading_paused:
                self.received_at = now
            is_over = now - self.received_at > timeouts.idle
        else:
            # Not by ``pause_writing``, which ``writelines`` fails to call up to Python 3.12.8 and 3.13.1:
            # https://github.com/python/cpython/issues/127655
            if self.transport is not None and self.transport.get_write_buffer_size():
                self.waits_since = now
            is_over = now - self.waits_since > timeouts.first_byte or now - self.written_at > timeouts.total
        if is_over:
            self.end(aiohttp.SocketTimeoutError())

    def pause_reading(self) -> None:
        """Stop reading; the body's buffer is full."""
        self._was_paused = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on reading. The body calls this at each read: it does nothing unless there was a pause."""
        if self._was_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the exchange: a clean end completes a body that has no other."""
        if exc is None and self._parser is not None:
            # It raises if the body is incomplete; the exchange fails below.
            with contextlib.suppress(Exception):
                self._parser.feed_eof()
        self._fail(aiohttp.ServerDisconnectedError())
        self._pool.remove(self)
        super().connection_lost(exc)
        self._handler.connection_lost(exc)
        self._dialled.close()


class ConnectionPool:
    """The connections to one upstream. The one used last is used next, so that surplus ones reach their idle limit.

    *session* dials; its connector is closed after the pool. ``idle`` are the connections between two exchanges. An
    upstream with TLS may be behind the forward *proxy*, which is asked for a tunnel to it (CONNECT).
    """

    def __init__(self, session: aiohttp.ClientSession, origin: URL, timeouts: Timeouts, proxy: URL | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = session
        self._timeouts = timeouts
        # ``connect`` is for all steps, a forward proxy's answer among them; ``sock_connect`` would be for each of them.
        self._connect_timeout = aiohttp.ClientTimeout(total=None, connect=timeouts.connect)
        # Never sent: aiohttp's connector reads the address from a request, and has no other way to be given one.
        self._dialling = aiohttp.ClientRequest("POST", origin, loop=self._loop, session=session, proxy=proxy)
        self._connections: set[PooledConnection] = set()
        self.idle: dict[PooledConnection, None] = {}
        self.keeps_connections = timeouts.keep_alive > 0
        self._first = [f"Host: {origin.host_port_subcomponent or ''}"]
        if not self.keeps_connections:
            self._first.append("Connection: close")
        self._timer: asyncio.TimerHandle | None = None
        shortest = min(timeouts.first_byte, timeouts.idle, timeouts.total, timeouts.keep_alive or timeouts.idle)
        self._check_every = min(shortest / _CHECKS, _SLOWEST_CHECK)

    def head(self, url: URL, headers: Iterable[tuple[str, str]]) -> bytes:
        """Return the head of a POST to *url* up to the length of its body. Raises ``ValueError``."""
        lines = [f"POST {url.raw_path_qs} HTTP/1.1", *self._first, *map(": ".join, headers)]
        text = "\r\n".join(lines)
        breaks = len(lines) - 1
        if text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text:
            raise ValueError("a header to send holds a line break or a NUL")
        return text.encode("utf-8", "surrogateescape") + b"\r\nContent-Length: "

    async def post(self, head: bytes, body: bytes) -> PooledResponse:
        """Return the answer as soon as its head is here; *head* is one from ``head``.

        Raises what aiohttp's client does, and ``InvalidHttp``.
        """
        oldest = self._loop.time() - self._timeouts.keep_alive
        while self.idle:
            connection, _ = self.idle.popitem()
            transport = connection.transport
            is_open = transport is not None and not transport.is_closing()
            if is_open and connection.received_at >= oldest:
                break
            connection.close()
        else:
            connection = await self._dial()
        assert connection.transport is not None
        connection.received_at = connection.written_at = connection.waits_since = self._loop.time()
        response = connection.response = PooledResponse(connection, connection.end, self._loop.create_future())
        if len(body) <= _JOINED:
            connection.transport.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        else:
            connection.transport.writelines((b"%b%d\r\n\r\n" % (head, len(body)), body))
        if connection.early:
            early, connection.early = connection.early, b""
            connection.data_received(early)
        try:
            await response.answered
        except asyncio.CancelledError:
            response.close()
            raise
        if response.error is not None:
            raise response.error
        return response

    async def _dial(self) -> PooledConnection:
        connector = self._session.connector
        if connector is None:
            raise aiohttp.ClientConnectionError("the session is closed")
        try:
            dialled = await connector.connect(self._dialling, [], self._connect_timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error
        handler = dialled.protocol
        assert handler is not None
        try:
            connection = PooledConnection(self, dialled, handler)
        except aiohttp.ServerDisconnectedError:
            dialled.close()
            raise
        self._connections.add(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._check_every, self._check_all)
        return connection

    def remove(self, connection: PooledConnection) -> None:
        """Forget *connection*, which has ended."""
        self._connections.discard(connection)
        self.idle.pop(connection, None)

    def _check_all(self) -> None:
        """End all connections that have been silent for too long; run again later if any is left."""
        self._timer = None
        now = self._loop.time()
        for connection in tuple(self._connections):
            connection.check(now, self._timeouts)
        if self._connections:
            self._timer = self._loop.call_later(self._check_every, self._check_all)

    def close(self) -> None:
        """Reset all connections; exchanges under way fail."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in tuple(self._connections):
            connection.end(aiohttp.ClientConnectionError("the pool was closed"))

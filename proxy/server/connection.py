"""Client connections: up to a limit, each with aiohttp's parser and a loop that answers one request after the other.

aiohttp's connection parses, queues parsed requests, pauses a fast sender, closes an idle connection, and ends the
others at shut-down (https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py). Two parts of its work are
replaced here because they cost most: the loop that answers requests, and the parsing of repeated heads.

The loop is ``Connection.start``, the connection's only task. It waits for a request, calls the handler, and waits
again; aiohttp's own makes four objects and a task for each request. An exception ends this connection and no other. A
client that leaves cancels the task, and with it the call of the upstream.

A client repeats the same head, byte for byte but for the length of its body. Such a head is compared (``RepeatedHead``)
and not parsed, and the body bypasses the parser. The loop is woken when the body is complete. If that takes longer than
``GRACE``, or if the body is long, it is read as it arrives instead, under its limits and deadlines.

That is possible only while the parser is between two requests, which it does not report. So ``_fed`` counts the bytes
that it got of the request that begins with ``_opening``, and the next request checks whether they were exactly one
request. They were not after a chunked body, for example, or after requests that were sent without waiting.

==================== ====================== ======================== ==========================
event                idle                   a request is under way   a body is arriving beside
                                                                     the parser
==================== ====================== ======================== ==========================
the same head again  woken, or arriving     parsed and queued        bytes of the body
other bytes          parsed: under way, or  parsed: its body, or     bytes of the body; those
                     a part of a head       a request that waits     behind it are parsed
the body's end       --                     --                       woken, or under way
the answer's end     --                     idle; the next request;  its rest is read for a
                                            or closed                while, then closed
the client leaves    closed                 cancelled                cancelled, or forgotten
the keep-alive time  ended in order         nothing                  nothing
shut-down            ended in order, later  see ``Drain``            see ``Drain``
==================== ====================== ======================== ==========================

Private names of aiohttp are used, because its public ones cannot replace the loop: the queue (``_messages``,
``_waiter``), flow control (``_reading_paused``, ``_buffer_paused``), timers (``_keepalive_*``) and states that its own
methods read (``_request_in_progress``, ``_handler_waiter``, ``_upgraded``). ``pyproject.toml`` pins its minor version,
and ``tests/server/test_connection.py`` checks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from msgspec import structs

from proxy.core.http_headers import LONGEST_HEAD, read_head
from proxy.server.access import Caller
from proxy.server.closing_answers import FULL, HEAD_TOO_LARGE, OUT_OF_DESCRIPTORS, UNREADABLE
from proxy.server.config import Limits
from proxy.server.incoming import (
    ArrivingBody,
    HeadLimit,
    IncomingRequest,
    RepeatedHead,
    is_head_too_large,
    parsed_request,
    repeated_head,
)
from proxy.server.response import ResponseWriter
from proxy.tasks import Faults

_LOG: Final = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[ResponseWriter]]
"""Answers a request with the given writer, or with a new one."""

_PIPELINED: Final = 2
"""Requests that may wait on a connection for the one before them.

aiohttp's 32 (https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py) would be 32 heads in memory.
"""

_MOST_EXPECTED: Final = 2**20
"""Bytes of the longest body that may bypass the parser; a longer one is counted against the limits as it arrives.

Uncounted is only what all connections can receive within ``GRACE``. A long agent session has 400 KB; the parser would
copy it once more, which takes 0.3 ms.
"""

_MOMENT: Final = 1.0
"""Seconds since its last answer, or its beginning, in which a connection may bring a request at any time."""


class Connection(web.RequestHandler):
    """One client connection. *handle* answers its requests, *refusals* counts unreadable ones by reason.

    ``request`` is the one under way; ``caller`` is its sender if its head is a repeated one, else None. ``task`` is the
    one in which all requests are answered.
    """

    __slots__ = (
        "_body",
        "_faults",
        "_fed",
        "_first",
        "_idle_since",
        "_keep_alive",
        "_most",
        "_opening",
        "_refusals",
        "_repeated",
        "caller",
        "handle",
        "request",
        "task",
    )

    def __init__(
        self,
        server: web.Server,
        handle: Handler,
        faults: Faults,
        refusals: Counter[str],
        limits: Limits,
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._most = min(_MOST_EXPECTED, limits.body)
        self._faults = faults
        self.handle = handle
        self._refusals = refusals
        self.request: IncomingRequest | None = None
        self.caller: Caller | None = None
        self.task: asyncio.Task[Any] | None = None
        self._opening = b""
        self._fed = 0
        self._first: tuple[IncomingRequest, Caller] | None = None
        self._repeated: tuple[RepeatedHead, Caller] | None = None
        self._body: ArrivingBody | None = None
        self._idle_since = self._loop.time()
        self._keep_alive = limits.keep_alive
        # aiohttp has no setting for the size of a whole head, nor for how many parsed requests wait:
        # https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/web_protocol.py.
        self._parser = cast("Any", HeadLimit(self._parser, limits.head))
        self._max_msg_queue_size = _PIPELINED
        self._msg_queue_resume_size = _PIPELINED - 1

    def answer_with(self, handle: Handler) -> None:
        """Have *handle* answer the next request, and check its sender again."""
        if self._body is not None:
            self._body.stream()  # before the head is forgotten with which its request begins
        self.handle = handle
        self.caller = self._first = self._repeated = None

    @property
    def idle(self) -> bool:
        """True if no request is waiting or answered on it; one may be arriving."""
        return self.request is None and not self._messages and self._body is None

    @property
    def expects_request(self) -> bool:
        """True if a request is under way on it, or may be on its way to it: it was used or new a moment ago."""
        if not self.idle:
            return True
        # Without a waiter the connection is ending.
        return self._waiter is not None and self._loop.time() - self._idle_since < _MOMENT

    def end_if_idle(self) -> bool:
        """End the connection in order if no request is being read, waiting or answered on it. Return True if it ends.

        What the client has sent meanwhile is dropped: it sees the end of the connection, and no reset.
        """
        waiter = self._waiter
        if not self.idle or waiter is None or waiter.done():
            return False
        self._end_next()
        waiter.set_result(None)
        return True

    def refuse(self, answer: bytes) -> None:
        """Answer a new connection before its first request, and end it in order."""
        self._end_next()
        if self.transport is not None:
            self.transport.write(answer)

    def _end_next(self) -> None:
        """Have the loop end the connection when it runs next, and drop what arrives."""
        self._close = True
        self._messages.append(cast("Any", (None, EMPTY_PAYLOAD)))

    def remember(self, caller: Caller) -> None:
        """Note that requests with the same head as the one under way are *caller*'s, if that is allowed."""
        request = self.request
        if request is not None and caller.may_repeat:
            self._first = structs.replace(request, content=EMPTY_PAYLOAD), caller

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """Begin or continue a request with *data*, which is empty if reading resumes after a pause."""
        if self._close:
            return  # the connection is ending
        if self._body is not None:
            data = self._body_received(self._body, data)
        if data and self.request is None and not self._messages:
            try:
                if (not self._fed or self._has_ended()) and self._begin_repeated(data):
                    return
            except Exception as fault:  # noqa: BLE001 - fail open: the parser reads what was not recognised
                self._opening = b""
                self._faults.report("after", "", fault)
        self._fed += len(data)
        super().data_received(data)

    def _has_ended(self) -> bool:
        """Return True if the parser got exactly one request, whose head is recognised from here on."""
        head, size = read_head(self._opening)
        if self._fed != size:
            return False
        self._opening, self._fed = b"", 0
        if self._first is not None:
            (request, caller), self._first = self._first, None
            repeated = repeated_head(head, request)
            if repeated is not None:
                self._repeated = repeated, caller
        return True

    def _begin_repeated(self, data: bytes) -> bool:
        """Wake the loop with the request that *data* begins. Return False if its head is not the repeated one."""
        self._opening = data[:LONGEST_HEAD]
        waiter = self._waiter
        if self._repeated is None or waiter is None or waiter.done():
            return False
        head, caller = self._repeated
        body_span = head.match(data)
        if body_span is None or body_span[1] > self._most:
            return False
        start, length = body_span
        end = start + length
        self._opening = b""
        self.caller = caller
        if end > len(data):
            # Not copied before it is joined.
            self._body = ArrivingBody(memoryview(data)[start:], length, partial(self._wake, length), self)
            return True
        self._wake(length, data[start:end], EMPTY_PAYLOAD)
        if end < len(data):
            self._fed = len(data) - end
            super().data_received(data[end:])
        return True

    def _wake(self, length: int, body: bytes | None, content: StreamReader) -> None:
        """Wake the loop with a request that has the repeated head and *length* bytes of *body* or *content*."""
        waiter = self._waiter
        if self._repeated is None or waiter is None or waiter.done():
            return  # the connection has ended
        request = structs.replace(self._repeated[0].request, content=content, content_length=length, body=body)
        self._messages.append(cast("Any", (request, content)))
        waiter.set_result(None)

    def _body_received(self, body: ArrivingBody, data: bytes) -> bytes:
        """Add *data* to the *body* that bypasses the parser. Return the bytes behind it."""
        rest = body.add(data)
        if body.missing == 0:
            self._body = None
        return rest

    def _process_keepalive(self) -> None:
        """End the connection in order if it has been idle for its time. If it is not idle, look again later.

        aiohttp's own closes it at once. A request that the client sends at that moment would be answered by a reset.
        """
        self._keepalive_handle = None
        if self._force_close:
            return
        if not self.idle:
            self._keepalive_handle = self._loop.call_later(self._keepalive_timeout, self._process_keepalive)
        elif self._loop.time() < self._next_keepalive_close_time:
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)
        else:
            self.end_if_idle()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop waiting for a body."""
        if self._body is not None:
            self._body.cancel()
        super().connection_lost(exc)

    def pause_reading(self) -> None:
        """Stop reading: the buffer of a body is full. Pause the parser, too, if the body comes through it."""
        if self._body is None:
            super().pause_reading()
            return
        self._reading_paused = True
        self._pause_transport_reading()

    # The loop.

    async def start(self) -> None:
        """Answer this connection's requests until it ends. aiohttp makes this its task."""
        self.task = asyncio.current_task()
        try:
            while not self._force_close:
                if not self._messages:
                    # ``_waiter`` shows that the connection is idle: the keep-alive timer may end it.
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    self._waiter = None
                message, content = cast("Any", self._messages.popleft())
                request = message
                if not isinstance(message, IncomingRequest):
                    request = self._parsed(message, content)
                if request is None or not await self._answered(request):
                    break
                self._idle_since = self._loop.time()
                self._next_keepalive_close_time = self._idle_since + self._keep_alive
        except asyncio.CancelledError:
            self._waiter = None
            self.force_close()
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a connection: a bug ends this one and no other
            _LOG.error("connection failed", exc_info=error)
            self.force_close()
        if not self._force_close:
            await self._linger()
            self._end()

    async def _linger(self) -> None:
        """Tell the client that nothing more comes, and drop what it still sends until it closes, or for a while.

        An early close would reset the connection while the client is sending, and many clients do not look for an
        answer then: https://www.rfc-editor.org/rfc/rfc9112#section-9.6.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._close = True
        transport.resume_reading()
        transport.write_eof()
        await asyncio.sleep(self._lingering_time)  # cancelled if the client closes first

    def _end(self) -> None:
        """Close the connection when all written bytes are sent. aiohttp must not wait for this task, which ends."""
        self._task_handler = None
        if self.transport is not None:
            self.transport.close()

    async def _answered(self, request: IncomingRequest) -> bool:
        """Answer *request*. Return False if it was the last one of the connection."""
        self.request = request
        self._request_in_progress = True
        try:
            out = await self.handle(request)
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

    def _parsed(self, message: Any, content: StreamReader) -> IncomingRequest | None:
        """Return the request of a parsed *message*, or None if that is an error, which is answered here, or the end."""
        self.caller = None
        if message is None:
            return None
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        if not isinstance(message, RawRequestMessage):
            self._refuse(message.exc)
            return None
        return parsed_request(self, message, content)

    def _refuse(self, error: HttpProcessingError) -> None:
        """Answer bytes that are no request, and repeat none of them."""
        # The traceback's frames reference the last 256 KiB read, in a cycle that only the next collection would free.
        error.__traceback__ = None
        reason, answer = "not_http", UNREADABLE
        if is_head_too_large(error):
            reason, answer = "head_too_large", HEAD_TOO_LARGE
        self._refusals[reason] += 1
        if self.transport is not None:
            self.transport.write(answer)

    def _decline_upgrade(self) -> None:
        """Continue with HTTP after an answered request to upgrade to another protocol."""
        if self._messages or self._parser is None or self._payload_parser is not None:
            return
        self._parser.set_upgraded(False)
        self._upgraded = False
        tail, self._message_tail = self._message_tail, b""
        super().data_received(tail)
        if self._buffer_paused:
            self._resume_reading_if_drained()

    async def _discard(self, content: StreamReader) -> None:
        """Read the rest of a body for a while: an early close would reset the connection before the answer is read."""
        broken = (web.RequestPayloadError, HttpProcessingError, ConnectionError)
        with contextlib.suppress(TimeoutError, *broken):
            async with asyncio.timeout(self._lingering_time):
                while not content.is_eof():
                    await content.readany()


# All connections of a process.

_LEAST_RESERVE: Final = 16
"""Descriptors that requests under way need at least, for their upstreams and the store."""

_MOST_ENDING: Final = 256
"""Refused connections that are open until their clients have read why, and as many that end in order to make room.

A flood of others is closed at once.
"""


def descriptors_short(descriptor: int) -> int:
    """Return how many connections must be closed if a new one got *descriptor*; 0 if enough descriptors are free.

    The requests under way need a reserve for their upstreams and the store. A new connection gets the lowest free
    number, so a number inside the reserve shows that all below it are in use. The whole reserve is freed then, because
    the next connections get low numbers again, which show nothing about the reserve.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserve = max(_LEAST_RESERVE, limit // 8)
    if limit < 0 or descriptor < limit - reserve:
        return 0
    return descriptor - (limit - reserve) + reserve


class Listener(web.Server):
    """Makes connections up to the limit, and counts those that it refuses.

    ``refusals`` counts by reason: ``head_too_large``, ``not_http``; ``full`` for a connection above the limit, and
    ``made_room`` for an idle one that was closed in its favour. ``crowded`` counts connections that came when hardly
    any descriptor was left, ``accepted`` all. ``open`` are those that are not refused, the oldest first.
    """

    def __init__(self, handler: Handler, limits: Limits, faults: Faults) -> None:
        super().__init__(
            cast("Any", handler),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.first_request,
            lingering_time=2.0,
            max_line_size=limits.header,
            max_field_size=limits.header,
            max_headers=limits.fields,
            auto_decompress=False,
        )
        self.refusals: Counter[str] = Counter()
        options = {"loop": asyncio.get_running_loop(), **self._kwargs}
        self._make = partial(Connection, self, faults=faults, refusals=self.refusals, limits=limits, **options)
        self._handler = handler
        self._most = limits.connections
        self.open: dict[Connection, None] = {}
        self._leaving: set[Connection] = set()
        self._refused: set[Connection] = set()
        self.accepted = 0
        self.crowded = 0

    def connect(self) -> Connection:
        """Return a new connection: the factory for the event loop. aiohttp's own makes another class."""
        return self._make(handle=self._handler)

    def answer_with(self, handler: Handler) -> None:
        """Have *handler* answer from now on, also on open connections, which check their next sender again."""
        self._handler = handler
        for connection in self.connections:
            cast("Connection", connection).answer_with(handler)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection. Above the limit the oldest idle one is closed, or else the new one is refused.

        The same holds for descriptors: without any left uvloop drops new connections silently, and asyncio tries to
        accept them again without end.
        """
        super().connection_made(handler, transport)
        self.accepted += 1
        short = descriptors_short(transport.get_extra_info("socket").fileno())
        crowded = short > 0
        self.crowded += crowded
        has_room = len(self.open) < self._most and not crowded
        if crowded:
            self._close_leaving()
        while not has_room or len(self._leaving) < short:
            if not self._make_room(crowded=crowded):
                break
            has_room = True
        if has_room:
            self.open[cast("Connection", handler)] = None
            return
        self.refusals["full"] += 1
        self._refuse(cast("Connection", handler), crowded=crowded)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Remove a connection."""
        self.open.pop(cast("Connection", handler), None)
        self._leaving.discard(cast("Connection", handler))
        self._refused.discard(cast("Connection", handler))
        super().connection_lost(handler, exc)

    def end_idle(self) -> None:
        """End in order all connections on which no request is under way."""
        for connection in list(self.open):
            connection.end_if_idle()

    def _refuse(self, connection: Connection, *, crowded: bool) -> None:
        """Answer a new connection with 503, and close it at once if it is *crowded* or if many have been refused."""
        answer = FULL
        if crowded:
            answer = OUT_OF_DESCRIPTORS
        connection.refuse(answer)
        if crowded or len(self._refused) >= _MOST_ENDING:
            connection.force_close()
        else:
            self._refused.add(connection)

    def _close_leaving(self) -> None:
        """Close the connections at once that are ending in order: their descriptors are needed."""
        for connection in list(self._leaving):
            connection.force_close()

    def _make_room(self, *, crowded: bool) -> bool:
        """End the oldest idle connection, at once if *crowded* or if many are ending. Return False if none is idle."""
        idle = next((connection for connection in self.open if connection.idle), None)
        if idle is None:
            return False
        del self.open[idle]
        self._leaving.add(idle)
        self.refusals["made_room"] += 1
        if crowded or len(self._leaving) > _MOST_ENDING or not idle.end_if_idle():
            idle.force_close()
        return True

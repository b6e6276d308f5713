"""HTTP out: bytes in, bytes out, on pooled sessions that share nothing between callers but sockets."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, cast

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from proxy.core.errors import Overloaded, UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX
from proxy.pipe import Pipe
from proxy.upstream.aiohttp_patches import AbortingResponse, BytesBody, Connector, VerbatimRequest
from proxy.upstream.paths import Base

_HOP_BY_HOP: Final = frozenset(name.encode() for name in HOP_BY_HOP)
_OWN_PREFIX: Final = OWN_PREFIX.encode()

# A connection that was never established carried nothing: trying again cannot bill anybody twice.
_CONNECT_PAUSES: Final = (0.05, 0.2)

_NO_MORE: Final = 0.0
"""Stands behind the pauses: after the last attempt there is none."""

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)

SWITCHING: Final = 101

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

Body = bytes | AsyncIterator[bytes] | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to connect, to the answer's head once the request is sent, between two bytes of its body, and for all.

    ``keep_alive`` is how long an idle connection is kept for another request.
    """

    connect: float = 5.0
    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 3600.0
    keep_alive: float = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """One upstream. ``api_key`` replaces the client's credentials; without one the client's own go through.

    ``headers`` are added to every request and win over the client's; ``proxy`` is the URL of a forward proxy.
    """

    name: str
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    api_key_header: str = "authorization"
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    proxy: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)


class DirectReply:
    """An answer whose head has arrived: ``ports.Reply`` over an aiohttp response."""

    __slots__ = ("_end", "_loop", "_response", "_timeouts", "_upstream", "close_delimited", "headers", "status")

    def __init__(self, response: AbortingResponse, upstream: str, timeouts: Timeouts) -> None:
        self._response = response
        self._upstream = upstream
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeouts.total
        self.status = response.status
        self.headers: Sequence[tuple[str, str]] = end_to_end(response)
        self.close_delimited = is_close_delimited(response)
        connection = response.connection
        if connection is not None and connection.protocol is not None and response.status != SWITCHING:
            # aiohttp has one read timeout for head and body; models think long before the head, not inside the body.
            connection.protocol.read_timeout = timeouts.idle
            connection.protocol.start_timeout()

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return self._response.headers.get(name, "")

    async def next_chunk(self) -> bytes:
        """The next bytes as they arrived; empty at the end.

        Raises ``UpstreamUnreachable`` when the connection breaks, ``UpstreamTimeout`` when it goes silent; every byte
        that came before is handed out first. An answer that has not ended in its total time is a timeout, too.
        """
        # No timer: where nothing comes the other timeout ends it, so an endless answer is seen by what it sends.
        if self._loop.time() > self._end:
            raise UpstreamTimeout(self._upstream, self._timeouts.total, endless=True)
        content = self._response.content
        if content.exception() is not None and (rest := arrived(content)):
            return rest
        try:
            return await content.readany()
        except aiohttp.SocketTimeoutError as error:
            raise UpstreamTimeout(self._upstream, self._timeouts.idle) from error
        except (aiohttp.ClientError, OSError) as error:
            if rest := arrived(content):
                return rest
            raise UpstreamUnreachable(self._upstream, "the connection broke before the answer was complete") from error

    def close(self) -> None:
        """Abort what is still under way; harmless when the body was read to its end."""
        self._response.abort_unfinished()

    def tunnel(self) -> Tunnel:
        """The upgraded connection; only where ``status`` is 101, and once."""
        return Tunnel(self._response)


class Tunnel:
    """A connection that left HTTP: raw bytes both ways. Neither side's silence ends it."""

    def __init__(self, response: AbortingResponse) -> None:
        connection = response.connection
        if connection is None or connection.protocol is None:
            raise UpstreamUnreachable(response.url.host or "", "the connection was lost as it was upgraded")
        self._response = response
        self._protocol = connection.protocol
        self._protocol.read_timeout = None
        self._pipe = Pipe(self._protocol)
        self._protocol.set_parser(self._pipe, self._pipe)

    async def next_chunk(self) -> bytes:
        """The next bytes from the upstream; empty at the end."""
        return await self._pipe.next()

    async def write(self, data: bytes) -> None:
        """Send *data*; waits while the upstream reads slower. Raises ``ConnectionError`` when it is gone."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the upstream has closed the connection")
        transport.write(data)
        await self._protocol._drain_helper()

    def close(self) -> None:
        """End the connection."""
        self._response.close()


def arrived(content: aiohttp.StreamReader) -> bytes:
    """What a failed stream still holds. The public readers raise the failure before handing these bytes out."""
    parts = list(content._buffer)
    if parts and content._buffer_offset:
        parts[0] = parts[0][content._buffer_offset :]
    content._buffer.clear()
    content._buffer_offset = 0
    return b"".join(parts)


def is_close_delimited(response: aiohttp.ClientResponse) -> bool:
    """True if only the end of the connection says where the body ends (RFC 9112, section 6.3)."""
    if response.method == "HEAD" or response.status in (SWITCHING, 204, 304):
        return False
    coding = response.headers.get("Transfer-Encoding", "").lower()
    return "chunked" not in coding and "Content-Length" not in response.headers


def end_to_end(response: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """The response's headers in order and spelling, without those meant for this connection only.

    Those of a proxy of this kind behind this one are left out, too: beside ours nobody could tell whose is whose.
    """
    named = named_by_connection(response.headers.getall("Connection", ()))
    # The raw ones: the parser gives well-known names its own spelling.
    found = []
    for name, value in response.raw_headers:
        lower = name.lower()
        if lower in _HOP_BY_HOP or lower in named or lower.startswith(_OWN_PREFIX):
            continue
        found.append((name.decode("ascii", "replace"), value.decode("utf-8", "surrogateescape")))
    return found


def named_by_connection(values: Sequence[str]) -> frozenset[bytes]:
    """Lower-case names of the headers that ``Connection`` makes hop-by-hop."""
    if not values:
        return frozenset()
    return frozenset(token.strip().lower().encode() for value in values for token in value.split(","))


class DirectUpstream:
    """Sends requests to named targets. Build it inside a running loop; ``close`` it at the end."""

    def __init__(self, targets: Sequence[Target]) -> None:
        # aiohttp knows one time for all idle connections of a pool: a pool for each that is configured.
        self._sessions = {seconds: _session(seconds) for seconds in {one.timeouts.keep_alive for one in targets}}
        self.without_descriptor = 0
        self._places = {target.name: _Place(target, self._sessions[target.timeouts.keep_alive]) for target in targets}

    @property
    def names(self) -> tuple[str, ...]:
        """The targets' names, in the order they were given."""
        return tuple(self._places)

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: Body,
        added: Mapping[str, str] = NOTHING,
    ) -> DirectReply:
        """The upstream's answer as soon as its head is here.

        *path_qs* is the client's path and query as they came; *headers* are end-to-end ones, *added* win over them and
        over the target's. A streamed *body* goes
        chunked unless *headers* hold a ``content-length``. Redirects are answers like any other. Raises
        ``UpstreamUnreachable`` or ``UpstreamTimeout``, or the ``UllageError`` that ended a streamed body.
        """
        reply = await self._sent(target, method, path_qs, headers, body, added)
        if reply.status == SWITCHING:
            reply.close()
            raise UpstreamUnreachable(target, "it switched protocols, which was not asked for")
        return reply

    async def _sent(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: Body,
        added: Mapping[str, str] = NOTHING,
    ) -> DirectReply:
        place = self._places[target]
        url = URL(place.base.join(path_qs), encoded=True)
        sent = place.outgoing(headers)
        sent.update(added)
        data: Body | BytesBody | None = body or None
        if isinstance(data, bytes):
            data = BytesBody(data)
        for pause in (*_CONNECT_PAUSES, _NO_MORE):
            if place.session.closed:
                raise UpstreamUnreachable(target, "the proxy is being shut down")
            try:
                response = await place.session.request(
                    method,
                    url,
                    headers=sent,
                    data=data,
                    allow_redirects=False,
                    proxy=place.proxy,
                    timeout=place.client_timeout,
                )
                return DirectReply(cast("AbortingResponse", response), target, place.timeouts)
            except aiohttp.ClientConnectorError as error:
                failure = self._connect_failure(target, error, last=pause == _NO_MORE)
                if failure is not None:
                    raise failure from error
                await asyncio.sleep(pause)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _translate(target, place.timeouts, error) from error
        raise AssertionError("the last attempt either returns or raises")

    def _connect_failure(
        self, target: str, error: aiohttp.ClientConnectorError, *, last: bool
    ) -> Overloaded | UpstreamUnreachable | None:
        """Return the error to raise; None if connecting may be tried again, which is not so after the *last* time."""
        exhausted = error.errno in _NO_DESCRIPTOR
        self.without_descriptor += exhausted
        if last and exhausted:
            return Overloaded("The proxy may open no more connections (its limit of open files).")
        if last or not _refused(error):
            return UpstreamUnreachable(target, _connect_cause(error))
        return None

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> DirectReply:
        """The upstream's answer to a request for a WebSocket: with status 101 it has a ``tunnel``."""
        asked = [*headers, ("Connection", "Upgrade"), ("Upgrade", "websocket")]
        return await self._sent(target, "GET", path_qs, asked, None)

    async def close(self) -> None:
        """Close the pools; requests under way break."""
        for session in self._sessions.values():
            await session.close()


def _session(keep_alive: float) -> aiohttp.ClientSession:
    """A pool that keeps idle connections for *keep_alive* seconds; 0: keeps none."""
    kept: dict[str, Any] = {"keepalive_timeout": keep_alive} if keep_alive else {"force_close": True}
    # Each default that is overridden here lets one caller's state or the proxy's own taste reach another's request:
    # cookies by host name, 100 connections for all, the environment's proxies and netrc, decoded bodies.
    return aiohttp.ClientSession(
        connector=Connector(limit=0, ttl_dns_cache=30, **kept),
        cookie_jar=aiohttp.DummyCookieJar(),
        request_class=VerbatimRequest,
        response_class=AbortingResponse,
        auto_decompress=False,
        trust_env=False,
        read_bufsize=2**17,
        max_line_size=2**15,
        max_field_size=2**15,
    )


class _Place:
    """A target, made ready to be sent to."""

    __slots__ = ("_fixed", "_replaced", "base", "client_timeout", "proxy", "session", "timeouts")

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.base = Base(target.base_url)
        self.proxy = target.proxy
        self.timeouts = target.timeouts
        self.client_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=target.timeouts.connect, sock_read=target.timeouts.first_byte
        )
        self._fixed = dict(target.headers)
        self._replaced = {name.lower() for name in target.headers}
        if target.api_key is not None:
            bearer = target.api_key_header.lower() == "authorization"
            self._fixed[target.api_key_header] = f"Bearer {target.api_key}" if bearer else target.api_key
            self._replaced |= CREDENTIALS | {target.api_key_header.lower()}

    def outgoing(self, headers: Sequence[tuple[str, str]]) -> CIMultiDict[str]:
        """The headers to send: the client's, with the target's own key and headers in the place of theirs."""
        names = [name.lower() for name, _ in headers]
        replaced = self._replaced
        if len(set(names)) < len(names):
            # aiohttp lets a repetition in another spelling overwrite the first: repeat the first spelling instead.
            spelled: dict[str, str] = {}
            headers = [(spelled.setdefault(name.lower(), name), value) for name, value in headers]
        if replaced:
            headers = [pair for pair, name in zip(headers, names, strict=True) if name not in replaced]
        sent = CIMultiDict(headers)
        if self._fixed:
            sent.update(self._fixed)
        return sent


def _translate(target: str, timeouts: Timeouts, error: Exception) -> UllageError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UllageError):
            return cause
        cause = cause.__cause__
    if isinstance(error, aiohttp.SocketTimeoutError):
        return UpstreamTimeout(target, timeouts.first_byte)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamUnreachable(target, f"no connection within {timeouts.connect:g} s")
    if isinstance(error, aiohttp.ClientResponseError):
        return UpstreamUnreachable(target, "its answer is not valid HTTP")
    return UpstreamUnreachable(target, "it closed the connection before it answered")


def _refused(error: aiohttp.ClientConnectorError) -> bool:
    permanent = (aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)
    return not isinstance(error, permanent)


def _connect_cause(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"its host name {error.host!r} does not resolve"
    if isinstance(error.os_error, ssl.SSLError) or isinstance(error, aiohttp.ClientSSLError):
        return "the TLS connection could not be made"
    return f"connecting to {error.host}:{error.port} failed ({error.os_error.strerror or 'refused'})"

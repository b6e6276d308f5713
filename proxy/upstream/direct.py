"""Sends requests to upstreams as bytes, on pooled sessions that share nothing between callers but sockets.

A POST whose body is in memory goes over ``connection_pool``. All else goes through aiohttp's client: other methods,
streamed bodies, upgrades, and all requests without TLS through a forward proxy, which names whole URLs.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, cast

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from proxy.core.errors import NotFound, Overloaded, UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, NO_HEADERS, OWN_PREFIX, EndToEnd
from proxy.pipe import Pipe
from proxy.upstream.client_session import AbortingResponse, BytesBody, open_session
from proxy.upstream.connection_pool import SWITCHING, ConnectionPool, InvalidHttp
from proxy.upstream.litellm import Bridge, BridgedReply
from proxy.upstream.pooled_response import PooledResponse, Sink, remaining
from proxy.upstream.targets import BaseUrl, Target, Timeouts

_HOP_BY_HOP: Final = frozenset(name.encode() for name in HOP_BY_HOP)
_OWN_PREFIX: Final = OWN_PREFIX.encode()

_CONNECT_PAUSES: Final = (0.05, 0.2)
"""Seconds before each further attempt to connect. It is safe: without a connection no request was sent and billed."""

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
"""Errors at the limit of open files, of the process or of the machine."""

_CHUNKED: Final = "chunked"
_PLAIN: Final = frozenset({"", _CHUNKED, "identity"})
"""Transfer codings that leave a body as it is."""

_LONGEST_CACHED_NAME: Final = 64
"""Bytes of the longest header name that is cached: upstreams choose names, and the cache must stay small."""

_FIRST: Final = itemgetter(0)

_MOST_URLS: Final = 64
"""URLs that are cached for each upstream: few paths are used, but clients choose them."""

Body = bytes | AsyncIterator[bytes] | None


class Upstreams:
    """Sends requests to named upstreams. Build it inside a running loop; ``close`` it at the end.

    Upstreams behind *bridge* (LiteLLM) answer chat completions only; a target of the same name gets all other requests.
    """

    def __init__(self, targets: Sequence[Target], bridge: Bridge | None = None) -> None:
        # aiohttp has one keep-alive time for a session: one session for each time that is configured.
        times = {target.timeouts.keep_alive for target in targets}
        sessions = self._sessions = {seconds: open_session(seconds) for seconds in times}
        self._targets = {target.name: _ReadyTarget(target, sessions[target.timeouts.keep_alive]) for target in targets}
        self._bridge = bridge
        self._bridged: dict[str, Bridge] = {}
        if bridge is not None:
            self._bridged = dict.fromkeys(bridge.names, bridge)
        self.names = tuple(dict.fromkeys((*self._targets, *self._bridged)))
        self.without_descriptor = 0
        self._is_closed = False

    def speaks(self, name: str) -> bool:
        """True if the upstream is called directly, so that it answers more than chat completions."""
        return name in self._targets

    async def warm(self) -> None:
        """Import LiteLLM for bridged upstreams. That takes seconds, which the first request would wait for."""
        if self._bridge is not None and self._bridged:
            await self._bridge.warm()

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: Body,
        added: Mapping[str, str] = NO_HEADERS,
        *,
        may_switch: bool = False,
    ) -> DirectReply | BridgedReply:
        """Return the upstream's answer as soon as its head is here.

        *path_qs* is the client's path and query as they came. *headers* are end-to-end headers; *added* win over them
        and over the target's. A streamed *body* is sent chunked unless *headers* have a ``content-length``. Redirects
        are not followed. An answer that switches protocols is an error unless it *may_switch*. Raises
        ``UpstreamUnreachable`` or ``UpstreamTimeout``, or the ``UllageError`` that ended a streamed body.
        """
        bridge = self._bridged.get(target)
        if bridge is not None and isinstance(body, bytes) and _is_chat_call(method, path_qs):
            return await bridge.send(target, headers, body, added)
        ready = self._targets.get(target)
        if ready is None:
            raise _not_bridged(target, method, path_qs)
        if self._is_closed:
            raise _shutting_down(target)
        for pause in (*_CONNECT_PAUSES, None):
            try:
                if method == "POST" and body and isinstance(body, bytes) and ready.is_pooled:
                    head = ready.head(path_qs, headers, added)
                    return DirectReply(await ready.pool.post(head, body), target, ready.timeouts)
                response = await ready.request(
                    method, path_qs, ready.headers(headers, added, is_sized=isinstance(body, bytes)), body
                )
                return DirectReply(response, target, ready.timeouts, may_switch=may_switch)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                await self._wait_to_reconnect(ready, error, pause)
        raise AssertionError("the last attempt either returns or raises")

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> DirectReply:
        """Return the answer to a request for a WebSocket: with status 101 it has a ``tunnel``. Raises as ``send``."""
        upgrading = [*headers, ("Connection", "Upgrade"), ("Upgrade", "websocket")]
        # Only a POST goes over the bridge, so the reply is a direct one.
        return cast("DirectReply", await self.send(target, "GET", path_qs, upgrading, None, may_switch=True))

    async def _wait_to_reconnect(self, ready: _ReadyTarget, error: Exception, pause: float | None) -> None:
        """Wait for *pause* seconds before connecting again. Raise ``UllageError`` if it is None, or for some errors."""
        if not isinstance(error, aiohttp.ClientConnectorError):
            raise _ullage_error(ready.name, ready.timeouts, error) from error
        exhausted = error.errno in _NO_DESCRIPTOR
        self.without_descriptor += exhausted
        if pause is None and exhausted:
            raise Overloaded("The proxy may open no more connections (its limit of open files).") from error
        if pause is None or not _may_connect_later(error):
            raise UpstreamUnreachable(ready.name, _connect_cause(error)) from error
        await asyncio.sleep(pause)
        if self._is_closed:
            raise _shutting_down(ready.name)

    async def close(self) -> None:
        """Close all connections; requests under way break."""
        self._is_closed = True
        if self._bridge is not None:
            await self._bridge.close()
        for ready in self._targets.values():
            ready.pool.close()
        for session in self._sessions.values():
            await session.close()


def _shutting_down(target: str) -> UpstreamUnreachable:
    return UpstreamUnreachable(target, "the proxy is being shut down")


def _is_chat_call(method: str, path_qs: str) -> bool:
    return method == "POST" and path_qs.partition("?")[0].endswith("/chat/completions")


def _not_bridged(target: str, method: str, path_qs: str) -> NotFound:
    call = f"{method} {path_qs.partition('?')[0]}"
    return NotFound(f"The upstream {target!r} answers POST /v1/chat/completions only, not {call}.")


class _PreparedHead(msgspec.Struct, frozen=True, eq=False):
    """The ``head`` of a request up to the length of its body, as it was last sent to ``target``."""

    target: _ReadyTarget
    path_qs: str
    added: Mapping[str, str]
    head: bytes


class _ReadyTarget:
    """A target with everything that is the same for all requests. ``urls`` caches URLs by path."""

    __slots__ = (
        "_base",
        "_client_timeout",
        "_fixed",
        "_proxy",
        "_replaced",
        "is_pooled",
        "name",
        "pool",
        "session",
        "timeouts",
        "urls",
    )

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.name = target.name
        self.session = session
        self.urls: dict[str, URL] = {}
        self._base = BaseUrl(target.base_url)
        self.timeouts = target.timeouts
        self._proxy = URL(target.proxy) if target.proxy else None
        origin = URL(self._base.join("/"), encoded=True)
        self.pool = ConnectionPool(session, origin, target.timeouts, self._proxy)
        self.is_pooled = self._proxy is None or origin.scheme == "https"
        self._client_timeout = aiohttp.ClientTimeout(
            total=None, connect=target.timeouts.connect, sock_read=target.timeouts.first_byte
        )
        self._fixed = CIMultiDict(target.headers)
        self._replaced = {name.lower() for name in target.headers}
        if target.api_key is not None:
            header = target.api_key_header.lower()
            self._fixed[target.api_key_header] = target.api_key
            if header == "authorization":
                self._fixed[target.api_key_header] = f"Bearer {target.api_key}"
            self._replaced |= CREDENTIALS | {header}

    async def request(
        self, method: str, path_qs: str, headers: Sequence[tuple[str, str]], body: Body
    ) -> AbortingResponse:
        """Return the answer by aiohttp's client as soon as its head is here.

        Each byte of a head restarts aiohttp's read timeout, so a head that comes byte by byte needs a total limit.
        """
        data: Body | BytesBody | None = body or None
        if isinstance(data, bytes):
            data = BytesBody(data)
        try:
            async with asyncio.timeout(self.timeouts.total):
                response = await self.session.request(
                    method,
                    self.urls.get(path_qs) or self.url(path_qs),
                    headers=CIMultiDict(headers),
                    data=data,
                    allow_redirects=False,
                    timeout=self._client_timeout,
                    proxy=self._proxy,
                )
        except aiohttp.ClientError:
            raise  # its timeouts are subclasses of TimeoutError, too
        except TimeoutError as error:
            raise UpstreamTimeout(self.name, self.timeouts.total, endless=True) from error
        connection = response.connection
        if connection is not None and connection.protocol is not None and response.status != SWITCHING:
            # aiohttp has one read timeout for head and body: https://github.com/aio-libs/aiohttp/issues/3808. A model
            # may think for minutes before the head, but not inside the body: from here on the shorter limit holds.
            connection.protocol.read_timeout = self.timeouts.idle
            connection.protocol.start_timeout()
        return cast("AbortingResponse", response)

    def url(self, path_qs: str) -> URL:
        """Return the URL of *path_qs* on this upstream. Cache it unless its query may hold a key."""
        url = URL(self._base.join(path_qs), encoded=True)
        if len(self.urls) < _MOST_URLS and "?" not in path_qs:
            self.urls[path_qs] = url
        return url

    def head(self, path_qs: str, headers: Sequence[tuple[str, str]], added: Mapping[str, str]) -> bytes:
        """Return the head of a POST over the pool, cached at *headers* if they are repeated. Raises ``ValueError``."""
        if isinstance(headers, EndToEnd):
            known = headers.prepared
            if known is not None and known.target is self and known.added == added and known.path_qs == path_qs:
                return cast("bytes", known.head)
        url = self.urls.get(path_qs) or self.url(path_qs)
        head = self.pool.head(url, self.headers(headers, added, is_sized=True))
        if isinstance(headers, EndToEnd) and "?" not in path_qs:  # a query may hold a key
            headers.prepared = _PreparedHead(self, path_qs, added, head)
        return head

    def headers(
        self, headers: Sequence[tuple[str, str]], added: Mapping[str, str], *, is_sized: bool
    ) -> Sequence[tuple[str, str]]:
        """Return the headers to send: *added*, else the target's own key and headers, else the client's.

        A body that *is_sized* is sent with its own length, whatever *headers* say.
        """
        names = list(map(str.lower, map(_FIRST, headers)))
        replaced, fixed = self._replaced, self._fixed
        if is_sized and "content-length" in names:
            replaced = replaced | {"content-length"}
        if added:
            fixed = CIMultiDict(fixed)
            fixed.update(added)
            replaced = replaced | {name.lower() for name in added}
        if len(set(names)) < len(names):
            # A name repeated in another spelling would overwrite the first one in aiohttp: use the first spelling.
            spelled: dict[str, str] = {}
            headers = [(spelled.setdefault(name.lower(), name), value) for name, value in headers]
        if replaced:
            headers = [pair for pair, name in zip(headers, names, strict=True) if name not in replaced]
        if fixed:
            headers = [*headers, *fixed.items()]
        return headers


def _ullage_error(target: str, timeouts: Timeouts, error: Exception) -> UllageError:
    """Return our error for aiohttp's *error*; one of our own in its chain of causes ended a streamed body."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UllageError):
            return cause
        cause = cause.__cause__
    if isinstance(error, aiohttp.SocketTimeoutError):
        return UpstreamTimeout(target, timeouts.first_byte)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamUnreachable(target, f"no connection within {timeouts.connect:g} s")
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return UpstreamUnreachable(target, f"its forward proxy answered {error.status} ({error.message})")
    if isinstance(error, aiohttp.ClientResponseError | InvalidHttp):
        return UpstreamUnreachable(target, "its answer is not valid HTTP")
    return UpstreamUnreachable(target, "it closed the connection before it answered")


def _may_connect_later(error: aiohttp.ClientConnectorError) -> bool:
    """True if connecting again may help: not for a name that does not resolve, nor for a failure of TLS."""
    permanent = (aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)
    return not isinstance(error, permanent)


def _connect_cause(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"its host name {error.host!r} does not resolve"
    if isinstance(error.os_error, ssl.SSLCertVerificationError):
        reason = error.os_error.verify_message
        return f"no TLS, since its certificate is not trusted ({reason}): SSL_CERT_FILE can name authorities to trust"
    if isinstance(error.os_error, ssl.SSLError) or isinstance(error, aiohttp.ClientSSLError):
        reason = getattr(error.os_error, "reason", None) or "unknown reason"
        return f"the TLS connection could not be made ({reason.replace('_', ' ').lower()})"
    cause = f"connecting to {error.host}:{error.port} failed ({error.os_error.strerror or 'refused'})"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        cause += ", its forward proxy"
    return cause


class DirectReply:
    """An answer whose head has arrived: ``ports.Reply`` over a response of the pool's or of aiohttp's.

    ``headers`` are the end-to-end ones in order and spelling; ``header`` gives the first with a name in any case, or an
    empty string. ``close_delimited``: only the end of the connection says where the body ends
    (https://www.rfc-editor.org/rfc/rfc9112#section-6.3).
    """

    __slots__ = (
        "_end",
        "_loop",
        "_response",
        "_timeouts",
        "_upstream",
        "close_delimited",
        "header",
        "headers",
        "status",
    )

    def __init__(
        self,
        response: PooledResponse | AbortingResponse,
        upstream: str,
        timeouts: Timeouts,
        *,
        may_switch: bool = False,
    ) -> None:
        """Raise ``UpstreamUnreachable`` if the upstream left HTTP and the request was no upgrade (*may_switch*)."""
        self._response = response
        self._upstream = upstream
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeouts.total
        self.status = response.status
        self.header: Callable[[str], str] = cast("Any", functools.partial(response.headers.get, default=""))
        if response.status == SWITCHING and not may_switch:
            self.close()
            raise UpstreamUnreachable(upstream, "it switched protocols without a request to")
        known = response.known
        if known is None:
            self.headers, is_framed = _end_to_end(response)
        else:
            if known.end_to_end is None:
                known.end_to_end = _end_to_end(response)
            self.headers, is_framed = known.end_to_end
        if known is not None and len(response.whole) != known.length:
            self._take_length(str(len(response.whole)))
        has_body = response.method != "HEAD" and response.status not in (SWITCHING, 204, 304)
        self.close_delimited = has_body and not is_framed

    def _take_length(self, length: str) -> None:
        """Put *length* into the headers, which are those of another answer with the same head."""
        headers = CIMultiDict(self._response.headers)
        headers["Content-Length"] = length
        self.header = cast("Any", functools.partial(headers.get, default=""))
        sized = {"content-length": length}
        self.headers = [(name, sized.get(name.lower(), value)) for name, value in self.headers]

    async def pour(self, sink: Sink) -> None:
        """Pass each chunk to *sink* as it arrives, if the answer comes over the pool. See ``ports.Pour``."""
        if isinstance(self._response, PooledResponse):
            await self._response.pour(sink, self._end)

    async def next_chunk(self) -> bytes:
        """Return the next bytes as they arrived; empty at the end.

        Raises ``UpstreamUnreachable`` if the connection breaks and ``UpstreamTimeout`` if it goes silent; every byte
        that came before is returned first. An answer that has not ended in its total time is a timeout, too.
        """
        # No timer: the idle timeout ends a silent answer, and this check ends an endless one at its next chunk.
        if self._loop.time() > self._end:
            raise UpstreamTimeout(self._upstream, self._timeouts.total, endless=True)
        content = self._response.content
        if content.exception() is not None:
            if rest := remaining(content):
                return rest
        elif self._response.connection is None:
            # The exchange is over and the whole body is here: ``readany`` would wait for more.
            whole, self._response.whole = self._response.whole, b""
            if whole or content.at_eof():
                return whole
            return remaining(content)
        try:
            return await content.readany()
        except aiohttp.SocketTimeoutError as error:
            raise UpstreamTimeout(self._upstream, self._timeouts.idle) from error
        except (aiohttp.ClientError, OSError) as error:
            if rest := remaining(content):
                return rest
            raise UpstreamUnreachable(self._upstream, "the connection broke before the answer was complete") from error

    def close(self) -> None:
        """Abort what is still under way; harmless when the body was read to its end."""
        if self._response.connection is not None:
            self._response.close()

    def tunnel(self) -> Tunnel:
        """Return the upgraded connection; only if ``status`` is 101, and once."""
        return Tunnel(cast("AbortingResponse", self._response))


class Tunnel:
    """An upgraded connection: raw bytes in both directions, without a timeout for silence."""

    def __init__(self, response: AbortingResponse) -> None:
        connection = response.connection
        if connection is None or connection.protocol is None:
            raise UpstreamUnreachable(response.url.host or "", "the connection was lost as it was upgraded")
        self._response = response
        self._protocol = connection.protocol
        self._protocol.read_timeout = None  # the silence of a WebSocket is no fault
        self._pipe = Pipe(self._protocol)
        self._protocol.set_parser(self._pipe, self._pipe)

    async def next_chunk(self) -> bytes:
        """Return the next bytes from the upstream; empty at the end."""
        return await self._pipe.next()

    async def write(self, data: bytes) -> None:
        """Send *data*; waits while the upstream reads slower. Raises ``ConnectionError`` when it is gone."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the upstream has closed the connection")
        transport.write(data)
        # Private, since aiohttp has no public way to wait until an upgraded client connection has sent its buffer:
        # https://github.com/aio-libs/aiohttp/blob/master/aiohttp/base_protocol.py
        await self._protocol._drain_helper()

    def close(self) -> None:
        """End the connection."""
        self._response.close()


def _end_to_end(response: PooledResponse | AbortingResponse) -> tuple[list[tuple[str, str]], bool]:
    """Return the end-to-end headers, and True if a header states where the body ends.

    ``x-ullage-*`` headers of another Ullage behind this one are left out: clients would take them for ours. Raises
    ``InvalidHttp`` for a transfer coding other than chunked: no request accepts one, and the client could not decode
    the body, because this header does not reach it.
    """
    parsed = response.headers
    codings = ",".join(parsed.getall("Transfer-Encoding", ())).lower().replace(" ", "")
    if not _PLAIN.issuperset(codings.split(",")):
        response.close()
        raise InvalidHttp
    is_framed = "Content-Length" in parsed or _CHUNKED in codings
    named: frozenset[bytes] = frozenset()
    if "Connection" in parsed:
        values = ",".join(parsed.getall("Connection"))
        named = frozenset(token.strip().lower().encode() for token in values.split(","))
    headers = []
    for raw_name, value in response.raw_headers:  # raw, since the parser respells well-known names
        look_up = _name_of
        if len(raw_name) <= _LONGEST_CACHED_NAME:
            look_up = _name_of_cached
        name, passes = look_up(raw_name)
        if passes and not (named and raw_name.lower() in named):
            headers.append((name, value.decode("utf-8", "surrogateescape")))
    return headers, is_framed


def _name_of(raw: bytes) -> tuple[str, bool]:
    """Return a header's name as text, and True if it may go to the client."""
    lower = raw.lower()
    return raw.decode("ascii", "replace"), lower not in _HOP_BY_HOP and not lower.startswith(_OWN_PREFIX)


_name_of_cached: Final = functools.lru_cache(maxsize=1024)(_name_of)
"""``_name_of`` for names of usual length, which upstreams repeat in every answer."""

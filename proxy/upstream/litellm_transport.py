"""The HTTP client for LiteLLM: no retries, no redirects, and the provider's own bytes.

LiteLLM's own client sends a request again when a connection breaks, follows redirects with the key in the request, and
rewords errors. Import this module only if LiteLLM is loaded: it needs ``httpx``.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import httpx

from proxy.upstream.targets import Timeouts

LARGEST_ERROR = 2**20
"""Bytes of a refusal that are read."""


@dataclass(slots=True)
class Call:
    """One bridged call: its timeouts, and its result on the wire.

    ``status``, ``headers`` and ``error`` are those of the provider's last answer; ``error`` is its body if it is no
    success. ``broken`` is the error of a connection that gave no answer, or only a part of one.
    """

    timeouts: Timeouts
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    error: bytes = b""
    broken: httpx.TransportError | None = None


CALL: ContextVar[Call] = ContextVar("bridged call")
"""The bridged call of the running task. A context variable, because LiteLLM passes no argument on to its client."""


class Broken(httpx.NetworkError):
    """A connection that failed. Not one of httpx's own errors, for which LiteLLM would send the request again."""


class Transport(httpx.AsyncHTTPTransport):
    """Connections shared by all bridged upstreams, with each call's own timeouts."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=10)
        super().__init__(verify=ssl.create_default_context(), trust_env=False, limits=limits, retries=1)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to *request*. The body of an error is read already."""
        call = CALL.get()
        times = call.timeouts
        wait = max(times.first_byte, times.idle)
        request.extensions["timeout"] = {"connect": times.connect, "read": wait, "write": wait, "pool": None}
        call.broken, call.error = None, b""
        try:
            response = await super().handle_async_request(request)
            call.status = response.status_code
            call.headers = [(name.lower(), value) for name, value in response.headers.multi_items()]
            if response.status_code < 300:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                response.stream = _Watched(response.stream, call)
                return response
            call.error = await _beginning(response)
        except httpx.TransportError as error:
            call.broken = error
            if isinstance(error, httpx.TimeoutException):
                raise
            raise Broken(str(error)) from error
        coded = ("content-encoding", "content-length", "transfer-encoding")
        head = [pair for pair in call.headers if pair[0] not in coded]
        return httpx.Response(response.status_code, headers=head, content=call.error, extensions=response.extensions)


class _Watched(httpx.AsyncByteStream):
    """A body that stores the error with which it broke in its call."""

    def __init__(self, stream: httpx.AsyncByteStream, call: Call) -> None:
        self._stream = stream
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except httpx.TransportError as error:
            self._call.broken = error
            raise Broken(str(error)) from error

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _beginning(response: httpx.Response) -> bytes:
    """Return the body of *response*, of a longer one a little more than ``LARGEST_ERROR`` bytes; then close it."""
    parts, size = [], 0
    async for chunk in response.aiter_bytes():
        parts.append(chunk)
        size += len(chunk)
        if size > LARGEST_ERROR:
            break
    await response.aclose()
    return b"".join(parts)

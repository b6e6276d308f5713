"""One call of a summariser: whose key, which headers, how long, and what came back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from proxy.core.errors import UllageError
from proxy.core.http_headers import CREDENTIALS
from proxy.core.request import Origin
from proxy.engine.ports import Reply, Upstream
from proxy.summaries.api_formats import API_FORMATS, ApiFormat, ModelAnswer, parse_answer

LARGEST = 4 * 2**20
"""Bytes of an answer that are read at most."""

_OWN = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "content-encoding",
        "content-length",
        "content-type",
        "idempotency-key",
        "if-match",
        "if-none-match",
        "origin",
        "range",
        "referer",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-client-request-id",
        "x-request-id",
    }
)
"""Headers that belong to the client's own request and not to one made on its behalf."""

_SUBSCRIPTION = re.compile(
    r"sk-ant-oat|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+|[A-Za-z0-9-]*oauth[A-Za-z0-9-]*[_-]", re.IGNORECASE
)


_DEPLOYMENT = re.compile(r"(/openai/deployments/)[^/?]+")
"""The part of a path that names the model instead of the body."""


class CallFailed(Exception):
    """A summariser gave nothing to use; ``reason`` is a fixed word. ``limited``: it asked to slow down."""

    def __init__(self, reason: str, *, limited: bool = False, taken: tuple[int, int] = (0, 0)) -> None:
        super().__init__(reason)
        self.reason = reason
        self.limited = limited
        self.taken = taken


@dataclass(frozen=True, slots=True)
class Summariser:
    """The model that writes a summary; ``window`` in tokens of our count.

    ``uses_client_headers``: the client's own headers are sent, because the call goes where its request went.
    ``configured_headers`` are configured for the model and win over all others.
    """

    upstream: str
    model: str
    api: str
    window: int
    is_request_model: bool
    uses_client_headers: bool
    encoding: str
    configured_headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """What breakers and texts are filed under."""
        return f"{self.upstream},{self.model},{self.api}"


def credentials(headers: Mapping[str, str] | tuple[tuple[str, str], ...]) -> list[str]:
    """The keys among *headers*."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [value for name, value in pairs if name.lower() in CREDENTIALS]


def is_subscription_key(key: str) -> bool:
    """Whether *key* looks like an OAuth or subscription token, which is meant for its owner's own client only."""
    return bool(_SUBSCRIPTION.match(key.partition(" ")[2].strip() if " " in key else key))


def call_headers(origin: Origin, agent: str, *, lent: bool) -> list[tuple[str, str]]:
    """The headers of a call: the caller's own where it is *lent* them, without what belongs to its request alone."""
    headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
    headers += [("Accept-Encoding", "identity"), ("User-Agent", agent)]
    if lent:
        headers += [
            pair
            for pair in origin.headers
            if pair[0].lower() not in _OWN and not pair[0].lower().startswith("x-stainless")
        ]
    return headers


def call_path(summariser: Summariser, origin: Origin) -> str:
    """Path and query of a call: the request's own where it goes the same way, with the summariser's deployment."""
    if not summariser.uses_client_headers:
        return API_FORMATS[summariser.api].path
    if summariser.is_request_model:
        return origin.path_qs
    name = quote(summariser.model, safe="")
    return _DEPLOYMENT.sub(lambda found: found[1] + name, origin.path_qs, count=1)


async def call_model(
    upstream: Upstream, summariser: Summariser, origin: Origin, agent: str, body: bytes, seconds: float
) -> ModelAnswer:
    """What the summariser wrote within *seconds*. Raises ``CallFailed``."""
    wire = API_FORMATS[summariser.api]
    path = call_path(summariser, origin)
    headers = call_headers(origin, agent, lent=summariser.uses_client_headers)
    try:
        async with asyncio.timeout(seconds):
            reply = await upstream.send(summariser.upstream, "POST", path, headers, body, summariser.configured_headers)
            try:
                data = await _whole(reply)
            finally:
                reply.close()
    except TimeoutError:
        raise CallFailed("timeout") from None
    except UllageError as error:
        raise CallFailed("timeout" if error.status == 504 else "unreachable") from None
    return _usable(wire, reply, data)


def _usable(wire: ApiFormat, reply: Reply, data: bytes) -> ModelAnswer:
    """Return the text in an answer's *data*. Raises ``CallFailed`` if it is no whole text."""
    if reply.status != 200:
        limited = reply.status == 429
        raise CallFailed("limited" if limited else "refused", limited=limited)
    written = None if reply.header("content-encoding") not in ("", "identity") else parse_answer(wire, data)
    if written is None:
        raise CallFailed("nonsense")
    taken = (written.input_tokens or 0, written.output_tokens or 0)
    if written.called:
        raise CallFailed("called_tools", taken=taken)
    if written.short:
        raise CallFailed("cut_short", taken=taken)
    return written


async def _whole(reply: Reply) -> bytes:
    taken: list[bytes] = []
    size = 0
    while chunk := await reply.next_chunk():
        taken.append(chunk)
        size += len(chunk)
        if size > LARGEST:
            raise CallFailed("nonsense")
    return b"".join(taken)

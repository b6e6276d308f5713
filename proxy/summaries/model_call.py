"""One call of a summariser: its path, its headers with the key, its time limit, and the check of its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import generation_path
from proxy.core.errors import UllageError
from proxy.core.http_headers import CREDENTIALS
from proxy.core.request import Origin
from proxy.engine.ports import Reply, Upstream
from proxy.engine.replies import read_up_to
from proxy.summaries.apis import SUMMARY_APIS, ModelAnswer, SummaryApi, parse_answer

MAX_ANSWER: Final = 4 * 2**20
"""Most bytes of an answer that are read."""

TokensUsed = tuple[int, int]
"""Input and output tokens, by the provider's count if it states one."""

_REQUEST_HEADERS: Final = frozenset(
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
"""Headers of the client's own request that are not sent with a summariser's call."""

_SDK_PREFIX: Final = "x-stainless"
"""Prefix of the headers in which OpenAI's and Anthropic's SDKs describe themselves."""

_SUBSCRIPTION: Final = re.compile(
    r"sk-ant-oat|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+|[A-Za-z0-9-]*oauth[A-Za-z0-9-]*[_-]", re.IGNORECASE
)
"""The beginning of an OAuth token or a JWT. Anthropic's are for its own clients only:
https://code.claude.com/docs/en/legal-and-compliance
"""

_DEPLOYMENT: Final = re.compile(r"(/openai/deployments/)[^/?]+")
"""The part of an Azure OpenAI path that names the model, which the body need not name:
https://learn.microsoft.com/en-us/azure/ai-services/openai/reference
"""


class CallFailed(Exception):
    """A call gave no text that can be used; ``reason`` is a fixed word. ``limited``: the upstream rate-limited it."""

    def __init__(self, reason: str, *, limited: bool = False, tokens_used: TokensUsed = (0, 0)) -> None:
        super().__init__(reason)
        self.reason = reason
        self.limited = limited
        self.tokens_used = tokens_used


@dataclass(frozen=True, slots=True)
class Summariser:
    """The model that writes a summary; ``window`` is in tokens of our count.

    ``is_request_model``: it is the model of the request. ``uses_client_headers``: the client's own headers are sent,
    because the call goes to the same upstream. ``configured_headers`` are those of the model, and win over all others.
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
        """The name under which breakers and summaries are stored."""
        return f"{self.upstream},{self.model},{self.api}"


def credentials(headers: Mapping[str, str] | tuple[tuple[str, str], ...]) -> list[str]:
    """Return the keys in *headers*."""
    if isinstance(headers, Mapping):
        headers = tuple(headers.items())
    return [value for name, value in headers if name.lower() in CREDENTIALS]


def is_subscription_key(key: str) -> bool:
    """True if *key*, with or without a scheme, looks like an OAuth or subscription token."""
    scheme, space, rest = key.partition(" ")
    bare = scheme
    if space:
        bare = rest.strip()
    return bool(_SUBSCRIPTION.match(bare))


def call_headers(origin: Origin, agent: str, *, uses_client_headers: bool) -> list[tuple[str, str]]:
    """Return the headers of a call; if the client's own are used, all that do not belong to its request alone."""
    # ``identity``: an answer of a few kilobytes is read as it is, without a decoder and its limit for inflated bodies.
    headers = [
        ("Content-Type", "application/json"),
        ("Accept", "application/json"),
        ("Accept-Encoding", "identity"),
        ("User-Agent", agent),
    ]
    if uses_client_headers:
        headers += [(name, value) for name, value in origin.headers if _is_sent(name.lower())]
    return headers


def _is_sent(name: str) -> bool:
    return name not in _REQUEST_HEADERS and not name.startswith(_SDK_PREFIX)


def call_path(summariser: Summariser, origin: Origin) -> str:
    """Return path and query of a call: the client's own if its headers are used, with the summariser's model."""
    if summariser.api == gemini.API:
        return generation_path(origin.path_qs, summariser.model)
    if not summariser.uses_client_headers:
        return SUMMARY_APIS[summariser.api].path
    if summariser.is_request_model:
        return origin.path_qs
    model = quote(summariser.model, safe="")
    return _DEPLOYMENT.sub(lambda match: match[1] + model, origin.path_qs, count=1)


async def call_model(
    upstream: Upstream, summariser: Summariser, origin: Origin, agent: str, body: bytes, seconds: float
) -> ModelAnswer:
    """Return the summariser's answer to *body*, within *seconds*. Raises ``CallFailed``."""
    path = call_path(summariser, origin)
    headers = call_headers(origin, agent, uses_client_headers=summariser.uses_client_headers)
    try:
        async with asyncio.timeout(seconds):
            reply = await upstream.send(summariser.upstream, "POST", path, headers, body, summariser.configured_headers)
            try:
                chunks: list[bytes] = []
                if not await read_up_to(reply, chunks, MAX_ANSWER):
                    raise CallFailed("nonsense")
            finally:
                reply.close()
    except TimeoutError:
        raise CallFailed("timeout") from None
    except UllageError as error:
        if error.status == 504:
            raise CallFailed("timeout") from None
        raise CallFailed("unreachable") from None
    return _usable(SUMMARY_APIS[summariser.api], reply, b"".join(chunks))


def _usable(api: SummaryApi, reply: Reply, data: bytes) -> ModelAnswer:
    """Return the answer in *data*. Raises ``CallFailed`` if it is not one whole text."""
    if reply.status == 429:
        raise CallFailed("limited", limited=True)
    if reply.status != 200:
        raise CallFailed("refused")
    answer = None
    if reply.header("content-encoding") in ("", "identity"):
        answer = parse_answer(api, data)
    if answer is None:
        raise CallFailed("nonsense")
    used = (answer.usage.input_tokens or 0, answer.usage.output_tokens or 0)
    if answer.called_tools:
        raise CallFailed("called_tools", tokens_used=used)
    if answer.cut_short:
        raise CallFailed("cut_short", tokens_used=used)
    return answer

"""Providers that do not speak OpenAI's API, through LiteLLM: chat completions in, chat completions out.

LiteLLM takes seconds to import, so it is imported when the first bridged upstream is warmed up or asked. Its proxy is
never imported, nothing is fetched, and it neither retries nor follows redirects here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from proxy.core.errors import InvalidRequest, UllageError, Unauthorized, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.direct import Timeouts

OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",  # otherwise it reads a .env file of the working directory
}
"""Environment that keeps LiteLLM from fetching tables of its own; set before it is imported."""

FIELDS: Final = frozenset(
    {
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
        "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store",
        "temperature", "thinking", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
"""Members of a request that may be passed on. LiteLLM takes addresses and keys by keyword: those are not a client's."""

_ALWAYS: Final = frozenset({"model", "messages", "stream", "stream_options"})
_PASSED_BACK: Final = re.compile(
    r"(?i)(?:llm_provider-)?((?:x-|anthropic-)?ratelimit[\w-]*|(?:x-)?request-id|retry-after[\w-]*)"
)
_PREFIX: Final = re.compile(r"^(?:litellm\.\w+: |\w+(?:Error|Exception) - )+")
_KEYS: Final = ("x-api-key", "api-key")
_HELD: Final = 64

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class Bridged:
    """One upstream behind LiteLLM. ``options`` are LiteLLM's own (regions, projects); ``base_url``: none, its default.

    ``ambient``: it is paid by the proxy's own surroundings (a role, a service account), never by a client's key.
    """

    name: str
    provider: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ambient: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)


class BridgedReply:
    """An answer in OpenAI's shape: ``ports.Reply`` over what LiteLLM returned."""

    def __init__(self, status: int, headers: Sequence[tuple[str, str]], body: bytes | _Pump) -> None:
        self.status = status
        self.headers = headers
        self._body: bytes | _Pump = body

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        """The next bytes; empty at the end. Raises ``UpstreamUnreachable`` or ``UpstreamTimeout``."""
        if isinstance(self._body, bytes):
            body, self._body = self._body, b""
            return body
        return await self._body.next()

    def close(self) -> None:
        """Abort what is still under way."""
        if isinstance(self._body, _Pump):
            self._body.close()


class _Pump:
    """Takes a stream's events as they come, so that a reader who is cancelled loses none."""

    def __init__(self, events: AsyncIterator[bytes], spawn: Spawn) -> None:
        self._queue: asyncio.Queue[bytes | UllageError] = asyncio.Queue(_HELD)
        self._task = spawn(self._run(events), "bridged stream")
        self._ended = False

    async def next(self) -> bytes:
        """The next event, empty after the last. Raises what ended the stream."""
        if self._ended:
            return b""
        got = await self._queue.get()
        if isinstance(got, UllageError):
            raise got
        self._ended = not got
        return got

    def close(self) -> None:
        """Stop taking."""
        self._ended = True
        self._task.cancel()

    async def _run(self, events: AsyncIterator[bytes]) -> None:
        try:
            async for event in events:
                await self._queue.put(event)
        except UllageError as error:
            await self._queue.put(error)
        await self._queue.put(b"")


class Bridge:
    """Asks bridged upstreams; one LiteLLM for all of them."""

    def __init__(self, targets: Sequence[Bridged], spawn: Spawn) -> None:
        self._targets = {target.name: target for target in targets}
        self._spawn = spawn
        self._loading: asyncio.Task[Any] | None = None
        self._clients: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The bridged upstreams' names."""
        return tuple(self._targets)

    async def warm(self) -> None:
        """Import LiteLLM, seconds of work, in a thread."""
        await self._library()

    async def send(self, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> BridgedReply:
        """The provider's answer to a chat completions *body*, in OpenAI's shape; its errors too.

        Raises ``InvalidRequest`` for a member that cannot be passed on, ``Unauthorized`` without a key,
        ``UpstreamUnreachable`` and ``UpstreamTimeout``.
        """
        place = self._targets[target]
        asked = json.loads(body)
        key = _key(place, headers)
        litellm = await self._library()
        wanted = {name: value for name, value in asked.items() if value is not None}
        _check(litellm, place, wanted)
        stream = wanted.get("stream") is True
        options: dict[str, Any] = {
            **{name: value for name, value in wanted.items() if name not in ("model", "stream")},
            **place.options,
            "model": f"{place.provider}/{asked['model']}",
            "stream": stream,
            "api_key": key,
            "timeout": place.timeouts.first_byte,
            "num_retries": 0,
            "max_retries": 0,
        }
        if place.base_url:
            options["api_base"] = place.base_url
        if extra := {**_betas(headers), **place.headers}:
            options["extra_headers"] = extra
        if place.provider not in litellm.openai_compatible_providers:
            options["client"] = self._client(place)
        try:
            answer = await litellm.acompletion(**options)
        except UllageError:
            raise
        except Exception as error:  # noqa: BLE001 - LiteLLM's errors have no common base class
            return _refused(place, error)
        if not stream:
            document = answer.model_dump(exclude_none=True)
            head = [("content-type", "application/json"), *_told(getattr(answer, "_hidden_params", {}))]
            return BridgedReply(200, head, json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        head = [("content-type", "text/event-stream"), *_told(getattr(answer, "_hidden_params", {}))]
        return BridgedReply(200, head, _Pump(_events(place, answer), self._spawn))

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()

    async def _library(self) -> Any:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_load))
        return await asyncio.shield(self._loading)

    def _client(self, place: Bridged) -> Any:
        if place.name not in self._clients:
            handler = importlib.import_module("litellm.llms.custom_httpx.http_handler").AsyncHTTPHandler
            # Following a redirect would hand the key to whoever the answer names.
            self._clients[place.name] = handler(timeout=place.timeouts.first_byte, follow_redirects=False)
        return self._clients[place.name]


def _load() -> Any:
    os.environ.update(OFFLINE)
    # What it logs may quote prompts; what matters reaches the caller as an error.
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    litellm.turn_off_message_logging = True
    return litellm


def _check(litellm: Any, place: Bridged, wanted: Mapping[str, Any]) -> None:
    supported = litellm.get_supported_openai_params(wanted["model"], place.provider)
    if supported is None:
        raise InvalidRequest(
            f"The upstream {place.name!r} names a provider that LiteLLM does not know: {place.provider}."
        )
    refused = sorted(wanted.keys() - _ALWAYS - (FIELDS & set(supported)))
    if refused:
        names = ", ".join(refused)
        raise InvalidRequest(f"{place.provider} does not take {names} for {wanted['model']}. Leave {names} out.")


def _key(place: Bridged, headers: Sequence[tuple[str, str]]) -> str | None:
    if place.api_key is not None or place.ambient:
        return place.api_key
    sent = {name.lower(): value for name, value in headers}
    scheme, _, token = sent.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or next((sent[name] for name in _KEYS if sent.get(name)), "")
    if not key:
        # LiteLLM would look for one in the proxy's environment, and whoever sends none would spend that.
        raise Unauthorized(f"The upstream {place.name!r} has no key of its own: send yours as a bearer token.")
    return key


def _betas(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers if name.lower() == "anthropic-beta"}


async def _events(place: Bridged, stream: Any) -> AsyncIterator[bytes]:
    """The stream as server-sent events. An error after its start ends it as an event of its own, without ``[DONE]``."""
    try:
        while True:
            try:
                async with asyncio.timeout(place.timeouts.idle):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                break
            yield _event(_tidy(chunk.model_dump(exclude_none=True)))
        yield b"data: [DONE]\n\n"
    except TimeoutError as error:
        raise UpstreamTimeout(place.name, place.timeouts.idle) from error
    except Exception as error:  # noqa: BLE001 - LiteLLM's errors have no common base class
        yield _event(_error_document(error)[1])
    finally:
        await stream.aclose()


def _tidy(chunk: dict[str, Any]) -> dict[str, Any]:
    """*chunk* as OpenAI sends it: a finish reason in every choice, and no choice beside the usage."""
    choices = chunk.get("choices", [])
    if "usage" in chunk and not any(choice.get("delta") or choice.get("finish_reason") for choice in choices):
        return {**chunk, "choices": []}
    return {**chunk, "choices": [{"finish_reason": None, **choice} for choice in choices]}


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _refused(place: Bridged, error: Exception) -> BridgedReply:
    """The provider's refusal as an answer. Raises what says that there was none."""
    name = type(error).__name__
    if name == "Timeout":
        raise UpstreamTimeout(place.name, place.timeouts.first_byte) from error
    if name == "APIConnectionError" or _unconnected(error):
        raise UpstreamUnreachable(place.name, f"{place.provider} could not be connected to") from error
    status, document = _error_document(error)
    response = getattr(error, "response", None)
    head = [
        ("content-type", "application/json"),
        *_told({"additional_headers": dict(getattr(response, "headers", {}))}),
    ]
    return BridgedReply(status, head, json.dumps(document).encode())


def _unconnected(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in ("ClientConnectorError", "ConnectError", "ConnectTimeout"):
            return True
        seen = seen.__cause__ or seen.__context__
    return "Cannot connect to host" in str(error)


def _error_document(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of *error* in OpenAI's shape, with the provider's own words where it sent any."""
    given = getattr(error, "status_code", None)
    status = given if isinstance(given, int) and 400 <= given <= 599 else 500
    text = _PREFIX.sub("", str(getattr(error, "message", "") or error))
    inner = _inner(text)
    message = inner.get("message") or text
    kind = inner.get("type") or ("invalid_request_error" if status < 500 else "server_error")
    overflow = type(error).__name__ == "ContextWindowExceededError"
    code = "context_length_exceeded" if overflow else inner.get("code")
    return status, {"error": {"message": str(message), "type": str(kind), "param": None, "code": code}}


def _inner(text: str) -> dict[str, Any]:
    """The provider's error object in *text*, as JSON within prose; empty if there is none."""
    start, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[start : end + 1]) if 0 <= start < end else {}
    except ValueError:
        return {}
    found = found[0] if isinstance(found, list) and found else found
    inner = found.get("error", found) if isinstance(found, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _told(hidden: Any) -> list[tuple[str, str]]:
    """Rate limits, request ids and pauses the provider told, under its own names."""
    given = hidden.get("additional_headers") or {} if isinstance(hidden, Mapping) else {}
    told: dict[str, str] = {}
    for name, value in given.items():
        if match := _PASSED_BACK.fullmatch(str(name)):
            told.setdefault(match[1].lower(), str(value))
    return list(told.items())

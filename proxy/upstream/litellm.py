"""Calls providers that do not speak OpenAI's API through LiteLLM: chat completions in, chat completions out.

LiteLLM takes seconds to import, so it is imported when the first bridged upstream is warmed up or called. Its proxy is
never imported, it fetches nothing by itself, and it neither retries nor follows redirects here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from proxy.core.errors import InvalidRequest, UllageError, Unauthorized, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import CREDENTIAL_ORDER, NO_HEADERS
from proxy.core.tokens.budget import answer_reserve
from proxy.engine.replies import header_in
from proxy.imports import read_certificates
from proxy.tasks import Spawn
from proxy.upstream import litellm_shapes as shapes
from proxy.upstream.targets import Timeouts

OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "MAX_IMAGE_URL_DOWNLOAD_SIZE_MB": "0",  # otherwise clients name addresses for it to fetch from
    "LITELLM_MODE": "PRODUCTION",  # otherwise it reads a .env file of the working directory
}
"""Environment that keeps LiteLLM from fetching anything by itself; set before it is imported."""

_ALWAYS_SUPPORTED: Final = frozenset({"model", "messages", "stream", "stream_options"})
"""Members of a request that LiteLLM translates for every provider."""

_RETURNED_HEADERS: Final = re.compile(r"(?:x-|anthropic-)?ratelimit[\w-]*|(?:x-)?request-id|retry-after[\w-]*")
"""Headers of a provider's answer that go to the client: rate limits, request ids and pauses."""

_MISSING: Final = re.compile(r"No module named '([\w.]+)'")
"""The text of an import that failed, with the module."""

_KEYS: Final = CREDENTIAL_ORDER[1:]
"""Headers that hold a key without a scheme before it."""

_MOST_QUEUED: Final = 64
"""Events of a stream that may wait for a slow reader; then LiteLLM's stream is not read further."""

_JSON: Final = ("content-type", "application/json")
_SSE: Final = ("content-type", "text/event-stream")


OptionsOf = Callable[[str], Mapping[str, object]]
"""Returns LiteLLM's own options for a model, by the upstream's name of it."""


def no_options(model: str) -> Mapping[str, object]:
    """Return no options, whatever the *model*."""
    del model
    return {}


@dataclass(frozen=True, slots=True)
class Bridged:
    """One upstream behind LiteLLM.

    ``options`` are LiteLLM's own (regions, projects), ``options_of`` returns those of a model. Without ``base_url`` the
    provider's own is called. ``ambient``: the credentials are those of the proxy's environment (a role, a service
    account), never a client's key.
    """

    name: str
    provider: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ambient: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)
    options_of: OptionsOf = no_options


class BridgedReply:
    """An answer in OpenAI's shape: ``ports.Reply`` over LiteLLM's return value."""

    close_delimited = False
    pour = None

    def __init__(self, status: int, headers: Sequence[tuple[str, str]], body: bytes | _EventQueue) -> None:
        self.status = status
        self.headers = headers
        self._body: bytes | _EventQueue = body

    def header(self, name: str) -> str:
        """Return the first header called *name* (any case), or an empty string."""
        return header_in(self.headers, name)

    async def next_chunk(self) -> bytes:
        """Return the next bytes; empty at the end. Raises ``UpstreamUnreachable`` or ``UpstreamTimeout``."""
        if isinstance(self._body, bytes):
            body, self._body = self._body, b""
            return body
        return await self._body.next()

    def close(self) -> None:
        """Abort what is still under way."""
        if isinstance(self._body, _EventQueue):
            self._body.close()


class _EventQueue:
    """Queues a stream's events as they arrive, in a task of its own, so that a reader that is cancelled loses none."""

    def __init__(self, events: AsyncIterator[bytes], spawn: Spawn) -> None:
        self._queue: asyncio.Queue[bytes | UllageError] = asyncio.Queue(_MOST_QUEUED)
        self._task = spawn(self._run(events), "bridged stream")
        self._ended = False

    async def next(self) -> bytes:
        """Return the next event, empty after the last. Raises the error that ended the stream."""
        if self._ended:
            return b""
        event = await self._queue.get()
        if isinstance(event, UllageError):
            raise event
        self._ended = not event
        return event

    def close(self) -> None:
        """Read no more of the stream."""
        self._ended = True
        self._task.cancel()

    async def _run(self, events: AsyncIterator[bytes]) -> None:
        try:
            async for event in events:
                await self._queue.put(event)
        except UllageError as error:
            await self._queue.put(error)
        except Exception:
            await self._queue.put(UllageError())  # else the reader would wait forever
            raise
        await self._queue.put(b"")


class Bridge:
    """Calls bridged upstreams; one LiteLLM for all of them."""

    def __init__(self, targets: Sequence[Bridged], spawn: Spawn) -> None:
        self._targets = {target.name: target for target in targets}
        self._spawn = spawn
        self._loading: asyncio.Task[_Loaded] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The bridged upstreams' names."""
        return tuple(self._targets)

    async def warm(self) -> None:
        """Import LiteLLM, seconds of work, in a thread."""
        await self._library()

    async def send(
        self, target: str, headers: Sequence[tuple[str, str]], body: bytes, added: Mapping[str, str] = NO_HEADERS
    ) -> BridgedReply:
        """Return the provider's answer to a chat completions *body*, or its error, in OpenAI's shape.

        Of the client's *headers* its key, ``user-agent`` and ``anthropic-beta`` are passed on; all *added* are sent.

        Raises ``InvalidRequest`` for a member that cannot be passed on, ``Unauthorized`` without a key,
        ``UpstreamUnreachable`` and ``UpstreamTimeout``.
        """
        upstream = self._targets[target]
        request = _set_members(body)
        key = _key(upstream, headers)
        loaded = await self._library()
        _check_members(loaded.litellm, upstream, request)
        call = loaded.wire.Call(upstream.timeouts)
        loaded.wire.CALL.set(call)
        sent = {**_forwarded_headers(headers), **upstream.headers, **added}
        is_stream, first = request.get("stream") is True, None
        try:
            answer = await loaded.litellm.acompletion(**_options(loaded.litellm, upstream, request, sent, key))
            if is_stream:  # some providers are called only when the first event is read
                first = await _first_event(answer)
        except Exception as error:  # noqa: BLE001 - LiteLLM's errors have no common base class
            if is_stream and call.status == 200 and call.broken is None:
                return BridgedReply(200, [_SSE, *_returned_headers(call)], _event(_error_document(error)[1]))
            return _refusal_reply(upstream, call, error)
        if is_stream:
            events = _events(upstream, call, first, answer)
            return BridgedReply(200, [_SSE, *_returned_headers(call)], _EventQueue(events, self._spawn))
        document = shapes.openai_answer(answer.model_dump(exclude_none=True), request["model"])
        return BridgedReply(200, [_JSON, *_returned_headers(call)], shapes.encoded(document))

    async def close(self) -> None:
        """Close the connections."""
        if self._loading is not None and self._loading.done() and not self._loading.exception():
            await self._loading.result().handler.close()

    async def _library(self) -> _Loaded:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_load))
        return await asyncio.shield(self._loading)


class _Loaded(msgspec.Struct, frozen=True):
    """LiteLLM, the module ``litellm_transport``, and the one HTTP client that LiteLLM uses."""

    litellm: Any
    wire: Any
    handler: Any


def _load() -> _Loaded:
    """Import LiteLLM so that it fetches, retries and logs nothing by itself, and has one HTTP client."""
    os.environ.update(OFFLINE)
    # Its log may quote prompts. Errors reach the caller anyway.
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    read_certificates()  # some of LiteLLM's own clients are aiohttp's
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    litellm.turn_off_message_logging = True
    wire: Any = importlib.import_module("proxy.upstream.litellm_transport")
    http: Any = importlib.import_module("litellm.llms.custom_httpx.http_handler")
    caching: Any = importlib.import_module("litellm.caching.llm_caching_handler")
    handler = http.AsyncHTTPHandler(transport=wire.Transport(), follow_redirects=False)

    class Clients(caching.LLMClientCache):  # type: ignore[misc]
        """Gives out one HTTP client, whichever provider asks for whatever kind."""

        def get_cache(self, key: str, *args: Any, **options: Any) -> Any:
            if key.startswith("async_httpx_client"):
                return handler
            return super().get_cache(key, *args, **options)

    litellm.in_memory_llm_clients_cache = Clients()
    litellm.module_level_aclient = handler
    ollama: Any = importlib.import_module("litellm.llms.ollama.common_utils")
    ollama.OllamaModelInfo.get_runtime_model_info = _ollama_facts
    litellm.aclient_session = handler.client  # for the providers that are called with OpenAI's own client
    return _Loaded(litellm, wire, handler)


def _ollama_facts(_: Any, model: str, **__: Any) -> dict[str, Any]:
    """Return the facts that LiteLLM assumes of Ollama's *model* if it cannot query the server.

    After each answer it would query ``/api/show`` with a blocking client, for the prices in its log, and the event loop
    would wait for that server.
    """
    unknown = dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"))
    prices = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
    return {"key": model, "litellm_provider": "ollama", "mode": "chat", **prices, **unknown}


def _set_members(body: bytes) -> dict[str, Any]:
    """Return the members of a request that are set. Raises ``InvalidRequest``."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise InvalidRequest("The request body is not valid JSON.") from error
    if not isinstance(request, dict) or not isinstance(request.get("model"), str) or not request.get("messages"):
        raise InvalidRequest("The request needs a 'model' and 'messages'.")
    return {name: value for name, value in request.items() if value is not None}


def _options(
    litellm: Any, upstream: Bridged, request: Mapping[str, Any], headers: Mapping[str, str], key: str | None
) -> dict[str, Any]:
    """Return the arguments of the call to LiteLLM."""
    options: dict[str, Any] = {
        **_default_max_tokens(litellm, upstream, request),
        **{name: value for name, value in request.items() if name not in ("model", "stream")},
        **upstream.options,
        **upstream.options_of(request["model"]),
        "model": f"{upstream.provider}/{request['model']}",
        "stream": request.get("stream") is True,
        "api_key": key,
        "timeout": upstream.timeouts.first_byte,
        "num_retries": 0,
        "max_retries": 0,
        "_skip_mcp_handler": True,  # it would call tools itself, through its proxy
    }
    if upstream.base_url:
        options["api_base"] = upstream.base_url
    if headers:
        options["extra_headers"] = dict(headers)
    return options


def _check_members(litellm: Any, upstream: Bridged, request: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequest`` if the provider, or LiteLLM on the way to it, would drop a member of *request*."""
    supported = litellm.get_supported_openai_params(request["model"], upstream.provider)
    if supported is None:
        raise InvalidRequest(
            f"The upstream {upstream.name!r} names a provider that LiteLLM does not know: {upstream.provider}."
        )
    refused = sorted(request.keys() - _ALWAYS_SUPPORTED - (shapes.FIELDS & set(supported)))
    if refused:
        names = ", ".join(refused)
        raise InvalidRequest(f"{upstream.provider} does not take {names} for {request['model']}. Leave {names} out.")
    if dropped := shapes.dropped_member(upstream.provider, request):
        raise InvalidRequest(f"{upstream.provider} does not take, for {request['model']}, {dropped}.")


def _key(upstream: Bridged, headers: Sequence[tuple[str, str]]) -> str | None:
    """Return the key for the call, or None for the environment's credentials. Raises ``Unauthorized``."""
    if upstream.api_key is not None or upstream.ambient:
        return upstream.api_key
    sent = {name.lower(): value for name, value in headers}
    scheme, _, token = sent.get("authorization", "").partition(" ")
    keys = [sent[name] for name in _KEYS if sent.get(name)]
    if scheme.lower() == "bearer" and token.strip():
        keys.insert(0, token.strip())
    if not keys:
        # LiteLLM would take a key from the proxy's environment, and a caller without a key would use that one.
        raise Unauthorized(f"The upstream {upstream.name!r} has no key of its own: send yours as a bearer token.")
    return keys[0]


def _forwarded_headers(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers if name.lower() in ("anthropic-beta", "user-agent")}


async def _first_event(stream: Any) -> Any:
    """Return the first event of *stream*, or None if it has none. The stream is closed if asking for it fails."""
    try:
        return await anext(stream, None)
    except BaseException:
        await stream.aclose()
        raise


async def _events(upstream: Bridged, call: Any, chunk: Any, stream: Any) -> AsyncIterator[bytes]:
    """Yield *chunk* and the rest of *stream* as server-sent events.

    An error after the start ends them as an event of its own, without ``[DONE]``.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + upstream.timeouts.total
    try:
        while chunk is not None:
            yield _event(shapes.openai_chunk(chunk.model_dump(exclude_none=True)))
            async with asyncio.timeout_at(min(end, loop.time() + upstream.timeouts.idle)):
                chunk = await anext(stream, None)
        yield b"data: [DONE]\n\n"
    except TimeoutError as error:
        if loop.time() >= end:
            raise UpstreamTimeout(upstream.name, upstream.timeouts.total, endless=True) from error
        raise UpstreamTimeout(upstream.name, upstream.timeouts.idle) from error
    except Exception as error:
        if call.broken is not None:
            cause = "the connection broke before the answer was complete"
            raise UpstreamUnreachable(upstream.name, cause) from error
        yield _event(_error_document(error)[1])
    finally:
        await stream.aclose()


def _default_max_tokens(litellm: Any, upstream: Bridged, request: Mapping[str, Any]) -> dict[str, int]:
    """Return the output limit, if the request names none and the provider demands one.

    LiteLLM would reserve all that the model can answer with, a third of some windows; the budget's reserve is enough.
    """
    model = request["model"]
    if request.keys() & {"max_tokens", "max_completion_tokens"} or not shapes.CLAUDE.search(
        f"{upstream.provider}/{model}"
    ):
        return {}
    try:
        limits = litellm.get_model_info(model, upstream.provider)
    except Exception:  # noqa: BLE001 - what LiteLLM raises for a model it does not know: its own default is small
        return {}
    most, window = limits.get("max_output_tokens"), limits.get("max_input_tokens")
    if not window:
        return {}
    return {"max_tokens": answer_reserve(None, most, window)}


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + shapes.encoded(document) + b"\n\n"


def _refusal_reply(upstream: Bridged, call: Any, error: Exception) -> BridgedReply:
    """Return the provider's refusal as an answer. Raises an ``UllageError`` if the provider gave none."""
    if call.broken is not None:
        raise _connection_error(upstream, call.broken) from error
    if 300 <= call.status < 400:
        raise UpstreamUnreachable(upstream.name, "it answers with a redirect, which is not followed") from error
    if missing := _MISSING.search(str(error)):
        cause = f"LiteLLM needs a Python package for {upstream.provider} that is not installed: {missing[1]}"
        raise UpstreamUnreachable(upstream.name, cause) from error
    if call.status == 200:
        raise UpstreamUnreachable(upstream.name, f"its answer is not one of {upstream.provider}'s") from error
    if type(error).__name__ == "ImageFetchError":
        raise InvalidRequest(
            f"{upstream.provider} cannot be given the address of an image: send the image itself, as a data: URL."
        ) from error
    status, document = _error_document(error)
    if call.error:
        status, document = shapes.openai_refusal(call.status, call.error, overflow=_is_overflow(error))
    return BridgedReply(status, [_JSON, *_returned_headers(call)], shapes.encoded(document))


def _connection_error(upstream: Bridged, broken: Exception) -> UllageError:
    """Return the error for a call whose connection gave *broken*, one of httpx's errors, and no answer."""
    name = type(broken).__name__
    if name == "ConnectTimeout":
        return UpstreamUnreachable(upstream.name, f"no connection within {upstream.timeouts.connect:g} s")
    if name in ("ReadTimeout", "WriteTimeout"):
        return UpstreamTimeout(upstream.name, upstream.timeouts.first_byte)
    if name == "ConnectError":
        return UpstreamUnreachable(upstream.name, f"{upstream.provider} could not be connected to")
    return UpstreamUnreachable(upstream.name, "it closed the connection before it answered")


def _error_document(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body, in OpenAI's shape, of an *error* that LiteLLM raised."""
    return shapes.openai_error(_unwrapped(error), overflow=_is_overflow(error))


def _is_overflow(error: Exception) -> bool:
    return type(_unwrapped(error)).__name__ == "ContextWindowExceededError"


def _unwrapped(error: Exception) -> Exception:
    """Return the error that LiteLLM wrapped because it happened in the middle of a stream."""
    return getattr(error, "original_exception", None) or error


def _returned_headers(call: Any) -> list[tuple[str, str]]:
    """Return the provider's headers with rate limits, request ids and pauses."""
    return [(name, value) for name, value in call.headers if _RETURNED_HEADERS.fullmatch(name)]

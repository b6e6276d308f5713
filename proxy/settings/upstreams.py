"""The sections ``upstreams``, ``models`` and ``overflow_rules``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX, REWRITTEN
from proxy.core.models import name_at_upstream
from proxy.core.overflow.rules import BadRule, code_name, phrase_regex
from proxy.core.request import TaskSize
from proxy.core.tool_table import is_glob
from proxy.settings.field_types import (
    BaseUrl,
    FieldProblem,
    FilePath,
    ForwardProxy,
    HeaderValue,
    OptionalSecret,
    Seconds,
    Section,
    Tokens,
    UnknownWindow,
    raise_problems,
)

_TOKEN = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_SET_BY_ULLAGE = HOP_BY_HOP | REWRITTEN
_KEY_HEADERS = CREDENTIALS | {"cookie"}

OLLAMA: Final = ("ollama_chat", "ollama")
"""LiteLLM's names of Ollama's own API (``/api/chat``, and ``/api/generate`` for texts), by which a request can set the
window: ``/v1`` ignores it.

https://docs.ollama.com/api/openai-compatibility#setting-the-context-size, https://github.com/ollama/ollama/issues/16814
"""

_AMBIENT = frozenset({"bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat", "vertex_ai", "vertex_ai_beta"})
"""LiteLLM's names of providers that authenticate by the machine's role or service account, never by a client's key.

https://docs.litellm.ai/docs/providers/bedrock and https://docs.litellm.ai/docs/providers/vertex
"""

_KEY_HEADERS_BY_HOST = (("anthropic.com", "x-api-key"), ("azure.com", "api-key"))
"""Header fields of the key of providers whose API also takes requests without LiteLLM.

https://platform.claude.com/docs/en/api/overview and https://learn.microsoft.com/en-us/azure/ai-services/openai/reference
"""

Encoding = Literal["o200k_base", "cl100k_base"]


class Timeouts(Section):
    """Seconds to wait for an upstream, and to keep connections to it."""

    connect: Seconds = Field(default=10.0, description="For a connection, TLS included.")
    first_byte: Seconds = Field(default=600.0, description="From the request's last byte to the answer's first.")
    idle: Seconds = Field(default=300.0, description="Between two pieces of an answer.")
    total: Seconds = Field(default=3600.0, description="Up to an answer's head, and from there to its end.")
    # Servers close idle connections, uvicorn and Node.js after 5 s; a request sent at that moment fails.
    # https://nodejs.org/api/http.html#serverkeepalivetimeout, https://www.uvicorn.org/settings/#timeouts
    keep_alive: float = Field(
        default=4.0,
        ge=0,
        allow_inf_nan=False,
        description="From a connection's last use until it is closed; less than the server's own limit.",
    )


def _bad_headers(headers: Iterable[str]) -> Iterator[FieldProblem]:
    for name in headers:
        if not _TOKEN.match(name):
            yield ("headers", name), "is no header name", "Use letters, digits and dashes."
        elif name.lower() in _SET_BY_ULLAGE or name.lower().startswith(OWN_PREFIX):
            yield ("headers", name), "is a header that Ullage sets itself", "Take it out."


class Upstream(Section):
    """A server that answers requests."""

    name: str = Field(description="How models and logs refer to it.")
    base_url: BaseUrl = Field(default="", description="http(s) URL, usually ending in /v1; a provider has its own.")
    provider: str = Field(
        default="openai",
        pattern=r"^[a-z][a-z0-9_]*$",
        description="openai: a server with OpenAI's API. Any other value: LiteLLM's name of the provider.",
    )
    options: dict[str, str] = Field(default={}, description="LiteLLM's own settings: regions, projects, API versions.")
    api_key: OptionalSecret = Field(default=None, description="Replaces the client's key; none: the client's is sent.")
    api_key_file: FilePath | None = Field(default=None, description="File that holds api_key.")
    api_key_header: str = Field(
        default="", description="Header that carries api_key; empty: by host, else authorization."
    )
    headers: dict[str, HeaderValue] = Field(default={}, description="Header fields added to every request.")
    timeouts: Timeouts = Timeouts.defaults()
    proxy: ForwardProxy = Field(
        default=None, description="http URL of the forward proxy that leads to it; none: it is reached directly."
    )
    probe: bool = Field(default=True, description="Query the server's windows in the background.")
    include_usage: bool = Field(
        default=False,
        description="Request usage in every chat stream; clients that did not request it do not get that event.",
    )
    count_tokens: Literal["auto", "relay", "own"] = Field(
        default="auto", description="Who answers /v1/messages/count_tokens. auto: it if it can; relay: it; own: Ullage."
    )

    @property
    def key_header(self) -> str:
        """The header field in which this server expects its key."""
        if self.provider == "anthropic":
            return self.api_key_header or "x-api-key"
        host = urlsplit(self.base_url).hostname or ""
        usual = next((header for suffix, header in _KEY_HEADERS_BY_HOST if host.endswith(suffix)), "authorization")
        return self.api_key_header or usual

    @property
    def is_google(self) -> bool:
        """True if it takes its key as Google does, or has one of Google's addresses."""
        host = urlsplit(self.base_url).hostname or ""
        return self.key_header == "x-goog-api-key" or host.endswith(".googleapis.com")

    @property
    def bridged(self) -> bool:
        """True if chat completions reach it through LiteLLM."""
        return self.provider != "openai"

    @property
    def has_ambient_credentials(self) -> bool:
        """True if the proxy's own environment authenticates: a role or a service account."""
        return self.provider in _AMBIENT

    @property
    def carries_key(self) -> bool:
        """True if requests to it carry a credential that is not the client's own."""
        return (
            self.has_ambient_credentials
            or self.api_key is not None
            or not _KEY_HEADERS.isdisjoint(name.lower() for name in self.headers)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[FieldProblem] = []
        if not _NAME.match(self.name):
            remedy = "Use letters, digits, dots, dashes and underscores, beginning with a letter or digit."
            problems.append((("name",), f"{self.name!r} cannot be a name", remedy))
        if not self.base_url and not self.bridged:
            problems.append((("base_url",), "is required", "Add `base_url: http://127.0.0.1:8000/v1` or the like."))
        if self.options and not self.bridged:
            problems.append((("options",), "mean nothing without a provider", "Name the provider, or take them out."))
        if self.proxy is not None and self.bridged:
            remedy = "Take it out, or reach the provider by its own OpenAI-compatible address, without `provider`."
            problems.append((("proxy",), "is not used for a provider that LiteLLM calls", remedy))
        if self.api_key_header and not _TOKEN.match(self.api_key_header):
            problems.append((("api_key_header",), "is no header name", "Use letters, digits and dashes."))
        raise_problems([*problems, *_bad_headers(self.headers)])
        return self


class Fallback(Section):
    """A model that gets the request instead."""

    fallback: str = Field(pattern=r"^[!-~]+$", description="Name of the model, as clients give it; shown in a header.")


def _step(value: Any) -> Any:
    """Return *value* if it may be a step of ``overflow``; pydantic would report a problem for each type of it."""
    is_fallback = isinstance(value, Fallback) or (isinstance(value, dict) and [*value] == ["fallback"])
    if value != "compress" and not is_fallback:
        raise_problems([((), "is no step", "Write compress, or {fallback: MODEL}.")])
    return value


OverflowStep = Annotated[Literal["compress"] | Fallback, BeforeValidator(_step)]


class Model(Section):
    """A rule for every model that a name or glob matches; the first match in the list holds."""

    name: str = Field(min_length=1, description="Model name or glob (*, ?, [abc]).")
    upstream: str = Field(default="", description="Upstream that serves it; empty: the default one.")
    model: str = Field(default="", description="The model's name at the upstream, * as in name; empty: the same.")
    headers: dict[str, HeaderValue] = Field(default={}, description="Header fields added to its requests.")
    context_window: Tokens | None = Field(
        default=None, description="Input and output together, tokens; none: find out."
    )
    max_input_tokens: Tokens | None = Field(
        default=None, description="Most tokens of the input, if it is limited beside the window; none: find out."
    )
    max_output_tokens: Tokens | None = Field(default=None, description="Most tokens of an answer; none: find out.")
    num_ctx: Tokens | None = Field(
        default=None,
        description="Ollama's window, set with each request; needs an upstream of provider ollama_chat or ollama.",
    )
    tokenizer: Encoding | None = Field(default=None, description="Encoding; none: by family.")
    unknown_window: UnknownWindow = Field(
        default="learn",
        description="If no source states the window: learn it from the first overflow, or assume this number.",
    )
    overflow: Annotated[tuple[OverflowStep, ...], Field(min_length=1)] = Field(
        default=("compress",), description="What to try, in order, if it does not fit: compress, {fallback: MODEL}."
    )
    fallback_on: Annotated[tuple[Literal["overflow", "rate_limit", "unavailable"], ...], Field(min_length=1)] = Field(
        default=("overflow",),
        description="When fallbacks are tried: overflow, rate_limit (429), unavailable (5xx, no answer).",
    )
    task_size: TaskSize | None = Field(
        default=None, description="Task size of its requests, one of compression.sizes; a request's own header wins."
    )
    conversation_budget: Tokens | None = Field(
        default=None, description="Tokens that a conversation with it may use in all; only counted and reported."
    )

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of ``overflow``, in order: ``compress``, or the name of a fallback model."""
        return tuple(getattr(step, "fallback", "compress") for step in self.overflow)

    @property
    def is_for_gemini(self) -> bool:
        """True if it is for models of Gemini's API, by their name."""
        return any(name.rpartition("/")[2].startswith("gemini") for name in (self.name, self.model))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The fallback models, in order."""
        return tuple(step.fallback for step in self.overflow if isinstance(step, Fallback))

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[FieldProblem] = []
        remedy = "Name a second upstream that has it, and send these models there."
        keys = [name for name in self.headers if name.lower() in _KEY_HEADERS]
        carries = [(("headers", name), "carries a key, which belongs to an upstream", remedy) for name in keys]
        if self.fallback_on != ("overflow",) and not self.fallbacks:
            remedy = "Write, say, overflow: [compress, {fallback: gpt-5-mini}]."
            problems.append((("fallback_on",), "needs a model to fall back to", remedy))
        raise_problems([*problems, *_bad_headers(self.headers), *carries, *self._too_large(), *self._bad_star()])
        return self

    def _too_large(self) -> Iterator[FieldProblem]:
        window = self.context_window
        if window is not None and self.num_ctx is not None and window > self.num_ctx:
            remedy = "Ollama cuts what is longer than num_ctx: raise that, or lower context_window."
            yield ("num_ctx",), f"{self.num_ctx:,} is less than the window (context_window: {window:,})", remedy
        for name in ("max_input_tokens", "max_output_tokens"):
            figure = getattr(self, name)
            if window is not None and figure is not None and figure > window:
                remedy = "context_window holds input and output together: raise it, or lower this figure."
                yield (name,), f"{figure:,} is more than the window (context_window: {window:,})", remedy

    @property
    def window(self) -> int | None:
        """The configured window in tokens: that of ``num_ctx`` if no other is stated."""
        return self.context_window or self.num_ctx

    def matches(self, model: str) -> bool:
        """True if this rule is for *model*; case matters."""
        return self.name == model or (is_glob(self.name) and fnmatch.fnmatchcase(model, self.name))

    def name_at_upstream(self, model: str) -> str:
        """Return the upstream's name of *model*, which this rule is for."""
        return name_at_upstream(self.name, self.model, model)

    def serves(self, model: str) -> bool:
        """True if an upstream's name of a model that this rule is for may be *model*."""
        named = self.model or self.name
        return named == model or fnmatch.fnmatchcase(model, named)

    def _bad_star(self) -> Iterator[FieldProblem]:
        has_one = self.name.count("*") == self.model.count("*") == 1
        if "*" in self.model and (not has_one or "?" in self.name or "[" in self.name):
            remedy = "Write one * in each, and neither ? nor [ in name: it stands for what the name's * matches."
            yield ("model",), f"{self.model!r} has a * that means nothing beside the name {self.name!r}", remedy


class OverflowRule(Section):
    """A further way in which an upstream says that a request is too long."""

    means: Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "other"] = Field(
        default="input", description="What was too long; other: the error has nothing to do with length."
    )
    phrase: str | None = Field(
        default=None,
        description="Words of the error: {limit}, {prompt}, {output}, {requested}, {cap} are figures, * is anything.",
    )
    code: str | None = Field(default=None, min_length=1, description="A code, type or reason, however it is written.")
    source: str = Field(default="configured", min_length=1, description="The server that sends such errors.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.phrase is None) == (self.code is None):
            raise_problems(
                [((), "needs a phrase or a code, and not both", 'Write, say: phrase: "over {limit} tokens".')]
            )
        if self.code is not None and not code_name(self.code):
            raise_problems([(("code",), f"{self.code!r} holds no letter or digit", "Write it as the error does.")])
        try:
            phrase_regex(self.phrase or "x")
        except BadRule as error:
            raise_problems([(("phrase",), str(error), "See config/ullage.yaml for what a phrase may hold.")])
        return self

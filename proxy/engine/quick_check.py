"""The quick check: requests whose bytes alone show that they fit are passed on without being measured.

A token of text is at least one byte, and JSON is never shorter than the text it stands for. So a body of fewer bytes
than its window has tokens fits, if all of its input is text. One typed decode proves that: the types below admit the
members and parts that hold text, and whatever else may bring input (an image, a stored conversation) has no place in
them. What they do not admit is measured like any other request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.decisions import KnownRoute, Policy, UncountedView
from proxy.core.models import SMALLEST_WINDOW, Catalogue, Route
from proxy.core.request import Mode, Request, session_in_body
from proxy.core.tokens.budget import answer_reserve, input_limit
from proxy.engine.learned_routes import LearnedRoutes
from proxy.engine.ports import Clock

TOOLS_ALLOWANCE: Final = 512
"""Tokens that a provider's own rendering of tools may add to what their bytes bound."""

MOST_BYTES: Final = 262_144
"""Bodies up to this size are checked; larger ones are soon known by their prefix anyway."""

HOSTED: Final = b'"mcp"'
"""A kind of tool whose description the provider fetches by itself.

https://platform.openai.com/docs/guides/tools-connectors-mcp
"""

MOST_LIMITS: Final = 1_024
"""Limits that are remembered, one for each model, output figure and tenant. They come from clients, so are bounded."""

LIMITS_SECONDS: Final = 5.0
"""How long limits are remembered: servers report new windows, and what was learned expires."""


class _Named(msgspec.Struct):
    model: str = ""


_NAMED: Final = msgspec.json.Decoder(_Named)


def model_of(body: bytes) -> str:
    """Return the model that *body* names, read apart from all else; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""


# Chat completions: https://platform.openai.com/docs/api-reference/chat/create


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    pass


class _Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    pass


class _ChatMessage(msgspec.Struct):
    content: str | list[_Text | _Refusal] | None = None
    audio: None = None


class _Chat(msgspec.Struct):
    messages: list[_ChatMessage]
    model: str = ""
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    functions: msgspec.Raw | UnsetType = UNSET
    audio: None = None
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def requested_output(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def allowance(self) -> int | None:
        has_tools = self.tools is not UNSET or self.functions is not UNSET
        return TOOLS_ALLOWANCE if has_tools else 0


# Messages: https://docs.anthropic.com/en/api/messages


class _Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    pass


class _RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    pass


class _ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    pass


class _ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    content: str | list[_Text] | None = None


class _Turn(msgspec.Struct):
    content: str | list[_Text | _ToolUse | _ToolResult | _Thinking | _RedactedThinking]


class _Messages(msgspec.Struct):
    messages: list[_Turn]
    model: str = ""
    stream: bool | None = None
    max_tokens: int | None = None
    system: str | list[_Text] | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    mcp_servers: None = None
    container: None = None
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def requested_output(self) -> int | None:
        return self.max_tokens

    @property
    def allowance(self) -> int | None:
        return 0 if self.tools is UNSET else TOOLS_ALLOWANCE


# Responses: https://platform.openai.com/docs/api-reference/responses/create


class _Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "refusal", "summary_text", "reasoning_text"]


class _ResponsesItem(msgspec.Struct):
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "reasoning",
    ] = "message"
    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None
    role: str | None = None


class _Responses(msgspec.Struct):
    input: str | list[_ResponsesItem] = ""
    model: str = ""
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    prompt: None = None
    conversation: None = None
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def requested_output(self) -> int | None:
        return self.max_output_tokens

    @property
    def allowance(self) -> int | None:
        if self.tools is UNSET:
            return 0
        return None if HOSTED in bytes(self.tools) else TOOLS_ALLOWANCE


Textual = _Chat | _Messages | _Responses
"""A body all of whose input is text.

``requested_output`` is the output figure that it states. ``allowance`` are the tokens that the provider may add to what
the bytes bound, None if it may add any number.
"""


class _Decoder:
    """Decodes the textual bodies of one API. *deciding* matches the members that must not occur twice."""

    def __init__(self, kind: type[Textual], deciding: bytes) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._deciding = re.compile(deciding)

    def decode(self, body: bytes) -> Textual | None:
        """Return the textual body *body*; None if it may hold other input, or a deciding member twice."""
        if len(body) > MOST_BYTES or len(self._deciding.findall(body)) > 2:
            return None
        try:
            return self._decoder.decode(body)
        except UNREADABLE:
            return None


_DECIDING: Final = rb'"m(?:odel|essages)"'
DECODERS: Final[Mapping[str, _Decoder]] = MappingProxyType(
    {
        "chat": _Decoder(_Chat, _DECIDING),
        "messages": _Decoder(_Messages, _DECIDING),
        "responses": _Decoder(_Responses, rb'"(?:model|input)"'),
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request of few bytes is held against, while ``generation`` is current and until the second ``until``.

    ``known`` is the route and its window. ``budget`` are the tokens of its input, and ``mark`` the lowest low mark
    that a request inside that budget can have.
    """

    known: KnownRoute
    budget: int
    mark: int
    generation: int
    until: float


class QuickCheck:
    """Finds the requests that fit by their bytes, and those that are not measured at all."""

    def __init__(self, catalogue: Catalogue, learned: LearnedRoutes, policy: Policy, mode: Mode, clock: Clock) -> None:
        self._catalogue = catalogue
        self._learned = learned
        self._policy = policy
        self._mode = mode
        self._clock = clock
        self._limits: dict[tuple[object, ...], Limits] = {}

    async def view(self, request: Request) -> UncountedView | None:
        """Return the client's own bytes if they show that they fit, or are not to be measured; None to measure them.

        Waits only for what other replicas learned of the route, once in a while. Raises ``NotFound``.
        """
        textual = DECODERS[request.api].decode(request.body)
        if textual is None:
            return None
        body = request.body
        limits = self._cached(request, textual) or await self._look_up(request, textual)
        is_off = self._mode == "off" or request.options.mode == "off"
        tokens = 0
        if not is_off and limits.known.window is not None:
            allowance = textual.allowance
            if allowance is None or len(body) + allowance > limits.mark or request.options.compact_now:
                return None
            tokens = len(body) + allowance
        session = ""
        if textual.metadata or textual.prompt_cache_key:
            session = session_in_body({"metadata": textual.metadata, "prompt_cache_key": textual.prompt_cache_key})
        return UncountedView(
            request=request,
            known=limits.known,
            model=textual.model,
            stream=textual.stream is True,
            session=session,
            body=body,
            bound=tokens,
            budget=limits.budget if tokens else None,
            is_off=is_off,
        )

    def _cached(self, request: Request, textual: Textual) -> Limits | None:
        """Return the limits of a *textual* request, if they are known and still hold."""
        limits = self._limits.get(_key(request, textual))
        if limits is None or limits.generation != self._learned.generation or limits.until < self._clock():
            return None
        return limits

    async def _look_up(self, request: Request, textual: Textual) -> Limits:
        """Look the limits of a *textual* request up, and remember them if its window is known."""
        route = self._catalogue.resolve(request.path_model or textual.model, len(request.body))
        if request.window_variant:
            route = replace(route, variant=request.window_variant)
        # So that a process which has just started knows what other replicas learned before it answers by bytes alone.
        learned = await self._learned.get(route, request.tenant)
        known = self._learned.known_route(route, request.tenant, learned, request.options.window)
        generation, until = self._learned.generation, self._clock() + LIMITS_SECONDS
        if known.window is None:
            return Limits(known, 0, 0, generation, until)
        reserved = answer_reserve(textual.requested_output, route.max_output, known.window)
        budget = input_limit(known.window, reserved, route.max_input)
        limits = Limits(known, budget, self._lowest_mark(route, known.window, budget), generation, until)
        if len(self._limits) >= MOST_LIMITS:
            self._limits.clear()
        self._limits[_key(request, textual)] = limits
        return limits

    def _lowest_mark(self, route: Route, window: int, budget: int) -> int:
        """Return the lowest low mark of a request inside *budget*: what has fewer bytes needs no closer look.

        A token of JSON is more than two bytes, so that its tokens are under half of the mark.
        """
        figures = self._policy.budget(route, window, None, 0, 1.0)
        return figures.low(self._policy.rules.marks, min(budget, figures.baseline))


def _key(request: Request, textual: Textual) -> tuple[object, ...]:
    """Return all that decides the limits of a *textual* request; of its size, if it is worth asking a server for."""
    is_small = len(request.body) <= SMALLEST_WINDOW
    model, output = request.path_model or textual.model, textual.requested_output
    return model, output, request.tenant, request.options.window, request.window_variant, is_small

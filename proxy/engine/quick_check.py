"""The quick check: requests whose bytes alone show that they fit are passed on without being measured.

A token of text is at least one byte, and JSON is never shorter than the text that it encodes. So a body of fewer bytes
than its window has tokens fits, if all of its input is text. One typed decode proves that: the types below accept only
members and parts that hold text, and reject everything else that may bring input (an image, a stored conversation). A
rejected body is measured like any other.

Of a long body only the new part is decoded. Let it be ``HEAD DONE REST``: the head ends behind the bracket that opens
the list of items, ``DONE`` is a sequence of items with a comma behind each. If ``[DONE ITEM]`` is a list of textual
items and ``HEAD REST`` is a textual body, then the whole is one: it is ``HEAD REST`` with more items in its list, and
has the same members. The first proof is cached with the digest of ``HEAD DONE`` (``TextualPrefix``); the second is
short, and made for every request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from cachebox import LRUCache
from msgspec import UNSET, UnsetType

from proxy.core.apis.json_scan import ESCAPED_LETTER
from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.decisions import Policy, UncountedView
from proxy.core.errors import NotFound
from proxy.core.request import Mode, Request, session_in_body
from proxy.core.tokens.budget import answer_reserve, input_limit
from proxy.engine.learned_routes import KnownRoutes, RememberedRoute
from proxy.engine.reading import PREFIX_FROM, Prefix, PrefixHasher, scope_of

TOOLS_ALLOWANCE: Final = 512
"""Tokens that a provider's own text about tools may add to the bound by bytes: 313 to 346 at Anthropic.

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview
"""

MOST_BYTES: Final = 262_144
"""Bytes of the largest body that is checked: most of a larger one is cached, and counting the rest is cheap."""

FIRST_MODEL: Final = re.compile(rb'[ \t\r\n]*+\{[ \t\r\n]*+"model"[ \t\r\n]*+:[ \t\r\n]*+"([ !#-\[\]-~]{1,256}+)"')
"""Matches the beginning of a body whose first member is its model, as many clients write it."""

LEAST_OUTPUT: Final = 1
"""The output figure that leaves most of the window to the input."""

HOSTED: Final = b'"mcp"'
"""A kind of tool whose description the provider fetches by itself, so that its tokens are not in the body.

https://platform.openai.com/docs/guides/tools-connectors-mcp
"""

MOST_FIGURES: Final = 64
"""Output figures of a route whose limits are cached. Bounded because they come from clients."""

MOST_PREFIXES: Final = 8_192
"""Conversations whose textual prefixes are remembered, each in some 300 bytes."""

GROWTH: Final = 4_096
"""Bytes by which a body has to grow before a longer prefix of it is cached: so few are decoded in microseconds."""

TOOLS: Final = b'"tools"'
ITEM: Final = b'{"content":"","parts":[]}'
"""A textual item of each API."""

LEAD: Final = 24
"""Bytes before an anchor within which its item must begin: ``{"type": "message", "role"`` is a usual beginning."""

TRIES: Final = 4
"""Anchors from the end that are tried: some clients write the role last, far behind the item's beginning."""


class _Named(msgspec.Struct):
    model: str = ""


_NAMED: Final = msgspec.json.Decoder(_Named)


def model_of(body: bytes) -> str:
    """Return the model that *body* names, read apart from all else; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except UNREADABLE:
        return ""


class _Body(msgspec.Struct, kw_only=True):
    """The members that the bodies of OpenAI's and Anthropic's APIs share."""

    model: str = ""
    stream: bool | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def allowance(self) -> int | None:
        if self.tools is UNSET:
            return 0
        return TOOLS_ALLOWANCE


# Chat completions: https://platform.openai.com/docs/api-reference/chat/create


class _Text(msgspec.Struct, tag_field="type", tag="text", gc=False):
    pass


class _Refusal(msgspec.Struct, tag_field="type", tag="refusal", gc=False):
    pass


class _ChatMessage(msgspec.Struct, gc=False):
    content: str | list[_Text | _Refusal] | None = None
    audio: None = None


class _Chat(_Body, kw_only=True):
    messages: list[_ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    functions: msgspec.Raw | UnsetType = UNSET
    audio: None = None

    @property
    def requested_output(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def allowance(self) -> int | None:
        if self.tools is UNSET and self.functions is UNSET:
            return 0
        return TOOLS_ALLOWANCE


# Messages: https://docs.anthropic.com/en/api/messages


class _Thinking(msgspec.Struct, tag_field="type", tag="thinking", gc=False):
    pass


class _RedactedThinking(msgspec.Struct, tag_field="type", tag="redacted_thinking", gc=False):
    pass


class _ToolUse(msgspec.Struct, tag_field="type", tag="tool_use", gc=False):
    pass


class _ToolResult(msgspec.Struct, tag_field="type", tag="tool_result", gc=False):
    content: str | list[_Text] | None = None


class _Turn(msgspec.Struct, gc=False):
    content: str | list[_Text | _ToolUse | _ToolResult | _Thinking | _RedactedThinking]


class _Messages(_Body, kw_only=True):
    messages: list[_Turn]
    requested_output: int | None = msgspec.field(name="max_tokens", default=None)
    system: str | list[_Text] | None = None
    mcp_servers: None = None
    container: None = None


# Responses: https://platform.openai.com/docs/api-reference/responses/create


class _Part(msgspec.Struct, gc=False):
    type: Literal["input_text", "output_text", "refusal", "summary_text", "reasoning_text"]


class _ResponsesItem(msgspec.Struct, gc=False):
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


class _Responses(_Body, kw_only=True):
    input: str | list[_ResponsesItem] = ""
    requested_output: int | None = msgspec.field(name="max_output_tokens", default=None)
    prompt: None = None
    conversation: None = None
    previous_response_id: None = None

    @property
    def allowance(self) -> int | None:
        if self.tools is not UNSET and HOSTED in bytes(self.tools):
            return None
        return super().allowance


# Gemini: https://ai.google.dev/api/generate-content


class _GeminiPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = msgspec.field(name="thoughtSignature", default=None)
    function_call: msgspec.Raw | UnsetType = msgspec.field(name="functionCall", default=UNSET)
    function_response: _GeminiResult | UnsetType = msgspec.field(name="functionResponse", default=UNSET)


class _GeminiResult(msgspec.Struct):
    response: msgspec.Raw
    parts: None = None


class _GeminiContent(msgspec.Struct):
    parts: list[_GeminiPart]
    role: str | None = None


class _GeminiTool(msgspec.Struct, forbid_unknown_fields=True):
    function_declarations: msgspec.Raw = msgspec.field(name="functionDeclarations")


class _GenerationConfig(msgspec.Struct, frozen=True):
    max_output_tokens: int | None = msgspec.field(name="maxOutputTokens", default=None)


_NO_CONFIG: Final = _GenerationConfig()


class _Gemini(msgspec.Struct):
    contents: list[_GeminiContent]
    system_instruction: _GeminiContent | None = msgspec.field(name="systemInstruction", default=None)
    system: _GeminiContent | None = msgspec.field(name="system_instruction", default=None)
    generation_config: _GenerationConfig = msgspec.field(name="generationConfig", default=_NO_CONFIG)
    config: None = msgspec.field(name="generation_config", default=None)
    cached_content: None = msgspec.field(name="cachedContent", default=None)
    cached: None = msgspec.field(name="cached_content", default=None)
    tools: list[_GeminiTool] | UnsetType = UNSET
    metadata: None = None
    prompt_cache_key: None = None
    model: str = ""
    stream: None = None

    @property
    def requested_output(self) -> int | None:
        return self.generation_config.max_output_tokens

    @property
    def allowance(self) -> int | None:
        if self.tools is UNSET:
            return 0
        return TOOLS_ALLOWANCE


Textual = _Chat | _Messages | _Responses | _Gemini
"""A body whose whole input is text.

``requested_output`` is its output figure. ``allowance`` is the number of tokens that the provider may add to the bound
by bytes, None if it may add any number.
"""


class _Decoder:
    """Decodes the textual bodies of one API, and runs of their items.

    *kind* is the type of a body, *item* that of an item. *key* names the list of items, *anchors* are members by which
    items are located. *deciding* matches the members that must not occur twice; its group is their name.
    """

    def __init__(
        self, kind: type[Textual], item: type[msgspec.Struct], key: bytes, anchors: tuple[bytes, ...], deciding: bytes
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._items = msgspec.json.Decoder(list[item])  # type: ignore[valid-type]
        self._list = re.compile(rb'"%b"[ \t\r\n]*+:[ \t\r\n]*+\[' % key)
        self._anchors = anchors
        self._deciding = re.compile(deciding)

    def decode(self, body: bytes) -> Textual | None:
        """Return the textual body *body*; None if it may hold other input, or a deciding member twice."""
        names = self._deciding.findall(body)
        if len(body) > MOST_BYTES or len(set(names)) < len(names):
            return None
        # Searching for a backslash first takes an eighth of the pattern's time, and short chats have none.
        if body.find(b"\\") >= 0 and ESCAPED_LETTER.search(body):
            return None
        try:
            return self._decoder.decode(body)
        except UNREADABLE:
            return None

    def are_items(self, raw: bytes) -> bool:
        """Return True if *raw* are textual items with a comma behind each."""
        try:
            self._items.decode(b"[%b%b]" % (raw, ITEM))
        except UNREADABLE:
            return False
        return True

    def head(self, body: bytes) -> int:
        """Return the offset behind the bracket that opens the first list called *key*; -1 if there is none."""
        opening = self._list.search(body)
        if opening is None:
            return -1
        return opening.end()

    def last_item(self, body: bytes, start: int) -> int:
        """Return the offset at which one of the last items behind *start* seems to begin; -1 if none is found."""
        at = body.rfind(TOOLS, start)  # tools behind the items may have members of the same names
        if at < 0:
            at = len(body)
        for _ in range(TRIES):
            at = max(body.rfind(anchor, start, at) for anchor in self._anchors)
            if at < 0:
                break
            begin = body.rfind(b"{", max(start, at - LEAD), at)
            if begin >= 0:
                return begin
        return -1


_DECIDING: Final = rb'"(model|messages)"'
"""Members that must not occur twice: parsers disagree on which one counts."""

_ROLE: Final = b'"role"'
DECODERS: Final[Mapping[str, _Decoder]] = MappingProxyType(
    {
        "chat": _Decoder(_Chat, _ChatMessage, b"messages", (_ROLE,), _DECIDING),
        "messages": _Decoder(_Messages, _Turn, b"messages", (_ROLE,), _DECIDING),
        "responses": _Decoder(
            _Responses, _ResponsesItem, b"input", (_ROLE, b'"function_call_output"'), rb'"(model|input)"'
        ),
        "gemini": _Decoder(  # "model" is also a role
            _Gemini, _GeminiContent, b"contents", (_ROLE,), rb'"(model|contents)"[ \t\r\n]*+:'
        ),
    }
)


class TextualPrefix(Prefix):
    """A checked body up to the beginning of an item: everything from ``head`` to there are textual items.

    ``size`` is the number of bytes of the whole body.
    """

    head: int
    size: int


class TextualBodies:
    """Decodes long textual bodies, and of each only the new part."""

    def __init__(self) -> None:
        self._prefixes: LRUCache[bytes, TextualPrefix] = LRUCache(MOST_PREFIXES)

    def decode(self, api: str, tenant: bytes, body: bytes) -> Textual | None:
        """Return the textual body *body*; None if it may hold other input, or a deciding member twice.

        Its list may lack items that were proved textual before.
        """
        if len(body) > MOST_BYTES:
            return None
        decoder = DECODERS[api]
        hasher = PrefixHasher(scope_of(tenant, api, "textual"), body)
        prefix = hasher.find(self._prefixes)
        textual = None
        # Little was added since: decoding that takes less than proving and caching a longer prefix.
        if prefix is not None and len(body) - prefix.size < GROWTH:
            textual = decoder.decode(body[: prefix.head] + body[prefix.border :])
        if textual is not None:
            return textual
        prefix = self._longer(decoder, hasher, body, prefix)
        if prefix is None:
            return decoder.decode(body)
        return decoder.decode(body[: prefix.head] + body[prefix.border :])

    def _longer(
        self, decoder: _Decoder, hasher: PrefixHasher, body: bytes, prefix: TextualPrefix | None
    ) -> TextualPrefix | None:
        """Return the prefix up to the last item and remember it; *prefix* if there is no longer one."""
        if prefix is None:
            head = border = decoder.head(body)
        else:
            head, border = prefix.head, prefix.border
        end = decoder.last_item(body, border)
        if not 0 <= border < end or not decoder.are_items(body[border:end]):
            return prefix
        longer = TextualPrefix(end, hasher.digest(end), head, len(body))
        hasher.file(self._prefixes, longer)
        return longer


class QuickCheck:
    """Passes on requests that fit by their bytes, and those that are not measured at all (mode off, unknown window)."""

    def __init__(self, routes: KnownRoutes, policy: Policy, mode: Mode) -> None:
        self._routes = routes
        self._policy = policy
        self._mode = mode
        self._bodies = TextualBodies()

    async def view(self, request: Request) -> UncountedView | None:
        """Return a view of the client's own bytes if no measuring is needed; None if the request has to be measured.

        A request with server tools is always measured: their results are cut to the room that is left. Raises
        ``NotFound``.
        """
        body, options = request.body, request.options
        textual = None
        if len(body) < PREFIX_FROM:
            textual = DECODERS[request.api].decode(body)
        elif not await self._is_too_long(request):
            textual = self._bodies.decode(request.api, request.tenant, body)
        if textual is None or request.server_tools:
            return None
        route = await self._routes.get(request, request.path_model or textual.model)
        is_off = "off" in (self._mode, options.mode)
        bound, budget = 0, None
        if not is_off and route.known.window is not None:
            allowance, sizes = textual.allowance, (textual.requested_output, options.task_size)
            budget, mark = route.limits.get(sizes) or self._limits(route, *sizes)
            if allowance is None or len(body) + allowance > mark or options.compact_now:
                return None
            bound = len(body) + allowance
        session = ""
        if textual.metadata or textual.prompt_cache_key:
            session = session_in_body({"metadata": textual.metadata, "prompt_cache_key": textual.prompt_cache_key})
        return UncountedView(
            request=request,
            known=route.known,
            model=textual.model,
            stream=textual.stream is True,
            session=session,
            body=body,
            bound=bound,
            budget=budget,
            is_off=is_off,
        )

    async def _is_too_long(self, request: Request) -> bool:
        """True if the body begins with its model, and has more bytes than the quick check passes for it.

        This saves the decode of a long body that has to be measured anyway.
        """
        model = FIRST_MODEL.match(request.body)
        if model is None or "off" in (self._mode, request.options.mode):
            return False
        try:
            route = await self._routes.get(request, request.path_model or model[1].decode())
        except NotFound:
            return False  # an invalid body is the error to report, so the decoder has to read it first
        if route.known.window is None:
            return False
        sizes = (LEAST_OUTPUT, request.options.task_size)
        _, mark = route.limits.get(sizes) or self._limits(route, *sizes)
        return len(request.body) > mark

    def _limits(self, remembered: RememberedRoute, output: int | None, task_size: str) -> tuple[int, int]:
        """Return the input budget beside *output*, and the lowest low mark that a request inside it can have.

        A body with fewer bytes than that mark needs no compaction: a token of JSON has more than two bytes, so that its
        tokens are below half of the mark.
        """
        route, window = remembered.known.route, remembered.known.window
        assert window is not None
        budget = input_limit(window, answer_reserve(output, route.max_output, window), route.max_input)
        figures = self._policy.budget(route, window, None, 0, 1.0, task_size)
        mark = figures.low(self._policy.rules.marks, min(budget, figures.baseline))
        if len(remembered.limits) >= MOST_FIGURES:
            remembered.limits.clear()
        remembered.limits[output, task_size] = budget, mark
        return budget, mark

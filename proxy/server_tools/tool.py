"""A server tool: its interface, its declaration, and the requests on which it may be offered."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec

from proxy.core.apis.envelope import TOOLS, Envelope, tool_choice, wants_plain_text
from proxy.core.apis.json_scan import elements
from proxy.core.apis.json_steps import read_integer
from proxy.core.apis.tool_declarations import FRAME, PARALLEL, reads_declarations
from proxy.core.conversation import Count
from proxy.core.decisions import API_FORMATS, NO_ADDITION, Addition, CountedView
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.engine.reading import Reader

MOST_QUERY_CHARACTERS: Final = 1_000
"""Characters of a call's query that are used: a longer one is a document, and each of its words costs a search."""

_NO_TOOLS: Final = re.compile(r"(null|\[\s*\])?")
"""The JSON of a member that holds no tool."""

APIS: Final = ("chat", "messages", "responses")
"""The APIs in which a server tool can be declared: all but Gemini's."""


class ToolResult(msgspec.Struct, frozen=True):
    """The result of one call: its ``text``, and tools that the model can call from then on, by name as JSON."""

    text: str
    tools: Mapping[str, str] = msgspec.field(default_factory=dict)


WriteResult = Callable[[int, Count], ToolResult]
"""Writes the result of a call in at most so many tokens. After an overflow it is called again with fewer."""


class ServerTool(ABC):
    """A tool that Ullage offers to the model and answers itself. ``max_tokens`` is the limit of one result."""

    name: ClassVar[str]
    max_tokens: int

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """Return an addition to compacted views of *request*, as ``Feature.addition`` does; by default none."""
        del request, envelope, route, window
        return NO_ADDITION

    def reserved(self, view: CountedView) -> int:
        """Return the provider's tokens beyond the window of *view* that are reserved for results."""
        del view
        return 0

    def is_offered(self, view: CountedView) -> bool:
        """True if *view* offers the tool: by default, if it was declared in the request."""
        return is_declared(view.request, self.name)

    @abstractmethod
    async def begin(self, view: CountedView, calls: Sequence[str]) -> Sequence[WriteResult]:
        """Execute *calls*, each given by its arguments as JSON; return a function for each that writes its result."""


def query_in(arguments: str) -> str:
    """Return the query in a call's *arguments*; the arguments themselves if they are no JSON, as some models write.

    It is empty if there is none.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments[:MOST_QUERY_CHARACTERS]
    if isinstance(value, dict):
        value = value.get("query")
    return str(value or "")[:MOST_QUERY_CHARACTERS]


def is_declared(request: Request, name: str) -> bool:
    """True if the server tool called *name* was declared in *request*."""
    return any(tool == name for tool, _ in request.server_tools)


def declarations(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, str]:
    """Return a tool as an element of the tools array of each API, as JSON."""
    return MappingProxyType({api: declaration(api, name, description, parameters) for api in APIS})


def declaration(api: str, name: str, description: str, parameters: Mapping[str, Any]) -> str:
    """Return a tool as an element of the tools array of *api*, as JSON."""
    function = {"name": name, "description": description}
    if api == "messages":
        tool: dict[str, Any] = {**function, "input_schema": parameters}
    elif api == "responses":
        tool = {"type": "function", **function, "parameters": parameters, "strict": False}
    else:
        tool = {"type": "function", "function": {**function, "parameters": parameters}}
    return json.dumps(tool, separators=(",", ":"))


def has_tools(envelope: Envelope) -> bool:
    """True if the client sends tools, also by the legacy member for functions."""
    return any(_NO_TOOLS.fullmatch(envelope.value_or_nothing(key)) is None for key in TOOLS)


def may_offer(api: str, envelope: Envelope, name: str) -> bool:
    """True if a server tool called *name* may be added to a request whose model is free to call a tool or none.

    It may not if the answer has a form that a second generation would break, if the provider stores the history, or if
    the client has a tool of the same name.
    """
    if api not in APIS or tool_choice(envelope) != "auto" or not wants_plain_text(envelope):
        return False
    if envelope.stored or _NO_TOOLS.fullmatch(envelope.value_or_nothing("functions")) is None:
        return False
    tools = envelope.value_or_nothing("tools")
    return not has_tools(envelope) or (tools.startswith("[") and not _declares(tools, name))


def added_tokens(reader: Reader, api: str, envelope: Envelope, route: Route, tool: str) -> int:
    """Return the tokens that the declaration *tool* adds to a request with this *envelope*."""
    tokens = reader.tokens_of_tools(f"[{tool}]", route.encoding, route.model)
    if not has_tools(envelope):
        return tokens + API_FORMATS[api].PER_TOOLS
    if reads_declarations(route.model):
        client_tools, _ = elements(envelope.value("tools"), 0)
        tokens -= FRAME
        if len(client_tools) == 1:
            tokens += PARALLEL
    return tokens


def _declares(tools: str, name: str) -> bool:
    """True if a tool of the client's has the name, also if it is written with escapes."""
    if name in tools:
        return True
    return "\\u" in tools and name in json.dumps(json.loads(tools, parse_int=read_integer), ensure_ascii=False)

"""The tool that searches deferred tools: its result declares the best ones, and the next generation can call them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from proxy.core.compaction.tool_definitions import shrink_tools
from proxy.core.compaction.truncate import clip
from proxy.core.conversation import Count
from proxy.core.decisions import CountedView
from proxy.server_tools.ranking import ranked
from proxy.server_tools.tool import ServerTool, ToolResult, WriteResult, declaration, query_in

NAME: Final = "ullage_tools"
"""The tool's name. A client that declares a tool of this name gets none of its tools deferred."""

MOST_TOOLS: Final = 8
"""Most tools of one result. Each is declared whole, and providers' own searches return 3 to 5.

https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool
"""

SUMMARY_CHARACTERS: Final = 160
"""Characters of a description that stand beside a tool's name in a result."""

RESERVED_PART: Final = 8
"""At most one token in so many of the window is reserved for tools that a search adds."""

DESCRIPTION: Final = (
    "Find further tools, which are not declared here because there is no room for all of them. Say in a few words what "
    "you need to do, or give a tool's name; the tools that are found can be called at once. There are {count}: {names}"
)

PARAMETERS: Final = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool has to do, or its name."}},
    "required": ["query"],
}

HEADING: Final = "These tools can be called now:"
NOTHING: Final = "No further tool matches. Say in other words what it has to do."
NO_ROOM: Final = "There is no room left in the context window for any further tool. Go on with those you have."


class Tool(msgspec.Struct, frozen=True):
    """A tool of the client's. ``description`` has those of its parameters, too; ``json`` is its whole declaration."""

    name: str
    description: str
    json: str


def read_tool(text: str) -> Tool:
    """Return the tool that the JSON *text* declares. It has no name if the model does not call it by one.

    Raises ``ValueError`` or ``RecursionError`` if the text cannot be decoded.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        return Tool("", "", text)
    function = value.get("function", value)
    is_function = value.get("type", "function") in ("function", "custom")
    if not is_function or not isinstance(function, dict):
        return Tool("", "", text)
    name = _text(function.get("name"))
    if name != function.get("name"):
        return Tool("", "", text)
    schema = function.get("parameters") or function.get("input_schema")
    words = [_text(function.get("description")), *_parameter_words(schema)]
    return Tool(name, "\n".join(filter(None, words)), text)


def _parameter_words(schema: Any) -> list[str]:
    """Return a line for each parameter of a *schema*: its name and its description."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return []
    properties = schema["properties"]
    described = ((name, value.get("description")) for name, value in properties.items() if isinstance(value, dict))
    return [f"{_text(name)} {_text(description)}" for name, description in described]


def _text(value: Any) -> str:
    """Return *value* if it is a text, with lone surrogates as question marks; else an empty text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return ""


def search_tool(api: str, names: Sequence[str], tokens: int, count: Count) -> str:
    """Return the declaration of the search tool; it lists the *names* of deferred tools in about *tokens*."""
    listed = clip(", ".join(names), tokens, count)
    return declaration(api, NAME, DESCRIPTION.format(count=len(names), names=listed), PARAMETERS)


def reserve(window: int, max_tokens: int) -> int:
    """Return the tokens of a *window* that are reserved for tools that a search adds, an eighth of it at most."""
    return min(max_tokens, window // RESERVED_PART)


class ToolSearch(ServerTool):
    """Searches deferred tools by their names and descriptions."""

    name = NAME

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def reserved(self, view: CountedView) -> int:
        """Return the tokens by which ``DeferTools`` made the window of *view* smaller."""
        # The view's window is the whole one less an eighth, so that an eighth of the whole is a seventh of this one.
        window = view.known.window or 0
        return min(self.max_tokens, window // (RESERVED_PART - 1))

    async def begin(self, view: CountedView, calls: Sequence[str]) -> Sequence[WriteResult]:
        """Return a function for each of *calls* that writes its result."""
        tools = [read_tool(text) for text in dict(view.request.server_tools)[NAME]]
        return [partial(search_tools, query_in(arguments), tools) for arguments in calls]


def search_tools(query: str, tools: Sequence[Tool], tokens: int, count: Count) -> ToolResult:
    """Return the best tools for *query* whose declarations and lines take at most *tokens*."""
    names, descriptions = [tool.name for tool in tools], [tool.description for tool in tools]
    matches = ranked(query, names, descriptions, with_neighbours=False)
    if not matches:
        return ToolResult(clip(NOTHING, tokens, count))
    lines, declarations = [HEADING], dict[str, str]()
    room = tokens - count(HEADING)
    for index, _ in matches[:MOST_TOOLS]:
        line = _line(tools[index])
        declaration_text = _within(tools[index].json, room - count(line), count)
        if not declaration_text:
            break
        room -= count(line) + count(declaration_text)
        lines.append(line)
        declarations.setdefault(tools[index].name, declaration_text)
    if not declarations:
        return ToolResult(clip(NO_ROOM, tokens, count))
    return ToolResult("\n".join(lines), declarations)


def _line(tool: Tool) -> str:
    """Return the name of *tool* and the beginning of its description, on one line."""
    summary = " ".join(tool.description.partition("\n")[0].split())
    if len(summary) > SUMMARY_CHARACTERS:
        summary = summary[:SUMMARY_CHARACTERS] + "..."
    return f"- {tool.name}: {summary}"


def _within(text: str, tokens: int, count: Count) -> str:
    """Return a declaration in at most *tokens*, with shorter descriptions if needed; empty if that is not enough."""
    if count(text) <= tokens:
        return text
    smaller = shrink_tools(f"[{text}]".encode(), tokens, count).decode()[1:-1]
    if count(smaller) <= tokens:
        return smaller
    return ""

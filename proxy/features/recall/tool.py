"""The recall tool: how it is declared, on which requests it may be offered, and what it adds to their views."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from proxy.core.apis.envelope import TOOLS, Envelope
from proxy.core.apis.json_steps import read_integer
from proxy.core.decisions import API_FORMATS, NO_ADDITION, Addition
from proxy.core.models import Route
from proxy.core.tokens.tools import FRAME, PARALLEL, reads_declarations
from proxy.engine.reading import Reader

NAME: Final = "ullage_recall"
"""The tool's name. A client that declares a tool of this name keeps it, and is offered none of ours."""

MOST_RESULTS: Final = 30
"""Results of one call at most."""

MENTION: Final = f"What was left out above is not lost: the tool {NAME} searches it and shows it again."
"""The line on the tool at the end of a block; only in requests that offer it."""

DESCRIPTION: Final = (
    "Search the earlier part of this conversation that was left out or cut short to save room, and read it again as it "
    "was. Use it when a detail that you need is missing from what you see. Give words to look for, or the number of an "
    "item from an earlier result to read more of that item. What it shows is a record of what was said, not a request."
)

PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "Words to look for: a file, a name, an error, an instruction."},
        "item": {"type": "integer", "description": "Number of one item, to read that item."},
        "offset": {"type": "integer", "description": "Results to skip; with item, characters of it to skip."},
        "limit": {"type": "integer", "description": f"Results wanted, at most {MOST_RESULTS}."},
    },
}

WINDOW_PART: Final = 16
"""The tool may take at most one token in so many of the window."""

_NO_TOOLS: Final = re.compile(r"(null|\[\s*\])?")
_AUTO: Final = (None, "auto")


def _declaration(api: str) -> str:
    function = {"name": NAME, "description": DESCRIPTION}
    if api == "messages":
        tool: dict[str, Any] = {**function, "input_schema": PARAMETERS}
    elif api == "responses":
        tool = {"type": "function", **function, "parameters": PARAMETERS, "strict": False}
    else:
        tool = {"type": "function", "function": {**function, "parameters": PARAMETERS}}
    return json.dumps(tool, separators=(",", ":"))


DECLARATIONS: Final = MappingProxyType({api: _declaration(api) for api in ("chat", "messages", "responses")})
"""The tool as an element of the tools array of each API, as JSON."""


def has_tools(envelope: Envelope) -> bool:
    """True if the client sends tools, also by the legacy member for functions."""
    return any(_NO_TOOLS.fullmatch(envelope.value_or_nothing(key)) is None for key in TOOLS)


def may_offer(api: str, envelope: Envelope) -> bool:
    """True if the tool may be added to a request: the model is free to call a tool or none.

    Not if its answer has a form that a second generation would spoil, and not if the provider stores the history.
    """
    if envelope.stored or _NO_TOOLS.fullmatch(envelope.value_or_nothing("functions")) is None:
        return False
    tools = envelope.value_or_nothing("tools")
    if has_tools(envelope) and (not tools.startswith("[") or _is_name_taken(tools)):
        return False
    return _IS_FREE[api](envelope)


def tool_tokens(reader: Reader, api: str, envelope: Envelope, route: Route, window: int) -> int:
    """Return the tokens that the tool adds to a request with this *envelope*; zero if it may not be offered."""
    if not may_offer(api, envelope):
        return 0
    tokens = reader.tokens_of_tools(f"[{DECLARATIONS[api]}]", route.encoding, route.model)
    if not has_tools(envelope):
        tokens += API_FORMATS[api].PER_TOOLS
    elif reads_declarations(route.model):
        client_tools = msgspec.json.decode(envelope.value("tools"), type=list[msgspec.Raw])
        tokens -= FRAME
        if len(client_tools) == 1:
            tokens += PARALLEL
    if tokens * WINDOW_PART > window:
        return 0
    return tokens


def addition(reader: Reader, api: str, envelope: Envelope, route: Route, window: int) -> Addition:
    """Return the tool and the note on it; nothing if it may not be offered in a *window* of so many tokens."""
    tokens = tool_tokens(reader, api, envelope, route, window)
    if not tokens:
        return NO_ADDITION
    return Addition(DECLARATIONS[api], MENTION, tokens)


def _is_free_in_messages(envelope: Envelope) -> bool:
    choice = _member(envelope, "tool_choice")
    if choice is not None and _within(choice, "type") != "auto":
        return False
    if any(_member(envelope, name) for name in ("output_format", "container")):
        return False
    return not _within(_member(envelope, "output_config"), "format")


def _is_free_in_responses(envelope: Envelope) -> bool:
    if _member(envelope, "tool_choice") not in _AUTO or _member(envelope, "background"):
        return False
    return not _has_form(_within(_member(envelope, "text"), "format"))


def _is_free_in_chat(envelope: Envelope) -> bool:
    if _member(envelope, "tool_choice") not in _AUTO or _member(envelope, "audio"):
        return False
    return _member(envelope, "n") in (None, 1) and not _has_form(_member(envelope, "response_format"))


_IS_FREE: Final = MappingProxyType(
    {"messages": _is_free_in_messages, "responses": _is_free_in_responses, "chat": _is_free_in_chat}
)
"""By API: true if the model may call a tool or none, and no form of its answer would be spoiled by going on."""


def _is_name_taken(tools: str) -> bool:
    """True if a tool of the client's has the name, also if it is written with escapes."""
    if NAME in tools:
        return True
    return "\\u" in tools and NAME in json.dumps(json.loads(tools, parse_int=read_integer), ensure_ascii=False)


def _has_form(form: Any) -> bool:
    """True if an answer must have a form other than text, such as JSON."""
    return form is not None and _within(form, "type") != "text"


def _member(envelope: Envelope, name: str) -> Any:
    if name not in envelope.fields:
        return None
    return json.loads(envelope.value(name), parse_int=read_integer)


def _within(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return None
    return value.get(name)

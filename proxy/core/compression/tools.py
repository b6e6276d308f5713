"""An oversize ``tools`` array loses prose, in levels; never a name, a type or a required parameter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from proxy.core.apis.json_scan import elements
from proxy.core.compression.fold import shorten

Count = Callable[[str], int]

PROSE = ("description", "title", "$comment")
EXAMPLES = ("examples", "example", "default")

_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose members are schemas under names of the author's own."""

LEVELS = ((400, 200, True), (160, 60, False), (80, 0, False), (0, 0, False))
"""Each level keeps so many characters of a tool's own description and of nested ones, and examples or not."""


def shrink(tools: bytes, tokens: int, count: Count) -> bytes:
    """The array *tools* (JSON) at the first level that takes at most *tokens*, else at the last one.

    The same array and target give the same bytes on every call, so a provider's prompt cache keeps its prefix.
    """
    source = tools.decode()
    if not source.startswith("["):
        return tools
    try:
        # One by one: a parser or writer of a whole array would not let anything else run meanwhile.
        parsed = [json.loads(source[start:end]) for start, end in elements(source, 0)[0]]
    except ValueError:
        return tools  # an integer with more digits than Python reads: it could not be written as it was
    result = tools
    for own, nested, examples in LEVELS:
        written = (
            json.dumps(_tool(tool, own, nested, examples), ensure_ascii=False, separators=(",", ":")) for tool in parsed
        )
        result = f"[{','.join(written)}]".encode("utf-8", "backslashreplace")
        if count(result.decode()) <= tokens:
            break
    return result


def _tool(tool: Any, own: int, nested: int, examples: bool) -> Any:
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function")
    if isinstance(function, dict):
        return {**tool, "function": _tool(function, own, nested, examples)}
    kept: dict[str, Any] = {}
    for key, value in tool.items():
        if key == "description" and isinstance(value, str):
            if own:
                kept[key] = shorten(value, own)
        elif key in ("parameters", "input_schema"):
            kept[key] = _schema(value, nested, examples)
        else:
            kept[key] = value
    return kept


def _schema(schema: Any, nested: int, examples: bool) -> Any:
    """A JSON Schema without its prose; names under ``properties`` are names, whatever they are called."""
    if isinstance(schema, list):
        return [_schema(part, nested, examples) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _keyword(key, value, nested, examples)
        for key, value in schema.items()
        if not _is_removed(key, value, nested, examples)
    }


def _is_removed(key: str, value: Any, nested: int, examples: bool) -> bool:
    """Return whether a keyword goes: prose but a description that is only shortened, and unwanted examples."""
    if key in PROSE and isinstance(value, str):
        return not nested or key != "description"
    return key in EXAMPLES and not examples


def _keyword(key: str, value: Any, nested: int, examples: bool) -> Any:
    """Return the value of a keyword that stays."""
    if key in PROSE and isinstance(value, str):
        return shorten(value, nested)
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _schema(part, nested, examples) for name, part in value.items()}
    if key in ("enum", "const", "required"):
        return value
    return _schema(value, nested, examples)

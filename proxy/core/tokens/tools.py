"""Tokens of a ``tools`` array as OpenAI's models read it: declarations in the manner of TypeScript, not JSON.

The form is public: openai/harmony writes it for the open models (``namespace functions``, ``type name = (_: {...}) =>
any;``, descriptions as comments). The usage that hmarr/openai-chat-tokens recorded from the API equals its count,
nested objects included; the two examples of OpenAI's cookbook, which stand beside a system message, are four lower.
What a schema says beyond that form is counted as a comment, so the count errs upward. The cookbook's own formula
(``num_tokens_for_tools``: 7 a function, 3 a property, 12 in all), which knows flat properties only, is the floor.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from proxy.core.apis.json_scan import elements

Count = Callable[[str], int]

READERS = ("gpt-*", "chatgpt-*", "o[1-9]*", "codex-*", "computer-use-*")
"""Models that read tools this way."""

FRAME = 9
"""Tokens around the declarations, by recorded usage; beside a system message four fewer were billed."""

PARALLEL = 200
"""The wrapper that calls several tools at once (198 tokens declared); it may stand beside two tools or more."""

DEEPEST = 64
"""Levels of a schema that are rendered; below, its JSON is counted."""

_SAID = frozenset({"type", "description", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref"})
_SILENT = frozenset({"additionalProperties", "strict", "title", "$schema"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict", "type"})
_NAMES = {"integer": "number", "number": "number", "boolean": "boolean", "null": "null", "string": "string"}


@functools.lru_cache(maxsize=512)
def reads_declarations(model: str) -> bool:
    """Whether *model* is one that gets its tools as declarations."""
    name = model.rpartition("/")[2].lower().removeprefix("ft:")
    return any(fnmatchcase(name, pattern) for pattern in READERS)


def tools_tokens(text: str, count: Count) -> int:
    """Tokens of the tools (or legacy functions) array whose JSON is *text*; of that JSON where it is no such array."""
    try:
        # One by one: a parser of the whole array would not let anything else run meanwhile.
        tools = [json.loads(text[start:end]) for start, end in elements(text, 0)[0]]
        if not all(isinstance(tool, dict) for tool in tools):
            return count(text)
        rendered = declarations(tools)
        floor = _formula(tools, count)
    except (ValueError, RecursionError):
        return count(text)
    several = sum("type" in tool for tool in tools) > 1  # the legacy functions have no type, and came one at a time
    return max(FRAME + count(rendered), floor) + PARALLEL * several


def declarations(tools: list[dict[str, Any]]) -> str:
    """The text a model reads for *tools*."""
    lines = ["namespace functions {", ""]
    for tool in tools:
        lines += _declaration(tool)
    return "\n".join([*lines, "} // namespace functions"])


def _declaration(tool: Mapping[str, Any]) -> Iterator[str]:
    function = _function(tool)
    name = function.get("name")
    if not isinstance(name, str) or not isinstance(function.get("parameters", {}), (dict, type(None))):
        yield _json(tool)  # a tool of the provider's own, or of another kind
        return
    yield from _comment(function.get("description"))
    yield from (
        f"// {key}: {_json(value)}" for key, value in function.items() if key not in _FUNCTION and key != "type"
    )
    parameters = function.get("parameters") or {}
    if parameters.get("properties"):
        yield f"type {name} = (_: {_object(parameters, 0)}) => any;"
    else:
        yield from _extras(parameters)
        yield f"type {name} = () => any;"
    yield ""


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that holds name and parameters, in Chat's shape, the one of Responses, or the legacy one."""
    for key in ("function", "custom"):
        if isinstance(tool.get(key), dict):
            found: Mapping[str, Any] = tool[key]
            return found
    return tool


def _object(schema: Mapping[str, Any], depth: int, indent: int = 0) -> str:
    """The fields of an object in braces; those of an object inside another one are indented."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return "object"
    wanted = schema.get("required")
    required = wanted if isinstance(wanted, list) else []
    lines = list(_extras(schema))
    for key, value in properties.items():
        if isinstance(value, dict):
            lines += _comment(value.get("description"))
            lines += _extras(value) if value.get("type") != "object" else ()
        lines.append(f"{key}{'' if key in required else '?'}: {_type(value, depth + 1, indent)},")
    return "\n".join(["{", *(" " * indent + line for line in lines), "}"])


def _type(schema: Any, depth: int, indent: int) -> str:
    if not isinstance(schema, dict) or depth > DEEPEST:
        return _json(schema)
    choices = _choices(schema, depth, indent)
    if choices is not None:
        return " | ".join(choices)
    kind = schema.get("type")
    if kind == "array":
        return f"{_type(schema.get('items', {}), depth + 1, indent)}[]"
    if kind == "object" or "properties" in schema:
        return _object(schema, depth, indent + 2)
    if "$ref" in schema:
        return str(schema["$ref"])
    return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _choices(schema: Mapping[str, Any], depth: int, indent: int) -> list[str] | None:
    """Return the types or values of which *schema* allows any one; None if it is one type."""
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            return [_member(part, depth + 1, indent) for part in schema[choice]]
    if isinstance(schema.get("enum"), list):
        return list(map(_json, schema["enum"]))
    if "const" in schema:
        return [_json(schema["const"])]
    kind = schema.get("type")
    if isinstance(kind, list):
        return [_type({**schema, "type": one}, depth + 1, indent) for one in kind]
    return None


def _member(schema: Any, depth: int, indent: int) -> str:
    """One of several types, behind what is said of it."""
    if not isinstance(schema, dict):
        return _json(schema)
    notes = [*_comment(schema.get("description")), *(_extras(schema) if schema.get("type") != "object" else ())]
    return "\n".join(["", *notes, _type(schema, depth, indent)]) if notes else _type(schema, depth, indent)


def _extras(schema: Mapping[str, Any]) -> Iterator[str]:
    """What a schema says that has no place in a type, as comments."""
    for key, value in schema.items():
        if key not in _SAID and key not in _SILENT:
            yield f"// {key}: {_json(value)}"
    items = schema.get("items")
    if isinstance(items, dict) and items.get("type") not in ("object", "array"):
        yield from _comment(items.get("description"))
        yield from _extras(items)


def _comment(text: Any) -> Iterator[str]:
    if isinstance(text, str) and text:
        yield from (f"// {line}" for line in text.split("\n"))


def _formula(tools: list[dict[str, Any]], count: Count) -> int:
    """The cookbook's count, which knows functions with flat properties."""
    total = 12
    for tool in tools:
        function = _function(tool)
        total += 7 + count(f"{function.get('name')}:{function.get('description') or ''}")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not properties:
            continue
        total += 3 + sum(_property_tokens(key, value, count) for key, value in properties.items())
    return total


def _property_tokens(name: str, value: Any, count: Count) -> int:
    schema = value if isinstance(value, dict) else {}
    total = 3 + count(f"{name}:{schema.get('type')}:{schema.get('description') or ''}")
    if isinstance(schema.get("enum"), list):
        total += sum(3 + count(str(item)) for item in schema["enum"]) - 3
    return total


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

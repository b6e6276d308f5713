"""Tokens of a ``tools`` array as OpenAI's models read it: declarations in the manner of TypeScript, not JSON.

The form is public: https://github.com/openai/harmony writes it for the open models (``namespace functions``, ``type
name = (_: {...}) => any;``, descriptions as comments). The usage that https://github.com/hmarr/openai-chat-tokens
recorded from the API equals this count, nested objects included. The two examples of OpenAI's cookbook, which stand
beside a system message, are four tokens lower. Members of a schema that this form does not have are counted as
comments, so the count is rather too high than too low.

The cookbook's own formula (``num_tokens_for_tools``: 7 a function, 3 a property, 12 in all) only covers flat
properties. It is the lower bound:
https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from proxy.core.apis.json_scan import elements
from proxy.core.conversation import Count

READERS = ("gpt-*", "chatgpt-*", "o[1-9]*", "codex-*", "computer-use-*")
"""Patterns of the names of models that read tools this way."""

FRAME = 9
"""Tokens around the declarations in recorded usage; beside a system message four fewer were billed."""

PARALLEL = 200
"""Tokens of the wrapper that calls several tools at once (198 as declared); it may stand beside two or more tools."""

DEEPEST = 64
"""Levels of a schema that are rendered; deeper ones are counted as JSON."""

_RENDERED = frozenset(
    {"type", "description", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref"}
)
"""Members of a schema that its TypeScript form expresses."""

_UNREAD = frozenset({"additionalProperties", "strict", "title", "$schema"})
"""Members of a schema that the model does not read."""

_FUNCTION = frozenset({"name", "description", "parameters", "strict", "type"})
"""Members of a function that the declaration expresses; others are counted as comments."""

_NAMES = {"integer": "number", "number": "number", "boolean": "boolean", "null": "null", "string": "string"}
"""Names of types in TypeScript by those of JSON Schema."""


@functools.lru_cache(maxsize=512)
def reads_declarations(model: str) -> bool:
    """Return True if *model* reads its tools as declarations."""
    name = model.rpartition("/")[2].lower().removeprefix("ft:")
    return any(fnmatchcase(name, pattern) for pattern in READERS)


def tools_tokens(text: str, count: Count) -> int:
    """Return the tokens of the array of tools (or legacy functions) in the JSON *text*.

    If it is no such array, the JSON itself is counted.
    """
    try:
        # One by one, because nothing else runs while a parser reads the whole array.
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
    """Return the text that a model reads for *tools*."""
    lines = ["namespace functions {", ""]
    for tool in tools:
        lines += _declaration(tool)
    return "\n".join([*lines, "} // namespace functions"])


def _declaration(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that declare *tool*; the JSON of a provider's own tool, or of one of another kind."""
    function = _function(tool)
    name = function.get("name")
    if not isinstance(name, str) or not isinstance(function.get("parameters", {}), (dict, type(None))):
        yield _json(tool)
        return
    yield from _comment(function.get("description"))
    for key, value in function.items():
        if key not in _FUNCTION:
            yield f"// {key}: {_json(value)}"
    parameters = function.get("parameters") or {}
    if parameters.get("properties"):
        yield f"type {name} = (_: {_object(parameters, 0)}) => any;"
    else:
        yield from _extras(parameters)
        yield f"type {name} = () => any;"
    yield ""


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with name and parameters, in Chat's shape, that of Responses, or the legacy one."""
    for key in ("function", "custom"):
        function = tool.get(key)
        if isinstance(function, dict):
            return function
    return tool


def _object(schema: Mapping[str, Any], depth: int, indent: int = 0) -> str:
    """Return the fields of an object in braces; *indent* are the spaces before those of a nested object."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return "object"
    required = schema.get("required")
    if not isinstance(required, list):
        required = []
    lines = list(_extras(schema))
    for key, value in properties.items():
        if isinstance(value, dict):
            lines += _notes(value)
        name = key
        if key not in required:
            name = f"{key}?"
        lines.append(f"{name}: {_type(value, depth + 1, indent)},")
    return "\n".join(["{", *(" " * indent + line for line in lines), "}"])


def _type(schema: Any, depth: int, indent: int) -> str:
    """Return the type that *schema* describes, as TypeScript writes it."""
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
    if isinstance(kind, str):
        return _NAMES.get(kind, "any")
    return "any"


def _choices(schema: Mapping[str, Any], depth: int, indent: int) -> list[str] | None:
    """Return the alternative types or values that *schema* allows; None if it is one type."""
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            return [_alternative(part, depth + 1, indent) for part in schema[choice]]
    if isinstance(schema.get("enum"), list):
        return list(map(_json, schema["enum"]))
    if "const" in schema:
        return [_json(schema["const"])]
    kind = schema.get("type")
    if isinstance(kind, list):
        return [_type({**schema, "type": name}, depth + 1, indent) for name in kind]
    return None


def _alternative(schema: Any, depth: int, indent: int) -> str:
    """Return one of several alternative types, with its comments before it."""
    if not isinstance(schema, dict):
        return _json(schema)
    notes = list(_notes(schema))
    if not notes:
        return _type(schema, depth, indent)
    return "\n".join(["", *notes, _type(schema, depth, indent)])


def _notes(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the comments before a type; those on an object's other members stand inside its braces."""
    yield from _comment(schema.get("description"))
    if schema.get("type") != "object":
        yield from _extras(schema)


def _extras(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield, as comments, the members of a schema that a type cannot express."""
    for key, value in schema.items():
        if key not in _RENDERED and key not in _UNREAD:
            yield f"// {key}: {_json(value)}"
    items = schema.get("items")
    if isinstance(items, dict) and items.get("type") not in ("object", "array"):
        yield from _comment(items.get("description"))
        yield from _extras(items)


def _comment(text: Any) -> Iterator[str]:
    if isinstance(text, str) and text:
        yield from (f"// {line}" for line in text.split("\n"))


def _formula(tools: list[dict[str, Any]], count: Count) -> int:
    """Return the tokens of *tools* by the cookbook's formula, which only covers flat properties."""
    total = 12
    for tool in tools:
        function = _function(tool)
        total += 7 + count(f"{function.get('name')}:{function.get('description') or ''}")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict):
            continue
        properties = parameters.get("properties")
        if isinstance(properties, dict) and properties:
            total += 3 + sum(_property_tokens(key, value, count) for key, value in properties.items())
    return total


def _property_tokens(name: str, value: Any, count: Count) -> int:
    schema: Mapping[str, Any] = {}
    if isinstance(value, dict):
        schema = value
    total = 3 + count(f"{name}:{schema.get('type')}:{schema.get('description') or ''}")
    if isinstance(schema.get("enum"), list):
        total += sum(3 + count(str(item)) for item in schema["enum"]) - 3
    return total


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

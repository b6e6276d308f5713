"""Makes the definitions of tools smaller: less white space, less prose, no schemas that nothing refers to.

What a call needs stays at every level: names, types and required members.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from proxy.core.apis.json_edit import minified, to_json
from proxy.core.apis.json_scan import elements
from proxy.core.apis.json_steps import parse
from proxy.core.compaction.truncate import shorten
from proxy.core.conversation import Count

PROSE = ("description", "title", "$comment")
EXAMPLES = ("examples", "example", "default")
"""Keywords of a JSON Schema that explain and validate nothing:
https://json-schema.org/understanding-json-schema/reference/metadata
"""

_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose members are schemas under names of the author's own."""

_SCHEMAS = frozenset({"parameters", "input_schema", "parametersJsonSchema", "parameters_json_schema"})
"""Members of a definition that hold the schema of its arguments."""

_DECLARATIONS = frozenset({"functionDeclarations", "function_declarations"})
"""Members of one of Gemini's tools that hold definitions: https://ai.google.dev/api/caching#Tool"""

_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)')
"""A reference to one of the definitions of the same schema."""

_OTHER_REFERENCES = re.compile(r'"\$(?:id|anchor|dynamicRef|recursiveRef)": |"\$ref": "[^"]*[~%]')
"""What can refer to a definition in another way, or spell its name differently."""

LEVELS = ((400, 200, True), (160, 60, False), (80, 0, False), (0, 0, False))
"""For each level, the characters that a tool's own description and the nested ones keep, and if examples stay."""


def shrink_tools(tools: bytes, tokens: int, count: Count) -> bytes:
    """The JSON array *tools*, which takes more than *tokens*, without white space if that is enough.

    Else it is the first level that takes at most *tokens*, or the last, which is tried first: if that is still too
    large, no other is written. *count* should remember what it counted.

    The same array and target give the same bytes on every call, so a provider's prompt cache keeps its prefix.
    """
    source = tools.decode()
    if not source.startswith("["):
        return tools
    try:
        # One tool at a time: while a large array is parsed or written at once, no other thread runs.
        parsed = [parse(source[start:end]) for start, end in elements(source, 0)[0]]
    except ValueError:
        return _minified_tools(source, tokens, count) or tools  # for example an integer that Python does not read
    smallest = _tools_at(parsed, *LEVELS[-1])
    if count(smallest.decode()) > tokens:
        return smallest
    if smaller := _minified_tools(source, tokens, count):
        return smaller
    for level in LEVELS[:-1]:
        result = _tools_at(parsed, *level)
        if count(result.decode()) <= tokens:
            return result
    return smallest


def _minified_tools(source: str, tokens: int, count: Count) -> bytes:
    """The JSON array *source* without white space; empty if it has none, or takes more than *tokens*."""
    smaller = minified(source)
    if len(smaller) < len(source) and count(smaller) <= tokens:
        return smaller.encode("utf-8", "backslashreplace")
    return b""


def _tools_at(parsed: list[Any], own: int, nested: int, examples: bool) -> bytes:
    """The JSON array of the tools *parsed*, with as much prose as one level leaves."""
    tools = (to_json(_tool(tool, own, nested, examples)) for tool in parsed)
    return f"[{','.join(tools)}]".encode()


def _tool(tool: Any, own: int, nested: int, examples: bool) -> Any:
    """One definition with less prose, in the format of any API."""
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function")
    if isinstance(function, dict):
        return {**tool, "function": _tool(function, own, nested, examples)}
    smaller = {key: _tool_member(key, value, own, nested, examples) for key, value in tool.items()}
    if not own and isinstance(tool.get("description"), str):
        del smaller["description"]
    return smaller


def _tool_member(key: str, value: Any, own: int, nested: int, examples: bool) -> Any:
    """The value of a member of a definition with less prose."""
    if key == "description" and isinstance(value, str):
        return shorten(value, own)
    if key in _DECLARATIONS and isinstance(value, list):
        return [_tool(declaration, own, nested, examples) for declaration in value]
    if key in _SCHEMAS:
        return _schema(_without_unused(value), nested, examples)
    return value


def _without_unused(schema: Any) -> Any:
    """*schema* without the definitions that nothing in it refers to: what it accepts stays the same.

    Some servers send all their definitions with every tool.
    """
    if not isinstance(schema, dict) or not schema.keys() & {*_DEFINITIONS}:
        return schema
    if _OTHER_REFERENCES.search(json.dumps(schema)):
        return schema
    used = _used_definitions(schema)
    smaller = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    for holder in _DEFINITIONS:
        if left := {name: part for name, part in _definitions(schema, holder) if (holder, name) in used}:
            smaller[holder] = left
    return smaller


def _used_definitions(schema: dict[str, Any]) -> set[tuple[str, str]]:
    """The definitions, each with the keyword that holds it, that *schema* refers to, also from inside others."""
    definitions = {(holder, name): part for holder in _DEFINITIONS for name, part in _definitions(schema, holder)}
    referring: list[Any] = [{key: value for key, value in schema.items() if key not in _DEFINITIONS}]
    used: set[tuple[str, str]] = set()
    while referring:
        found = set(_REFERENCE.findall(json.dumps(referring.pop()))) & definitions.keys()
        referring += [definitions[each] for each in found - used]
        used |= found
    return used


def _definitions(schema: dict[str, Any], holder: str) -> Iterable[tuple[str, Any]]:
    """The names and schemas that the keyword *holder* defines."""
    defined = schema.get(holder)
    if isinstance(defined, dict):
        return defined.items()
    return ()


def _schema(schema: Any, nested: int, examples: bool) -> Any:
    """A JSON Schema with less prose. A property may have the name of a keyword: it is no keyword."""
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
    """True if a keyword is removed: prose that is not only shortened, and examples unless they stay."""
    if key in PROSE and isinstance(value, str):
        return not nested or key != "description"
    return key in EXAMPLES and not examples


def _keyword(key: str, value: Any, nested: int, examples: bool) -> Any:
    """The value of a keyword that stays."""
    if key in PROSE and isinstance(value, str):
        return shorten(value, nested)
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _schema(part, nested, examples) for name, part in value.items()}
    if key in ("enum", "const", "required"):
        return value
    return _schema(value, nested, examples)

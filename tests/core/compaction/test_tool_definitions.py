"""Definitions of tools lose prose, and nothing that a call needs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compaction.tool_definitions import LEVELS, shrink_tools
from tests.core.compaction.test_truncate import CountsCharacters
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import prose, tool

TOOL: dict[str, Any] = {
    "type": "function",
    "x_vendor": {"title": "kept"},
    "function": {
        "name": "look_up",
        "strict": True,
        "description": prose(1, 400),
        "parameters": {
            "type": "object",
            "title": "Arguments",
            "description": prose(2, 200),
            "required": ["title", "description"],
            "additionalProperties": False,
            "properties": {
                "title": {
                    "type": "string",
                    "description": prose(3, 100),
                    "default": "none",
                    "examples": ["one", "two"],
                },
                "description": {"type": ["string", "null"], "enum": ["description", "title", None]},
                "default": {"type": "array", "items": {"anyOf": [{"const": "x", "title": "X"}, {"$ref": "#/$defs/k"}]}},
                "kind": {"type": "object", "properties": {"examples": {"type": "integer", "minimum": 100}}},
            },
            "$defs": {"k": {"type": "number", "$comment": prose(4, 50)}},
        },
    },
}


def frame(value: Any, inside: bool = False) -> Any:
    """A schema without its prose, read independently: names under ``properties`` are names."""
    if isinstance(value, list):
        return [frame(part) for part in value]
    if not isinstance(value, dict):
        return value
    prose_keys = ("description", "title", "$comment", "default", "examples", "example")
    kept = {key: part for key, part in value.items() if inside or key not in prose_keys}
    return {key: frame(part, not inside and key in ("properties", "$defs")) for key, part in kept.items()}


@pytest.mark.parametrize("tokens", [0, 60, 150, 300, 400, 10_000])
def test_whatever_a_call_needs_stays(tokens: int) -> None:
    """Names, types, required, enums and properties that are called like prose survive at every level."""
    [cut] = json.loads(shrink_tools(json.dumps([TOOL]).encode(), tokens, count_tokens))
    was, now = TOOL["function"], cut["function"]
    assert (now["name"], now["strict"], cut["type"], cut["x_vendor"]) == (
        "look_up",
        True,
        "function",
        {"title": "kept"},
    )
    assert frame(now["parameters"]) == frame(was["parameters"])
    assert list(now["parameters"]["properties"]) == list(was["parameters"]["properties"])
    assert now["parameters"]["properties"]["description"]["enum"] == ["description", "title", None]


def _with_definitions(**schema: Any) -> list[dict[str, Any]]:
    definitions = {
        "page": {"type": "object", "properties": {"parent": {"$ref": "#/$defs/parent"}}},
        "parent": {"type": "string"},
        "comment": {"type": "object", "properties": {"page": {"$ref": "#/$defs/page"}}},
    }
    return [{"type": "function", "function": {"name": "move", "parameters": {"$defs": definitions, **schema}}}]


def _definitions_left(tools: list[dict[str, Any]]) -> list[str]:
    [tool] = json.loads(shrink_tools(json.dumps(tools).encode(), 0, count_tokens))
    return list(tool["function"]["parameters"].get("$defs", ()))


def test_definitions_that_nothing_refers_to_go() -> None:
    to_page = {"type": "object", "properties": {"page": {"$ref": "#/$defs/page"}}}
    assert _definitions_left(_with_definitions(**to_page)) == ["page", "parent"]
    assert _definitions_left(_with_definitions(type="object")) == []


@pytest.mark.parametrize(
    "reference", [{"$ref": "#/$defs/pa%67e"}, {"$dynamicRef": "#page"}, {"$id": "https://a.test/"}]
)
def test_definitions_stay_if_they_could_be_meant_in_another_way(reference: dict[str, str]) -> None:
    assert _definitions_left(_with_definitions(properties={"page": reference})) == ["page", "parent", "comment"]


def test_declarations_of_gemini_lose_prose_too() -> None:
    declaration = {"name": "find", "description": "Find a page. " * 99, "parametersJsonSchema": {"title": "Arguments"}}
    [tool] = json.loads(shrink_tools(json.dumps([{"functionDeclarations": [declaration]}]).encode(), 0, count_tokens))
    assert tool == {"functionDeclarations": [{"name": "find", "parametersJsonSchema": {}}]}


def test_it_stops_at_the_first_level_that_fits() -> None:
    """More room keeps more prose, and enough room keeps whole words of every description."""
    raw = json.dumps([TOOL]).encode()
    least_cut = count_tokens(shrink_tools(raw, 10_000, count_tokens).decode()) - 1
    sizes = [count_tokens(shrink_tools(raw, tokens, count_tokens).decode()) for tokens in (0, 150, 250, least_cut)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < count_tokens(raw.decode())
    longest = json.loads(shrink_tools(raw, least_cut, count_tokens))[0]["function"]["description"]
    assert 0 < len(longest) <= LEVELS[0][0] + 10
    assert set(longest.removesuffix(" [...]").split()) <= set(TOOL["function"]["description"].split())


def test_tools_lose_white_space_before_prose() -> None:
    """If that is enough, all that a tool says stays."""
    raw = json.dumps([TOOL], indent=2)
    compact = json.dumps([TOOL], ensure_ascii=False, separators=(",", ":"))
    cut = shrink_tools(raw.encode(), count_tokens(compact), count_tokens)
    assert cut.decode() == json.dumps([TOOL], separators=(",", ":"))
    assert json.loads(cut) == [TOOL]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 600), st.booleans())
def test_the_same_array_gives_the_same_bytes(seeds: list[int], tokens: int, indent: bool) -> None:
    """The result parses, has every tool in order, and is the same on every call, however the client wrote it."""
    tools = [tool(f"look_{seed}", prose(seed, 60), key=prose(seed + 1, 30)) for seed in seeds]
    raw = json.dumps(tools, indent=2 if indent else None).encode()
    cut = shrink_tools(raw, tokens, count_tokens)
    assert cut == shrink_tools(json.dumps(tools).encode(), tokens, count_tokens)
    assert [one["function"]["name"] for one in json.loads(cut)] == [f"look_{seed}" for seed in seeds]


@pytest.mark.parametrize(
    "raw",
    [
        '[{"type":"web_search"},1,null,"x",{"function":null},{"name":"bare","description":1}]',
        '[{"name":"a","input_schema":{"properties":{"p":{"description":"\\ud83d"}}}}]',
        '[{"function":{"name":"a","parameters":[true,{"properties":["odd"]}]}}]',
    ],
)
def test_odd_tools_pass(raw: str) -> None:
    """Tools of no known shape, and half a surrogate pair in a description, come out as valid UTF-8 JSON."""
    cut = json.loads(shrink_tools(raw.encode(), 0, count_tokens).decode("utf-8"))
    assert len(cut) == len(json.loads(raw))


def test_tools_that_stay_too_large_are_counted_once() -> None:
    """No level between is written if the last one is too large."""
    raw = json.dumps([TOOL] * 40, indent=1).encode()
    count = CountsCharacters()
    cut = shrink_tools(raw, 10, count)
    assert count.read == len(cut) < len(raw)


@pytest.mark.parametrize("number", ["1e400", "9" * 5000])
def test_tools_without_prose_spell_numbers_as_they_came(number: str) -> None:
    """A limit in a schema that Python does not hold is sent as the client wrote it."""
    tool = {"name": "t", "description": "words " * 50, "input_schema": {"type": "number", "maximum": "@"}}
    raw = json.dumps([tool]).replace('"@"', number).encode()
    cut = shrink_tools(raw, 0, count_tokens)
    assert b"words words" not in cut
    assert f'"maximum":{number}}}'.encode() in cut

"""Shrinking tools: prose goes, whatever a call needs stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compression.tools import LEVELS, shrink
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
    [cut] = json.loads(shrink(json.dumps([TOOL]).encode(), tokens, count_tokens))
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


def test_it_stops_at_the_first_level_that_fits() -> None:
    """More room keeps more prose, and enough room keeps whole words of every description."""
    raw = json.dumps([TOOL]).encode()
    sizes = [count_tokens(shrink(raw, tokens, count_tokens).decode()) for tokens in (0, 150, 250, 10_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < count_tokens(raw.decode())
    longest = json.loads(shrink(raw, 10_000, count_tokens))[0]["function"]["description"]
    assert 0 < len(longest) <= LEVELS[0][0] + 10
    assert set(longest.removesuffix(" [...]").split()) <= set(TOOL["function"]["description"].split())


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 600), st.booleans())
def test_the_same_array_gives_the_same_bytes(seeds: list[int], tokens: int, indent: bool) -> None:
    """The result parses, has every tool in order, and is the same on every call, however the client wrote it."""
    tools = [tool(f"look_{seed}", prose(seed, 60), key=prose(seed + 1, 30)) for seed in seeds]
    raw = json.dumps(tools, indent=2 if indent else None).encode()
    cut = shrink(raw, tokens, count_tokens)
    assert cut == shrink(json.dumps(tools).encode(), tokens, count_tokens)
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
    cut = json.loads(shrink(raw.encode(), 0, count_tokens).decode("utf-8"))
    assert len(cut) == len(json.loads(raw))

"""What the search finds, and that it never takes more room than it has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.features.deferred_tools.search import (
    MOST_TOOLS,
    NAME,
    NO_ROOM,
    NOTHING,
    Tool,
    read_tool,
    search_tool,
    search_tools,
)
from tests.support.engine_fixtures import count_tokens


def declared(name: str, says: str, **properties: Any) -> str:
    return json.dumps({"name": name, "description": says, "input_schema": {"properties": properties}})


TOOLS = [
    *(read_tool(declared(f"list_{at}", f"Lists the things of kind {at}.")) for at in range(20)),
    read_tool(declared("forecast", "Tells the weather.", place={"description": "Town or village."})),
    read_tool(declared("send_mail", "Sends a message to somebody.")),
]


@pytest.mark.parametrize("query", ["weather", "forecast", "which village", "Tell me the weather of the village"])
def test_a_tool_is_found_by_its_name_its_words_and_its_parameters(query: str) -> None:
    """The best match is declared first, as the client declared it."""
    result = search_tools(query, TOOLS, 1_000, count_tokens)
    assert json.loads(result.tools["forecast"])["name"] == "forecast"
    assert "- forecast: Tells the weather." in result.text


def test_a_result_has_a_bounded_number_of_tools() -> None:
    """A common word finds the best few."""
    result = search_tools("things", TOOLS, 10_000, count_tokens)
    assert len(result.tools) == MOST_TOOLS
    assert result.text.count("\n- ") == MOST_TOOLS


def test_no_match_and_no_room_have_different_texts() -> None:
    """Neither declares a tool."""
    assert search_tools("kingfisher", TOOLS, 500, count_tokens).text == NOTHING
    full = search_tools("weather", TOOLS, 20, count_tokens)
    assert full.text[:40] == NO_ROOM[:40]
    assert full.tools == {}


def test_a_tool_that_is_too_large_loses_prose_first() -> None:
    """Its name and its parameters stay."""
    prose = "Weather. " + "It has been written with much care. " * 60
    long = read_tool(declared("forecast", prose, place={"type": "string"}))
    (text,) = search_tools("forecast", [long], 200, count_tokens).tools.values()
    assert json.loads(text)["name"] == "forecast"
    assert "place" in json.loads(text)["input_schema"]["properties"]
    assert count_tokens(text) < 200 < count_tokens(long.json)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"type":"function","function":{"name":"a","parameters":null}}', "a"),
        ('{"type":"function","name":"a","description":5,"parameters":{"properties":[]}}', "a"),
        ('{"name":"a","input_schema":{"properties":{"b":7}}}', "a"),
        ('{"type":"custom","name":"a"}', "a"),
        ('{"type":"web_search_20250305","name":"web_search"}', ""),
        ('{"type":"function","function":{"name":7}}', ""),
        (r'{"type":"function","function":{"name":"a\ud800"}}', ""),
        (r'{"type":"function","name":"a","description":"\ud800","parameters":{"properties":{"\udfff":{}}}}', "a"),
        ("[1]", ""),
    ],
)
def test_tools_of_every_shape_are_read(text: str, name: str) -> None:
    """Tools that the provider runs, and values that are no tools, have no name."""
    assert read_tool(text).name == name
    assert read_tool(text).json == text
    assert search_tools(name, [read_tool(text)], 500, count_tokens).text


def test_the_declaration_lists_names_within_its_tokens() -> None:
    """The description has the number of tools, and as many names as fit."""
    names = [f"tool_number_{at}" for at in range(500)]
    for api in ("chat", "messages", "responses"):
        text = search_tool(api, names, 100, count_tokens)
        assert NAME in text
        assert "There are 500: tool_number_0" in text
        assert count_tokens(text) < 300


@given(st.text(max_size=60), st.lists(st.text(max_size=30), max_size=6), st.integers(1, 400))
def test_no_result_takes_more_than_its_room(query: str, words: list[str], tokens: int) -> None:
    """Text and declarations together, whatever is looked for."""
    tools = [Tool(f"t{at}", says, declared(f"t{at}", says)) for at, says in enumerate(words)]
    result = search_tools(query, tools, tokens, count_tokens)
    assert count_tokens(result.text) + sum(map(count_tokens, result.tools.values())) <= tokens + len(result.tools) + 1

"""Tools as OpenAI's models read them: the count equals the usage the API reported, and never falls below it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis.tool_declarations import FRAME, PARALLEL, declarations, reads_declarations, tools_tokens
from proxy.tokenizers import Tokenizers

TOKENIZERS = Tokenizers()


def cl100k(text: str) -> int:
    return TOKENIZERS.count("cl100k_base", text)


def o200k(text: str) -> int:
    return TOKENIZERS.count("o200k_base", text)


def function(name: str, properties: dict[str, Any], description: str = "", **more: Any) -> dict[str, Any]:
    said = {"description": description} if description else {}
    return {"name": name, **said, "parameters": {"type": "object", "properties": properties, **more}}


TEXT = {"type": "string"}
NESTED = {
    "type": "object",
    "properties": {"bar": {"type": "string", "enum": ["a", "b", "c"]}, "baz": {"type": "boolean"}},
}
UNITS = ["grams", "ml", "cups", "pieces", "teaspoons"]
INGREDIENT = {
    "type": "object",
    "required": ["name", "unit", "amount"],
    "properties": {"name": TEXT, "unit": {"enum": UNITS, "type": "string"}, "amount": {"type": "number"}},
}
RECIPE = {
    "ingredients": {"type": "array", "items": INGREDIENT},
    "instructions": {"type": "array", "items": TEXT, "description": "Steps to prepare the recipe (no numbering)"},
    "time_to_cook": {"type": "number", "description": "Total time to prepare the recipe in minutes"},
}


@pytest.mark.parametrize(
    ("tool", "reported"),
    [
        (function("foo", {}), 31),
        (function("foo", {}, "Do a foo"), 36),
        (function("bing_bong", {"foo": TEXT}, "Do a bing bong"), 49),
        (
            function(
                "bing_bong", {"foo": TEXT, "bar": {"type": "number", "description": "A number"}}, "Do a bing bong"
            ),
            57,
        ),
        (function("bing_bong", {"foo": NESTED}, "Do a bing bong"), 68),
        (function("get_recipe", RECIPE, required=["ingredients", "instructions", "time_to_cook"]), 106),
    ],
)
def test_reported_usage(tool: dict[str, Any], reported: int) -> None:
    """Beside a message that was reported as 8 tokens, each function counts as what the API reported for both."""
    assert 8 + tools_tokens(json.dumps([tool]), cl100k) == reported


WEATHER = function(
    "get_current_weather",
    {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "unit": {
            "type": "string",
            "description": "The unit of temperature to return",
            "enum": ["celsius", "fahrenheit"],
        },
    },
    "Get the current weather in a given location",
    required=["location"],
)


@pytest.mark.parametrize(("count", "reported"), [(o200k, 101), (cl100k, 105)])
def test_the_cookbooks_example(count: Any, reported: int) -> None:
    """The cookbook's example counts as the API reported it, and the four tokens that a system message saves."""
    said = (
        "system",
        "You are a helpful assistant that can answer to questions about the weather.",
        "user",
        "What's the weather like in San Francisco?",
    )
    messages = 3 + 3 + 3 + sum(map(count, said))
    assert messages + tools_tokens(json.dumps([{"type": "function", "function": WEATHER}]), count) == reported + 4


def test_shapes_of_a_tool_read_alike() -> None:
    """A function is the same text in Chat's shape, the shape of Responses and the legacy one."""
    shapes = [WEATHER, {"type": "function", "function": WEATHER}, {"type": "function", **WEATHER, "strict": True}]
    assert len({declarations([shape]) for shape in shapes}) == 1


def test_several_tools_bring_their_wrapper() -> None:
    """From two tools on, what calls them in parallel is counted too; one tool has none."""
    tools = [{"type": "function", "function": function(name, {}, "x")} for name in ("a", "b", "c")]
    counts = [tools_tokens(json.dumps(tools[:n]), o200k) for n in (1, 2, 3)]
    assert counts[0] == FRAME + o200k(declarations(tools[:1]))
    assert counts[1] - counts[0] > PARALLEL
    assert counts[2] - counts[1] < 20


@pytest.mark.parametrize(
    "more",
    [
        {"default": "a long text indeed"},
        {"minimum": "a long text indeed"},
        {"pattern": "a long text indeed"},
        {"type": "array", "items": {"type": "string", "description": "a long text indeed"}},
        {"type": "array", "items": {"type": "object", "properties": {"a long text indeed": {}}}},
        {"anyOf": [{"type": "string", "description": "a long text indeed"}, {"type": "null"}]},
        {"oneOf": [{"type": "object", "properties": {"x": {"description": "a long text indeed"}}}]},
        {"type": ["object", "null"], "properties": {"x": {"description": "a long text indeed"}}},
        {"enum": ["a long text indeed"]},
        {"const": "a long text indeed"},
        {"$ref": "a long text indeed"},
        {"x-vendor": {"y": "a long text indeed"}},
    ],
)
def test_everything_counts(more: dict[str, Any]) -> None:
    """Every text of a schema is part of the counted declarations."""
    assert "a long text indeed" in declarations([function("f", {"p": more})])


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "user_location": {"city": "a long text indeed"}},
        {"type": "custom", "custom": {"name": "f", "description": "a long text indeed"}},
        {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "definition": "a long text indeed"}}},
        {"type": "function", "function": {"name": "f", "parameters": {"$defs": {"x": "a long text indeed"}}}},
        {"type": "function", "function": {"name": "f", "parameters": "a long text indeed"}},
        {"type": "function", "function": "a long text indeed"},
    ],
)
def test_other_tools_count_too(tool: dict[str, Any]) -> None:
    """Tools of other kinds and misshapen ones are counted by all they say."""
    assert "a long text indeed" in declarations([tool])
    assert tools_tokens(json.dumps([tool]), o200k) >= o200k("a long text indeed")


@pytest.mark.parametrize("text", ["[1]", "{}", '"x"', "null", "[", "[" * 5_000, '[{"a":' * 5_000])
def test_what_is_no_list_of_tools_counts_as_its_text(text: str) -> None:
    """A member that holds something else is counted as it stands."""
    assert tools_tokens(text, len) == len(text)


words = st.sampled_from(["id", "path", "The file to read.", "Line\nby line", "", "x" * 40, "naïve café", "数据"])
leaves = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "number", "integer", "boolean", "null"])},
    optional={"description": words, "enum": st.lists(words, min_size=1, max_size=4)},
)
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(words, inner, max_size=4)},
            optional={"description": words, "required": st.lists(words, max_size=2)},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=10,
)
tool_lists = st.lists(
    st.builds(
        lambda name, said, fields: {"type": "function", "function": function(name, fields, said)},
        words.filter(bool),
        words,
        st.dictionaries(words, schemas, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def formula(tools: list[dict[str, Any]], count: Any) -> int:
    """The cookbook's count for gpt-4o, for flat functions."""
    total = 12
    for tool in tools:
        said = tool["function"]
        total += 7 + count(f"{said['name']}:{said.get('description', '').rstrip('.')}")
        fields = said["parameters"]["properties"]
        total += 3 * bool(fields)
        for key, field in fields.items():
            total += 3 + count(f"{key}:{field['type']}:{field.get('description', '').rstrip('.')}")
            total += sum(3 + count(item) for item in field["enum"]) - 3 if "enum" in field else 0
    return total


@settings(max_examples=100)
@given(tool_lists)
@pytest.mark.slow
def test_never_below_the_published_formula(tools: list[dict[str, Any]]) -> None:
    """Any tools count as at least what the cookbook's formula gives, and every text of them stands in the rendering."""
    assert tools_tokens(json.dumps(tools), o200k) >= formula(tools, o200k) - 2 * len(tools)
    rendered = declarations(tools)
    assert all(f"type {tool['function']['name']} = (" in rendered for tool in tools)


def test_deep_schemas_end() -> None:
    """A schema nested beyond all reason is counted, not followed for ever."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    assert tools_tokens(json.dumps([function("f", {"p": schema})]), o200k) > 300


@pytest.mark.parametrize(
    ("model", "reads"),
    [
        ("gpt-4o", True), ("openai/gpt-5-mini", True), ("o3", True), ("ft:gpt-4o-mini:us::x", True),
        ("gpt-oss-120b", True), ("claude-3-opus", False), ("qwen3", False), ("", False), ("olmo-2", False),
    ],
)  # fmt: skip
def test_who_reads_declarations(model: str, reads: bool) -> None:
    """OpenAI's models read declarations, with any prefix; other models do not."""
    assert reads_declarations(model) is reads

"""The envelope around the items: its facts, and assembling a body again."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis.envelope import (
    COUNTED,
    LEAST_THINKING,
    OVERLAP,
    STEP,
    continues_stored,
    least_output,
    lowered_thinking,
    read_envelope,
    splice,
)
from proxy.core.apis.json_scan import members, scan
from proxy.core.errors import InvalidRequest
from tests.support import conversation_strategies

FIGURES = ("max_completion_tokens", "max_tokens")


def test_facts() -> None:
    """Model, stream, output figure and the counted members are read from the outline's text."""
    text = '{"model":"m","stream":true,"max_tokens":5,"tools":[ {"a": 1} ],"x":1,"response_format":null,"messages":[]}'
    found = read_envelope(text, FIGURES)
    assert (found.model, found.stream, found.requested_output) == ("m", True, 5)
    assert found.counted() == {"tools": '[ {"a": 1} ]'}
    assert found.value("x") == "1"
    with pytest.raises(KeyError):
        found.value("y")


@pytest.mark.parametrize("config", ["generationConfig", "generation_config"])
def test_figures_in_a_member_of_a_member(config: str) -> None:
    """Gemini's figures are fields of their own, in either spelling, and only their own bytes are edited."""
    inner = '"%s" : { "temperature":1.0, "max_output_tokens": 9000 , "thinkingConfig":{"thinking_budget":8000}}'
    text = '{"contents":[],"systemInstruction":{"parts":[{"text":"Be"},{"text":"short."}]},' + inner % config + "}"
    figure, budget = "generationConfig.maxOutputTokens", "generationConfig.thinkingConfig.thinkingBudget"
    found = read_envelope(text, (figure,))
    assert (found.requested_output, found.value(figure), found.least_output) == (9000, "9000", 1025)
    assert found.texts == {"systemInstruction": "Be\nshort."}
    assert found.counted() == {"systemInstruction": "Be\nshort."}
    assert found.thinking(3000) == {budget: "2048"}
    edited = splice(found, text.index("[]") + 1, b"", {figure: "3000"} | found.thinking(3000))
    assert edited.decode() == text.replace("9000", "3000").replace("8000", "2048")
    assert read_envelope(text.replace("9000", '"9000"'), (figure,)).requested_output is None
    assert read_envelope('{"generationConfig":null}', (figure,)).requested_output is None


@pytest.mark.parametrize(
    ("figures", "requested"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1, "max_completion_tokens": True}, None),
        ({"max_tokens": "5", "max_completion_tokens": 2.5}, None),
        ({"max_tokens": [5]}, None),
    ],
)
def test_the_first_figure_that_is_one_holds(figures: dict[str, Any], requested: int | None) -> None:
    """The output figure is the first positive whole number, in the order the API prefers."""
    assert read_envelope(json.dumps(figures), FIGURES).requested_output == requested


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("empty", ["null", "[]", "{}"])
def test_empty_members_weigh_nothing(name: str, empty: str) -> None:
    """A counted member that holds nothing is not counted, one that holds something is."""
    assert read_envelope(f'{{"{name}":{empty}}}', FIGURES).counted() == {}
    assert read_envelope(f'{{"{name}":["x"]}}', FIGURES).counted() == {name: '["x"]'}


@pytest.mark.parametrize("stream", ["true", "false", "null", "1", '"true"'])
def test_only_true_streams(stream: str) -> None:
    """A request streams when it says so in JSON's own word."""
    assert read_envelope(f'{{"stream":{stream}}}', FIGURES).stream == (stream == "true")


def test_a_model_is_optional() -> None:
    """A missing or null model is an empty name."""
    assert read_envelope("{}", FIGURES).model == ""
    assert read_envelope('{"model":null}', FIGURES).model == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model":5}', "'model' must be a string"),
        ('{"model":["m"]}', "'model' must be a string"),
        ('{"model":"a","model":"a"}', "'model' more than once"),
        ('{"model":"a","mod\\u0065l":"a"}', "'model' more than once"),
        ('{"messages":[],"messages":[]}', "'messages' more than once"),
        ('{"input":1,"input":[]}', "'input' more than once"),
        ("[]", "not valid JSON"),
        ('{"a":1', "not valid JSON"),
        ('{"tools":' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    ],
)
def test_what_cannot_be_trusted_is_refused(text: str, words: str) -> None:
    """Wrong types and members that decide and occur twice are the client's mistake."""
    with pytest.raises(InvalidRequest, match=words):
        read_envelope(text, FIGURES)


def test_other_members_may_repeat() -> None:
    """Of a member that decides nothing the last one holds, as parsers have it."""
    found = read_envelope('{"tools":["a"],"tools":["b"],"max_tokens":1,"max_tokens":2}', FIGURES)
    assert found.counted() == {"tools": '["b"]'}
    assert found.requested_output == 2


new_values = st.one_of(
    st.sampled_from(["1", "null", '"é\\ud83d"', "[ ]"]),
    conversation_strategies.tools.map(lambda made: json.dumps(made)),
)


@settings(max_examples=120)
@given(conversation_strategies.bodies(), st.data())
@pytest.mark.slow
def test_only_what_is_edited_changes(body: bytes, data: st.DataObject) -> None:
    """New items and members are put in place, and every other byte stays where it was."""
    found = scan(body, "messages")
    outline = read_envelope(found.without_items(body).decode(), FIGURES)
    others = [key for key in outline.fields if key != "messages"]
    edits = data.draw(st.dictionaries(st.sampled_from(others), new_values))
    items = data.draw(st.sampled_from([b"", b'{"role":"user"}', '{"content":"é"} , {}'.encode()]))
    at = len(body[: found.start].decode())
    made = splice(outline, at, items, edits)
    before, after = members(body.decode()), members(made.decode())
    assert [field.key for field in after] == [field.key for field in before]
    old, new = _pieces(body.decode(), before), _pieces(made.decode(), after)
    assert old[0] == new[0]
    for field, was, now in zip(before, old[1], new[1], strict=True):
        if field.key == "messages":
            assert json.loads(now) == json.loads(b"[" + items + b"]")
        else:
            assert now == edits.get(field.key, was)


def _pieces(text: str, fields: list[Any]) -> tuple[list[str], list[str]]:
    """Return the text between the values of *fields*, and the values."""
    edges = [0, *(edge for field in fields for edge in (field.start, field.end)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    return pieces[::2], pieces[1::2]


@settings(max_examples=60)
@given(conversation_strategies.bodies())
@pytest.mark.slow
def test_nothing_edited_is_the_clients_body(body: bytes) -> None:
    """The list's own bytes put back give the body as it came."""
    found = scan(body, "messages")
    outline = read_envelope(found.without_items(body).decode(), FIGURES)
    at = len(body[: found.start].decode())
    assert splice(outline, at, body[found.start : found.end], {}) == body


def outline(**members: Any) -> Any:
    """The outline of a request with these members."""
    return read_envelope(json.dumps({**members, "messages": []}), FIGURES)


def test_the_operators_words_are_counted_as_words() -> None:
    """A system text counts without its quotes, a list of text blocks without its frame, anything else as JSON."""
    blocks = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert outline(system='a\n"b"').counted() == {"system": 'a\n"b"'}
    assert outline(system=blocks).counted() == {"system": "one\ntwo"}
    assert outline(instructions="x", system="").counted() == {"instructions": "x"}
    odd = outline(system=[{"type": "odd"}]).counted()
    assert json.loads(odd["system"]) == [{"type": "odd"}]


def test_what_the_output_figure_may_not_fall_below() -> None:
    """A budget for thinking has to be smaller than the output figure."""
    assert outline(thinking={"type": "enabled", "budget_tokens": 2000}).least_output == 1025, (
        "it is lowered to 1,024 first"
    )
    assert outline(thinking={"type": "enabled", "budget_tokens": 800}).least_output == 801
    assert (
        outline(thinking={"type": "adaptive"}).least_output
        == outline(thinking=None).least_output
        == outline().least_output
        == 0
    )


UNSEEN: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, False, False),
    ({"previous_response_id": "r"}, True, True),
    ({"conversation": {"id": "c"}}, True, True),
    ({"previous_response_id": None, "conversation": None, "prompt": None}, False, False),
    ({"prompt": {"id": "p"}}, False, True),
    ({"mcp_servers": [{"url": "u"}]}, False, True),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, False, True),
    ({"tools": [{"type": "function", "name": "web_search"}]}, False, False),
    ({"tools": [{"type": "function", "description": '"type":"mcp"'}]}, False, False),
    ({"cachedContent": "cachedContents/x"}, False, True),
    ({"tools": [{"googleSearch": {}}]}, False, True),
    ({"tools": [{"functionDeclarations": [{"name": "f"}], "code_execution": {}}]}, False, True),
    ({"tools": [{"functionDeclarations": [{"parameters": {"properties": {"codeExecution": {}}}}]}]}, False, False),
]


@pytest.mark.parametrize(("members", "stored", "unseen"), UNSEEN)
def test_what_cannot_be_seen(members: dict[str, Any], stored: bool, unseen: bool) -> None:
    """History that the provider keeps, and input that it adds by itself, are known as such."""
    found = outline(**members)
    assert (found.stored, found.has_unseen_input) == (stored, unseen)


MANAGED: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"truncation": "disabled"}, None),
    ({"truncation": "auto"}, 0),
    ({"context_management": [{"type": "compaction", "compact_threshold": 9000}]}, 9000),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, None),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 100_000),
    ({"context_management": {"edits": [{"type": "compact_20260112", "trigger": {"value": 5}}]}}, 5),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_1", "trigger": {"type": "tool_uses"}}]}}, 0),
    ({"context_management": {"edits": ["odd"]}}, None),
    ({"context_management": "odd"}, None),
]


@pytest.mark.parametrize(("members", "managed"), MANAGED)
def test_from_where_the_provider_shortens_the_conversation(members: dict[str, Any], managed: int | None) -> None:
    """The least that the client asks the provider to act at, by itself."""
    assert outline(**members).provider_compacts_from == managed


def test_a_budget_for_thinking_beside_a_lower_figure() -> None:
    """The member comes back with a smaller budget, and nothing where the figure is not stated or leaves room."""
    found = read_envelope('{"max_tokens":9000,"thinking":{"type":"enabled","budget_tokens":8000}}', ("max_tokens",))
    assert found.thinking(3000) == {"thinking": '{"type": "enabled", "budget_tokens": 2048}'}
    assert found.thinking(9000) == {"thinking": '{"type": "enabled", "budget_tokens": 6144}'}
    assert read_envelope('{"thinking":{"budget_tokens":8000}}', ("max_tokens",)).thinking(3000) == {}
    assert read_envelope('{"max_tokens":9000}', ("max_tokens",)).thinking(3000) == {}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"previous_response_id": "resp_1"}', True),
        (b'{"conversation": {"id": "c"}}', True),
        (b'{"conversation": "", "previous_response_id": null}', False),
        (b'{"input": "conversation"}', False),
        (b'{"input": {"conversation": "c"}}', False),
        (b'{"previous_response_id": "resp_1"', True),
        (b'{"conversation": "\xff"}', True),
        (b"{}", False),
        (b"", False),
        (b'{"input": [{"type": "item_reference", "id": "msg_1"}]}', True),
        (b'{"input": [{"role": "user", "content": "x"}, {"id": "msg_1", "type": null}]}', True),
        (b'{"input": [{"id":"msg_1"}]}', True),
        (b'{"input": [{"type": "item_r\\u0065ference", "id": "msg_1"}]}', True),
        (b'{"input": [{"id": "msg_1"}], "input": []}', True),
        (b'{"input": [{"role": "user", "content": "an \\"item_reference\\", or {\\"id\\": \\"x\\"}"}]}', False),
        (b'{"input": "item_reference"}', False),
        (b'{"input": [], "metadata": {"id": "x"}, "tools": [{"type": "item_reference"}]}', False),
        (b'{"messages": [{"id": "msg_1"}]}', False),
        (b'{"contents": [], "cached_content": "cachedContents/x"}', True),
        (
            b'{"input": [{"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}", "call_id": "c"}]}',
            False,
        ),
    ],
)
def test_a_body_that_goes_on_from_what_is_stored_is_recognised(body, found):
    """Members at the top level decide; a body that names one and cannot be read counts as one that has it."""
    assert continues_stored(body) == found


def nested(budget: Any) -> list[dict[str, Any]]:
    """Every form of a request that states *budget*."""
    google = {"google": {"thinking_config": {"thinking_budget": budget, "include_thoughts": True}}}
    return [
        {"thinking": {"type": "enabled", "budget_tokens": budget}},
        {"reasoning": {"max_tokens": budget}},
        {"thinking_budget": budget},
        {"extra_body": google},
        google,
    ]


@given(st.integers(1, 64_000), st.integers(2, 64_000), st.integers(2, 64_000), st.integers(0, 4))
def test_a_lowered_budget_is_below_the_figure_and_no_less_than_the_least(
    budget: int, requested: int, output: int, form: int
) -> None:
    """A budget only falls, never under 1,024, and is below every figure that is not below the least one."""
    members = nested(budget)[form]
    least = least_output(members)
    assert least == min(budget, LEAST_THINKING) + 1
    output = max(least, min(output, requested))
    found = lowered_thinking(members, requested, output)
    after = {key: json.loads(found[key]) if key in found else value for key, value in members.items()}
    values = [text for text in json.dumps(after).replace("}", " ").replace(",", " ").split() if text.isdigit()]
    (now,) = map(int, values)
    assert min(budget, LEAST_THINKING) <= now <= budget
    assert now < output
    assert (now == budget) == (found == {})


def test_a_budget_that_leaves_the_answer_half_stays() -> None:
    """Nothing changes that need not: another budget costs the prompt cache."""
    assert lowered_thinking({"thinking": {"budget_tokens": 4_000}}, 32_000, 9_000) == {}
    assert lowered_thinking({"thinking": {"budget_tokens": 4_000}}, 32_000, 7_000) == {
        "thinking": '{"budget_tokens": 1024}'
    }
    assert lowered_thinking({"thinking": {"budget_tokens": 31_999}}, 32_000, 31_449) == {
        "thinking": '{"budget_tokens": 24576}'
    }


@pytest.mark.parametrize("budget", [None, True, -1, 0, "8000", 1.5, {}])
def test_what_is_no_budget_is_left_alone(budget: Any) -> None:
    """Off, dynamic or malformed: the provider reads it as it came."""
    for stated in (*nested(budget), {"thinking": budget}, {"reasoning": [budget]}, {"extra_body": {"google": budget}}):
        if stated.get("thinking_budget") is None:
            assert least_output(stated) == 0
            assert lowered_thinking(stated, 32_000, 2_000) == {}


def test_a_member_that_is_not_there_goes_behind_the_others() -> None:
    """The body stays valid, and every other byte where it was."""
    body = '{"messages":[ ], "model":"m" } '
    outline = read_envelope(body, FIGURES)
    assert outline.value_or_nothing("tools") == ""
    assert outline.value_or_nothing("model") == '"m"'
    assert splice(outline, 13, b"", {"tools": "[1]"}) == b'{"messages":[ ], "model":"m" ,"tools":[1]} '


@pytest.mark.parametrize("before", [STEP - 40, STEP - 20, STEP - 1, STEP, 3 * STEP + OVERLAP])
def test_a_hosted_tool_is_seen_wherever_it_stands(before: int) -> None:
    """A long array is searched in steps, and no tool is missed between two of them."""
    own = {"type": "function", "function": {"name": "f", "description": "x" * (before - 60)}}
    assert outline(tools=[own, {"type": "web_search"}]).has_unseen_input
    assert not outline(tools=[own, own]).has_unseen_input


@pytest.mark.parametrize("name", ["\\ud800", "m\\udfff", "\\ude00\\ud83d"])
def test_a_model_name_with_half_a_character_is_refused(name: str) -> None:
    """Half a character can be spelled in JSON, and nowhere else: not in a header, a metric's label or a key."""
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_envelope(f'{{"model":"{name}"}}', FIGURES)
    assert read_envelope('{"model":"\\ud83d\\ude00"}', FIGURES).model == "\N{GRINNING FACE}"

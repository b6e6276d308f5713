"""Calls and results that clients write as text: found if both are there, and otherwise the user's own words."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis import chat, messages, responses
from proxy.core.apis.base import ApiFormat
from proxy.core.conversation import Item, WrittenCalls
from proxy.core.tool_calls import pairs_of
from proxy.core.written_calls import as_result, find_written_calls, join_written_results, replace_written_result
from tests.support.engine_fixtures import count_tokens, read_one, tool_map_of_package

TASK = {"role": "user", "content": "Fix a.py."}
ASKS = "I look.\n<read_file>\n<path>a.py</path>\n</read_file>"
ASKS_USER = "<ask_followup_question>\n<question>Which?</question>\n</ask_followup_question>"
GIVES = "[read_file for 'a.py'] Result:\n# never delete this file\nx = 1"
API_FORMATS: list[ApiFormat] = [chat, messages, responses]


def read(*talk: dict[str, Any], api_format: ApiFormat = chat) -> list[Item]:
    slices = [json.dumps(message).encode() for message in talk]
    items = [read_one(api_format, raw, count_tokens, tool_map_of_package()) for raw in slices]

    return list(join_written_results(items, 0, partial(calls_in, slices, api_format)))


def calls_in(slices: list[bytes], api_format: ApiFormat, index: int) -> WrittenCalls:
    text, tools = api_format.read_item_text(slices[index]).text, tool_map_of_package()
    return find_written_calls(text, tools.text_format, tools.call)


def model(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("call", "result", "kind"),
    [
        (ASKS, GIVES, "file_read"),
        (
            '<tool_call>\n{"name": "Read", "arguments": {"file_path": "a<b.py"}}\n</tool_call>',
            "<tool_response>\nx",
            "file_read",
        ),
        (
            "<function=read_file>\n<parameter=path>a.py</parameter>\n</function>",
            "EXECUTION RESULT of [read_file]:\nx",
            "file_read",
        ),
        ('Thought: look\nAction: grep\nAction Input: {"pattern": "x"}', "Observation: a.py:1", "grep"),
        ('Action:\n{"name": "web_search", "arguments": "limits"}', "Observation:\nnothing", "web_search"),
        ("Thought 2: look\nAction 2: read_file[a.py]", "Observation 2: x", "file_read"),
        ("DISCUSSION\nI look.\n```\ncat a.py\n```", "OBSERVATION:\nx", "unknown"),
        ('<|python_tag|>read_file.call(path="a.py")', '{"output": "x"}', "unknown"),
        ("TOOL_NAME: read_file\nBEGIN_ARG: path\na.py\nEND_ARG", "```tool_output\nx\n```", "file_read"),
        ("Let me see.\n```bash\nls\n```", "<returncode>0</returncode>\n<output>\na.py\n</output>", "unknown"),
        ("<execute_bash>\nls\n</execute_bash>", "OBSERVATION:\na.py", "shell"),
        (ASKS + "\n<list_files>\n<path>.</path>\n</list_files>", GIVES, "unknown"),
    ],
)
def test_a_result_written_as_text_is_one_if_a_call_precedes_it(call: str, result: str, kind: str) -> None:
    """The user's message is a tool item with a result of that call; without the call before it, it is the user's."""
    items = read(TASK, model(call), user(result))
    assert [item.role for item in items] == ["user", "assistant", "tool"]
    (pair,) = pairs_of(items, 0, 3)
    assert (pair.index, pair.call_index, pair.call.kind) == (2, 1, kind)
    for before in (model("Done."), TASK, {"role": "assistant", "tool_calls": [], "content": "See a.py."}):
        assert [item.role for item in read(TASK, before, user(result))][2] == "user"
    assert read(user(result))[0].role == "user"
    assert read(model(call), TASK, user(result))[2].role == "user"


CALLS = [
    ASKS,
    '<tool_use>\n<name>read_file</name>\n<arguments>{"path": "a.py"}</arguments>\n</tool_use>',
    '```json\n{"action": "read_file", "action_input": {"path": "a.py"}}\n```',
    '{"tool": "read_file", "arguments": {"path": "a.py"}}',
    'Tool: read_file\nArguments: {"path": "a.py"}',
    '{"name": "read_file", "parameters": {"path": "a.py"}}',
]


@pytest.mark.parametrize(
    "result",
    [
        "Tool output (read_file):\nx",
        "Tool result for `read_file`: x",
        "**Tool Result** (read_file):\nx",
        "### Tool Result\nx",
        "TOOL_RESULT: x",
        "Function response: x",
        "Function read_file returned: x",
        "The tool read_file returned: x",
        "Result of calling read_file: x",
        "read_file output: x",
        "[tool_result id=call_1]\nx",
        "[Tool 'read_file' executed successfully]\nResult: x",
        "[Tool: read_file]\nx",
        "[TOOL_RESULTS] x",
        '<tool_result name="read_file">x</tool_result>',
        '<tool_result tool_use_id="1">x</tool_result>',
        "<tool_output>\nx\n</tool_output>",
        "<function_response>\nx",
        "<output>\nx\n</output>",
        "<|tool_response|>x",
        "Call id: call_1\nObservation:\nx",
        "Command output:\nx",
        "Exit code: 0\nx",
        '{"tool_result": "x"}',
        '{"output": "x"}',
        "工具结果：x",
        "\n\n  Tool result: x",
        "[read_file for 'a.py'] Error:\nx",
        "<tool_use_result>\n<name>read_file</name>\n<result>x</result>\n</tool_use_result>",
        "Here is the output of the tool read_file:\n\nx",
        '<file_content path="a.py">\nx\n</file_content>',
        "<files>\n<file><path>a.py</path>\n<content>\nx\n</content></file>\n</files>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>x",
        "## Return of functions.read_file:0\nx",
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_results_in_many_forms(call: str, result: str) -> None:
    """However agents without tool calls of the API frame a result, it is the one of the call before it."""
    items = read(TASK, model(call), user(result))
    assert [item.role for item in items] == ["user", "assistant", "tool"]
    (pair,) = pairs_of(items, 0, 3)
    assert (pair.call.kind, len(pair.call.paths)) == ("file_read", 1)
    assert read(TASK, model("Done."), user(result))[2].role == "user"


@pytest.mark.parametrize(
    "said",
    [
        "Result: the tests fail, please look",
        "expected output: 5",
        "Response from Bob: he wants it sorted.",
        "Tool output is wrong in the UI",
        "Function response time is too high: fix it",
        "Code output\nis wrong",
        "结果：失败了",
        "[1] first do this",
        "> Result: no",
        "Observation is key here: look again",
        "Here is the output of my program: it hangs",
        "<files> is the tag that I want",
    ],
)
@pytest.mark.parametrize("call", [ASKS, "Try this:\n```python\nprint(1)\n```"])
def test_words_that_only_resemble_a_result(call: str, said: str) -> None:
    """What a user writes behind a call is the user's."""
    assert read(TASK, model(call), user(said))[2].role == "user"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ASKS, "Read a.py again, please."),
        (ASKS, "See: " + GIVES),
        (ASKS, "[write_file for 'a.py'] Result:\ndone"),
        (
            ASKS_USER,
            "[ask_followup_question for 'Which?'] Result:\n<answer>The first.</answer>",
        ),
        ("Type <read_file> to read.", GIVES),
    ],
)
def test_a_users_words_stay_the_users(call: str, said: str) -> None:
    """A question's answer, a result of another tool, and a quotation are no results."""
    assert read(TASK, model(call), user(said))[2].role == "user"


@pytest.mark.parametrize("api_format", API_FORMATS)
def test_parts_behind_a_result_are_the_users(api_format: ApiFormat) -> None:
    """No text inside a result becomes a part; other parts are the user's words."""
    kind = "input_text" if api_format is responses else "text"
    texts = [
        "[read_file for 'a.py'] Result:",
        "<feedback>obey me</feedback>",
        "Be quick.",
        "<environment_details>1</environment_details>",
    ]
    message = {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}
    item = read(TASK, model(ASKS), message, api_format=api_format)[2]
    assert item.role == "tool"
    assert item.user_tokens == count_tokens("Be quick.")
    raw = json.dumps(message).encode()
    assert item.written_result is not None
    entry = as_result(raw, api_format.read_item_text(raw), item.written_result)
    assert (entry.role, entry.user_text) == ("tool", "Be quick.")
    assert entry.results == (("<feedback>obey me</feedback>", False),)
    made = json.loads(replace_written_result(raw, "[gone]", item.written_result, None))["content"]
    assert [part["text"] for part in made] == ["[read_file for 'a.py'] Result:\n[gone]", "Be quick.", texts[3]]


INDENTED = """Let me look.
    <read_file>
      <path>a.py</path>
    </read_file>"""
DETAILS = "<environment_details>\n# Open tabs\na.py\n</environment_details>"


def test_an_indented_call_is_a_call() -> None:
    """Models indent the tags of a call, for example in a list."""
    items = read(TASK, model(INDENTED), user(GIVES))
    (pair,) = pairs_of(items, 0, 3)
    assert (pair.call.kind, len(pair.call.paths)) == ("file_read", 1)


@pytest.mark.parametrize(
    ("content", "made"),
    [
        (f"{DETAILS}\n\n{GIVES}", f"{DETAILS}\n\n[read_file for 'a.py'] Result:\n[gone]"),
        (
            [DETAILS, "<system-reminder>x</system-reminder>\n", GIVES, "Be quick."],
            [
                DETAILS,
                "<system-reminder>x</system-reminder>\n",
                "[read_file for 'a.py'] Result:\n[gone]",
                "Be quick.",
            ],
        ),
    ],
)
def test_a_result_behind_what_the_client_adds(content: str | list[str], made: str | list[str]) -> None:
    """A block that the client adds before a result stays as it is, and is neither a result nor the user's words."""

    def parts(texts: str | list[str]) -> object:
        return texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]

    message = user(parts(content))
    item = read(TASK, model(ASKS), message)[2]
    assert item.role == "tool"
    raw = json.dumps(message).encode()
    assert item.written_result is not None
    entry = as_result(raw, chat.read_item_text(raw), item.written_result)
    assert entry.results == ((GIVES.partition("\n")[2], False),)
    assert entry.user_text == ("" if isinstance(content, str) else "Be quick.")
    assert json.loads(replace_written_result(raw, "[gone]", item.written_result, None))["content"] == parts(made)


@pytest.mark.parametrize("said", [DETAILS, f"{DETAILS}\nRead a.py again.", "<environment_details>\n" + GIVES])
def test_what_the_client_adds_is_no_result(said: str) -> None:
    """A block alone, before the user's words, or without an end makes no result."""
    assert read(TASK, model(ASKS), user(said))[2].role == "user"


@pytest.mark.parametrize(
    ("content", "made"),
    [
        (GIVES, "[read_file for 'a.py'] Result:\n[gone]"),
        ("<tool_response>\nx = 1\n</tool_response>", "<tool_response>\n[gone]\n</tool_response>"),
        (
            "<returncode>1</returncode>\n<output>\nx\n</output>\n",
            "<returncode>1</returncode>\n<output>\n[gone]\n</output>",
        ),
        ("Observation: x", "Observation:\n[gone]"),
    ],
)
def test_a_result_that_gives_way_keeps_its_frame(content: str, made: str) -> None:
    """The model still sees that this is a result, and where it ends."""
    written = tool_map_of_package().text_format.find_result(content)
    assert written is not None
    raw = json.dumps({"role": "user", "content": content, "x": 1}).encode()
    assert json.loads(replace_written_result(raw, "[gone]", written, None)) == {"role": "user", "content": made, "x": 1}


def test_items_are_settled_the_same_in_every_later_request() -> None:
    """A prefix that was settled before is gone on from, wherever it ended."""
    talk = [TASK, model(ASKS), user(GIVES), user(GIVES), user("And now?"), user(GIVES)]
    slices = [json.dumps(message).encode() for message in talk]
    items = [read_one(chat, raw, count_tokens, tool_map_of_package()) for raw in slices]
    whole = tuple(read(*talk))
    assert [item.role for item in whole] == ["user", "assistant", "tool", "tool", "user", "user"]
    for end in range(len(items)):
        assert join_written_results([*whole[:end], *items[end:]], end, partial(calls_in, slices, chat)) == whole


@given(
    st.text(max_size=200),
    st.sampled_from([GIVES, "<tool_response>", "<tool_call>{", "<function=x>", "Action: a\nAction Input: {"]),
)
def test_nothing_written_is_ever_an_error(text: str, piece: str) -> None:
    """Any text in either role is an item."""
    assert len(read(model(piece + text), user(piece + text), user([{"type": "text", "text": text}]))) == 3

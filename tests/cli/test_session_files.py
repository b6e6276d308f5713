"""Session files of the common clients as chat messages: pairs whole, order kept, what is broken left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli.session_files import Session, read_file
from tests.support.sample_conversations import agent_session
from tests.support.tool_pair_checks import pair_violations

USER = {"role": "user", "content": "Fix it."}
ANSWER = {"role": "assistant", "content": "Done."}


def lines(*values: Any) -> str:
    return "\n".join(map(json.dumps, values))


def one(name: str, text: str) -> Session:
    (session,) = read_file(name, text).sessions
    assert pair_violations(list(session.messages)) == []
    return session


def test_requests_line_by_line() -> None:
    """Each line is a conversation, with its model and tools, also inside what a log or a batch file puts around it."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = lines(
        {"id": "a", "model": "m", "messages": [USER, ANSWER], "tools": tools},
        {"custom_id": "b", "body": {"model": "n", "messages": [{"role": "user", "content": "Other."}, ANSWER]}},
    )
    first, second = read_file("log.jsonl", text + "\n{broken\n\n7\n").sessions
    assert (first.name, first.model, list(first.messages), list(first.tools)) == ("a", "m", [USER, ANSWER], tools)
    assert (second.name, second.model) == ("log.jsonl:2", "n")


def test_a_request_that_goes_on_takes_the_place_of_the_one_before() -> None:
    """The requests of one conversation, logged one after the other, are one conversation."""
    messages = agent_session(3, 20)
    text = lines(*[{"messages": messages[:end]} for end in range(1, len(messages) + 1)])
    assert list(one("log.jsonl", text).messages) == messages


def test_one_request_as_a_whole_file() -> None:
    """A file that is one JSON document is one conversation, however it is broken into lines."""
    assert list(one("r.json", json.dumps({"messages": [USER, ANSWER]}, indent=2)).messages) == [USER, ANSWER]


@pytest.mark.parametrize(
    ("name", "text", "broken"),
    [
        ("a.jsonl", lines({"messages": [USER, ANSWER]}), 0),
        ("a.jsonl", "{broken\n\n7\n" + lines({"messages": [USER, ANSWER]}) + '\r\n{"messages": [{"ro', 2),
        ("a.json", json.dumps({"messages": [USER, ANSWER]}, indent=1)[:-5], 10),
        ("a.md", "{broken", 0),
        ("a.jsonl", "", 0),
    ],
)
def test_lines_that_are_no_json_are_counted(name: str, text: str, broken: int) -> None:
    """A line is left out if it is cut off or damaged; an empty one is none."""
    assert read_file(name, text).broken == broken


@pytest.mark.parametrize("end", "\x85\u2028\u2029")
def test_only_a_line_feed_ends_a_line(end: str) -> None:
    """JSON may hold others as they are, and Node.js writes them so: https://www.rfc-editor.org/rfc/rfc8259#section-7."""
    messages = [{"role": "user", "content": f"One{end}two."}, ANSWER]
    text = json.dumps({"messages": messages}, ensure_ascii=False) + "\n7\n"
    read = read_file("a.jsonl", text)
    assert ([list(session.messages) for session in read.sessions], read.broken) == ([messages], 0)


def test_claude_code() -> None:
    """Blocks of one answer are one message, results follow their calls, sub-agents stand apart."""

    def row(kind: str, content: Any, **more: Any) -> dict[str, Any]:
        extra = {"id": more.pop("answer"), "model": "claude-x"} if "answer" in more else {}
        return {"type": kind, "message": {"role": kind, "content": content, **extra}, **more}

    call = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x = 1"}]}
    text = lines(
        {"type": "summary", "summary": "A title"},
        row("user", "Fix it."),
        row("assistant", [{"type": "thinking", "thinking": "Hm."}], answer="m1"),
        row("assistant", [{"type": "text", "text": "I look."}], answer="m1"),
        row("assistant", [call], answer="m1"),
        row("user", "Search.", isSidechain=True, agentId="s1"),
        row("assistant", "Found.", isSidechain=True, agentId="s1"),
        row("user", [result]),
        row("assistant", [{"type": "text", "text": "Done."}], answer="m2"),
        row("user", "This session goes on from an earlier one.", isCompactSummary=True),
        row("assistant", "Yes.", answer="m3"),
    )
    main, agent, after = read_file("p.jsonl", text).sessions
    assert (main.name, agent.name, after.name) == ("p.jsonl", "p.jsonl/s1", "p.jsonl/1")
    assert main.model == "claude-x"
    function = {"name": "Read", "arguments": '{"file_path": "a.py"}'}
    assert list(main.messages) == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "x = 1"},
        ANSWER,
    ]
    assert [len(agent.messages), len(after.messages)] == [2, 2]


@pytest.mark.parametrize("wrapped", [True, False])
def test_codex(wrapped: bool) -> None:
    """Items of the Responses API become messages, parallel calls one; the client's own compaction starts anew."""

    def item(**payload: Any) -> dict[str, Any]:
        return {"type": "response_item", "payload": payload} if wrapped else payload

    call = {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}'}
    rows = [
        item(type="message", role="user", content=[{"type": "input_text", "text": "Fix it."}]),
        item(type="reasoning", summary=[]),
        item(**call, call_id="c1"),
        item(**call, call_id="c2"),
        item(type="function_call_output", call_id="c1", output="a"),
        item(type="function_call_output", call_id="c2", output=[{"type": "input_text", "text": "b"}]),
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "Done."}]),
    ]
    if not wrapped:
        assert len(one("rollout.jsonl", lines({"id": "x", "instructions": None}, *rows)).messages) == 5
        return
    meta = {"type": "session_meta", "payload": {"base_instructions": {"text": "Be brief."}}}
    turn = {"type": "turn_context", "payload": {"model": "gpt-5-codex"}}
    compacted = {"type": "compacted", "payload": {"message": "We fixed it."}}
    first, second = read_file("rollout.jsonl", lines(meta, turn, *rows, compacted, rows[-1])).sessions
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert pair_violations(list(first.messages)) == []
    assert [call["id"] for call in first.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert [m["content"] for m in second.messages] == ["Be brief.", "We fixed it.", "Done."]
    assert first.model == second.model == "gpt-5-codex"


def test_opencode() -> None:
    """An export's parts become calls with their results."""
    state = {"status": "completed", "input": {"filePath": "a.py"}, "output": "x = 1"}
    tool = {"type": "tool", "callID": "c1", "tool": "read", "state": state}
    answer = {"info": {"role": "assistant", "modelID": "m"}, "parts": [{"type": "text", "text": "I look."}, tool]}
    question = {"info": {"role": "user"}, "parts": [{"type": "text", "text": "Fix it."}]}
    session = one("x.json", json.dumps({"info": {"id": "ses_1"}, "messages": [question, answer]}, indent=1))
    assert (session.name, session.model) == ("ses_1", "m")
    assert [m["role"] for m in session.messages] == ["user", "assistant", "tool"]
    assert session.messages[2]["content"] == "x = 1"


def test_cline() -> None:
    """A list of messages made of blocks is read; text beside results stays behind them."""
    call = {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Environment."}]},
        ANSWER,
    ]
    session = one("api_conversation_history.json", json.dumps(history))
    assert [m["role"] for m in session.messages] == ["user", "assistant", "tool", "user", "assistant"]


def test_aider() -> None:
    """Each start is a conversation; typed lines are the user's, and what aider printed is left out."""
    text = (
        "\n# aider chat started at 2024-05-01 10:00:00\n\n> Aider v0.30\n\n"
        "#### Fix it.\n#### Please.\n\nDone.\nReally.\n"
        "> Tokens: 1k\n\n# aider chat started at 2024-05-02 10:00:00\n\n#### More\n\nNo.\n"
    )
    first, second = read_file(".aider.chat.history.md", text).sessions
    assert [m["content"].strip() for m in first.messages] == ["Fix it.\nPlease.", "Done.\nReally."]
    assert [m["role"] for m in second.messages] == ["user", "assistant"]


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", "[1, 2]", '{"messages": 3}', "no json", "[" * 100_000])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.md"])
def test_what_is_no_conversation_is_none(name: str, text: str) -> None:
    """Other files hold no conversation, and are no error."""
    assert read_file(name, text).sessions == []


VALUES = st.recursive(
    st.none() | st.integers() | st.sampled_from(["user", "assistant", "tool_use", "text", "message", "response_item"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "messages", "type", "payload", "message", "parts", "info", "text"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=4), st.sampled_from(["a.json", "a.jsonl"]))
@pytest.mark.slow
def test_no_line_however_odd_is_an_error(values: list[Any], name: str) -> None:
    """Whatever JSON a file holds, it is read or left out."""
    for session in read_file(name, lines(*values)).sessions:
        assert all(isinstance(message["role"], str) for message in session.messages)

"""Clients' own compactions are recognised, and other requests are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.core.apis.envelope import read_envelope
from proxy.core.client_compaction import METADATA_HEADER, announced_client, compacting_client, without_prompt
from tests.support.handovers import HANDOVERS, OTHER_REQUESTS

CLAUDE = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nWrite an <analysis> block, then a <summary> block."
)
CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
OPENCODE = "You are a context summarization agent. You are given a conversation between a user and an agent."
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]

TOOLED = {"tools": TOOLS}


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def client_of(*items: dict[str, Any], **members: Any) -> str:
    """Return the client whose compaction a request with these items is."""
    outline = read_envelope(json.dumps({"model": "m", "messages": [], **members}), ("max_tokens",))
    history = any(item.get("role") == "assistant" for item in items[:-1])
    return compacting_client(outline, json.dumps(items[0]).encode(), json.dumps(items[-1]).encode(), history)


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": CLAUDE}


@pytest.mark.parametrize(
    ("items", "members", "client"),
    [
        ([user("Go on."), user("A question?", CLAUDE)], {"tools": TOOLS, "system": "You are Claude."}, "claude-code"),
        ([{"role": "user", "content": "\n" + CLAUDE}], {"tools": TOOLS}, "claude-code"),
        ([{"role": "user", "content": [RESULT, {"type": "text", "text": CLAUDE}]}], {}, "claude-code"),
        ([{"type": "message", **user("Go on.")}, {"type": "message", **user(CODEX)}], {"tools": TOOLS}, "codex"),
        ([user("Go on."), {"type": "compaction_trigger"}], {}, "codex"),
        ([{"role": "system", "content": OPENCODE}, user("<conversation>" + "x" * 99_999)], {}, "opencode"),
        ([user("The conversation: ...")], {"system": [{"type": "text", "text": OPENCODE}]}, "opencode"),
        ([user("Hm.")], {"instructions": "You are a context summarization assistant. Your task is"}, "pi"),
        (
            [user("First, reason in your scratchpad. Then, generate the <state_snapshot>.")],
            {"tools": TOOLS},
            "qwen-code",
        ),
        (
            [user("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.")],
            {"tools": TOOLS},
            "qwen-code",
        ),
        (
            [user("Go on."), user("You are the component that summarizes internal chat history")],
            {"tools": TOOLS},
            "qwen-code",
        ),
        ([user('<explicit_instructions type="summarize_task">\nThe current', "<environment_details>")], {}, "cline"),
        ([user("Please summarize our conversation so far.")], {}, "other"),
        ([user("x" * 9000 + "\nNow write a detailed summary of this session.")], {"tool_choice": "none"}, "other"),
        ([user("Create a summary of the discussion.")], {"tools": TOOLS, "tool_choice": {"type": "none"}}, "other"),
        (
            [{"role": "user", "parts": [{"text": "Create a summary of the discussion."}]}],
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
            "other",
        ),
    ],
)
def test_a_compaction_is_known_for_what_it_is(items: list[Any], members: dict[str, Any], client: str) -> None:
    """The client's own prompt tells, where it puts it; else the form of the request does."""
    assert client_of(*items, **members) == client


WORK = {"role": "assistant", "content": "Done: the parser reads the new form."}


@pytest.mark.parametrize(
    ("system", "prompt", "members", "client"),
    [
        (
            "",
            "Your task is to create a detailed summary of the RECENT portion of the conversation.",
            TOOLED,
            "claude-code",
        ),
        (
            "",
            "You have exceeded the maximum number of tokens, please stop coding and write a memento.",
            TOOLED,
            "codex",
        ),
        ("", "Provide a detailed prompt for continuing our conversation above.", {}, "opencode"),
        ("", '<explicit_instructions type="condense">\nThe user has asked', TOOLED, "cline"),
        ("", "Please provide a concise summary of our conversation so far, capturing the key context", {}, "continue"),
        ("The conversation context above needs to be compacted.", "Provide a detailed summary.", {}, "crush"),
        ("*Briefly* summarize this partial conversation about programming.", "# USER\nfix it", {}, "aider"),
        ("## Summary Task", "Please summarize the conversation history provided in the system prompt.", {}, "goose"),
        ("You are a specialized system component responsible for distilling chat history", "Go.", {}, "gemini-cli"),
    ],
)
def test_present_and_older_prompts_of_clients_are_known(
    system: str, prompt: str, members: dict[str, Any], client: str
) -> None:
    """Each client's own words name it, those it had before, too."""
    items = [{"role": "system", "content": system}] if system else [user("Fix it.")]
    assert client_of(*items, WORK, user(prompt), **members) == client


@pytest.mark.parametrize(
    ("items", "members"),
    [
        (
            [user("Fix it."), WORK, user("Turn all of this session into a handoff that another model resumes from.")],
            TOOLED,
        ),
        ([user("Fix it."), WORK, user("Do not call any tools. Summarize the whole conversation for later.")], TOOLED),
        ([user("Fix it."), WORK, user("Condense our history: your text will replace the conversation.")], {}),
        (
            [
                user("Fix it."),
                WORK,
                user("Write a handoff note for whoever continues this task: decisions, open items."),
            ],
            TOOLED,
        ),
        ([user("Fix it."), WORK, user("Write a handoff for the next agent: decisions, files touched.")], TOOLED),
        ([user("Fix it."), WORK, user("The context gets cleared. Write everything the next session needs.")], TOOLED),
        (
            [
                user("Fix it."),
                WORK,
                user(
                    "Based on the above conversation, extract relevant information for continuing in a new thread. "
                    "What did I just do, which files matter?"
                ),
            ],
            {},
        ),
        (
            [
                user("Fix it."),
                WORK,
                user(
                    "Before the window is reset, leave yourself a memo: goal, files touched, next step. The old "
                    "messages will be gone. Don't use tools."
                ),
            ],
            TOOLED,
        ),
        (
            [
                {"role": "system", "content": "You compress chats."},
                user("Summarize this chat to resume it:\n" + "a: b\n" * 500),
            ],
            {},
        ),
        (
            [
                {"role": "developer", "content": "Your job is to condense a conversation into a summary."},
                user("a: b\n" * 99),
            ],
            {},
        ),
    ],
)
def test_unknown_words_tell_by_intent_and_form(items: list[Any], members: dict[str, Any]) -> None:
    """A request for a text to go on from is a compaction; with tools, if no work is left for them."""
    assert client_of(*items, **members) == "other"


@pytest.mark.parametrize(
    ("items", "members"),
    [
        ([user("Turn all of this session into a handoff that another model resumes from.")], TOOLED),
        ([user("Fix it."), WORK, user("Write a handoff of this session to NEXT.md for the next agent.")], TOOLED),
        ([user("Fix it."), WORK, user("Add a command that summarizes the history in a new session.")], TOOLED),
        ([user("Fix it."), WORK, user("Please summarize our conversation so far.")], TOOLED),
        ([user("Fix it."), WORK, user("Continue where you left off; the context was compacted.")], TOOLED),
        ([user("Fix it."), WORK, user("Summarize the history of Rome.")], {}),
        ([user("Fix it."), WORK, user("Write a handoff for the next engineer on call: restart and rollback.")], {}),
        ([user("Fix it."), WORK, user("Write everything the next release needs into the notes.")], {}),
        ([user("Fix it."), WORK, user("Summarize the logs and continue our work.")], {}),
        ([user("Fix it."), WORK, user("Draft a handover to the night shift, then continue.")], {}),
        ([user("Fix it."), WORK, user("Should we compact the conversation or use a larger context window?")], {}),
        ([user("Fix it."), WORK, user("Summarize our discussion in an e-mail to my manager.")], {}),
        ([user("Summarize this chat between Ann and Bob:\n\n" + "Ann: hi\nBob: hello\n" * 40)], {}),
        (
            [
                user("Fix it."),
                WORK,
                user(
                    "This is what my previous agent left me as its only memory, a summary of the whole conversation. "
                    "Take over and finish the job: tests are missing."
                ),
            ],
            TOOLED,
        ),
        (
            [
                user(
                    "Summarise the following meeting transcript for people who could not attend:\n\n"
                    "Anna: let's resume tomorrow.\nBob: the next session is at ten."
                )
            ],
            {},
        ),
        ([user("Here is a summary of our conversation so far; continue from it: the parser is done.")], {}),
        (
            [
                user("Fix it."),
                WORK,
                {"role": "tool", "tool_call_id": "c", "content": "Summarize this session to resume it."},
            ],
            {},
        ),
    ],
)
def test_ordinary_summaries_are_none(items: list[Any], members: dict[str, Any]) -> None:
    """A summary of a file, of a pasted chat or for other people, and work on such texts, is an ordinary request."""
    assert client_of(*items, **members) == ""


TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."


@pytest.mark.parametrize(
    ("items", "members"),
    [
        ([user("Hello.")], {}),
        ([user("Please summarize our conversation so far.")], {"tools": TOOLS}),
        ([{"role": "system", "content": TITLE}, user("Generate a title for this conversation:"), user("Hi")], {}),
        ([{"role": "system", "content": TITLE}, user("Summarize the conversation in a few words.")], {}),
        ([user("Write a title that can summarize the chat history.")], {}),
        ([user("What does this prompt do?\n" + CLAUDE)], {"tools": TOOLS}),
        ([user("CRITICAL: Respond with TEXT ONLY. Which questions may the user ask next?")], {"tools": TOOLS}),
        ([{"role": "tool", "tool_call_id": "c", "content": CLAUDE}], {"tools": TOOLS}),
        ([{"role": "user", "content": [RESULT]}], {"tools": TOOLS}),
        ([{"type": "function_call_output", "call_id": "c", "output": CODEX}], {}),
        ([{"role": "assistant", "content": CODEX}], {}),
        ([user("Which file names a compaction_trigger?")], {}),
        ([user("Summarize this file: " + "x" * 500)], {}),
        ([user(OPENCODE)], {"tools": TOOLS}),
    ],
)
def test_everything_else_is_left_alone(items: list[Any], members: dict[str, Any]) -> None:
    """Titles, probes, quotations of a prompt and what tools returned make no compaction."""
    assert client_of(*items, **members) == ""


def test_nothing_that_cannot_be_read_is_a_compaction() -> None:
    """An element that is no JSON object is for others to refuse."""
    outline = read_envelope("{}", ())
    assert compacting_client(outline, b"{", b'{"CRITICAL: Respond with TEXT ONLY', has_history=False) == ""
    assert compacting_client(outline, b"[]", b'["CRITICAL: Respond with TEXT ONLY"]', has_history=False) == ""
    assert (
        compacting_client(
            outline, b'{"role":"system","content": You are a context summarization agent', b"1", has_history=False
        )
        == ""
    )


@pytest.mark.parametrize(
    ("metadata", "client"),
    [
        ('{"request_kind":"compaction","compaction":{"trigger":"auto"},"window_number":2}', "codex"),
        ('{"request_kind":"turn","window_number":2}', ""),
        ('{"request_kind":"turn","note":"compaction"}', ""),
        ('{"request_kind":"compaction"', ""),
        ('["compaction"]', ""),
        ("", ""),
    ],
)
def test_headers_announce_a_compaction(metadata: str, client: str) -> None:
    """Codex says in a header what a request is for."""
    assert announced_client({METADATA_HEADER: metadata} if metadata else {}) == client


@pytest.mark.parametrize(
    ("item", "left"),
    [
        ({"role": "user", "content": CODEX}, None),
        (user(CLAUDE), None),
        (user("A question?", CLAUDE), user("A question?")),
        (
            {"role": "user", "content": [RESULT, {"type": "text", "text": CLAUDE}]},
            {"role": "user", "content": [RESULT]},
        ),
        (user("A question?", "Now summarize our conversation."), user("A question?")),
        ({"type": "compaction_trigger"}, {"type": "compaction_trigger"}),
        ({"role": "user"}, None),
    ],
)
def test_the_words_that_ask_are_taken_out(item: dict[str, Any], left: dict[str, Any] | None) -> None:
    """The user's words and tool results beside the client's prompt stay."""
    found = without_prompt(json.dumps(item).encode())
    assert (json.loads(found) if found else None) == left


def test_what_cannot_be_read_asks_nothing() -> None:
    """A broken item is left out."""
    assert without_prompt(b"{") == b""


PROMPTS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "compaction_prompts.jsonl").read_text("utf-8").splitlines()
]
"""Requests as agents and frameworks make them for a summary, by the openings of their prompts, and ordinary ones that
speak of summaries. Of a first batch 33 of 45 were recognised before the words were looked at, and 1 of 36 ordinary ones
was taken for one; of a second, written once they had been mended for the first, 7 of 10, and 2 of 15; of a third, in
requests with tools, 15 of 23, and 3 of 24; of a fourth 12 of 16, and 2 of 16. Two of those that are still taken for one
are not here."""


def recognised(row: dict[str, Any]) -> bool:
    members = {name: value for name, value in row.items() if name in ("tools", "tool_choice")}
    return bool(client_of(*row["messages"], **members))


def test_prompts_of_many_clients() -> None:
    """Of prompts in other words 94 % are recognised by what they want."""
    real = [row for row in PROMPTS if row["compaction"]]
    assert len(real) > 50
    missed = [row["origin"] for row in real if not recognised(row)]
    assert len(missed) <= 0.06 * len(real), missed


def test_letters_of_any_script_count_escaped_and_as_they_are() -> None:
    """A client may write a letter into JSON as it is or escape it: a prompt is recognised either way."""
    words = "これまでの会話を要約し、新しいセッションで続けられるようにしてください。ツールは呼び出さないでください。"
    outline = read_envelope(json.dumps({"model": "m", "messages": [], **TOOLED}), ("max_tokens",))
    for is_escaped in (True, False):
        last = json.dumps({"role": "user", "content": words}, ensure_ascii=is_escaped).encode()
        assert compacting_client(outline, b'{"role": "user", "content": "Go."}', last, has_history=True) == "other"


@pytest.mark.parametrize("row", [row for row in PROMPTS if not row["compaction"]], ids=lambda row: row["origin"])
def test_requests_that_merely_speak_of_summaries(row: dict[str, Any]) -> None:
    """A text for people, code, a question or other work is no compaction."""
    assert not recognised(row)


def handover_client(text: str, *, is_escaped: bool = False, has_results: bool = True, **members: Any) -> str:
    outline = read_envelope(json.dumps({"model": "m", "messages": [], **members}), ("max_tokens",))
    last = json.dumps({"role": "user", "content": text}, ensure_ascii=is_escaped).encode()
    return compacting_client(outline, b"{}", last, True, has_results=has_results)


def test_a_handover_is_recognised_if_the_tools_are_gone() -> None:
    """Who takes over, or that the context is full, says enough if the conversation called tools and now has none."""
    for is_escaped in (True, False):
        missed = [text for text in HANDOVERS if handover_client(text, is_escaped=is_escaped) != "other"]
        assert len(missed) <= 0.16 * len(HANDOVERS), missed
    assert {handover_client(text, **TOOLED) for text in HANDOVERS} == {""}


def test_other_requests_without_tools_are_none() -> None:
    """A final answer, documentation for the next developer or a mail requests no compaction."""
    assert [text for text in OTHER_REQUESTS if handover_client(text)] == [
        "An other engineer resumed the deployment, please check that it is healthy."
    ]
    assert handover_client(HANDOVERS[0], has_results=False) == ""

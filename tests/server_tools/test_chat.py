"""Recall over chat completions: what servers do differently."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.apis.usage import read_usage
from proxy.core.report import NO_USAGE, Usage
from proxy.features.recall.tool import NAME
from proxy.server_tools import chat
from tests.support.answer_parser import events

NAMES = frozenset({NAME})

RECALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": NAME, "arguments": '{"query":"x"}'}}


def chunk(delta: dict[str, Any], finish: str | None = None, **members: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": "a", "object": "chat.completion.chunk", "created": 1, "choices": [choice], **members}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_role_that_was_not_sent_comes_with_the_next_generation() -> None:
    """The role is sent once: with the second generation if the first one's came with its call."""
    for opening, roles in ((b"", 1), (chunk({"role": "assistant", "content": ""}), 1)):
        merger = chat.new_stream(NAMES)
        out = merger.feed(opening + chunk({"role": "assistant", "tool_calls": [RECALL]}) + chunk({}, "tool_calls"))
        assert merger.calls()
        merger.next_generation()
        out += merger.feed(chunk({"role": "assistant", "content": ""}) + chunk({"content": "Yes."}) + chunk({}, "stop"))
        deltas = [value["choices"][0]["delta"] for value in events(out)]
        assert sum("role" in delta for delta in deltas) == roles


def test_calls_of_the_same_index_are_distinguished_by_their_ids() -> None:
    """A server that gives every call the index zero still means several calls."""
    read = {**RECALL, "id": "c2", "function": {"name": "read_file", "arguments": "{}"}}
    merger = chat.new_stream(NAMES)
    merger.feed(chunk({"tool_calls": [read]}) + chunk({"tool_calls": [RECALL]}) + chunk({}, "tool_calls"))
    assert [call.id for call in merger.calls()] == ["c1"]
    (made,) = events(merger.release())[:1]
    assert [call["id"] for call in made["choices"][0]["delta"]["tool_calls"]] == ["c2"]


def test_an_opening_without_choices_gives_no_id() -> None:
    """The id of an answer is that of its first chunk with content, not of a preamble that has none."""
    merger = chat.new_stream(NAMES)
    merger.feed(b'data: {"id":"","created":0,"choices":[],"prompt_filter_results":[]}\n\n')
    merger.feed(chunk({"tool_calls": [RECALL]}, id="first"))
    merger.next_generation()
    (made,) = events(merger.feed(chunk({"content": "Yes."}, id="second")))
    assert made["id"] == "first"


def test_thoughts_go_back_where_the_client_sends_them_back() -> None:
    """Members that only some servers know are sent to those only whose clients send them too."""
    output = {
        "role": "assistant",
        "content": "Hm.",
        "reasoning_content": "why",
        "refusal": None,
        "tool_calls": [RECALL],
    }
    (known,) = chat.input_of(output, b'{"messages":[{"reasoning_content":"before"}]}')
    (unknown,) = chat.input_of(output, b'{"messages":[{"role":"user"}]}')
    assert known["reasoning_content"] == "why"
    assert unknown.keys() == {"role", "content", "tool_calls"}
    assert "index" not in known["tool_calls"][0]


def test_thoughts_in_pieces_are_put_together() -> None:
    """Elements of a list that come in pieces are one element each; marks of a call stay with it."""
    merger = chat.new_stream(NAMES)
    for text in ("a", "b"):
        merger.feed(chunk({"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": text}]}))
    merger.feed(chunk({"reasoning_details": [{"type": "reasoning.encrypted", "index": 1, "data": "z"}]}))
    merger.feed(chunk({"tool_calls": [{**RECALL, "extra_content": {"google": {"thought_signature": "s"}}}]}))
    details = merger.output["reasoning_details"]
    assert [(part["index"], part.get("text"), part.get("data")) for part in details] == [
        (0, "ab", None),
        (1, None, "z"),
    ]
    (message,) = chat.input_of(merger.output, b"{}")
    assert message["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "s"}}


def test_texts_of_generations_stand_apart() -> None:
    """The second text begins a paragraph of its own, unless the first ended in white space or was empty."""
    for first, both in (("One.", "One.\n\nTwo."), ("One.\n", "One.\nTwo."), ("", "Two.")):
        answer = {"choices": [{"message": {"role": "assistant", "content": "Two."}, "finish_reason": "stop"}]}
        whole = chat.merged(answer, [{"role": "assistant", "content": first, "tool_calls": [RECALL]}], NAMES)
        assert whole["choices"][0]["message"]["content"] == both


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_an_answer_cut_short_may_hold_half_a_call(reason: str) -> None:
    """An answer that was cut off by its output figure or a filter is truncated: its last call may be half."""
    merger = chat.new_stream(NAMES)
    merger.feed(chunk({"tool_calls": [RECALL]}) + chunk({}, reason))
    assert merger.truncated
    assert chat.is_truncated({"choices": [{"finish_reason": reason}]})
    assert not chat.is_truncated({"choices": [{"finish_reason": "tool_calls"}]})


def test_usage_is_counted_if_it_is_reported() -> None:
    """Prompt and completion together; nothing where there is no figure."""
    assert read_usage({"prompt_tokens": 10, "completion_tokens": 2}) == Usage(10, 2)
    assert read_usage(None) == read_usage({}) == NO_USAGE


def test_what_is_no_answer_says_nothing() -> None:
    """Errors, several choices and odd shapes are not looked into."""
    for answer in ({"error": {}}, {"choices": []}, {"choices": [{}, {}]}, {"choices": [{"message": None}]}):
        assert chat.output_of(answer) is None

"""Recall over Responses: items, and the reasoning that belongs to them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.usage import read_usage
from proxy.core.report import NO_USAGE, Usage
from proxy.features.recall.tool import NAME
from proxy.server_tools import responses
from proxy.server_tools.events import written
from proxy.server_tools.merger import NOT_RUN, without_calls

NAMES = frozenset({NAME})

Item = dict[str, Any]

TEXT = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
RECALL = {"type": "function_call", "id": "f1", "call_id": "c1", "name": NAME, "arguments": "{}", "status": "completed"}
READ = {**RECALL, "id": "f2", "call_id": "c2", "name": "read_file"}
HOSTED = {"type": "web_search_call", "id": "w", "status": "completed"}
KINDS = {"t": TEXT, "o": RECALL, "c": READ, "h": HOSTED, "r": {"type": "reasoning", "id": "r", "summary": []}}


def items(letters: str) -> list[Item]:
    return [KINDS[letter] for letter in letters]


def letters(found: list[Any]) -> str:
    return "".join(next(letter for letter, kind in KINDS.items() if kind is item) for item in found)


def left(drawn: str) -> str:
    """The letters of a generation without its recalls."""
    remaining = without_calls(
        items(drawn), lambda item: item is RECALL, lambda item: item in (RECALL, READ), lambda item: item is KINDS["r"]
    )
    return letters(remaining)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ro", ""),
        ("rt", "rt"),
        ("rtro", "rt"),
        ("roc", "rc"),
        ("rco", "rc"),
        ("rorc", "rc"),
        ("rhro", "rh"),
        ("rot", "t"),
        ("r", "r"),
        ("tor", "tr"),
    ],
)
def test_reasoning_goes_with_the_calls_it_led_to(before: str, after: str) -> None:
    """A thought that led only to calls that are removed is removed too: a provider refuses it alone."""
    assert left(before) == after


@given(st.text("tochr", max_size=12))
def test_nothing_else_is_lost(drawn: str) -> None:
    """All that is neither a call that goes nor reasoning stays, in its order; what stays once stays for good."""
    remaining = left(drawn)
    assert remaining.replace("r", "") == drawn.replace("r", "").replace("o", "")
    assert left(remaining) == remaining


def test_items_go_back_as_they_are_where_the_provider_keeps_them() -> None:
    """Reasoning goes back by its id, or sealed; without either it stays away, and so do the ids that point at it."""
    thought = {"type": "reasoning", "id": "r1", "summary": [], "encrypted_content": None, "status": None}
    sealed = {**thought, "encrypted_content": "z"}
    remaining = responses.input_of([thought, RECALL], b'{"model":"m"}')
    assert remaining == [{"type": "reasoning", "id": "r1", "summary": []}, RECALL]
    assert len(responses.input_of([sealed, RECALL, READ], b'{"store": false}')) == 3
    (bare,) = responses.input_of([thought, RECALL], b'{"store":false}')
    assert bare == {key: value for key, value in RECALL.items() if key != "id"}


def test_every_call_that_a_text_can_answer_is_answered() -> None:
    """Functions and custom tools get an output each; a call that only its client can answer does not go back."""
    custom = {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "x"}
    clicked = {"type": "computer_call", "call_id": "c4", "action": {}}
    output = [READ, RECALL, custom, clicked]
    assert [item["call_id"] for item in responses.input_of(output, b"{}")] == ["c2", "c1", "c3"]
    assert responses.results(output, NAMES, ["found"]) == [
        {"type": "function_call_output", "call_id": "c2", "output": NOT_RUN},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": NOT_RUN},
    ]


def event(kind: str, number: int, **members: Any) -> bytes:
    return written({"type": kind, "sequence_number": number, **members}, kind)


def test_reasoning_waits_for_what_it_leads_to() -> None:
    """It passes once a message begins, and never where only a recall follows."""
    thought = {"type": "reasoning", "id": "r1", "summary": []}
    for follower, passes in ((TEXT, True), (HOSTED, True), (RECALL, False)):
        merger = responses.new_stream(NAMES)
        out = merger.feed(
            event("response.output_item.added", 2, output_index=0, item=thought)
            + event("response.output_item.done", 3, output_index=0, item=thought)
        )
        assert out == b""
        out = merger.feed(event("response.output_item.added", 4, output_index=1, item=follower))
        assert (b'"r1"' in out) is passes


def test_the_end_of_a_response_may_leave_its_output_out() -> None:
    """If a server lists no output at the end, the end is completed from its earlier events."""
    merger = responses.new_stream(NAMES)
    merger.feed(
        event("response.output_item.added", 2, output_index=0, item=RECALL)
        + event("response.output_item.done", 3, output_index=0, item=RECALL)
        + event("response.completed", 4, response={"output": [], "usage": None})
    )
    merger.next_generation()
    out = merger.feed(
        event("response.created", 0, response={})
        + event("response.output_item.added", 1, output_index=0, item=TEXT)
        + event("response.output_item.done", 2, output_index=0, item=TEXT)
        + event("response.completed", 3, response={"id": "second", "output": [], "usage": {"input_tokens": 3}})
    )
    assert b"response.created" not in out
    assert out.count(b'"text":"So."') == 3
    assert b'"id":"second"' in out
    assert read_usage(merger.usage) == Usage(3)


def test_an_answer_cut_short_is_recognised() -> None:
    """Running out of output, streamed or not."""
    merger = responses.new_stream(NAMES)
    merger.feed(event("response.incomplete", 2, response={"output": []}))
    assert merger.truncated
    assert responses.is_truncated({"status": "incomplete"})
    assert not responses.is_truncated({"status": "completed"})


def test_what_is_no_answer_says_nothing() -> None:
    """An error has no items, and no usage."""
    assert responses.output_of({"error": {}}) is None
    assert read_usage({}) == NO_USAGE

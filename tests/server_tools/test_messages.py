"""Recall over Messages."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.apis.usage import read_usage
from proxy.core.report import NO_USAGE, Usage
from proxy.features.recall.tool import NAME
from proxy.server_tools import messages
from proxy.server_tools.events import written
from proxy.server_tools.merger import NOT_RUN
from tests.support.answer_parser import events

NAMES = frozenset({NAME})

RECALL = {"type": "tool_use", "id": "t1", "name": NAME, "input": {}}


def event(kind: str, **members: Any) -> bytes:
    return written({"type": kind, **members}, kind)


def start(**usage: int) -> bytes:
    return event("message_start", message={"id": "m", "content": [], "usage": usage})


def block(index: int, content: dict[str, Any], *deltas: dict[str, Any]) -> bytes:
    pieces = [event("content_block_delta", index=index, delta=delta) for delta in deltas]
    opened = event("content_block_start", index=index, content_block=content)
    return opened + b"".join(pieces) + event("content_block_stop", index=index)


def stop(reason: str, **usage: int) -> bytes:
    return event("message_delta", delta={"stop_reason": reason}, usage=usage) + event("message_stop")


def test_blocks_are_put_together_from_their_deltas() -> None:
    """Texts, thoughts, seals, citations and inputs; an input that is no JSON is an empty one."""
    merger = messages.new_stream(NAMES)
    merger.feed(
        start()
        + block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Hm."},
            {"type": "signature_delta", "signature": "s"},
        )
        + block(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "So"},
            {"type": "citations_delta", "citation": {"cited_text": "x"}},
        )
        + block(2, RECALL, {"type": "input_json_delta", "partial_json": '{"que'})
    )
    assert merger.output == [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "So", "citations": [{"cited_text": "x"}]},
        RECALL,
    ]


def test_the_last_generation_tells_its_own_input() -> None:
    """The usage that a client adds up is the last generation's, whose start it never sees."""
    merger = messages.new_stream(NAMES)
    out = merger.feed(start(input_tokens=100, cache_read_input_tokens=5) + block(0, RECALL) + stop("tool_use"))
    merger.next_generation()
    out += merger.feed(start(input_tokens=7, cache_read_input_tokens=200))
    out += merger.feed(block(0, {"type": "text", "text": "Yes."}) + stop("end_turn", output_tokens=9))
    values = events(out)
    assert [value["type"] for value in values].count("message_start") == 1
    assert values[-2]["usage"] == {"input_tokens": 7, "cache_read_input_tokens": 200, "output_tokens": 9}
    assert read_usage(merger.usage) == Usage(207, 9, 200)


def test_empty_texts_do_not_go_back() -> None:
    """A provider refuses text blocks without text, and members that are null."""
    output = [{"type": "text", "text": ""}, {"type": "text", "text": "So", "citations": None}, RECALL]
    (message,) = messages.input_of(output, b"")
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "So"}, RECALL]}


def test_results_stand_in_one_message() -> None:
    """Two calls of one generation are answered by one user message."""
    output = [RECALL, {**RECALL, "id": "t2", "name": "read_file"}, {**RECALL, "id": "t3"}]
    (message,) = messages.results(output, NAMES, ["a", "b"])
    assert message["role"] == "user"
    answered = [(part["tool_use_id"], part["content"]) for part in message["content"]]
    assert answered == [("t1", "a"), ("t2", NOT_RUN), ("t3", "b")]


def test_thoughts_wait_for_what_they_lead_to() -> None:
    """They pass once a text begins, and never where only a recall follows; what keeps the connection alive passes."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    for follower, passes in (({"type": "text", "text": "So"}, True), (RECALL, False)):
        merger = messages.new_stream(NAMES)
        ping = event("ping")
        assert merger.feed(start() + block(0, thought) + ping) == start() + ping
        out = merger.feed(event("content_block_start", index=1, content_block=follower))
        assert (b"Hm." in out) is passes
    assert messages.merged({"content": [{"type": "text", "text": "So"}]}, [[thought, RECALL]], NAMES)["content"] == [
        {"type": "text", "text": "So"}
    ]


@pytest.mark.parametrize("reason", ["max_tokens", "model_context_window_exceeded", "refusal"])
def test_an_answer_cut_short_is_recognised(reason: str) -> None:
    """Running out of output or of the window, or a filter, streamed or not."""
    merger = messages.new_stream(NAMES)
    merger.feed(start() + block(0, RECALL) + stop(reason))
    assert merger.truncated
    assert messages.is_truncated({"stop_reason": reason})
    assert not messages.is_truncated({"stop_reason": "tool_use"})


def test_what_is_no_answer_says_nothing() -> None:
    """An error has no blocks, and no usage."""
    assert messages.output_of({"type": "error", "error": {}}) is None
    assert read_usage(None) == NO_USAGE

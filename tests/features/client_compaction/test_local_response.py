"""Answers of plain text: what clients' own libraries read from them is the text, and usage that claims no input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from proxy.features.client_compaction.local_response import PIECE, TextAnswer, stream_events, whole_response

TEXT = "First.\n\u00e9\u4e0d" + "long " * PIECE
ANSWER = TextAnswer(TEXT, 4100, "a1b2", "m", 1_760_000_000)


def events(api: str, answer: TextAnswer = ANSWER) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    found = [line[6:] for line in stream_events(api, answer).decode().split("\n") if line.startswith("data: ")]
    return [json.loads(data) for data in found if data != "[DONE]"]


@pytest.mark.slow
def test_chat() -> None:
    """A completion with one choice; its chunks add up to the same, the usage in the last if the client requested it."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    answer = ChatCompletion.model_validate(json.loads(whole_response("chat", ANSWER)))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (0, 4100)
    chunks = [ChatCompletionChunk.model_validate(each) for each in events("chat")]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"
    quiet = TextAnswer(TEXT, 4100, "a1b2", "m", 1, usage=False)
    assert all(chunk.get("usage") is None for chunk in events("chat", quiet))
    assert stream_events("chat", quiet).endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_messages() -> None:
    """A message of one text block; its stream opens, fills and closes that block."""
    from anthropic.types import Message

    answer = Message.model_validate(json.loads(whole_response("messages", ANSWER)))
    assert (answer.content[0].text, answer.stop_reason) == (TEXT, "end_turn")  # type: ignore[union-attr]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (0, 4100)
    kinds = [each["type"] for each in events("messages")]
    assert [kinds[0], kinds[1], *kinds[-3:]] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [each["delta"]["text"] for each in events("messages") if each["type"] == "content_block_delta"]
    assert "".join(deltas) == TEXT


@pytest.mark.slow
def test_responses() -> None:
    """A response of one message; every event is one the API knows, numbered without a gap."""
    from openai.types.responses import Response, ResponseStreamEvent

    answer = Response.model_validate(json.loads(whole_response("responses", ANSWER)))
    assert answer.output_text == TEXT
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (0, 4100)
    known = TypeAdapter[Any](ResponseStreamEvent)
    read = [known.validate_python(each) for each in events("responses")]
    assert [each.sequence_number for each in read] == list(range(len(read)))
    assert "".join(each.delta for each in read if each.type == "response.output_text.delta") == TEXT
    assert read[-1].response.output_text == TEXT


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_an_empty_text_is_an_answer_too(api: str) -> None:
    """A stream of no text at all is whole."""
    assert events(api, TextAnswer("", 0, "a", "m", 1))

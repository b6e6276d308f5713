"""A response whose only content is a text, in each API: whole, or as the events of a stream.

The shapes are those of https://platform.openai.com/docs/api-reference/chat/object,
https://docs.anthropic.com/en/docs/build-with-claude/streaming and
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

PIECE: Final = 4_096
"""Characters of text in one event of a stream."""

STREAM: Final = "text/event-stream; charset=utf-8"
JSON: Final = "application/json"


class TextAnswer(msgspec.Struct, frozen=True):
    """A ``text`` of so many ``tokens``; ``name`` (letters and digits) is the part of the response's id after its
    prefix.

    ``model`` is the model that was requested, ``created`` Unix time. ``usage``: a chat stream ends with it
    (``stream_options.include_usage``).
    """

    text: str
    tokens: int
    name: str
    model: str
    created: int
    usage: bool = True


def whole_response(api: str, answer: TextAnswer) -> bytes:
    """Return *answer* as a response of *api* that is not streamed."""
    return json.dumps(_WHOLE[api](answer)).encode()


def stream_events(api: str, answer: TextAnswer) -> bytes:
    """Return *answer* as the events of a streamed response of *api*, to its end."""
    return b"".join(_STREAMED[api](answer))


def output_usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the ``usage`` of a response of the Responses API."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def event(kind: str, **members: Any) -> bytes:
    """Return a server-sent event of the type *kind*."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


def _pieces(text: str) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


# No model read anything for such a response: its usage counts no input.


def _chat(answer: TextAnswer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {**_chat_head(answer, "chat.completion"), "choices": [choice], "usage": _chat_usage(answer)}


def _chat_head(answer: TextAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": answer.created, "model": answer.model}


def _chat_usage(answer: TextAnswer) -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": answer.tokens, "total_tokens": answer.tokens}


def _chat_events(answer: TextAnswer) -> Iterator[bytes]:
    head = _chat_head(answer, "chat.completion.chunk")
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": piece}, None) for piece in _pieces(answer.text)]
    deltas.append(({}, "stop"))
    for delta, finish_reason in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    if answer.usage:  # in a chunk of its own, which has no choice
        yield b"data: " + json.dumps({**head, "choices": [], "usage": _chat_usage(answer)}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _message(answer: TextAnswer) -> dict[str, Any]:
    head = {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}
    usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    content = [{"type": "text", "text": answer.text}]
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    return {**head, "content": content, **stop, "usage": {**usage, "output_tokens": answer.tokens}}


def _message_events(answer: TextAnswer) -> Iterator[bytes]:
    message = _message(answer)
    # The usage at the beginning is provisional: that of ``message_delta`` is cumulative and replaces it.
    opening = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    yield event("message_start", message=opening)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in _pieces(answer.text):
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    yield event("content_block_stop", index=0)
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield event("message_delta", delta=stop, usage={"output_tokens": answer.tokens})
    yield event("message_stop")


def _response(answer: TextAnswer) -> dict[str, Any]:
    head = response_head(answer.name, answer.model, answer.created)
    return {**head, "output": [_item(answer)], "usage": output_usage(0, answer.tokens)}


def response_head(name: str, model: str, created: int) -> dict[str, Any]:
    """Return the members of a completed response beside its output and its usage."""
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": "completed",
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }


def _item(answer: TextAnswer) -> dict[str, Any]:
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    head = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


def _response_events(answer: TextAnswer) -> Iterator[bytes]:
    completed, item = _response(answer), _item(answer)
    started = {**completed, "status": "in_progress", "output": [], "usage": None}
    started_item = {**item, "status": "in_progress", "content": []}
    part = item["content"][0]
    position = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    deltas = [{**position, "delta": piece, "logprobs": []} for piece in _pieces(answer.text)]
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": started}),
        ("response.in_progress", {"response": started}),
        ("response.output_item.added", {"output_index": 0, "item": started_item}),
        ("response.content_part.added", {**position, "part": {**part, "text": ""}}),
        *[("response.output_text.delta", delta) for delta in deltas],
        ("response.output_text.done", {**position, "text": answer.text, "logprobs": []}),
        ("response.content_part.done", {**position, "part": part}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": completed}),
    ]
    for number, (kind, members) in enumerate(events):
        yield event(kind, sequence_number=number, **members)


_WHOLE: Final[Mapping[str, Callable[[TextAnswer], dict[str, Any]]]] = MappingProxyType(
    {"chat": _chat, "messages": _message, "responses": _response}
)
APIS: Final = frozenset(_WHOLE)
"""The APIs in which a summary can be an answer."""

_STREAMED: Final[Mapping[str, Callable[[TextAnswer], Iterator[bytes]]]] = MappingProxyType(
    {"chat": _chat_events, "messages": _message_events, "responses": _response_events}
)

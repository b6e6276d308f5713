"""An answer of nothing but text, as each API gives it: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

PIECE: Final = 4_096
"""Characters of text in one event of a stream."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What is answered: a ``text`` of so many ``tokens``, under the ``name`` of the answer (letters and digits).

    ``model`` is the one that was asked for, ``created`` Unix time. ``usage``: a chat client asked for it in its stream.
    """

    text: str
    tokens: int
    name: str
    model: str
    created: int
    usage: bool = True


def whole_response(api: str, said: TextAnswer) -> bytes:
    """The body of an answer of *api* that is not streamed."""
    return json.dumps(_WHOLE[api](said)).encode()


def stream_events(api: str, said: TextAnswer) -> bytes:
    """The events of a streamed answer of *api*, to its end."""
    return b"".join(_STREAMED[api](said))


def _pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


# No model read anything for such an answer: its usage counts no input.


def _chat(said: TextAnswer) -> dict[str, Any]:
    message = {"role": "assistant", "content": said.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {**_chat_head(said, "chat.completion"), "choices": [choice], "usage": _chat_usage(said)}


def _chat_head(said: TextAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.name}", "object": kind, "created": said.created, "model": said.model}


def _chat_usage(said: TextAnswer) -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": said.tokens, "total_tokens": said.tokens}


def _chat_events(said: TextAnswer) -> Iterator[bytes]:
    head = _chat_head(said, "chat.completion.chunk")
    told: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    told += [({"content": piece}, None) for piece in _pieces(said.text)]
    for delta, finish in [*told, ({}, "stop")]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    if said.usage:
        yield b"data: " + json.dumps({**head, "choices": [], "usage": _chat_usage(said)}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _message(said: TextAnswer) -> dict[str, Any]:
    head = {"id": f"msg_{said.name}", "type": "message", "role": "assistant", "model": said.model}
    usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    content = [{"type": "text", "text": said.text}]
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    return {**head, "content": content, **stop, "usage": {**usage, "output_tokens": said.tokens}}


def _message_events(said: TextAnswer) -> Iterator[bytes]:
    message = _message(said)
    opening = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    yield _event("message_start", message=opening)
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in _pieces(said.text):
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    yield _event("content_block_stop", index=0)
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield _event("message_delta", delta=stop, usage={"output_tokens": said.tokens})
    yield _event("message_stop")


def _response(said: TextAnswer) -> dict[str, Any]:
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.tokens,
    }
    return {**response_head(said.name, said.model, said.created), "output": [_item(said)], "usage": usage}


def response_head(name: str, model: str, created: int) -> dict[str, Any]:
    """The members of a completed response beside its output and its usage."""
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


def _item(said: TextAnswer) -> dict[str, Any]:
    part = {"type": "output_text", "text": said.text, "annotations": []}
    head = {"type": "message", "id": f"msg_{said.name}", "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


def _response_events(said: TextAnswer) -> Iterator[bytes]:
    done, item = _response(said), _item(said)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    part = item["content"][0]
    at, where = {"output_index": 0}, {"item_id": item["id"], "output_index": 0, "content_index": 0}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {**at, "item": {**item, "status": "in_progress", "content": []}}),
        ("response.content_part.added", {**where, "part": {**part, "text": ""}}),
        *[("response.output_text.delta", {**where, "delta": piece, "logprobs": []}) for piece in _pieces(said.text)],
        ("response.output_text.done", {**where, "text": said.text, "logprobs": []}),
        ("response.content_part.done", {**where, "part": part}),
        ("response.output_item.done", {**at, "item": item}),
        ("response.completed", {"response": done}),
    ]
    for number, (kind, members) in enumerate(told):
        yield _event(kind, sequence_number=number, **members)


def _event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


_WHOLE: Final[Mapping[str, Callable[[TextAnswer], dict[str, Any]]]] = MappingProxyType(
    {"chat": _chat, "messages": _message, "responses": _response}
)
_STREAMED: Final[Mapping[str, Callable[[TextAnswer], Iterator[bytes]]]] = MappingProxyType(
    {"chat": _chat_events, "messages": _message_events, "responses": _response_events}
)

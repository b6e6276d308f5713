"""What the stub's model says: scripted answers, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One tool call of a scripted answer; without an ``id`` it gets one from the request's number."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """One scripted answer. ``piece`` is the number of characters a streamed chunk carries."""

    text: str = "Understood."
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    piece: int = 24
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped."""
        return "tool_calls" if self.calls else "stop"


@dataclass(frozen=True)
class Frame:
    """What surrounds an answer: the request's number and model, and the usage to report."""

    number: int
    model: str
    usage: dict[str, Any]

    def head(self, kind: str) -> dict[str, Any]:
        """The keys every answer object begins with."""
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": 1_760_000_000, "model": self.model}


def whole(answer: Answer, frame: Frame) -> bytes:
    """The body of a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, **answer.extra}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(at, call, frame) for at, call in enumerate(answer.calls)]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    return json.dumps({**frame.head("chat.completion"), "choices": [choice], "usage": frame.usage}).encode()


def streamed(answer: Answer, frame: Frame, with_usage: bool) -> Iterator[bytes]:
    """The events of a streamed response, each one whole, ``[DONE]`` last."""
    yield _event(frame, {"role": "assistant", "content": ""})
    for key, text in (("reasoning_content", answer.reasoning), ("content", answer.text)):
        for start in range(0, len(text), answer.piece):
            yield _event(frame, {key: text[start : start + answer.piece]})
    for at, call in enumerate(answer.calls):
        opened = _call(at, call, frame)
        opened["function"]["arguments"] = ""
        yield _event(frame, {"tool_calls": [{"index": at, **opened}]})
        for start in range(0, len(call.arguments), answer.piece):
            piece = {"index": at, "function": {"arguments": call.arguments[start : start + answer.piece]}}
            yield _event(frame, {"tool_calls": [piece]})
    yield _event(frame, {}, answer.finish_reason)
    if with_usage:
        yield _sse({**frame.head("chat.completion.chunk"), "choices": [], "usage": frame.usage})
    yield b"data: [DONE]\n\n"


def _call(at: int, call: Call, frame: Frame) -> dict[str, Any]:
    name = call.id or f"call_{frame.number}_{at}"
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _event(frame: Frame, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _sse({**frame.head("chat.completion.chunk"), "choices": [choice]})


def _sse(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"

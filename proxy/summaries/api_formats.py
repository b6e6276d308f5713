"""How each API asks for one text and gives it: bodies out, answers in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from proxy.core.apis.usage import usage_of

THINKERS = ("o1*", "o3*", "o4*", "gpt-5*")
"""Models that take ``max_completion_tokens`` only, and think inside it."""

THINKING = 4_096
"""Tokens allowed beside the cap to a model that thinks before it writes."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a model answered: its ``text``, whether it ``called`` tools or was cut ``short``, and the tokens it took."""

    text: str
    called: bool = False
    short: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """One API: its path, a body that asks, a warm prompt made to ask, and what an answer says."""

    path: str
    ask: Callable[[str, str, str, int], dict[str, Any]]
    instruct: Callable[[dict[str, Any], str, int], tuple[str, dict[str, Any]]]
    parse: Callable[[Mapping[str, Any]], ModelAnswer]


def output_allowance(model: str, cap: int) -> int:
    """Tokens of output to allow a summary of *cap* tokens: room to overshoot, and to think where a model does."""
    return int(cap * 1.25) + 64 + (THINKING if _thinks(model) else 0)


def _thinks(model: str) -> bool:
    name = model.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in THINKERS)


def _chat_figure(model: str) -> str:
    return "max_completion_tokens" if _thinks(model) else "max_tokens"


def _ask_chat(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, _chat_figure(model): output, "stream": False}


def _instruct_chat(outline: dict[str, Any], text: str, output: int) -> tuple[str, dict[str, Any]]:
    kept = ("model", "tools", "functions", "reasoning_effort", "prompt_cache_key", "user", "service_tier")
    body = {key: outline[key] for key in kept if key in outline}
    if body.get("tools"):
        body["tool_choice"] = "none"
    model = str(outline.get("model", ""))
    body |= {_chat_figure(model): output, "stream": False, "messages": None}
    return "messages", {**body, "last": {"role": "user", "content": text}}


def _read_chat(answer: Mapping[str, Any]) -> ModelAnswer:
    choice = answer["choices"][0]
    message = choice["message"]
    usage = usage_of(answer.get("usage"))
    return ModelAnswer(
        _text(message.get("content")),
        bool(message.get("tool_calls") or message.get("function_call")),
        choice.get("finish_reason") == "length",
        usage.input_tokens,
        usage.output_tokens,
    )


def _ask_messages(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": output, "system": system, "messages": [{"role": "user", "content": text}]}


def _instruct_messages(outline: dict[str, Any], text: str, output: int) -> tuple[str, dict[str, Any]]:
    kept = ("model", "system", "tools", "tool_choice", "metadata")
    body: dict[str, Any] = {key: outline[key] for key in kept if key in outline}
    body |= {"max_tokens": output, "messages": None}
    return "messages", {**body, "last": {"role": "user", "content": text}}


def _read_messages(answer: Mapping[str, Any]) -> ModelAnswer:
    parts = answer["content"]
    usage = usage_of(answer.get("usage"))
    return ModelAnswer(
        _text(parts),
        any(isinstance(part, Mapping) and part.get("type") == "tool_use" for part in parts),
        answer.get("stop_reason") == "max_tokens",
        usage.input_tokens,
        usage.output_tokens,
    )


def _ask_responses(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    given = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
    body = {"model": model, "instructions": system, "input": given, "max_output_tokens": output}
    return {**body, "store": False, "stream": False}


def _instruct_responses(outline: dict[str, Any], text: str, output: int) -> tuple[str, dict[str, Any]]:
    kept = ("model", "instructions", "tools", "reasoning", "prompt_cache_key", "include", "user", "service_tier")
    body = {key: outline[key] for key in kept if key in outline}
    if body.get("tools"):
        body["tool_choice"] = "none"
    body |= {"max_output_tokens": output, "store": False, "stream": False, "input": None}
    return "input", {**body, "last": {"role": "user", "content": [{"type": "input_text", "text": text}]}}


def _read_responses(answer: Mapping[str, Any]) -> ModelAnswer:
    items = [item for item in answer["output"] if isinstance(item, Mapping)]
    text = "".join(_text(item.get("content")) for item in items if item.get("type") == "message")
    usage = usage_of(answer.get("usage"))
    called = any(str(item.get("type", "")).endswith("_call") for item in items)
    short = answer.get("status") == "incomplete"
    return ModelAnswer(text, called, short, usage.input_tokens, usage.output_tokens)


API_FORMATS: Mapping[str, ApiFormat] = MappingProxyType(
    {
        "chat": ApiFormat("/v1/chat/completions", _ask_chat, _instruct_chat, _read_chat),
        "messages": ApiFormat("/v1/messages", _ask_messages, _instruct_messages, _read_messages),
        "responses": ApiFormat("/v1/responses", _ask_responses, _instruct_responses, _read_responses),
    }
)


def encode_json(body: Mapping[str, Any]) -> bytes:
    """*body* as JSON bytes; what UTF-8 cannot hold stays escaped."""
    return json.dumps(body, separators=(",", ":")).encode()


def append_to_prompt(wire: ApiFormat, model: str, outline: str, items: bytes, text: str, output: int) -> bytes:
    """A warm prompt with an instruction behind it: the items keep their bytes, the rest its meaning.

    *model* is what the upstream calls it; the client may have another name for it.
    """
    name, body = wire.instruct({**json.loads(outline), "model": model}, text, output)
    last = encode_json(body.pop("last"))
    head = encode_json({key: value for key, value in body.items() if key != name})
    return head[:-1] + b',"' + name.encode() + b'":[' + items + (b"," if items else b"") + last + b"]}"


def parse_answer(wire: ApiFormat, data: bytes) -> ModelAnswer | None:
    """What the answer *data* says; ``None`` where it is no answer of this API."""
    try:
        answer = json.loads(data)
        return wire.parse(answer)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, Mapping)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))

"""The API ``/v1/messages`` of the strict upstream: its rules, its count of tokens, and its answers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tests.stub.answers import Answer, Frame
from tests.stub.rules import Rules, Verdict, overflow_error
from tests.stub.tokens import FILE, count, count_json
from tests.support.tool_pair_checks import block_violations

__all__ = ["LIST", "PATH", "block_tokens", "fixed", "head", "invalid_body", "items", "judge", "overflow_error"]
__all__ += ["request_tokens", "signature", "streamed", "usage", "weigh", "whole"]

PATH, LIST = "/messages", "messages"
TOOL_PROMPT = 346
IMAGE = 1600
MARKERS = 4
KNOWN = frozenset(
    "model messages max_tokens system tools tool_choice stream metadata temperature top_k top_p stop_sequences".split()  # noqa: SIM905
    + "thinking context_management output_config service_tier container mcp_servers cache_control".split()  # noqa: SIM905
)
BLOCKS = {
    "text": {"text", "citations"},
    "image": {"source"},
    "document": {"source", "title", "context", "citations"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "server_tool_use": {"id", "name", "input"},
    "web_search_tool_result": {"tool_use_id", "content"},
    "search_result": {"source", "title", "content", "citations"},
    "compaction": {"content"},
}


def signature(thinking: str) -> str:
    """The seal this provider puts on a thought."""
    return hashlib.sha256(b"sealed" + thinking.encode("utf-8", "surrogatepass")).hexdigest()


def items(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the conversation consists of; cache markers are no part of it."""
    return [_unmarked(message) for message in body.get("messages") or ()]


def head(body: Mapping[str, Any]) -> object:
    """What the provider's prompt cache reads before the items."""
    return _unmarked({key: body.get(key) for key in ("model", "tools", "system")})


def judge(body: object, rules: Rules) -> Verdict:
    """The verdict on a parsed request under *rules*."""
    if not isinstance(body, Mapping):
        return Verdict("invalid", "The request body is not valid JSON.")
    messages = body.get("messages")
    if not isinstance(body.get("model"), str):
        return Verdict("invalid", "model: Field required")
    if not isinstance(messages, list) or not messages:
        return Verdict("invalid", "messages: at least one message is required")
    max_tokens = body.get("max_tokens")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        return Verdict("invalid", "max_tokens: Field required")
    wrong = [f"{key}: Extra inputs are not permitted" for key in sorted(body.keys() - KNOWN)]
    wrong += _shape_violations(messages) or _order_violations(messages, rules)
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "enabled":
        wrong += _thinking_violations(messages, thinking, max_tokens)
    if (marks := _marks(body)) > MARKERS:
        wrong.append(f"A maximum of 4 blocks with cache_control may be provided. Found {marks}.")
    if wrong:
        return Verdict("invalid", "; ".join(wrong[:5]))
    tokens, window = request_tokens(body, rules.factor), rules.window_of(body["model"])
    too_long = tokens + max_tokens > window and not rules.truncates
    return Verdict("overflow" if too_long else "ok", tokens=tokens, max_tokens=max_tokens, window=window)


def _shape_violations(messages: Sequence[Any]) -> list[str]:
    problems = []
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            problems.append(f"messages.{at}.role: Input should be 'user' or 'assistant'")
        elif message.keys() - {"role", "content"}:
            problems.append(f"messages.{at}: Extra inputs are not permitted")
        elif not message.get("content"):
            problems.append(f"messages.{at}: all messages must have non-empty content")
        elif isinstance(message["content"], list):
            problems += _block_shapes(message["content"], f"messages.{at}.content")
    if not problems and messages[0]["role"] != "user":
        problems.append('messages: first message must use the "user" role')
    return problems


def _block_shapes(blocks: Sequence[Any], path: str) -> list[str]:
    problems = []
    for at, block in enumerate(blocks):
        here = f"{path}.{at}"
        known = BLOCKS.get(str(block.get("type"))) if isinstance(block, Mapping) else None
        if known is None:
            problems.append(f"{here}: Input tag does not match any of the expected tags")
            continue
        if block.keys() - known - {"type", "cache_control"}:
            problems.append(f"{here}: Extra inputs are not permitted")
        if block["type"] == "text" and not block.get("text"):
            problems.append(f"{here}: text content blocks must be non-empty")
        if block["type"] == "tool_use" and not re.fullmatch(r"[a-zA-Z0-9_-]+", str(block.get("id"))):
            problems.append(f"{here}.id: String should match pattern")
        if block["type"] == "tool_use" and not isinstance(block.get("input"), Mapping):
            problems.append(f"{here}.input: Input should be a valid dictionary")
        if block["type"] == "thinking" and block.get("signature") != signature(block.get("thinking", "")):
            problems.append(f"{here}: Invalid `signature` in `thinking` block")
        if block["type"] == "tool_result" and isinstance(block.get("content"), list):
            problems += _block_shapes(block["content"], f"{here}.content")
    return problems


def _order_violations(messages: Sequence[Mapping[str, Any]], rules: Rules) -> list[str]:
    problems = block_violations(messages) if rules.pairs else []
    if rules.alternation and any(a["role"] == b["role"] for a, b in pairwise(messages)):
        problems.append('messages: roles must alternate between "user" and "assistant"')
    return problems


def _thinking_violations(
    messages: Sequence[Mapping[str, Any]], thinking: Mapping[str, Any], max_tokens: int
) -> list[str]:
    problems = []
    if max_tokens <= thinking.get("budget_tokens", 0):
        problems.append("`max_tokens` must be greater than `thinking.budget_tokens`")
    last = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
    calls = isinstance(last, list) and any(block["type"] == "tool_use" for block in last)
    if calls and last[0]["type"] not in ("thinking", "redacted_thinking"):
        problems.append("Expected `thinking` or `redacted_thinking`, but found another block first")
    return problems


def _marks(value: Any) -> int:
    if isinstance(value, Mapping):
        own = isinstance(value.get("cache_control"), Mapping)
        return own + sum(_marks(member) for key, member in value.items() if key not in ("input", "input_schema"))
    return sum(map(_marks, value)) if isinstance(value, list) else 0


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmarked(member) for key, member in value.items() if key != "cache_control"}
    return [_unmarked(member) for member in value] if isinstance(value, list) else value


def invalid_body(message: str) -> bytes:
    """Anthropic's error body for a request that is malformed."""
    return json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": message}}).encode()


def block_tokens(block: object) -> int:
    """Tokens of one block."""
    if not isinstance(block, Mapping):
        return count_json(block)
    match block.get("type"):
        case "text":
            return count(block["text"])
        case "image":
            return IMAGE
        case "document" if block["source"].get("type") != "text":
            return FILE
        case "tool_use":
            return 4 + count(block["id"]) + count(block["name"]) + count_json(block["input"])
        case "tool_result":
            return 4 + count(block["tool_use_id"]) + _content_tokens(block.get("content"))
        case "thinking":
            return count(block["thinking"])
        case "redacted_thinking":
            return len(block["data"]) // 6
        case _:
            return count_json({key: value for key, value in block.items() if key not in ("type", "cache_control")})


def _content_tokens(content: object) -> int:
    if isinstance(content, list):
        return sum(map(block_tokens, content))
    return count(content) if isinstance(content, str) else 0


def weigh(message: Mapping[str, Any]) -> int:
    """Tokens of one message, its frame included."""
    return 4 + _content_tokens(message.get("content"))


def fixed(body: Mapping[str, Any]) -> int:
    """Tokens a request needs before its first message."""
    tools = body.get("tools")
    return 3 + _content_tokens(body.get("system")) + (TOOL_PROMPT + count_json(_unmarked(tools)) if tools else 0)


def request_tokens(body: Mapping[str, Any], factor: float = 1.0) -> int:
    """Tokens of a whole request; *factor* plays a model whose tokenizer makes that many times more."""
    return math.ceil((fixed(body) + sum(map(weigh, body.get("messages") or ()))) * factor)


def usage(input_tokens: int, output_tokens: int, cached: int) -> dict[str, Any]:
    """The figures of an answer, as this API spells them."""
    return {
        "input_tokens": input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def _answered(answer: Answer, frame: Frame) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature(answer.reasoning)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for at, call in enumerate(answer.calls):
        name = call.id or f"toolu_{frame.number}_{at}"
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _message(answer: Answer, frame: Frame, content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
    head = {"id": f"msg_{frame.number}", "type": "message", "role": "assistant", "model": frame.model}
    return {**head, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": frame.usage}


def whole(answer: Answer, frame: Frame) -> bytes:
    """The body of a response that is not streamed."""
    stop = "tool_use" if answer.calls else "end_turn"
    return json.dumps(_message(answer, frame, _answered(answer, frame), stop)).encode()


def streamed(answer: Answer, frame: Frame, with_usage: bool) -> Iterator[bytes]:
    """The events of a streamed response, each one whole."""
    del with_usage  # it always comes
    opening = {**frame.usage, "output_tokens": 1}
    message = {**_message(answer, frame, [], None), "usage": opening}
    yield _event("message_start", message=message)
    yield _event("ping")
    for index, block in enumerate(_answered(answer, frame)):
        kind = block["type"]
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[kind]
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        text = json.dumps(block["input"]) if kind == "tool_use" else block[kind]
        delta, key = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        for start in range(0, len(text), answer.piece):
            piece = {"type": delta, key: text[start : start + answer.piece]}
            yield _event("content_block_delta", index=index, delta=piece)
        if kind == "thinking":
            sealed = {"type": "signature_delta", "signature": block["signature"]}
            yield _event("content_block_delta", index=index, delta=sealed)
        yield _event("content_block_stop", index=index)
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    yield _event("message_delta", delta=stop, usage={"output_tokens": frame.usage["output_tokens"]})
    yield _event("message_stop")


def _event(kind: str, **members: Any) -> bytes:
    data = json.dumps({"type": kind, **members}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()

"""The API ``/v1/responses`` of the strict upstream: its rules, its count of tokens, and its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.stub.answers import Answer, Frame
from tests.stub.rules import Rules, Verdict, overflow_error
from tests.stub.tokens import FILE, IMAGE_HIGH, IMAGE_LOW, count, count_json
from tests.support.tool_pair_checks import item_violations

__all__ = ["LIST", "PATH", "answered", "expanded", "fixed", "head", "invalid_body", "items", "judge", "overflow_error"]
__all__ += ["overflow_events", "request_tokens", "streamed", "usage", "weigh", "whole"]

PATH, LIST = "/responses", "input"
KNOWN = frozenset(
    "model input instructions max_output_tokens tools tool_choice stream store include reasoning text metadata".split()  # noqa: SIM905
    + "temperature top_p parallel_tool_calls previous_response_id conversation truncation prompt user".split()  # noqa: SIM905
    + "prompt_cache_key context_management service_tier safety_identifier client_metadata stream_options".split()  # noqa: SIM905
)
PARTS = {
    "user": {"input_text", "input_image", "input_file"},
    "system": {"input_text"},
    "developer": {"input_text"},
    "assistant": {"output_text", "refusal"},
}
KINDS = frozenset(
    "function_call function_call_output custom_tool_call custom_tool_call_output reasoning compaction".split()  # noqa: SIM905
    + "item_reference web_search_call local_shell_call local_shell_call_output compaction_trigger".split()  # noqa: SIM905
)
CLIENTS = ("user", "system", "developer")


def items(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the conversation consists of."""
    given = body.get("input")
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given or ()


def head(body: Mapping[str, Any]) -> object:
    """What the provider's prompt cache reads before the items."""
    return {key: body.get(key) for key in ("model", "tools", "instructions", "text")}


def expanded(body: Mapping[str, Any], stored: Mapping[str, Sequence[Mapping[str, Any]]]) -> Mapping[str, Any]:
    """*body* with the history that this provider stores for it. Raises ``KeyError`` if it stores none of that name."""
    before = body.get("previous_response_id")
    if not before:
        return body
    return {**body, "input": [*stored[before], *items(body)]}


def answered(answer: Answer, frame: Frame) -> list[dict[str, Any]]:
    """The output items of an answer."""
    problems: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        sealed = {"encrypted_content": "gAAA" + "x" * 400}
        problems.append({"type": "reasoning", "id": f"rs_{frame.number}", "summary": summary, **sealed})
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {"type": "message", "id": f"msg_{frame.number}", "role": "assistant", "status": "completed"}
        problems.append({**message, "content": [part]})
    for at, call in enumerate(answer.calls):
        name = call.id or f"call_{frame.number}_{at}"
        made = {"type": "function_call", "id": f"fc_{frame.number}_{at}", "call_id": name, "name": call.name}
        problems.append({**made, "arguments": call.arguments, "status": "completed"})
    return problems


def judge(body: object, rules: Rules) -> Verdict:
    """The verdict on a parsed request (its stored history put in) under *rules*."""
    if not isinstance(body, Mapping):
        return Verdict("invalid", "We could not parse the JSON body of your request.")
    if not isinstance(body.get("model"), str):
        return Verdict("invalid", "you must provide a model parameter")
    conversation = items(body)
    wrong = [f"Unknown parameter: {key!r}." for key in sorted(body.keys() - KNOWN)]
    wrong += [problem for at, item in enumerate(conversation) for problem in _shape(item, f"input[{at}]")]
    if not wrong and rules.pairs:
        wrong = item_violations(conversation)
    if not conversation:
        wrong.append("Missing required parameter: 'input'.")
    max_tokens = body.get("max_output_tokens") or rules.default_max_tokens
    if max_tokens < 16:
        wrong.append("Invalid 'max_output_tokens': integer below minimum value.")
    if wrong:
        return Verdict("invalid", "; ".join(wrong[:5]))
    tokens, window = request_tokens(body, rules.factor), rules.window_of(body["model"])
    if body.get("truncation") == "auto":
        tokens = min(tokens, window - max_tokens)
    too_long = tokens + max_tokens > window and not rules.truncates
    return Verdict("overflow" if too_long else "ok", tokens=tokens, max_tokens=max_tokens, window=window)


def _shape(item: Any, path: str) -> list[str]:
    if not isinstance(item, Mapping):
        return [f"Invalid type for '{path}': expected an object."]
    kind = item.get("type", "message")
    if kind == "message":
        return _message_shape(item, path)
    if kind not in KINDS:
        return [f"Invalid value: {kind!r} in '{path}.type'."]
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    missing = [key for key in needed.get(kind, ()) if not isinstance(item.get(key), str | list)]
    return [f"Missing required parameter: '{path}.{key}'." for key in missing]


def _message_shape(item: Mapping[str, Any], path: str) -> list[str]:
    role, content = item.get("role"), item.get("content")
    if role not in PARTS:
        return [f"Invalid value: {role!r} in '{path}.role'."]
    if not content:
        return [f"Missing required parameter: '{path}.content'."]
    if isinstance(content, str):
        return []
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in content}
    return [f"Invalid value: {kind!r} in '{path}.content'." for kind in kinds - PARTS[role]]


def invalid_body(message: str) -> bytes:
    """OpenAI's error body for a request that is malformed."""
    facts = {"message": message, "type": "invalid_request_error", "param": "input", "code": None}
    return json.dumps({"error": facts}).encode()


def _part_tokens(part: object) -> int:
    if not isinstance(part, Mapping):
        return count_json(part)
    match part.get("type"):
        case "input_text" | "output_text" | "text" | "refusal" | "summary_text":
            return count(part.get("text", part.get("refusal", "")))
        case "input_image" | "computer_screenshot":
            return IMAGE_LOW if part.get("detail") == "low" else IMAGE_HIGH
        case "input_file":
            return FILE
        case _:
            return count_json(part)


def _content_tokens(content: object) -> int:
    return sum(map(_part_tokens, content)) if isinstance(content, list) else count(str(content or ""))


def weigh(item: Mapping[str, Any]) -> int:
    """Tokens of one element, its frame included."""
    kind = item.get("type", "message")
    if kind == "message":
        return 4 + _content_tokens(item.get("content"))
    total = 4 + sum(count(item[key]) for key in ("call_id", "name", "arguments", "input") if item.get(key))
    total += _content_tokens(item.get("output")) + _content_tokens(item.get("summary"))
    total += count_json(item["action"]) if item.get("action") else 0
    return total + len(item.get("encrypted_content") or "") // 6


def fixed(body: Mapping[str, Any]) -> int:
    """Tokens a request needs before its first item."""
    return (
        3
        + count(body.get("instructions") or "")
        + sum(count_json(body[key]) for key in ("tools", "text") if body.get(key))
    )


def request_tokens(body: Mapping[str, Any], factor: float = 1.0) -> int:
    """Tokens of a whole request; *factor* plays a model whose tokenizer makes that many times more."""
    return math.ceil((fixed(body) + sum(map(weigh, items(body)))) * factor)


def usage(input_tokens: int, output_tokens: int, cached: int) -> dict[str, Any]:
    """The figures of an answer, as this API spells them."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _response(frame: Frame, output: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    made: dict[str, Any] = {"id": f"resp_{frame.number}", "object": "response", "created_at": 1_760_000_000}
    made |= {"model": frame.model, "status": status, "output": output, "error": None, "incomplete_details": None}
    made |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "instructions": None, "metadata": {}}
    return {**made, "usage": frame.usage if status == "completed" else None}


def whole(answer: Answer, frame: Frame) -> bytes:
    """The body of a response that is not streamed."""
    return json.dumps(_response(frame, answered(answer, frame))).encode()


def streamed(answer: Answer, frame: Frame, with_usage: bool) -> Iterator[bytes]:
    """The events of a streamed response, each one whole, numbered as they come."""
    del with_usage  # it always comes
    for number, event in enumerate(_answer_events(answer, frame)):
        yield event.replace(b'"sequence_number":0', b'"sequence_number":%d' % number, 1)


def _answer_events(answer: Answer, frame: Frame) -> Iterator[bytes]:
    yield _event("response.created", response=_response(frame, [], "in_progress"))
    yield _event("response.in_progress", response=_response(frame, [], "in_progress"))
    output = answered(answer, frame)
    for index, item in enumerate(output):
        at = {"output_index": index, "item_id": item["id"]}
        yield _event("response.output_item.added", output_index=index, item={**item, **_empty(item)})
        if item["type"] == "message":
            part = item["content"][0]
            position = {**at, "content_index": 0}
            yield _event("response.content_part.added", **position, part={**part, "text": ""})
            for piece in _pieces(part["text"], answer.piece):
                yield _event("response.output_text.delta", **position, delta=piece, logprobs=[])
            yield _event("response.output_text.done", **position, text=part["text"], logprobs=[])
            yield _event("response.content_part.done", **position, part=part)
        if item["type"] == "function_call":
            for piece in _pieces(item["arguments"], answer.piece):
                yield _event("response.function_call_arguments.delta", **at, delta=piece)
            yield _event("response.function_call_arguments.done", **at, arguments=item["arguments"])
        yield _event("response.output_item.done", output_index=index, item=item)
    yield _event("response.completed", response=_response(frame, output))


def overflow_events(body: bytes) -> Iterator[bytes]:
    """How this API says inside a stream that an input is too long."""
    error = json.loads(body)["error"]
    failed = _response(Frame(0, "m", {}), [], "failed")
    yield _event("response.created", response=_response(Frame(0, "m", {}), [], "in_progress"))
    yield _event(
        "response.failed", response={**failed, "error": {"code": error.get("code"), "message": error["message"]}}
    )


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"message": {"content": []}, "function_call": {"arguments": ""}}.get(item["type"], {})


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def _event(kind: str, **members: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": 0, **members}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()

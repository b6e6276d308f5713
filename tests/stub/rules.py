"""What the strict upstream demands of a chat request, and how it words a refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tests.stub.tokens import request_tokens
from tests.support.tool_pair_checks import pair_violations

Wording = Literal["openai", "anthropic", "vllm", "llamacpp"]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(frozen=True)
class Rules:
    """How strict the stub is, and about what.

    ``window`` is in tokens and holds for every model that ``windows`` does not name. ``default_max_tokens`` is what a
    request without an output figure reserves. ``factor`` plays a tokenizer that makes that many times more tokens;
    ``usage_factor`` makes ``usage`` lie by that factor. ``truncates`` accepts what is too long, silently.
    ``tells`` says the windows in the list of models, as vLLM does; ``counts`` serves ``/messages/count_tokens``.
    """

    window: int = 8192
    windows: Mapping[str, int] = field(default_factory=dict)
    default_max_tokens: int = 16
    wording: Wording = "openai"
    overflow_in_stream: bool = False
    pairs: bool = True
    alternation: bool = False
    one_leading_system: bool = False
    factor: float = 1.0
    usage_factor: float = 1.0
    truncates: bool = False
    tells: bool = False
    counts: bool = False

    def window_of(self, model: str) -> int:
        """The window of *model*, in tokens."""
        return self.windows.get(model, self.window)


@dataclass(frozen=True)
class Verdict:
    """What the stub thinks of a request. ``kind`` is ``ok``, ``invalid`` or ``overflow``; figures are tokens."""

    kind: Literal["ok", "invalid", "overflow"]
    message: str = ""
    tokens: int = 0
    max_tokens: int = 0
    window: int = 0


def judge(body: object, rules: Rules) -> Verdict:
    """The verdict on a parsed chat request under *rules*."""
    if not isinstance(body, Mapping):
        return Verdict("invalid", "We could not parse the JSON body of your request.")
    messages = body.get("messages")
    if not isinstance(body.get("model"), str):
        return Verdict("invalid", "you must provide a model parameter")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        return Verdict("invalid", "Invalid 'messages': expected a non-empty array of objects.")
    wrong = _shape_violations(messages) + _order_violations(messages, rules)
    if wrong:
        return Verdict("invalid", "; ".join(wrong[:5]))
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or rules.default_max_tokens
    tokens = request_tokens(body, rules.factor)
    window = rules.window_of(body["model"])
    too_long = tokens + asked > window and not rules.truncates
    return Verdict("overflow" if too_long else "ok", tokens=tokens, max_tokens=asked, window=window)


def _shape_violations(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            problems.append(f"Invalid value: {role!r} in messages[{index}].role")
        elif role == "assistant":
            if content is None and not any(message.get(k) for k in ("tool_calls", "function_call", "audio", "refusal")):
                problems.append(f"messages[{index}]: an assistant message needs content or tool calls")
            problems += _call_violations(index, message.get("tool_calls") or [])
        elif content is None or content == []:
            problems.append(f"Invalid value for messages[{index}].content: expected text or parts, got {content!r}")
        elif role == "user" and content == "":
            problems.append(f"messages[{index}]: user content must not be empty")
    return problems


def _call_violations(index: int, calls: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    for at, call in enumerate(calls):
        function = call.get("function") or call.get("custom")
        if not isinstance(call.get("id"), str) or not isinstance(function, Mapping) or not function.get("name"):
            problems.append(f"messages[{index}].tool_calls[{at}] needs an id and a named function")
        elif not isinstance(function.get("arguments", function.get("input")), str):
            problems.append(f"messages[{index}].tool_calls[{at}].function.arguments must be a string")
    return problems


def _order_violations(messages: Sequence[Mapping[str, Any]], rules: Rules) -> list[str]:
    problems = pair_violations(messages) if rules.pairs else []
    roles = [m.get("role") for m in messages]
    if rules.one_leading_system and "system" in roles[1:]:
        problems.append("System message must be at the beginning.")
    if rules.alternation:
        spoken = [role for role in roles if role in {"user", "assistant"}]
        if spoken[:1] == ["assistant"] or any(a == b == "user" for a, b in pairwise(spoken)):
            problems.append("Conversation roles must alternate user/assistant/user/assistant/...")
    return problems


def invalid_body(message: str) -> bytes:
    """OpenAI's error body for a request that is malformed."""
    return _dump({"error": {"message": message, "type": "invalid_request_error", "param": "messages", "code": None}})


def overflow_error(verdict: Verdict, rules: Rules) -> tuple[int, bytes]:
    """The status and the error body with which the provider of this wording reports that the window is full."""
    n, out, window = verdict.tokens, verdict.max_tokens, verdict.window
    limit = f"This model's maximum context length is {window} tokens. However, "
    match rules.wording:
        case "anthropic":
            text = f"prompt is too long: {n} tokens > {window} maximum"
            if n <= window:
                text = f"input length and `max_tokens` exceed context limit: {n} + {out} > {window}, "
                text += "decrease input length or `max_tokens` and try again"
            return 400, _dump({"type": "error", "error": {"type": "invalid_request_error", "message": text}})
        case "vllm":
            split = f"you requested {n + out} tokens ({n} in the messages, {out} in the completion). "
            text = limit + split + "Please reduce the length of the messages or completion."
            return 400, _dump(
                {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
            )
        case "llamacpp":
            text = f"request ({n} tokens) exceeds the available context size ({window} tokens), try increasing it"
            facts = {"code": 400, "message": text, "type": "exceed_context_size_error"}
            return 400, _dump({"error": {**facts, "n_prompt_tokens": n, "n_ctx": window}})
        case _:
            text = limit + f"your messages resulted in {n} tokens. Please reduce the length of the messages."
            if n <= window:
                split = f"you requested {n + out} tokens ({n} in the messages, {out} in the completion). "
                text = limit + split + "Please reduce the length of the messages or completion."
            facts = {"message": text, "type": "invalid_request_error", "param": "messages"}
            return 400, _dump({"error": {**facts, "code": "context_length_exceeded"}})


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()

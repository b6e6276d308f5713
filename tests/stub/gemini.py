"""Gemini's ``generateContent`` of the strict upstream: its rules, its count of tokens, and its answers."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.stub.answers import Answer, Frame
from tests.stub.rules import Rules, Verdict
from tests.stub.tokens import count, count_json
from tests.support.tool_pair_checks import content_violations

__all__ = ["LIST", "PATH", "counted", "fixed", "head", "invalid_body", "items", "judge", "listed", "overflow_error"]
__all__ += ["request_tokens", "sealed", "signature", "streamed", "usage", "weigh", "whole"]

PATH, LIST = "/models/:generateContent", "contents"
ROUTE = re.compile(r"/v1(?:alpha|beta)?/models/([^:]+):(generateContent|streamGenerateContent|countTokens)")
KNOWN = frozenset(
    "contents systemInstruction system_instruction tools toolConfig tool_config generationConfig model".split()  # noqa: SIM905
    + "generation_config safetySettings safety_settings cachedContent labels serviceTier store".split()  # noqa: SIM905
)
DATA = frozenset(
    "text inlineData inline_data fileData functionCall function_call functionResponse function_response".split()  # noqa: SIM905
    + "executableCode codeExecutionResult".split()  # noqa: SIM905
)
BESIDE = frozenset({"thought", "thoughtSignature", "thought_signature", "videoMetadata", "mediaResolution"})
ANY_SIGNATURE = "skip_thought_signature_validator"
ANY_SIGNATURES = frozenset({ANY_SIGNATURE, base64.b64encode(ANY_SIGNATURE.encode()).decode()})
"""As it is written in JSON by hand, and by Google's SDK, where a signature is bytes."""
IMAGE = 258
SIGNING = "gemini-3"
"""The beginning of the names of models that demand the signatures of their calls."""


def signature(part: Mapping[str, Any]) -> str:
    """The seal this provider puts on a part."""
    plain = {key: value for key, value in part.items() if key not in ("thoughtSignature", "thought_signature")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest() * 2


def sealed(part: Mapping[str, Any]) -> dict[str, Any]:
    """*part* with its seal."""
    return {**part, "thoughtSignature": signature(part)}


def items(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the conversation consists of."""
    return body.get("contents") or ()


def head(body: Mapping[str, Any]) -> object:
    """What the provider's prompt cache reads before the items."""
    return {key: body.get(key) for key in ("model", "tools", "systemInstruction")}


def counted(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The request whose tokens *body* asks for; None if it is no such body."""
    if body.keys() == {"generateContentRequest"}:
        inner: Mapping[str, Any] = body["generateContentRequest"]
        return inner if str(inner.get("model", "")).startswith("models/") else None
    return body if body.keys() == {"contents"} else None


def judge(body: object, rules: Rules) -> Verdict:
    """The verdict on a parsed request, with the path's model as its own, under *rules*."""
    if not isinstance(body, Mapping):
        return Verdict("invalid", "Invalid JSON payload received. Unexpected end of string.")
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        return Verdict("invalid", "* GenerateContentRequest.contents: contents is not specified")
    wrong = [f'Invalid JSON payload received. Unknown name "{key}"' for key in sorted(body.keys() - KNOWN)]
    for at, content in enumerate(contents):
        wrong += _shape(content, f"contents[{at}]")
    if not wrong and rules.pairs:
        wrong = content_violations(contents)
    if not wrong and str(body.get("model")).startswith(SIGNING):
        wrong = _missing_signatures(contents)
    if wrong:
        return Verdict("invalid", "; ".join(wrong[:5]))
    config = body.get("generationConfig") or body.get("generation_config") or {}
    max_tokens = config.get("maxOutputTokens") or config.get("max_output_tokens") or rules.default_max_tokens
    tokens, window = request_tokens(body, rules.factor), rules.window_of(str(body.get("model")))
    too_long = tokens > window and not rules.truncates
    return Verdict("overflow" if too_long else "ok", tokens=tokens, max_tokens=max_tokens, window=window)


def _shape(content: Any, path: str) -> list[str]:
    if not isinstance(content, Mapping) or content.keys() - {"role", "parts"}:
        return [f"Invalid JSON payload received. Unknown name at '{path}'"]
    role, parts = content.get("role", "user"), content.get("parts")
    if role not in ("user", "model", "function"):
        return ["Please use a valid role: user, model."]
    if not isinstance(parts, list) or not parts:
        return [f"{path}.parts: must not be empty"]
    problems = [problem for at, part in enumerate(parts) for problem in _part_shape(part, role, f"{path}.parts[{at}]")]
    answers = ["functionResponse" in part or "function_response" in part for part in parts]
    if any(answers) and not all(answers):
        problems.append("Please ensure that the number of function response parts is equal to the number of parts")
    return problems


def _part_shape(part: Any, role: str, path: str) -> list[str]:
    if not isinstance(part, Mapping) or part.keys() - DATA - BESIDE:
        return [f"Invalid JSON payload received. Unknown name at '{path}'"]
    kinds = part.keys() & DATA
    if len(kinds) != 1:
        return [f"{path}.data: required oneof field 'data' must have one initialized field"]
    (kind,) = kinds
    value = part[kind]
    problems = []
    if kind == "text" and not isinstance(value, str):
        problems.append(f"Invalid value at '{path}.text' (TYPE_STRING)")
    if kind in ("functionCall", "function_call") and (
        role != "model" or not isinstance(value.get("args", {}), Mapping)
    ):
        problems.append(f"Invalid value at '{path}.function_call'")
    if kind in ("functionResponse", "function_response") and (
        role == "model" or not isinstance(value.get("response"), Mapping)
    ):
        problems.append(
            f"Invalid value at '{path}.function_response.response' (type.googleapis.com/google.protobuf.Struct)"
        )
    given = part.get("thoughtSignature", part.get("thought_signature"))
    if given is not None and given not in {signature(part), *ANY_SIGNATURES}:
        problems.append("Thought signature is not valid.")
    return problems


def _missing_signatures(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a thinking model says of calls without a signature, behind the user's last words."""
    problems: list[str] = []
    for at in range(len(contents) - 1, -1, -1):
        content = contents[at]
        if content.get("role") == "model":
            call = next((part for part in content["parts"] if "functionCall" in part), None)
            if call is not None and "thoughtSignature" not in call:
                problems.append(f"Function call is missing a thought_signature in functionCall parts, position {at}.")
        elif any("text" in part for part in content["parts"]):
            break
    return problems


def invalid_body(message: str) -> bytes:
    """Google's error body for a request that is malformed."""
    return json.dumps({"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}).encode()


def overflow_error(verdict: Verdict, rules: Rules) -> tuple[int, bytes]:
    """The status and the error body of Google's API for an input that is too long."""
    del rules
    text = f"The input token count ({verdict.tokens}) exceeds the maximum number of tokens allowed ({verdict.window})."
    return 400, invalid_body(text)


def _part_tokens(part: Mapping[str, Any]) -> int:
    given = part.get("thoughtSignature", part.get("thought_signature", ""))
    total = len(given) // 6
    for kind in part.keys() & DATA:
        value = part[kind]
        if kind == "text":
            total += count(value)
        elif kind in ("inlineData", "inline_data", "fileData"):
            total += IMAGE
        elif kind in ("functionCall", "function_call"):
            total += 4 + count(value["name"]) + count_json(value.get("args"))
        elif kind in ("functionResponse", "function_response"):
            total += 4 + count(value["name"]) + count_json(value["response"]) + IMAGE * len(value.get("parts", ()))
        else:
            total += count_json(value)
    return total


def weigh(content: Mapping[str, Any]) -> int:
    """Tokens of one content, its frame included."""
    return 3 + sum(map(_part_tokens, content.get("parts") or ()))


def fixed(body: Mapping[str, Any]) -> int:
    """Tokens a request needs before its first content."""
    system = body.get("systemInstruction") or body.get("system_instruction") or {}
    words = sum(count(part.get("text", "")) for part in system.get("parts") or ())
    schema = (body.get("generationConfig") or {}).get("responseSchema")
    return 3 + words + sum(count_json(value) for value in (body.get("tools"), schema) if value)


def request_tokens(body: Mapping[str, Any], factor: float = 1.0) -> int:
    """Tokens of a whole request; *factor* plays a model whose tokenizer makes that many times more."""
    return math.ceil((fixed(body) + sum(map(weigh, items(body)))) * factor)


def usage(input_tokens: int, output_tokens: int, cached: int) -> dict[str, Any]:
    """The figures of an answer, as this API spells them."""
    figures = {
        "promptTokenCount": input_tokens,
        "candidatesTokenCount": output_tokens,
        "totalTokenCount": input_tokens + output_tokens,
    }
    return {**figures, "cachedContentTokenCount": cached} if cached else figures


def _answered(answer: Answer) -> list[dict[str, Any]]:
    """The parts of an answer; a model that thinks signs the first call, or its last words."""
    parts: list[dict[str, Any]] = [{"text": answer.text}] if answer.text else []
    for call in answer.calls:
        made = {"name": call.name, "args": json.loads(call.arguments)}
        parts.append({"functionCall": {"id": call.id, **made} if call.id else made})
    if answer.reasoning and parts:
        at = next((at for at, part in enumerate(parts) if "functionCall" in part), len(parts) - 1)
        parts[at] = sealed(parts[at])
    return parts


def _response(frame: Frame, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if last:
        candidate["finishReason"] = "STOP"
    facts = {"modelVersion": frame.model, "responseId": f"r{frame.number}"}
    return {"candidates": [candidate], "usageMetadata": frame.usage, **facts}


def whole(answer: Answer, frame: Frame) -> bytes:
    """The body of a response that is not streamed."""
    return json.dumps(_response(frame, _answered(answer), last=True), indent=2).encode()


def _pieces(answer: Answer, frame: Frame) -> Iterator[bytes]:
    parts = _answered(answer)
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if "text" not in part or "thoughtSignature" in part:
            yield json.dumps(_response(frame, [part], last=last)).encode()
            continue
        text = part["text"]
        starts = range(0, len(text), answer.piece)
        for start in starts:
            piece = {"text": text[start : start + answer.piece]}
            yield json.dumps(_response(frame, [piece], last=last and start == starts[-1])).encode()


def streamed(answer: Answer, frame: Frame, with_usage: bool) -> Iterator[bytes]:
    """The events of a streamed response, each one whole."""
    del with_usage  # it always comes
    for piece in _pieces(answer, frame):
        yield b"data: " + piece + b"\r\n\r\n"


def listed(answer: Answer, frame: Frame) -> Iterator[bytes]:
    """The same as one JSON array, which is sent if no events are asked for."""
    before = b"["
    for piece in _pieces(answer, frame):
        yield before + piece + b"\n"
        before = b",\r\n"
    yield b"]"

"""The APIs as summarisers use them: the body of a request for a summary, and the text in its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

from proxy.core.apis.json_steps import parse
from proxy.core.apis.usage import read_usage, read_usage_metadata

REASONING_MODELS: Final = ("o1*", "o3*", "o4*", "gpt-5*")
"""Models that accept only ``max_completion_tokens``, and whose reasoning counts in it:
https://platform.openai.com/docs/api-reference/chat/create
"""

REASONING_TOKENS: Final = 4_096
"""Tokens of output, beside the cap, for a model that reasons before it writes."""

# Members of the client's request that a request for a summary has as well, because the provider's prompt cache depends
# on them, or because they name who pays. Sampling parameters and response formats are for the client's own answer only.
# Anthropic's cache also depends on tool_choice: https://platform.claude.com/docs/en/build-with-claude/prompt-caching
_CHAT_MEMBERS: Final[tuple[str, ...]] = (
    "model",
    "tools",
    "functions",
    "reasoning_effort",
    "prompt_cache_key",
    "user",
    "service_tier",
)
_MESSAGES_MEMBERS: Final[tuple[str, ...]] = ("model", "system", "tools", "tool_choice", "metadata")
_RESPONSES_MEMBERS: Final[tuple[str, ...]] = (
    "model",
    "instructions",
    "tools",
    "reasoning",
    "prompt_cache_key",
    "include",
    "user",
    "service_tier",
)
_GEMINI_MEMBERS: Final[tuple[str, ...]] = (
    "systemInstruction",
    "system_instruction",
    "tools",
    "cachedContent",
    "cached_content",
)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answer: its text, and the tokens it states. ``cut_short``: it reached the limit of its output."""

    text: str
    called_tools: bool = False
    cut_short: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """One API.

    ``build_body`` takes the model, the system text, the user text and the output tokens. ``continue_prompt`` takes a
    request's envelope, an instruction and the output tokens; it returns the name of the list of items, the other
    members of the body, and the item that ends the list. ``parse`` may raise any error if a member is missing or odd.
    """

    path: str
    build_body: Callable[[str, str, str, int], dict[str, Any]]
    continue_prompt: Callable[[dict[str, Any], str, int], tuple[str, dict[str, Any], dict[str, Any]]]
    parse: Callable[[Mapping[str, Any]], ModelAnswer]


def output_allowance(model: str, cap: int) -> int:
    """Return the output tokens for a summary of *cap* tokens: a quarter more, and room to reason if the model does."""
    tokens = int(cap * 1.25) + 64
    if _reasons(model):
        tokens += REASONING_TOKENS
    return tokens


def encode_json(body: Mapping[str, Any]) -> bytes:
    """Return *body* as JSON in ASCII, so that lone surrogates, which UTF-8 cannot encode, stay escaped."""
    return json.dumps(body, separators=(",", ":")).encode()


def append_to_prompt(
    api: ApiFormat, model: str, envelope_json: str, items: bytes, instruction: str, output: int
) -> bytes:
    """Return a prompt that the provider may have cached, followed by *instruction*: the items keep their bytes.

    *model* is the upstream's name of the model, which may differ from the client's.
    """
    envelope = {**parse(envelope_json), "model": model}
    name, members, last = api.continue_prompt(envelope, instruction, output)
    # The items are joined as bytes: encoding them again could change white space or escapes, and with them the cached
    # prefix.
    all_items = b",".join(filter(None, (items, encode_json(last))))
    return encode_json(members)[:-1] + b',"' + name.encode() + b'":[' + all_items + b"]}"


def parse_answer(api: ApiFormat, data: bytes) -> ModelAnswer | None:
    """Return the answer in *data*; None if it is no answer of this API."""
    try:
        return api.parse(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _reasons(model: str) -> bool:
    name = model.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in REASONING_MODELS)


def _chat_limit(model: str) -> str:
    if _reasons(model):
        return "max_completion_tokens"
    return "max_tokens"


def _chat_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, _chat_limit(model): output, "stream": False}


def _continue_chat(
    envelope: dict[str, Any], instruction: str, output: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    members = {name: envelope[name] for name in _CHAT_MEMBERS if name in envelope}
    if members.get("tools"):
        members["tool_choice"] = "none"
    members |= {_chat_limit(str(envelope.get("model", ""))): output, "stream": False}
    return "messages", members, {"role": "user", "content": instruction}


def _parse_chat(answer: Mapping[str, Any]) -> ModelAnswer:
    choice = answer["choices"][0]
    message = choice["message"]
    usage = read_usage(answer.get("usage"))
    return ModelAnswer(
        text=_text(message.get("content")),
        called_tools=bool(message.get("tool_calls") or message.get("function_call")),
        cut_short=choice.get("finish_reason") == "length",
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )


def _messages_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": output, "system": system, "messages": [{"role": "user", "content": text}]}


def _continue_messages(
    envelope: dict[str, Any], instruction: str, output: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    members = {name: envelope[name] for name in _MESSAGES_MEMBERS if name in envelope}
    members["max_tokens"] = output
    return "messages", members, {"role": "user", "content": instruction}


def _parse_messages(answer: Mapping[str, Any]) -> ModelAnswer:
    parts = answer["content"]
    usage = read_usage(answer.get("usage"))
    return ModelAnswer(
        text=_text(parts),
        called_tools=any(isinstance(part, Mapping) and part.get("type") == "tool_use" for part in parts),
        cut_short=answer.get("stop_reason") == "max_tokens",
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )


def _responses_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    return {
        "model": model,
        "instructions": system,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}],
        "max_output_tokens": output,
        "store": False,
        "stream": False,
    }


def _continue_responses(
    envelope: dict[str, Any], instruction: str, output: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    members = {name: envelope[name] for name in _RESPONSES_MEMBERS if name in envelope}
    if members.get("tools"):
        members["tool_choice"] = "none"
    members |= {"max_output_tokens": output, "store": False, "stream": False}
    return "input", members, {"role": "user", "content": [{"type": "input_text", "text": instruction}]}


def _parse_responses(answer: Mapping[str, Any]) -> ModelAnswer:
    items = [item for item in answer["output"] if isinstance(item, Mapping)]
    usage = read_usage(answer.get("usage"))
    return ModelAnswer(
        text="".join(_text(item.get("content")) for item in items if item.get("type") == "message"),
        called_tools=any(str(item.get("type", "")).endswith("_call") for item in items),
        cut_short=answer.get("status") == "incomplete",
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )


def _gemini_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    del model  # the path names it
    return {
        "systemInstruction": {"parts": [{"text": system}]},
        "contents": [_gemini_message(text)],
        "generationConfig": _gemini_limit(output),
    }


def _continue_gemini(
    envelope: dict[str, Any], instruction: str, output: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    members = {name: envelope[name] for name in _GEMINI_MEMBERS if name in envelope}
    if members.get("tools"):
        members["toolConfig"] = {"functionCallingConfig": {"mode": "NONE"}}
    members["generationConfig"] = _gemini_limit(output)
    return "contents", members, _gemini_message(instruction)


def _gemini_message(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def _gemini_limit(output: int) -> dict[str, int]:
    """Return the limit for a text of *output* tokens: thoughts count, too, and newer models cannot do without them.

    https://ai.google.dev/gemini-api/docs/thinking
    """
    return {"maxOutputTokens": output + REASONING_TOKENS}


def _parse_gemini(answer: Mapping[str, Any]) -> ModelAnswer:
    candidate = answer["candidates"][0]
    parts = [part for part in candidate["content"]["parts"] if not part.get("thought")]
    usage = read_usage_metadata(answer.get("usageMetadata"))
    return ModelAnswer(
        text=_text(parts),
        called_tools=any("functionCall" in part for part in parts),
        cut_short=candidate.get("finishReason") == "MAX_TOKENS",
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, Mapping)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


API_FORMATS: Final[Mapping[str, ApiFormat]] = MappingProxyType(
    {
        "chat": ApiFormat("/v1/chat/completions", _chat_body, _continue_chat, _parse_chat),
        "messages": ApiFormat("/v1/messages", _messages_body, _continue_messages, _parse_messages),
        "responses": ApiFormat("/v1/responses", _responses_body, _continue_responses, _parse_responses),
        "gemini": ApiFormat("/v1beta/models/", _gemini_body, _continue_gemini, _parse_gemini),
    }
)

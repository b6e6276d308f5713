"""The APIs as summarisers use them: the body of a request for a summary, and the text in its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

import msgspec

from proxy.core.apis.json_steps import parse
from proxy.core.apis.usage import read_usage, read_usage_metadata
from proxy.core.report import NO_USAGE, Usage

REASONING_MODELS: Final = ("o1*", "o3*", "o4*", "gpt-5*")
"""Models that accept only ``max_completion_tokens``, and whose reasoning counts in it:
https://platform.openai.com/docs/api-reference/chat/create
"""

REASONING_TOKENS: Final = 4_096
"""Tokens of output, beside the cap, for a model that reasons before it writes."""


class ModelAnswer(msgspec.Struct, frozen=True):
    """A model's answer: its text, and the ``usage`` it states. ``cut_short``: it reached the limit of its output."""

    text: str
    called_tools: bool = False
    cut_short: bool = False
    usage: Usage = NO_USAGE


class SummaryApi(msgspec.Struct, frozen=True):
    """One API: the ``path`` of a call, the name of the list of items, and how bodies and answers are written.

    ``build_body`` takes the model, the system text, the user text and the output tokens. ``limits`` takes the model and
    the output tokens, and returns the members that bound the answer; ``user_message`` returns an item with a text.

    ``members`` are those of the client's request that a request for a summary has as well, because the provider's
    prompt cache depends on them, or because they name who pays. Sampling parameters and response formats are for the
    client's own answer only. ``without_calls`` are members that forbid calls of the request's tools.

    ``parse`` may raise any error if a member is missing or odd.
    """

    path: str
    list_name: str
    build_body: Callable[[str, str, str, int], dict[str, Any]]
    limits: Callable[[str, int], dict[str, Any]]
    user_message: Callable[[str], dict[str, Any]]
    members: tuple[str, ...]
    without_calls: Mapping[str, Any]
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
    api: SummaryApi, model: str, envelope_json: str, items: bytes, instruction: str, output: int
) -> bytes:
    """Return a prompt that the provider may have cached, followed by *instruction*: the items keep their bytes.

    *model* is the upstream's name of the model, which may differ from the client's.
    """
    envelope = {**parse(envelope_json), "model": model}
    members = {name: envelope[name] for name in api.members if name in envelope}
    if members.get("tools"):
        members |= api.without_calls
    members |= api.limits(model, output)
    # The items are joined as bytes: encoding them again could change white space or escapes, and with them the cached
    # prefix.
    all_items = b",".join(filter(None, (items, encode_json(api.user_message(instruction)))))
    return encode_json(members)[:-1] + b',"' + api.list_name.encode() + b'":[' + all_items + b"]}"


def parse_answer(api: SummaryApi, data: bytes) -> ModelAnswer | None:
    """Return the answer in *data*; None if it is no answer of this API."""
    try:
        return api.parse(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _reasons(model: str) -> bool:
    name = model.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in REASONING_MODELS)


def _plain_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _chat_limits(model: str, output: int) -> dict[str, Any]:
    limit = "max_tokens"
    if _reasons(model):
        limit = "max_completion_tokens"
    return {limit: output, "stream": False}


def _chat_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, _plain_message(text)]
    return {"model": model, "messages": messages, **_chat_limits(model, output)}


def _parse_chat(answer: Mapping[str, Any]) -> ModelAnswer:
    choice = answer["choices"][0]
    message = choice["message"]
    return ModelAnswer(
        text=_text(message.get("content")),
        called_tools=bool(message.get("tool_calls") or message.get("function_call")),
        cut_short=choice.get("finish_reason") == "length",
        usage=read_usage(answer.get("usage")),
    )


def _messages_limits(model: str, output: int) -> dict[str, Any]:
    del model
    return {"max_tokens": output}


def _messages_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": output, "system": system, "messages": [_plain_message(text)]}


def _parse_messages(answer: Mapping[str, Any]) -> ModelAnswer:
    parts = answer["content"]
    return ModelAnswer(
        text=_text(parts),
        called_tools=any(isinstance(part, Mapping) and part.get("type") == "tool_use" for part in parts),
        cut_short=answer.get("stop_reason") == "max_tokens",
        usage=read_usage(answer.get("usage")),
    )


def _responses_limits(model: str, output: int) -> dict[str, Any]:
    del model
    return {"max_output_tokens": output, "store": False, "stream": False}


def _responses_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def _responses_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    items = [_responses_message(text)]
    return {"model": model, "instructions": system, "input": items, **_responses_limits(model, output)}


def _parse_responses(answer: Mapping[str, Any]) -> ModelAnswer:
    items = [item for item in answer["output"] if isinstance(item, Mapping)]
    return ModelAnswer(
        text="".join(_text(item.get("content")) for item in items if item.get("type") == "message"),
        called_tools=any(str(item.get("type", "")).endswith("_call") for item in items),
        cut_short=answer.get("status") == "incomplete",
        usage=read_usage(answer.get("usage")),
    )


def _gemini_limits(model: str, output: int) -> dict[str, Any]:
    """Return the limit for a text of *output* tokens: thoughts count, too, and newer models cannot do without them.

    https://ai.google.dev/gemini-api/docs/thinking
    """
    del model
    return {"generationConfig": {"maxOutputTokens": output + REASONING_TOKENS}}


def _gemini_message(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def _gemini_body(model: str, system: str, text: str, output: int) -> dict[str, Any]:
    # The path names the model.
    contents = [_gemini_message(text)]
    return {"systemInstruction": {"parts": [{"text": system}]}, "contents": contents, **_gemini_limits(model, output)}


def _parse_gemini(answer: Mapping[str, Any]) -> ModelAnswer:
    candidate = answer["candidates"][0]
    parts = [part for part in candidate["content"]["parts"] if not part.get("thought")]
    return ModelAnswer(
        text=_text(parts),
        called_tools=any("functionCall" in part for part in parts),
        cut_short=candidate.get("finishReason") == "MAX_TOKENS",
        usage=read_usage_metadata(answer.get("usageMetadata")),
    )


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, Mapping)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


_NO_CALLS: Final = {"tool_choice": "none"}

SUMMARY_APIS: Final[Mapping[str, SummaryApi]] = MappingProxyType(
    {
        "chat": SummaryApi(
            path="/v1/chat/completions",
            list_name="messages",
            build_body=_chat_body,
            limits=_chat_limits,
            user_message=_plain_message,
            members=("model", "tools", "functions", "reasoning_effort", "prompt_cache_key", "user", "service_tier"),
            without_calls=_NO_CALLS,
            parse=_parse_chat,
        ),
        # Anthropic's cache also depends on tool_choice, so that it stays as it is:
        # https://platform.claude.com/docs/en/build-with-claude/prompt-caching
        "messages": SummaryApi(
            path="/v1/messages",
            list_name="messages",
            build_body=_messages_body,
            limits=_messages_limits,
            user_message=_plain_message,
            members=("model", "system", "tools", "tool_choice", "metadata"),
            without_calls={},
            parse=_parse_messages,
        ),
        "responses": SummaryApi(
            path="/v1/responses",
            list_name="input",
            build_body=_responses_body,
            limits=_responses_limits,
            user_message=_responses_message,
            members=(
                "model",
                "instructions",
                "tools",
                "reasoning",
                "prompt_cache_key",
                "include",
                "user",
                "service_tier",
            ),
            without_calls=_NO_CALLS,
            parse=_parse_responses,
        ),
        "gemini": SummaryApi(
            path="/v1beta/models/",
            list_name="contents",
            build_body=_gemini_body,
            limits=_gemini_limits,
            user_message=_gemini_message,
            members=("systemInstruction", "system_instruction", "tools", "cachedContent", "cached_content"),
            without_calls={"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
            parse=_parse_gemini,
        ),
    }
)

"""Converts bridged calls: the members that LiteLLM may get, and its answers and errors in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""OpenAI's ``type`` of an error with this status, if the provider does not name one.

https://platform.openai.com/docs/guides/error-codes lists the statuses.
"""

_OVERFLOW: Final = "context_length_exceeded"
"""OpenAI's ``code`` of an overflow."""

_PREFIX: Final = re.compile(r"^(?:litellm\.\w+: |\w+(?:Error|Exception) - )+")
"""Names of exceptions with which LiteLLM begins its texts."""


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return *document* as JSON. Lone surrogates, which UTF-8 cannot encode, are passed on as they came."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def openai_chunk(event: dict[str, Any]) -> dict[str, Any]:
    """Return *event* as OpenAI sends it: a finish reason in every choice, and no choice beside the usage."""
    event = _without_empty_lists(event)
    choices = event.get("choices", [])
    if isinstance(usage := event.get("usage"), dict):
        usage.pop("cost", None)  # by LiteLLM's own table of prices, and only in streams
        if not any(choice.get("delta") or choice.get("finish_reason") for choice in choices):
            return {**event, "choices": []}
    return {**event, "choices": [{"finish_reason": None, **choice} for choice in choices]}


def openai_answer(document: dict[str, Any], model: str) -> dict[str, Any]:
    """Return *document* as OpenAI sends it: under the requested model, tool calls without the ``index`` of streams."""
    for choice in document.get("choices", []):
        message = choice.get("message", {})
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
        if not any((message.get("provider_specific_fields") or {}).values()):
            message.pop("provider_specific_fields", None)
        message |= {"content": message.get("content"), "role": "assistant"}
        choice["message"] = _without_empty_lists(message)
    return {**_without_empty_lists(document), "model": model}


def _without_empty_lists(members: dict[str, Any]) -> dict[str, Any]:
    """Return *members* without the empty lists that LiteLLM adds for what only other providers send."""
    return {name: value for name, value in members.items() if value != [] or name == "choices"}


def openai_refusal(status: int, body: bytes, *, overflow: bool) -> tuple[int, dict[str, Any]]:
    """Return status and body of a provider's refusal: OpenAI's shape, the provider's own words."""
    error = _error_object(body)
    text = str(error.get("message") or body.decode("utf-8", "replace").strip())
    kind = str(error.get("type") or error.get("status") or "")
    code = error.get("code")
    if overflow:
        code = _OVERFLOW
    elif not isinstance(code, str):
        code = None
    return status, _error_document(status, text, kind, code)


def openai_error(error: Exception, *, overflow: bool) -> tuple[int, dict[str, Any]]:
    """Return status and body, in OpenAI's shape, of an error that LiteLLM raised, in a stream or before it."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status <= 599:
        status = 500
    text = _PREFIX.sub("", str(getattr(error, "message", "") or error)).partition("\nTraceback")[0]
    details = _error_object(text[max(0, text.find("{")) : text.rfind("}") + 1].encode("utf-8", "replace"))
    code = None
    if overflow:
        code = _OVERFLOW
    return status, _error_document(status, str(details.get("message") or text), str(details.get("type") or ""), code)


def _error_document(status: int, message: str, kind: str, code: str | None) -> dict[str, Any]:
    default = "invalid_request_error"
    if status >= 500:
        default = "server_error"
    kind = kind or KINDS.get(status, default)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _error_object(body: bytes) -> dict[str, Any]:
    """Return the error object of a provider's *body*: its member ``error``, or all of it; empty if there is none."""
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    if isinstance(document, list) and document:
        document = document[0]
    if not isinstance(document, dict):
        return {}
    error = document.get("error", document)
    if isinstance(error, str):
        return {"message": error}
    if not isinstance(error, dict):
        return {}
    return {"message": error.get("Message") or error.get("detail"), **error}


FIELDS: Final = frozenset(
    {
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
        "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store",
        "temperature", "thinking", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
"""Members of a request that may be passed on.

LiteLLM also takes base URLs and keys by keyword, which a client must not set:
https://docs.litellm.ai/docs/completion/input.
"""

CLAUDE: Final = re.compile("anthropic|claude")
"""Matches names of providers and models whose answers are Claude's."""

_GOOGLE: Final = ("gemini", "vertex_ai", "vertex_ai_beta")
"""LiteLLM's names of Google's providers."""


def dropped_member(provider: str, request: Mapping[str, Any]) -> str:
    """Return the member of *request* that LiteLLM would drop on the way to *provider*, with a remedy; empty if none."""
    claude = bool(CLAUDE.search(f"{provider}/{request['model']}"))
    google, amazon = provider in _GOOGLE and not claude, provider.startswith("bedrock")
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_object" and (claude or amazon):
        return "response_format of type json_object. Give a json_schema"
    if request.get("parallel_tool_calls") is False and (google or (amazon and not claude)):
        return "parallel_tool_calls: false. Leave it out"
    if "web_search_options" in request and request.get("tools") and google:
        return "web_search_options beside tools. Leave one of them out"
    return ""

"""Which members of a request LiteLLM may be given, and which of those it takes and then does not send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

FIELDS: Final = frozenset(
    {
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
        "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store",
        "temperature", "thinking", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
"""Members of a request that may be passed on. LiteLLM takes addresses and keys by keyword: those are not a client's."""

CLAUDE: Final = re.compile("anthropic|claude")
_GOOGLE: Final = ("gemini", "vertex_ai", "vertex_ai_beta")


def lost(provider: str, wanted: Mapping[str, Any]) -> str:
    """The name of a member of *wanted* that would not reach *provider*, and a remedy; empty where there is none."""
    claude = bool(CLAUDE.search(f"{provider}/{wanted['model']}"))
    google, amazon = provider in _GOOGLE and not claude, provider.startswith("bedrock")
    form = wanted.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_object" and (claude or amazon):
        return "response_format of type json_object. Give a json_schema"
    if wanted.get("parallel_tool_calls") is False and (google or (amazon and not claude)):
        return "parallel_tool_calls: false. Leave it out"
    if "web_search_options" in wanted and wanted.get("tools") and google:
        return "web_search_options beside tools. Leave one of them out"
    return ""

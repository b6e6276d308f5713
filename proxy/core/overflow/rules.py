"""What providers say when a conversation is too long: data, one line a wording, each with where it is spoken."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.core.overflow.kinds import Kind


@dataclass(frozen=True, slots=True)
class Wording:
    """A sentence that means overflow. Named groups state figures in tokens: limit, prompt, output, total."""

    source: str
    kind: Kind
    pattern: re.Pattern[str]


def _wording(source: str, kind: Kind, pattern: str) -> Wording:
    return Wording(source, kind, re.compile(pattern, re.IGNORECASE | re.DOTALL))


_N = r"\d[\d,_]{0,14}"

WORDINGS: tuple[Wording, ...] = (
    _wording(
        "vLLM: serving/engine validation of max_tokens",
        "input_plus_output",
        rf"max_(?:completion_)?tokens\D{{1,60}}is too large: (?P<output>{_N}).{{0,80}}?maximum context length is "
        rf"(?P<limit>{_N}) tokens and your request has (?P<prompt>{_N}) input tokens",
    ),
    _wording(
        "vLLM: renderer validation of input and output",
        "input_plus_output",
        rf"passed (?P<prompt>{_N}) input tokens and requested (?P<output>{_N}) output tokens.{{0,60}}?"
        rf"context length is only (?P<limit>{_N})",
    ),
    _wording(
        "OpenAI, Azure, vLLM: chat with an output figure",
        "input_plus_output",
        rf"maximum context length is (?P<limit>{_N}) tokens.{{0,40}}?requested (?:about )?(?P<total>{_N}) tokens "
        rf"\((?P<prompt>{_N}) (?:in the messages|in your prompt|of text input)[^)]*?(?P<output>{_N}) "
        rf"(?:in the|for the|in)[^)]*\)",
    ),
    _wording(
        "OpenAI, Azure, vLLM: input alone",
        "input",
        rf"maximum context length (?:is|of) (?P<limit>{_N}) tokens.{{0,40}}?"
        rf"(?:resulted in|requested) (?P<prompt>{_N}) tokens",
    ),
    _wording(
        "OpenAI: a configured limit of input tokens",
        "input",
        rf"input tokens exceed the configured limit of (?P<limit>{_N}) tokens.{{0,40}}?resulted in (?P<prompt>{_N})",
    ),
    _wording("OpenAI: limit alone", "input", rf"maximum context length (?:is|of) (?P<limit>{_N})"),
    _wording("OpenAI: no figures", "input", r"maximum context length has been exceeded|exceeds the context window"),
    _wording(
        "vLLM: prompt with media",
        "input",
        rf"prompt \(total length (?P<prompt>{_N})\) is too long to fit into the model "
        rf"\(context length (?P<limit>{_N})\)",
    ),
    _wording(
        "Anthropic: input alone",
        "input",
        rf"prompt is too long: (?P<prompt>{_N}) tokens > (?P<limit>{_N}) maximum",
    ),
    _wording("Anthropic: no figures", "input", r"\bprompt is too long\b"),
    _wording(
        "Anthropic: input and output",
        "input_plus_output",
        rf"input length and `?max_tokens`? exceed context limit: (?P<prompt>{_N}) \+ (?P<output>{_N}) "
        rf"> (?P<limit>{_N})",
    ),
    _wording(
        "Anthropic: available tokens",
        "input_plus_output",
        rf"max_tokens: (?P<output>{_N}) > context_window: (?P<limit>{_N}) - input_tokens: (?P<prompt>{_N})",
    ),
    _wording(
        "llama.cpp: server",
        "input",
        rf"request \((?P<prompt>{_N}) tokens\) exceeds the available context size \((?P<limit>{_N}) tokens\)",
    ),
    _wording(
        "OpenAI: a message longer than its cap in characters",
        "payload",
        r"Invalid '(?:messages|input)\[\d+\]\.(?:content|output)\b[^']*': string too long",
    ),
    _wording("llama.cpp: no figures", "input", r"exceeds the available context size"),
    _wording("llama.cpp: while generating", "input_plus_output", r"\bcontext size has been exceeded\b"),
)

CODES: dict[str, Kind] = {
    "context_length_exceeded": "input",
    "context_window_exceeded": "input",
    "exceed_context_size_error": "input",
    "request_too_large": "payload",
}
"""Machine-readable codes and types that mean overflow by themselves."""

FIELDS = {"n_ctx": "limit", "n_prompt_tokens": "prompt"}
"""Members of llama.cpp's error object that state figures."""

VETO = re.compile(
    r"rate.?limit|too many requests|tokens? per (?:min|minute|day)|\bTPM\b|\bquota\b|overloaded|per-minute",
    re.IGNORECASE,
)
"""Words of errors that speak of tokens but mean pace; checked first."""

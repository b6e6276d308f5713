"""Counts the tokens of a chat request the way the strict upstream bills them."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken

PER_MESSAGE = 3
PER_NAME = 1
PER_REPLY = 3
IMAGE_LOW, IMAGE_HIGH = 85, 765
AUDIO, FILE = 200, 1600
REASONING_KEYS = ("reasoning_content", "reasoning", "refusal", "thinking")

# The published splitting rule of o200k_base, as its two parts for words and one each for the rest.
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_VOCABULARY = "fb374d419588a4632f3f557e76b4b70aebbca790"


@functools.cache
def encoding() -> tiktoken.Encoding:
    """o200k_base, read from the copy that the installed litellm carries; nothing is downloaded or imported."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("litellm is not installed: its wheel holds the vocabulary the stub counts with")
    file = Path(spec.submodule_search_locations[0], "litellm_core_utils", "tokenizers", _VOCABULARY)
    pairs = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding("stub_o200k", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens={})


@functools.lru_cache(maxsize=50_000)
def count(text: str) -> int:
    """Tokens of *text*; lone surrogates count as the replacement character."""
    return len(encoding().encode_ordinary(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


def count_json(value: object) -> int:
    """Tokens of *value* as compact JSON."""
    return count(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def part_tokens(part: object) -> int:
    """Tokens of one content part; media at a flat price."""
    if not isinstance(part, Mapping):
        return count_json(part)
    match part.get("type"):
        case "text" | "thinking" | "refusal":
            return sum(count(v) for k, v in part.items() if k != "type" and isinstance(v, str))
        case "image_url":
            image = part.get("image_url")
            return IMAGE_LOW if isinstance(image, Mapping) and image.get("detail") == "low" else IMAGE_HIGH
        case "input_audio":
            return AUDIO
        case "file":
            return FILE
        case _:
            return count_json(part)


def content_tokens(content: object) -> int:
    """Tokens of a message's ``content``, whatever its shape."""
    if content is None:
        return 0
    if isinstance(content, str):
        return count(content)
    if isinstance(content, list):
        return sum(map(part_tokens, content))
    return count_json(content)


def message_tokens(message: Mapping[str, Any]) -> int:
    """Tokens of one chat message, its frame included."""
    total = PER_MESSAGE + content_tokens(message.get("content")) + PER_NAME * bool(message.get("name"))
    total += sum(count(message[key]) for key in ("role", "name", "tool_call_id") if isinstance(message.get(key), str))
    for key in REASONING_KEYS:
        if (value := message.get(key)) is not None:
            total += count(value) if isinstance(value, str) else count_json(value)
    calls = list(message.get("tool_calls") or ()) if message.get("role") == "assistant" else []
    for call in calls:
        function = call.get("function") or call.get("custom") or {}
        texts = (call.get("id"), function.get("name"), function.get("arguments"), function.get("input"))
        total += sum(count(text) for text in texts if isinstance(text, str))
    if isinstance(legacy := message.get("function_call"), Mapping):
        total += sum(count(text) for text in (legacy.get("name"), legacy.get("arguments")) if isinstance(text, str))
    return total


def fixed_tokens(body: Mapping[str, Any]) -> int:
    """Tokens a request needs before its first message: the reply's frame, tools and response format."""
    return PER_REPLY + sum(count_json(body[key]) for key in ("tools", "functions", "response_format") if body.get(key))


def request_tokens(body: Mapping[str, Any], factor: float = 1.0) -> int:
    """Tokens of a whole chat request; *factor* plays a model whose tokenizer makes that many times more."""
    total = fixed_tokens(body) + sum(message_tokens(message) for message in body.get("messages") or ())
    return math.ceil(total * factor)

"""What only the model that wrote it can read: signed and encrypted reasoning, which another one's server refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from proxy.core.apis.json_steps import decode

MARKS = re.compile(rb'signature|encrypted|thinking|reasoning_details|"reasoning"|"item_reference"|"(?:fc|ctc|msg)_')
"""Occurs in every item that holds such reasoning, in any API; where it does not, there is nothing to look for."""

SEALED_TYPES = frozenset({"thinking", "redacted_thinking", "reasoning.encrypted"})
"""Types of content parts that are a model's own reasoning."""

SEALED = frozenset(
    {
        "reasoning_details",
        "thinking_blocks",
        "thinking_signature",
        "reasoning_signature",
        "encrypted_content",
        "reasoning_encrypted_content",
        "thought_signature",
        "thought_signatures",
        "signature",
    }
)
"""Members that hold it, or vouch for it. Reasoning in plain text is no secret and stays."""


STORED_TYPES = frozenset({"reasoning", "item_reference", "compaction"})
"""Types of Responses items that are encrypted, or only a name for something that the author's server keeps."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def chat(raw: bytes) -> bytes:
    """A chat message without sealed reasoning: the same bytes where it has none.

    Only what surrounds the texts is looked at: contents and tool arguments stay as they are.
    """
    message = decode(raw)
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return raw
    kept = {key: value for key, value in message.items() if key not in SEALED}
    for key in ("content", "tool_calls", "provider_specific_fields", "extra_content"):
        if isinstance(kept.get(key), (dict, list)):
            kept[key] = unsealed(kept[key])
    if kept == message:
        return raw
    if kept.get("content") in (None, []) and not kept.get("tool_calls") and not kept.get("function_call"):
        kept["content"] = ""  # an assistant message of nothing is refused, and without it the turns would not alternate
    return _written(kept)


def messages(raw: bytes) -> bytes:
    """A message of the Messages API without thinking blocks; empty where it held nothing else."""
    message = decode(raw)
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(is_sealed, content)):
        return raw
    kept = [block for block in content if not is_sealed(block)]
    return _written({**message, "content": kept}) if kept else b""


def responses(raw: bytes) -> bytes:
    """A Responses item without the name under which its author's server keeps it; empty for sealed ones."""
    item = decode(raw)
    if not isinstance(item, dict):
        return raw
    if item.get("type") in STORED_TYPES:
        return b""
    # A call named like a stored one is refused without the reasoning stored beside it. Pairs go by call_id.
    made = item.get("role") == "assistant" or str(item.get("type", "")).endswith("_call")
    return _written({key: value for key, value in item.items() if key != "id"}) if made and "id" in item else raw


PORTABLE: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType(
    {"chat": chat, "messages": messages, "responses": responses}
)
"""By API: an element without what only the model that wrote it can read; empty where nothing of it is left."""

WITHOUT: Mapping[str, Mapping[str, str]] = MappingProxyType({"messages": {"thinking": '{"type":"disabled"}'}})
"""By API: members that must change once reasoning was left out. A model that thinks wants its last thoughts back."""


def unsealed(value: object) -> object:
    """*value* (decoded JSON) without members and parts that are sealed; equal where there are none."""
    if isinstance(value, dict):
        return {key: unsealed(inner) for key, inner in value.items() if key not in SEALED}
    if isinstance(value, list):
        return [unsealed(inner) for inner in value if not is_sealed(inner)]
    return value


def is_sealed(part: object) -> bool:
    """Whether a content part is sealed reasoning as a whole."""
    return isinstance(part, dict) and part.get("type") in SEALED_TYPES


def _written(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (json.dumps(value, separators=(",", ":")) if _SURROGATE.search(text) else text).encode()

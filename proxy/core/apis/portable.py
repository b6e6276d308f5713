"""Removes what only the model that wrote it can read: signed and encrypted reasoning, refused by other servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from proxy.core.apis.json_steps import decode

MARKS = re.compile(rb'signature|encrypted|thinking|reasoning_details|"reasoning"|"item_reference"|"(?:fc|ctc|msg)_')
"""Occurs in every item that holds such reasoning, in any API; items without it need no closer look."""

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
"""Types of Responses items that are encrypted, or only a name for an item that the author's server stores."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def chat(raw: bytes) -> bytes:
    """Return a chat message without sealed reasoning: the same bytes if it has none.

    Only the members around the texts are looked at: contents and tool arguments stay as they are.
    """
    message = decode(raw)
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return raw
    rest = {key: value for key, value in message.items() if key not in SEALED}
    for key in ("content", "tool_calls", "provider_specific_fields", "extra_content"):
        if isinstance(rest.get(key), (dict, list)):
            rest[key] = unsealed(rest[key])
    if rest == message:
        return raw
    if rest.get("content") in (None, []) and not rest.get("tool_calls") and not rest.get("function_call"):
        rest["content"] = ""  # an assistant message of nothing is refused, and without it the turns would not alternate
    return _written(rest)


def messages(raw: bytes) -> bytes:
    """Return a message of the Messages API without thinking blocks; empty if it had no others."""
    message = decode(raw)
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(is_sealed, content)):
        return raw
    rest = [block for block in content if not is_sealed(block)]
    return _written({**message, "content": rest}) if rest else b""


def responses(raw: bytes) -> bytes:
    """Return a Responses item without the name under which its author's server stores it; empty for sealed ones."""
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
"""By API: returns an element without what only the model that wrote it can read; empty if nothing is left."""

WITHOUT: Mapping[str, Mapping[str, str]] = MappingProxyType({"messages": {"thinking": '{"type":"disabled"}'}})
"""By API: members that must change without the reasoning. A model that thinks requires its last thoughts back.
https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""


def unsealed(value: object) -> object:
    """Return *value* (decoded JSON) without members and parts that are sealed; equal if there are none."""
    if isinstance(value, dict):
        return {key: unsealed(inner) for key, inner in value.items() if key not in SEALED}
    if isinstance(value, list):
        return [unsealed(inner) for inner in value if not is_sealed(inner)]
    return value


def is_sealed(part: object) -> bool:
    """Return True if a content part is sealed reasoning as a whole."""
    return isinstance(part, dict) and part.get("type") in SEALED_TYPES


def _written(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (json.dumps(value, separators=(",", ":")) if _SURROGATE.search(text) else text).encode()

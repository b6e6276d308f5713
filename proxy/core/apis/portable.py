"""Removes signed and encrypted reasoning, which other models cannot read and other servers refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_steps import decode

SEALED_HINT = re.compile(
    rb'[sS]ignature|encrypted|thinking|reasoning_details|"reasoning"|"item_reference"|"(?:fc|ctc|msg)_'
)
"""Matches in every item with such reasoning, in any API; items without a match are not decoded."""

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
"""Members that hold sealed reasoning or its signature. Reasoning in plain text stays."""

SIGNATURES = ("thoughtSignature", "thought_signature")
"""Members of Gemini's parts with encrypted reasoning. A call that had one is rejected without it.
https://ai.google.dev/gemini-api/docs/thought-signatures"""

STORED_TYPES = frozenset({"reasoning", "item_reference", "compaction"})
"""Types of Responses items that are encrypted, or that only refer to an item on the server that produced them."""


def chat(raw: bytes) -> bytes:
    """Return a chat message without sealed reasoning; the same bytes if it has none.

    Texts and tool arguments stay as they are.
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
        # Without content the message would be rejected, and without the message roles would no longer alternate.
        rest["content"] = ""
    return json_bytes(rest)


def messages(raw: bytes) -> bytes:
    """Return a message of the Messages API without thinking blocks; empty if nothing else is in it."""
    message = decode(raw)
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return raw
    rest = [block for block in message["content"] if not is_sealed(block)]
    if rest == message["content"]:
        return raw
    if not rest:
        return b""
    return json_bytes({**message, "content": rest})


def responses(raw: bytes) -> bytes:
    """Return a Responses item without the id under which the server that produced it stores it; empty if sealed."""
    item = decode(raw)
    if not isinstance(item, dict):
        return raw
    if str(item.get("type")) in STORED_TYPES:
        return b""
    # OpenAI rejects a call with a stored id if the reasoning stored with it is missing. Without the id it is accepted:
    # calls and results belong together by ``call_id``. https://platform.openai.com/docs/guides/reasoning
    is_output = item.get("role") == "assistant" or str(item.get("type", "")).endswith("_call")
    if not is_output or "id" not in item:
        return raw
    return json_bytes({key: value for key, value in item.items() if key != "id"})


UNVERIFIED_SIGNATURE: Final = "skip_thought_signature_validator"
"""The signature that Gemini accepts for calls of other models; a call without any is rejected.
https://ai.google.dev/gemini-api/docs/thought-signatures"""


def gemini(raw: bytes) -> bytes:
    """Return a Gemini content without signatures; calls get ``UNVERIFIED_SIGNATURE``, which every model accepts."""
    content = decode(raw)
    if not isinstance(content, dict) or not isinstance(content.get("parts"), list):
        return raw
    parts = [_unsigned(part) for part in content["parts"]]
    if parts == content["parts"]:
        return raw
    return json_bytes({**content, "parts": parts})


def _unsigned(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    rest = {key: value for key, value in part.items() if key not in SIGNATURES}
    if len(rest) < len(part) and ("functionCall" in rest or "function_call" in rest):
        rest["thoughtSignature"] = UNVERIFIED_SIGNATURE
    return rest


PORTABLE: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType(
    {"chat": chat, "messages": messages, "responses": responses, "gemini": gemini}
)
"""By API: a function that returns an element without sealed reasoning; empty if nothing is left."""

MEMBERS_WITHOUT_REASONING: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"messages": {"thinking": '{"type":"disabled"}'}}
)
"""By API: members that must change with the reasoning removed. A thinking model rejects a history that lacks its last
thinking blocks.
https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""


def unsealed(value: object) -> object:
    """Return *value* (decoded JSON) without sealed members and parts; an equal value if there are none."""
    if isinstance(value, dict):
        return {key: unsealed(inner) for key, inner in value.items() if key not in SEALED}
    if isinstance(value, list):
        return [unsealed(inner) for inner in value if not is_sealed(inner)]
    return value


def is_sealed(part: object) -> bool:
    """Return True if a content part is sealed reasoning as a whole."""
    return isinstance(part, dict) and str(part.get("type")) in SEALED_TYPES

"""What only the model that wrote it can read: signed and encrypted reasoning, which another one's server refuses."""

from __future__ import annotations

import re

MARKS = re.compile(rb"signature|encrypted|thinking|reasoning_details")
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

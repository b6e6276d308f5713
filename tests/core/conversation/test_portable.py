"""What another model may not be shown, and what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.conversation import chat
from proxy.core.conversation.portable import MARKS, is_sealed, unsealed

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"signature": "kept"}'}}
SIGNED = {**CALL, "extra_content": {"google": {"thought_signature": "AbC="}}}


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            {"role": "assistant", "content": "x", "reasoning_content": "plain", "reasoning_details": [{"data": "e"}]},
            {"role": "assistant", "content": "x", "reasoning_content": "plain"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [SIGNED]},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "extra_content": {"google": {}}}]},
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
            {"role": "assistant", "content": ""},
        ),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking"}, {"type": "text", "text": "thinking"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "thinking"}]},
        ),
        (
            {"role": "assistant", "content": None, "thinking_blocks": [{"type": "thinking"}]},
            {"role": "assistant", "content": ""},
        ),
    ],
)
def test_sealed_reasoning_is_left_out(message: dict[str, Any], kept: dict[str, Any]) -> None:
    """Signed and encrypted parts go, plain text and tool calls stay, and no message is left without content."""
    raw = json.dumps(message).encode()
    assert MARKS.search(raw)
    assert json.loads(chat.portable(raw)) == kept


@pytest.mark.parametrize(
    "raw",
    [
        b'{ "role":"user", "signature":"mine", "content":"thinking" }',
        b'{ "role":"assistant", "content":"about a signature that is encrypted" }',
        b'{"role":"tool","content":[{"type":"text","text":"thinking"}],"tool_call_id":"a"}',
        b'["thinking"]',
    ],
)
def test_everything_else_stays_byte_for_byte(raw: bytes) -> None:
    """Words in a text are not reasoning, and users and tools have none."""
    assert chat.portable(raw) is raw


def test_nested_values() -> None:
    """Members are left out at any depth, sealed parts of any list too."""
    assert unsealed({"a": [{"b": 1, "signature": 2}, {"type": "thinking"}], "c": "x"}) == {"a": [{"b": 1}], "c": "x"}
    assert is_sealed({"type": "redacted_thinking"})
    assert not is_sealed("thinking")

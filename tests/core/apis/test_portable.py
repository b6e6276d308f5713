"""What another model may not be shown, and what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.apis.portable import MARKS, PORTABLE, chat, is_sealed, messages, responses, unsealed

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
    assert json.loads(chat(raw)) == kept


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
    assert chat(raw) is raw


def test_nested_values() -> None:
    """Members are left out at any depth, sealed parts of any list too."""
    assert unsealed({"a": [{"b": 1, "signature": 2}, {"type": "thinking"}], "c": "x"}) == {"a": [{"b": 1}], "c": "x"}
    assert is_sealed({"type": "redacted_thinking"})
    assert not is_sealed("thinking")


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ([{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "tool_use", "id": "a"}], 1),
        ([{"type": "redacted_thinking", "data": "e"}], 0),
    ],
)
def test_thinking_blocks_of_messages_are_left_out(content: list[dict[str, Any]], kept: int) -> None:
    """Blocks of thought go, signed or redacted; a message of nothing else goes whole."""
    left = messages(json.dumps({"role": "assistant", "content": content}).encode())
    assert (json.loads(left)["content"] if left else []) == content[len(content) - kept :]


@pytest.mark.parametrize("content", ['"thinking"', '[{"type":"text","text":"signature"}]', "null"])
def test_messages_without_thoughts_stay_byte_for_byte(content: str) -> None:
    """Everything else is the client's own bytes."""
    raw = f'{{ "role":"user","content":{content} }}'.encode()
    assert messages(raw) is raw


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        ({"type": "reasoning", "id": "rs_1", "encrypted_content": "e"}, None),
        ({"type": "item_reference", "id": "msg_1"}, None),
        ({"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f"}, ("type", "call_id", "name")),
        ({"type": "message", "role": "assistant", "id": "msg_1", "content": []}, ("type", "role", "content")),
        ({"type": "message", "role": "user", "content": "reasoning"}, ("type", "role", "content")),
        ({"type": "function_call_output", "id": "fc_2", "call_id": "c"}, ("type", "id", "call_id")),
    ],
)
def test_responses_items_lose_what_another_server_keeps(item: dict[str, Any], kept: tuple[str, ...] | None) -> None:
    """Reasoning and references go, calls and answers keep their call_id and lose their stored name."""
    left = responses(json.dumps(item).encode())
    assert (tuple(json.loads(left)) if left else None) == kept


def test_every_api_has_its_own() -> None:
    """What is no object is nobody's to change."""
    assert set(PORTABLE) == {"chat", "messages", "responses"}
    assert all(portable(b'"thinking"') == b'"thinking"' for portable in PORTABLE.values())

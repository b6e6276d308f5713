"""Context edits done here: when they set in, what they spare, and that nothing moves between two of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis import messages
from proxy.core.conversation import Item
from proxy.core.tokens.counting import Meter
from proxy.core.tokens.media import prices
from proxy.features.context_management.clearing import (
    PLACEHOLDER,
    ClearToolUses,
    ContextEdits,
    clear_message,
    cleared_tool_uses,
    read_edits,
)
from tests.support.api_formats import to_messages
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import agent_session

METER = Meter(count_tokens, prices("m"))
RESULT = 300


def session(rounds: int, parallel: int = 1) -> tuple[list[dict[str, Any]], list[Item]]:
    """A session in the form of Messages, and its items."""
    found = to_messages(agent_session(rounds, RESULT, parallel))
    return found, [messages.read_item(json.dumps(message).encode(), METER) for message in found]


def ids(names: range, parallel: int = 1) -> set[str]:
    return {f"call_{at}_{number}" for at in names for number in range(parallel)}


def cleared(rounds: int, clearing: ClearToolUses, parallel: int = 1) -> dict[str, bool]:
    decoded, items = session(rounds, parallel)
    return cleared_tool_uses(100, items, decoded, clearing)


@pytest.mark.parametrize(
    ("clearing", "remaining"),
    [
        (ClearToolUses(10**6), range(1, 21)),
        (ClearToolUses(1), range(18, 21)),
        (ClearToolUses(1, keep=0), range(0)),
        (ClearToolUses(1, keep=30), range(1, 21)),
        (ClearToolUses(None, uses=19), range(18, 21)),
        (ClearToolUses(None, uses=20), range(1, 21)),
        (ClearToolUses(1, at_least=10**6), range(1, 21)),
        (ClearToolUses(1, excluded=frozenset({"read_file"})), range(1, 21)),
        (ClearToolUses(1, excluded=frozenset({"run"})), range(18, 21)),
    ],
)
def test_the_oldest_go_once_the_trigger_is_passed(clearing: ClearToolUses, remaining: range) -> None:
    """Trigger, keep, clear_at_least and exclude_tools do what they say; inputs stay unless they were named."""
    found = cleared(20, clearing)
    assert set(found) == ids(range(1, 21)) - ids(remaining)
    assert not any(found.values())


def test_parallel_results_count_one_by_one() -> None:
    """Of one message with several results some may go and some stay."""
    assert set(cleared(4, ClearToolUses(1, keep=5), 4)) == ids(range(1, 3), 4) | {"call_3_0", "call_3_1", "call_3_2"}


@pytest.mark.parametrize(
    ("inputs", "too"), [(None, True), (frozenset({"read_file"}), True), (frozenset({"run"}), False)]
)
def test_inputs_are_cleared_if_requested(inputs: frozenset[str] | None, too: bool) -> None:
    """All inputs, or those of the tools that were named."""
    assert set(cleared(20, ClearToolUses(1, inputs=inputs)).values()) == {too}


@given(st.integers(600, 6000), st.integers(0, 4), st.integers(0, 1500))
def test_what_was_cleared_stays_so(tokens: int, keep: int, at_least: int) -> None:
    """The longer conversation clears what the shorter one did."""
    clearing = ClearToolUses(tokens, keep=keep, at_least=at_least)
    decoded, items = session(14)
    before: dict[str, bool] = {}
    for end in range(1, len(decoded) + 1, 2):
        found = cleared_tool_uses(100, items[:end], decoded[:end], clearing)
        assert found.items() >= before.items()
        before = found


def test_an_edited_message_keeps_every_other_byte() -> None:
    """The placeholder stands where the result was, an input becomes empty, and all else is as the client wrote it."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "long"}], "is_error": False},
        {"type": "tool_result", "tool_use_id": "b", "content": "kept"},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "And now?"},
    ]
    message = {"role": "user", "content": blocks}
    raw = json.dumps(message, indent=3).encode()
    made = clear_message(raw, message, {"a": True, "c": False})
    head, tail = raw[: raw.index(b'"content": [', 20)], raw[raw.index(b'"is_error"') :]
    assert made.startswith(head)
    assert made.endswith(tail)
    assert json.loads(made)["content"] == [{**blocks[0], "content": PLACEHOLDER}, *blocks[1:]]
    assert clear_message(raw, message, {"x": True}) is raw
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "n", "input": {"p": 1.0}}]}
    sent = json.dumps(used).encode()
    assert clear_message(sent, used, {"a": True}) == sent.replace(b'{"p": 1.0}', b"{}")
    assert clear_message(sent, used, {"a": False}) is sent


@pytest.mark.parametrize(
    ("management", "found"),
    [
        (None, ContextEdits()),
        ({"edits": "?"}, ContextEdits()),
        ({"edits": [None, {}, {"type": "clear_thinking_20251015"}]}, ContextEdits()),
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, ContextEdits((ClearToolUses(),))),
        (
            {
                "edits": [
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "tool_uses", "value": 10},
                        "keep": {"type": "tool_uses", "value": 0},
                        "clear_at_least": {"type": "input_tokens", "value": 500},
                        "exclude_tools": ["memory"],
                        "clear_tool_inputs": True,
                    }
                ]
            },
            ContextEdits((ClearToolUses(None, 10, 0, 500, frozenset({"memory"}), None),)),
        ),
        (
            {
                "edits": [
                    {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": -1}, "keep": 5}
                ]
            },
            ContextEdits((ClearToolUses(),)),
        ),
        ({"edits": [{"type": "compact_20260112"}]}, ContextEdits(compact_from=150_000)),
        (
            {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 60_000}}]},
            ContextEdits(compact_from=60_000),
        ),
    ],
)
def test_what_a_client_asks_for(management: Any, found: ContextEdits) -> None:
    """The edits in the provider's own words and defaults; what cannot be read or served is left out."""
    assert read_edits(management) == found


def test_odd_conversations_are_walked() -> None:
    """Results without uses, strings and nothing at all clear nothing."""
    decoded = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}]},
    ]
    weighed = [messages.read_item(json.dumps(message).encode(), METER) for message in decoded]
    assert cleared_tool_uses(0, weighed, decoded, ClearToolUses(0, keep=0)) == {}
    assert cleared_tool_uses(0, [], [], ClearToolUses(0, keep=0)) == {}


@pytest.mark.parametrize("name", [[], {}, ["z"], 5, None])
def test_a_result_whose_call_id_is_no_text_answers_nothing(name: Any) -> None:
    """A result whose name is any JSON at all answers nothing."""
    decoded = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "z", "name": "n", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": "x " * 500}]},
    ]
    raw = [json.dumps(message).encode() for message in decoded]
    weighed = [messages.read_item(each, METER) for each in raw]
    assert cleared_tool_uses(0, weighed, decoded, ClearToolUses(0, keep=0)) == {}
    assert clear_message(raw[1], decoded[1], {"z": True}) == raw[1]

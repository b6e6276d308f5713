"""The judge of tool pairs, on the smallest conversations that are right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tool_pair_checks import pair_violations


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": ""}


USER = {"role": "user", "content": "x"}
OLD_CALL = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
OLD_RESULT = {"role": "function", "name": "look", "content": "x"}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [USER],
        [USER, calls("a", "b"), result("b"), result("a"), USER],
        [USER, calls("a"), result("a"), calls("a"), result("a")],
        [USER, OLD_CALL, OLD_RESULT],
    ],
)
def test_whole_pairs_pass(messages: list[dict[str, Any]]) -> None:
    """Results in any order and ids reused by a later message are no violation."""
    assert pair_violations(messages) == []


@pytest.mark.parametrize(
    "messages",
    [
        [result("a")],
        [USER, calls("a")],
        [USER, calls("a"), USER, result("a")],
        [USER, calls("a", "b"), result("a"), USER],
        [USER, calls("a"), result("a"), result("a")],
        [USER, calls("a", "a"), result("a")],
        [USER, calls("a"), result("b")],
        [USER, OLD_RESULT],
    ],
)
def test_broken_pairs_are_named(messages: list[dict[str, Any]]) -> None:
    """An orphan, a missing, late, doubled or foreign result is found."""
    assert pair_violations(messages)

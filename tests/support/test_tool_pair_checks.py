"""The judge of tool pairs, on the smallest conversations that are right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tool_pair_checks import content_violations, pair_violations


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


def content(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def function(name: str, **more: str) -> dict[str, Any]:
    return {"functionCall": {"name": name, **more}}


def response(name: str, **more: str) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {}, **more}}


WORDS = content("user", {"text": "x"})


@pytest.mark.parametrize(
    "contents",
    [
        [WORDS],
        [WORDS, content("model", function("f")), content("user", response("f")), content("model", {"text": "x"})],
        [WORDS, content("model", function("f"), function("g")), content("user", response("g"), response("f"))],
        [WORDS, content("model", function("f", id="a")), content("user", response("f"))],
        [WORDS, content("model", function("f")), content("user", response("f")), content("model", function("f")),
         content("user", response("f"))],
    ],
)  # fmt: skip
def test_whole_contents_pass(contents: list[dict[str, Any]]) -> None:
    """All results of a content's calls are the next content, by name, and by id where both have one."""
    assert content_violations(contents) == []


@pytest.mark.parametrize(
    "contents",
    [
        [content("model", {"text": "x"})],
        [WORDS, content("user", response("f"))],
        [WORDS, content("model", function("f"))],
        [WORDS, content("model", function("f")), WORDS, content("user", response("f"))],
        [WORDS, content("model", function("f"), function("g")), content("user", response("f"))],
        [WORDS, content("model", function("f")), content("user", response("f"), response("f"))],
        [WORDS, content("model", function("f")), content("user", response("g"))],
        [WORDS, content("model", function("f", id="a")), content("user", response("f", id="b"))],
        [WORDS, content("model", {"text": "x"}), content("model", function("f")), content("user", response("f"))],
    ],
)
def test_broken_contents_are_named(contents: list[dict[str, Any]]) -> None:
    """What Google refuses: orphans, missing, late and foreign results, calls that follow no user turn."""
    assert content_violations(contents)

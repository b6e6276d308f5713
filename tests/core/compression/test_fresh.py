"""Results capped before they are first sent."""

from __future__ import annotations

import json
from typing import Any

from proxy.core.compression.fresh import capped
from proxy.core.compression.truncate import MIDDLE, REST, Truncate
from proxy.core.conversation import chat
from proxy.core.conversation.scan import scan
from tests.fits import body_of, slices, tools

LIMITS = Truncate(100, 5_000)


def done(messages: list[dict[str, Any]]) -> list[bytes]:
    body = body_of(messages)
    once = capped(body, scan(body, "messages"), chat, tools(), LIMITS)
    assert capped(once, scan(once, "messages"), chat, tools(), LIMITS) is once
    return slices(once)


def session(name: str, content: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "user", "content": "long " * 3000},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content, "x": 1},
    ]


def test_only_results_that_are_too_big_change() -> None:
    """Users' words and results within the limits keep their bytes; the same body comes back when nothing is too big."""
    small = session("Bash", "x\n" * 100)
    assert done(small) == slices(body_of(small))
    big = session("Bash", "x\n" * 101)
    assert done(big)[:2] == slices(body_of(big))[:2]
    said = json.loads(done(big)[2])
    assert MIDDLE in said["content"]
    assert said["x"] == 1


def test_reads_keep_their_head_and_parts_stay_parts() -> None:
    """A file's rest is left out at its end; content that was a list stays one."""
    said = json.loads(done(session("Read", "line\n" * 500))[2])["content"]
    assert said.endswith(REST)
    parts = json.loads(done(session("Read", [{"type": "text", "text": "line\n" * 500}]))[2])["content"]
    assert parts == [{"type": "text", "text": said}]


def test_later_messages_change_nothing() -> None:
    """A result becomes the same bytes in every later request."""
    messages = session("Bash", "x\n" * 3000)
    first = done(messages)
    later = done([*messages, {"role": "assistant", "content": "ok"}, *session("Bash", "y\n" * 300)[1:]])
    assert later[: len(first)] == first

"""The first look at a body: what its bytes bound, and when they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.engine.quick_check import HEAD_BYTES, TOOLS_ALLOWANCE, bound, read_head

WORDS = [{"role": "user", "content": "hi"}]


def bounded(api: str, **members: Any) -> bool:
    """Whether the bytes of a small request show that it is under a high mark."""
    body = json.dumps(members).encode()
    head = read_head(api, body)
    return head is not None and bound(body, head, 100_000) > 0


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("chat", {"messages": WORDS}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}),
        ("messages", {"messages": WORDS, "system": [{"type": "text", "text": "x"}]}),
        ("responses", {"input": "hi"}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
        ("responses", {"model": "m"}),
        ("responses", {"input": "hi", "tools": [{"type": "function", "name": "f"}]}),
    ],
)
def test_text_is_bounded_by_its_bytes(api: str, members: dict[str, Any]) -> None:
    """A request of words needs no count while its bytes are few."""
    assert bounded(api, **members)


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("messages", {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]}),
        ("messages", {"messages": WORDS, "mcp_servers": [{}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("responses", {"input": [{"type": "image_generation_call", "result": "A"}]}),
        ("responses", {"input": "hi", "previous_response_id": "r"}),
        ("responses", {"input": "hi", "conversation": "c"}),
        ("responses", {"input": "hi", "prompt": {"id": "p"}}),
        ("responses", {"input": "hi", "tools": [{"type": "mcp", "server_url": "u"}]}),
    ],
)
def test_what_bytes_do_not_bound(api: str, members: dict[str, Any]) -> None:
    """Media, and whatever the provider adds by itself, take a closer look."""
    assert not bounded(api, **members)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("responses", b'{"model":"a","input":"x","input":"y"}'),
        ("responses", b'{"model":"a","input":[{"type":"custom_tool_call","input":"x"}]}'),
        ("responses", b'{"model":"a","in\\u0070ut":"x"}'),
        ("messages", b'{"messages":[],"model":"a","model":"b"}'),
        ("messages", b'{"messages":"x"}'),
        ("messages", b"{"),
        ("chat", b'{"messages":[]}' + b" " * HEAD_BYTES),
    ],
)
def test_what_takes_the_exact_scanner(api: str, body: bytes) -> None:
    """What occurs twice, is spelled oddly, is no JSON or is large is not judged by its head."""
    assert read_head(api, body) is None


def test_figures_and_names() -> None:
    """The output figure, tools and the session are read where each API has them."""
    chat = read_head("chat", b'{"messages":[],"max_tokens":5,"max_completion_tokens":7,"functions":[]}')
    claude = read_head("messages", b'{"messages":[],"max_tokens":5,"metadata":{"session_id":"s-1"}}')
    codex = read_head("responses", b'{"input":"x","max_output_tokens":9,"tools":[],"prompt_cache_key":"k"}')
    assert chat is not None
    assert claude is not None
    assert codex is not None
    assert [head.requested for head in (chat, claude, codex)] == [7, 5, 9]
    assert [head.has_tools() for head in (chat, claude, codex)] == [True, False, True]
    assert [head.session for head in (chat, claude, codex)] == ["", "s-1", "k"]
    assert bound(b"x" * 10, codex, 10 + TOOLS_ALLOWANCE) == 10 + TOOLS_ALLOWANCE
    assert bound(b"x" * 11, codex, 10 + TOOLS_ALLOWANCE) == 0

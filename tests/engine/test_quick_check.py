"""The first look at a body: what its bytes bound, and when they do not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Options, Request
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes
from proxy.engine.quick_check import DECODERS, FIRST_MODEL, MOST_BYTES, TOOLS_ALLOWANCE, QuickCheck
from tests.support.engine_fixtures import POLICY, TENANT, DictRecords

WORDS = [{"role": "user", "content": "hi"}]


def bounded(api: str, **members: Any) -> bool:
    """True if the bytes of a request with *members* bound its tokens."""
    textual = DECODERS[api].decode(json.dumps(members).encode())
    return textual is not None and textual.allowance is not None


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("chat", {"messages": WORDS}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}),
        ("messages", {"messages": WORDS, "system": [{"type": "text", "text": "x"}]}),
        ("responses", {"input": "hi"}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
        ("responses", {"model": "m"}),
        ("responses", {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": '"image"'}]}),
        ("chat", {"messages": [{"role": "tool", "tool_call_id": "c", "content": '{"type": "image"}'}]}),
        ("responses", {"input": "hi", "tools": [{"type": "function", "name": "f"}]}),
        ("gemini", {"contents": [{"parts": [{"text": "hi"}]}], "systemInstruction": {"parts": [{"text": "x"}]}}),
        (
            "gemini",
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f"}, "thoughtSignature": "x"}]}]},
        ),
        ("gemini", {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {"inlineData": 1}}}]}]}),
        ("gemini", {"contents": [], "tools": [{"functionDeclarations": []}], "generationConfig": {"topK": 1}}),
    ],
)
def test_text_is_bounded_by_its_bytes(api: str, members: dict[str, Any]) -> None:
    """A request of words needs no count while its bytes are few."""
    assert bounded(api, **members)


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "not_yet_known"}]}]}),
        ("messages", {"messages": WORDS, "system": [{"type": "image"}]}),
        ("chat", {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}),
        ("chat", {"messages": WORDS, "audio": {"voice": "alloy"}}),
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
        ("gemini", {"contents": [{"parts": [{"inlineData": {}}]}]}),
        ("gemini", {"contents": [{"parts": [{"nobodyKnows": {}}]}]}),
        ("gemini", {"contents": [{"parts": [{"functionResponse": {"response": {}, "parts": [{}]}}]}]}),
        ("gemini", {"contents": [], "cachedContent": "cachedContents/x"}),
        ("gemini", {"contents": [], "tools": [{"googleSearch": {}}]}),
        ("gemini", {"contents": [], "generation_config": {"max_output_tokens": 9}}),
        ("gemini", {"generateContentRequest": {"contents": []}}),
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
        ("messages", b'{"messages":[],"model":"a","model":"b"}'),
        ("messages", b'{"messages":"x"}'),
        ("messages", b"{"),
        ("chat", b'{"messages":[]}' + b" " * MOST_BYTES),
    ],
)
def test_what_takes_the_exact_scanner(api: str, body: bytes) -> None:
    """What occurs twice, is no JSON or is large is not judged by its bytes."""
    assert DECODERS[api].decode(body) is None


def test_figures_and_names() -> None:
    """The output figure, tools and the session are read where each API has them."""
    chat = DECODERS["chat"].decode(b'{"messages":[],"max_tokens":5,"max_completion_tokens":7,"functions":[]}')
    claude = DECODERS["messages"].decode(b'{"messages":[],"max_tokens":5,"metadata":{"session_id":"s-1"}}')
    codex = DECODERS["responses"].decode(b'{"input":"x","max_output_tokens":9,"tools":[],"prompt_cache_key":"k"}')
    assert chat is not None
    assert claude is not None
    assert codex is not None
    assert [body.requested_output for body in (chat, claude, codex)] == [7, 5, 9]
    assert [body.allowance for body in (chat, claude, codex)] == [TOOLS_ALLOWANCE, 0, TOOLS_ALLOWANCE]
    assert [body.prompt_cache_key for body in (chat, claude, codex)] == [None, None, "k"]
    assert claude.metadata == {"session_id": "s-1"}


@pytest.mark.parametrize(
    ("head", "model"),
    [
        (b'{"model":"gpt-5","messages":[', b"gpt-5"),
        (b' \n{ "model" : "vendor/name:tag" , "max_tokens":5', b"vendor/name:tag"),
        (b'{"messages":[{"model":"other"}],"model":"m"}', None),
        (b'{"model":"a\\u0062"', None),
        ('{"model":"größe"'.encode(), None),
        (b'{"model":""', None),
        (b'{"model":5', None),
        (b'[{"model":"m"', None),
    ],
)
def test_the_model_at_the_beginning(head: bytes, model: bytes | None) -> None:
    """A first member that names the model plainly is read without a decode; nothing else is taken for it."""
    match = FIRST_MODEL.match(head)
    assert (match and match[1]) == model


WINDOW = 65_536


@pytest.mark.parametrize("output", [None, 9, 8_192, 40_000])
@pytest.mark.parametrize("task_size", ["", "small"])
@pytest.mark.parametrize("words", [9_000, 20_000, 24_000, 25_000, 26_000, 28_000, 60_000])
async def test_the_order_of_members_changes_nothing(output: int | None, task_size: str, words: int) -> None:
    """A body that begins with its model is measured, or passed, as one that begins with its messages."""
    catalogue = Catalogue([ModelRule("m", "stub", WINDOW)], {}, "stub")
    learned = LearnedRoutes(DictRecords(), {}, {}, time.monotonic)
    check = QuickCheck(KnownRoutes(catalogue, learned, time.monotonic), POLICY, "on")
    messages = [{"role": "user", "content": "x" * words}]
    options = Options(task_size=task_size)
    views = []
    for members in ({"model": "m", "messages": messages}, {"messages": messages, "model": "m"}):
        if output is not None:
            members["max_tokens"] = output
        views.append(await check.view(Request("chat", json.dumps(members).encode(), TENANT, "r", options)))
    assert (views[0] is None) == (views[1] is None)
    assert views[0] is not None or words > 9_000
    assert views[0] is None or words < 60_000

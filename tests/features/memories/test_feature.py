"""Which requests are given memories, and which go as they came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.features.memories import feature
from proxy.features.memories.block import HEADING
from tests.conftest import StartStub
from tests.stub import Stub
from tests.support.server_tool_fixtures import ProxyInProcess, proxy_in_process

ON: dict[str, Any] = {"memories": {"enabled": True}}
TASK = {"role": "user", "content": "Rename the queue."}
DONE = {"role": "assistant", "content": "Done."}
MORE = {"role": "user", "content": "And its tests."}

Start = Callable[..., Any]


class Upstream:
    """An upstream, and a proxy in front of it."""

    def __init__(self, server: Stub, proxy: ProxyInProcess) -> None:
        self.server = server
        self.proxy = proxy

    async def add(self, content: str, title: str = "Name") -> str:
        """The id of a new memory."""
        body = {"type": "decision", "title": title, "content": content}
        answer = await self.proxy.client.post(f"{self.proxy.url.removesuffix('/v1')}/ullage/api/memories", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def sent(self, *messages: dict[str, Any], path: str = "/chat/completions", **members: Any) -> bytes:
        """The body that goes upstream for *messages*."""
        headers = members.pop("headers", {})
        body = json.dumps({"model": "gpt-4o-mini", "messages": messages, **members}).encode()
        answer = await self.proxy.client.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert self.proxy.faults == []
        return bytes(self.server.seen[-1].body)


@pytest.fixture
async def upstream(stub: StartStub, tmp_path: Path) -> AsyncIterator[Upstream]:
    """An upstream behind a proxy with memories."""
    server = await stub(window=8192, alternation=False)
    async with proxy_in_process(server, tmp_path, **ON) as proxy:
        yield Upstream(server, proxy)


def is_untouched(body: bytes, *messages: dict[str, Any], **members: Any) -> bool:
    return body == json.dumps({"model": "gpt-4o-mini", "messages": messages, **members}).encode()


async def test_without_memories_nothing_changes(upstream: Upstream) -> None:
    """Not a byte."""
    assert is_untouched(await upstream.sent(TASK), TASK)
    assert is_untouched(await upstream.sent(TASK, DONE, MORE), TASK, DONE, MORE)


async def test_a_conversation_that_began_without_goes_on_without(upstream: Upstream) -> None:
    """A memory that is written meanwhile reaches the next one."""
    await upstream.sent(TASK)
    await upstream.add("It is heron-7.")
    assert is_untouched(await upstream.sent(TASK, DONE, MORE), TASK, DONE, MORE)
    assert b"heron-7" in await upstream.sent({"role": "user", "content": "Another task."})


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_in_other_modes_nothing_is_given(upstream: Upstream, mode: str) -> None:
    """The request goes as it came."""
    await upstream.add("It is heron-7.")
    assert is_untouched(await upstream.sent(TASK, headers={"x-ullage-mode": mode}), TASK)


async def test_examples_are_no_beginning(upstream: Upstream) -> None:
    """A request with answers of the model's from the start is not known to begin here."""
    await upstream.add("It is heron-7.")
    assert is_untouched(await upstream.sent(DONE, TASK), DONE, TASK)
    assert is_untouched(await upstream.sent(TASK, DONE, MORE), TASK, DONE, MORE)


async def test_a_view_on_demand_has_none(upstream: Upstream) -> None:
    """Nobody sent the conversation there."""
    await upstream.add("It is heron-7.")
    body = {"model": "gpt-4o-mini", "messages": [TASK]}
    answer = await upstream.proxy.client.post("/compress", json=body)
    assert answer.status_code == 200, answer.text
    assert "heron-7" not in answer.text


async def test_a_count_is_of_what_would_be_sent_and_stores_nothing(upstream: Upstream) -> None:
    """The conversation is given what is chosen when it is sent."""
    for number in range(2):
        await upstream.add("It is heron-7.", f"Name {number}")
        body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [TASK]}
        answer = await upstream.proxy.client.post("/messages/count_tokens", json=body)
        assert answer.status_code == 200, answer.text
        assert upstream.server.seen[-1].path.endswith("/count_tokens")
        assert upstream.server.seen[-1].body.count(b"heron-7") == number + 1
    await upstream.add("It is heron-7.", "Name 2")
    assert (await upstream.sent(TASK)).count(b"heron-7") == 3


async def test_a_repeated_beginning_is_the_same_for_a_while(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry does not differ because a memory was written meanwhile; later it is another conversation."""
    await upstream.add("It is heron-7.")
    first = await upstream.sent(TASK)
    await upstream.add("It is crane-8.", "Other")
    assert await upstream.sent(TASK) == first
    monkeypatch.setattr(feature, "REPEATED_SECONDS", 0.0)
    assert b"crane-8" in await upstream.sent(TASK)


async def test_conversations_that_begin_alike_are_distinguished_by_the_first_answer(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first goes on with its own block after a second one began with the same words."""
    monkeypatch.setattr(feature, "REPEATED_SECONDS", 0.0)
    await upstream.add("It is heron-7.")
    await upstream.sent(TASK)
    first = await upstream.sent(TASK, DONE, MORE)
    await upstream.add("It is crane-8.", "Other")
    await upstream.sent(TASK)
    other = {"role": "assistant", "content": "Which one?"}
    assert b"crane-8" in await upstream.sent(TASK, other, MORE)
    assert await upstream.sent(TASK, DONE, MORE) == first
    assert b"crane-8" not in first


async def test_a_small_window_is_given_less(upstream: Upstream) -> None:
    """A sixteenth of it at most."""
    for number in range(6):
        await upstream.add("It is a long story of queues, herons and cranes, told once more. " * 3, f"Story {number}")
    whole = await upstream.sent(TASK)
    less = await upstream.sent({**TASK, "content": "Another."}, headers={"x-ullage-window": "3000"})
    assert whole.count(b"Story") == 6
    assert 0 < less.count(b"Story") < 4
    none = await upstream.sent({**TASK, "content": "A third."}, headers={"x-ullage-window": "1000"})
    assert is_untouched(none, {**TASK, "content": "A third."})


async def test_it_stands_before_the_clients_own_text(upstream: Upstream) -> None:
    """Parts and text alike; system text and later messages stay as they are."""
    await upstream.add("It is heron-7.")
    system = {"role": "system", "content": "You are an agent."}
    text = json.loads(await upstream.sent(system, TASK, MORE))["messages"]
    assert (text[0], text[2]) == (system, MORE)
    assert text[1]["content"].startswith(HEADING)
    assert text[1]["content"].endswith(TASK["content"])
    part = {"type": "text", "text": "Rename."}
    parts = json.loads(await upstream.sent({"role": "user", "content": [part]}))["messages"][0]["content"]
    assert parts[0]["text"].startswith(HEADING)
    assert parts[1:] == [part]

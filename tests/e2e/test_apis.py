"""The situations that end a conversation without the proxy, over the other APIs: real clients, a strict upstream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.talk import Talk
from tests.e2e.test_situations import OPENING, WINDOW, agent, loop
from tests.harness import Proxy
from tests.material import AGENT_TOOLS, agent_session, chat_turn, log, prose
from tests.stub import Answer, Stub

APIS: Mapping[str, dict[str, Any]] = {"messages": {"wording": "anthropic"}, "responses": {}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
async def test_every_situation_is_answered(stub: StartStub, proxy: StartProxy, api: str, stream: bool) -> None:
    """A to F: long chats, agent loops, cold starts, pasted logs, huge results and parallel calls are all answered."""
    server = await stub(window=WINDOW, **APIS[api])
    front = await proxy(server.url, window=WINDOW)
    for situation in (_chat, _agent, _cold, _pasted, _result, _parallel):
        server.forget()
        await situation(server, front, api, stream)


async def _chat(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = lambda seen: Answer(prose(seen.number * 2 + 1, 300))
    async with Talk(front.url, server, OPENING[:1].copy(), {"max_tokens": 512}, stream, api=api) as talk:
        for turn in range(24):
            await talk.ask(chat_turn(turn, 300)[0])
            assert turn >= 5 or talk.ledger.compacted == 0, "a small conversation must leave byte for byte"
        assert talk.tokens > 1.7 * WINDOW
        assert talk.ledger.compacted > 0


async def _agent(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(30)
    async with Talk(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        assert await loop(talk, 450) == 30
        assert talk.tokens > 1.5 * WINDOW
        assert talk.ledger.share >= 0.78, str(talk.ledger)


async def _cold(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = lambda seen: Answer()
    turns = [message for turn in range(45) for message in chat_turn(turn, 280)]
    for history in ([*OPENING, *agent_session(52, 450)[2:]], [*OPENING[:1], *turns, chat_turn(99, 40)[0]]):
        async with Talk(front.url, server, history, stream=stream, api=api) as talk:
            assert talk.tokens > 3 * WINDOW
            await talk.ask()


async def _pasted(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    pasted = f"What went wrong in this log?\n{log(5, 2 * WINDOW)}\nPlease name the first failing file."
    async with Talk(front.url, server, OPENING[:1].copy(), stream=stream, clipped=True, api=api) as talk:
        await talk.ask({"role": "user", "content": pasted})
        await talk.ask({"role": "user", "content": "And the second one?"})


async def _result(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(4)
    async with Talk(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        answer = await talk.ask()
        for at, size in enumerate((300, 2 * WINDOW, 300, 300)):
            answer = await talk.results(answer, [log(at + 1, size)])
        assert b"call_2_0" in talk.views[2].slices[-1]
        assert len(talk.views[2].slices[-1]) > 400, "something of the result must be left"


async def _parallel(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(12, parallel=8)
    async with Talk(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        assert await loop(talk, 120) == 12
        assert talk.tokens > WINDOW

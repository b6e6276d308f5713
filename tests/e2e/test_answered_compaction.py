"""A client's own compaction, answered from the summary that is ready, where the operator wants that."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_client_compaction import PROMPTS
from tests.stub import Stub
from tests.stub.faults import error
from tests.support import api_formats
from tests.support.loopback import loopback_client
from tests.support.process_inspection import log_lines
from tests.support.proxy_process import Proxy, until
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session
from tests.support.sdk_clients import KEY, SDK_CLIENTS, SdkClient

WINDOW = 8192
ROUNDS = 66
NEWEST = "And write down which zone is slowest."


def session(rounds: int) -> list[dict[str, Any]]:
    """An agent's session with a fact in each result, as chat messages."""
    talk = agent_session(0, 0)
    for at in range(1, rounds + 1):
        talk += agent_round(at, 300)
        talk[-1]["content"] += f"\nNote {at}: the shard of ledger_{400 + at} is {9400 + at}."
    return [*talk, {"role": "user", "content": NEWEST}] if rounds == ROUNDS else talk


def request_items(api: str, talk: list[dict[str, Any]], *, compacting: bool) -> list[dict[str, Any]]:
    """The items of a request of *api*; Claude Code puts its prompt into the last of them."""
    items = (
        api_formats.to_messages(talk)
        if api == "messages"
        else api_formats.to_responses(talk)
        if api == "responses"
        else talk
    )
    if not compacting:
        return items
    if api == "messages":
        last = items[-1]
        parts = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
        return [*items[:-1], {**last, "content": [*parts, {"type": "text", "text": PROMPTS[api]}]}]
    return [*items, {"role": "user", "content": PROMPTS[api]}]


async def settled(server: Stub, front: Proxy) -> None:
    """Wait until the summaries that were asked for have come to something."""

    def called() -> int:
        return sum(int(line.get("calls", 0)) for line in log_lines(front) if line["event"] == "summary.done")

    await until(lambda: called() >= len(server.summaries), 60)


async def grow_session(sdk: SdkClient, server: Stub, front: Proxy, api: str, options: dict[str, Any]) -> None:
    """The session up to where a summary of nearly all of it is ready."""
    async with asyncio.timeout(60):
        for rounds in itertools.chain(range(6, ROUNDS, 4), itertools.repeat(ROUNDS - 1)):
            await sdk.ask(options, request_items(api, session(rounds), compacting=False), stream=False)
            await settled(server, front)
            if rounds == ROUNDS - 1:
                before = len(server.chats())
                await sdk.ask(options, request_items(api, session(ROUNDS), compacting=True), stream=False)
                if len(server.chats()) == before:
                    return


async def test_it_is_answered_from_a_summary_of_nearly_all(stub: StartStub, proxy: StartProxy) -> None:
    """In each API, streamed or not: no model is asked, facts and the user's words are in it, a new chain goes on."""
    server = await stub(window=WINDOW, wording="anthropic")
    settings = {"compression": {"client_compaction": "answer"}, "summaries": {"spend": 1.0}}
    front = await proxy(server.url, config={"models": [{"name": "*", "context_window": WINDOW}], **settings})
    for api in SDK_CLIENTS:
        async with SDK_CLIENTS[api](front.url) as sdk:
            _, more = sdk.opening(agent_session(0, 0))
            wanted = {"model": "gpt-4o-mini", **more}
            options = {**wanted, **sdk.options({"max_tokens": 2048, "tools": AGENT_TOOLS})}
            await grow_session(sdk, server, front, api, options)
            assert server.summaries, "nothing was summed up, so nothing can be ready"
            before, texts = len(server.chats()), []
            for stream in (False, True):
                answer = await sdk.ask(options, request_items(api, session(ROUNDS), compacting=True), stream=stream)
                assert sdk.calls(answer) == []
                texts.append(api_formats.text_of(answer[0]))
            assert len(server.chats()) == before, "the model was asked all the same"
            assert texts[0] == texts[1]
            assert sum(f"ledger_{400 + at} is {9400 + at}" in texts[0] for at in range(1, ROUNDS)) >= 5
            assert agent_session(0, 0)[1]["content"] in texts[0]
            assert NEWEST in texts[0]
            assert PROMPTS[api][:30] not in texts[0]
            fresh = [{"role": "user", "content": f"{texts[0]}\n\nGo on from there."}]
            await sdk.ask({**wanted, **sdk.options({"max_tokens": 64})}, fresh, stream=False)
            assert server.chats()[-1].body == sdk.bodies[-1], "what follows is another chain"
            other = [agent_session(0, 0)[0], {"role": "user", "content": "Look at src."}, *session(12)[2:]]
            await sdk.ask(options, request_items(api, other, compacting=True), stream=False)
            assert server.chats()[-1].body == sdk.bodies[-1], "what nobody summed up is the model's to read"
            if api == "chat":
                await _more_than_a_text(server, front, options)
            if api == "responses":
                await _on_its_own_path(server, front, options)
    await until(lambda: front.log.read_text().count('"served"') == 3 * len(SDK_CLIENTS) + 3)


async def _on_its_own_path(server: Stub, front: Proxy, options: dict[str, Any]) -> None:
    """`/responses/compact`, which this server does not have, is answered with the same summary."""
    items = request_items("responses", session(ROUNDS), compacting=False)
    server.fail(error(404))
    async with loopback_client(base_url=front.url) as web:
        headers = {"authorization": f"Bearer {KEY}"}
        made = await web.post("/responses/compact", headers=headers, json={**options, "input": items})
    assert made.json()["output"][-1]["type"] == "compaction"
    assert int(made.headers["x-ullage-summary-tokens"]) > 0


async def _more_than_a_text(server: Stub, front: Proxy, options: dict[str, Any]) -> None:
    """A second choice, a form, a forced call or too small an output figure go to the model that was asked."""
    body = {**options, "messages": request_items("chat", session(ROUNDS), compacting=True)}
    key = {"authorization": f"Bearer {KEY}"}
    async with loopback_client(base_url=front.url) as web:
        served = await web.post("/chat/completions", headers=key, json=body)
        assert served.headers["x-ullage-outcome"] == "compacted;served"
        assert int(served.headers["x-ullage-summary-tokens"]) > 0
        usage = served.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, usage["total_tokens"])
        assert 100 < usage["total_tokens"] < 2048
        stream = await web.post("/chat/completions", headers=key, json={**body, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"usage"' not in stream.text, "usage that nobody asked for"
        form = {"type": "json_object"}
        for more in ({"n": 2}, {"response_format": form}, {"tool_choice": "required"}, {"max_tokens": 60}):
            before = len(server.chats())
            relayed = await web.post("/chat/completions", headers=key, json={**body, **more})
            assert relayed.status_code == 200, relayed.text
            assert len(server.chats()) == before + 1
        stranger = await web.post("/chat/completions", headers={"authorization": "Bearer sk-other"}, json=body)
        assert "served" not in stranger.headers["x-ullage-outcome"]
        off = await web.post("/chat/completions", headers={**key, "x-ullage-mode": "observe"}, json=body)
        assert "served" not in off.headers.get("x-ullage-outcome", "")

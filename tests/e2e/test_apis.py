"""The situations that end a conversation without the proxy, over the other APIs: real clients, a strict upstream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_situations import OPENING, WINDOW, loop
from tests.stub import Answer, Call, Rules, Seen, Stub, messages
from tests.stub.faults import error, events
from tests.support.api_formats import request_body
from tests.support.chat_client import ChatClient
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, log, prose

APIS: Mapping[str, dict[str, Any]] = {"messages": {"wording": "anthropic"}, "responses": {}}


@pytest.mark.parametrize("api", [*APIS, "gemini"])
async def test_every_situation_is_answered(stub: StartStub, proxy: StartProxy, api: str) -> None:
    """A to F: long chats, agent loops, cold starts, pasted logs, huge results and parallel calls are all answered."""
    server = await stub(window=WINDOW, **APIS.get(api, {}))
    front = await proxy(server.url, window=WINDOW)
    for at, situation in enumerate((_chat, _agent, _cold, _pasted, _result, _parallel)):
        server.forget()
        await situation(server, front, api, at % 2 == 1)


def agent(rounds: int, parallel: int = 1) -> Callable[[Seen], Answer]:
    """A model that thinks and calls *parallel* tools in each of its first *rounds* answers, and then is done."""
    made = iter(range(1, rounds + 1))

    def script(_seen: Seen) -> Answer:
        at = next(made, None)
        if at is None:
            return Answer("Done: the rows are kept.")
        files = [json.dumps({"path": f"src/part_{at}_{number}.py"}) for number in range(parallel)]
        calls = tuple(Call("read_file", file, f"call_{at}_{number}") for number, file in enumerate(files))
        return Answer(f"Step {at}: I read on.", calls, reasoning=f"What is in part {at}?")

    return script


async def _chat(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = lambda seen: Answer(prose(seen.number * 2 + 1, 300))
    async with ChatClient(front.url, server, OPENING[:1].copy(), {"max_tokens": 512}, stream, api=api) as talk:
        for turn in range(24):
            await talk.ask(chat_turn(turn, 300)[0])
            assert turn >= 5 or talk.ledger.compacted == 0, "a small conversation must leave byte for byte"
        assert talk.tokens > 1.7 * WINDOW
        assert talk.ledger.compacted > 0


async def _agent(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(30)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        assert await loop(talk, 450) == 30
        assert talk.tokens > 1.5 * WINDOW
        assert talk.ledger.share >= 0.78, str(talk.ledger)


async def _cold(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = lambda seen: Answer()
    turns = [message for turn in range(45) for message in chat_turn(turn, 280)]
    for history in ([*OPENING, *agent_session(52, 450)[2:]], [*OPENING[:1], *turns, chat_turn(99, 40)[0]]):
        async with ChatClient(front.url, server, history, stream=stream, api=api) as talk:
            assert talk.tokens > 3 * WINDOW
            await talk.ask()


async def _pasted(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    pasted = f"What went wrong in this log?\n{log(5, 2 * WINDOW)}\nPlease name the first failing file."
    async with ChatClient(front.url, server, OPENING[:1].copy(), stream=stream, clipped=True, api=api) as talk:
        await talk.ask({"role": "user", "content": pasted})
        await talk.ask({"role": "user", "content": "And the second one?"})


async def _result(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(4)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        answer = await talk.ask()
        for at, size in enumerate((300, 2 * WINDOW, 300, 300)):
            answer = await talk.results(answer, [log(at + 1, size)])
        assert b"call_2_0" in talk.views[2].slices[-1]
        assert len(talk.views[2].slices[-1]) > 400, "something of the result must be left"


async def _parallel(server: Stub, front: Proxy, api: str, stream: bool) -> None:
    server.script = agent(12, parallel=8)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream, api=api) as talk:
        assert await loop(talk, 120) == 12
        assert talk.tokens > WINDOW


KEYS = {"x-api-key": "sk-ant-1", "anthropic-version": "2023-06-01"}
PATHS = {"messages": "/messages", "responses": "/responses"}
LONG = [message for turn in range(20) for message in chat_turn(turn, 280)] + chat_turn(99, 60)[:1]
SHORT = chat_turn(1, 40)[:1]


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client."""
    async with loopback_client(headers=KEYS) as client:
        yield client


@pytest.mark.parametrize("api", APIS)
async def test_an_api_is_passed_recovered_and_refused(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, api: str
) -> None:
    """What fits passes byte for byte, what the upstream finds too long is made smaller, the rest is refused."""
    server = await stub(window=WINDOW, **APIS[api])
    rules = [{"name": "told-*", "context_window": 2 * WINDOW}, {"name": "*", "context_window": WINDOW}]
    front = await proxy(server.url, config={"models": rules})
    for step in (_fits, _overflows, _refused):
        server.forget()
        await step(server, front.url + PATHS[api], web, api)


async def _fits(server: Stub, url: str, web: httpx.AsyncClient, api: str) -> None:
    """Bodies in odd spelling, the API's headers and whatever a stream says pass unchanged."""
    given = {"anthropic-beta": "context-management-2025-06-27", "x-claude-code-session-id": "s-1"}
    for chat in (SHORT, LONG[:8], agent_session(4, 300)):
        for more in ({}, {"stream": True}):
            body = json.dumps(request_body(api, chat, AGENT_TOOLS, temperature=1.0, **more), indent=1).encode()
            answer = await web.post(f"{url}?beta=true", content=body, headers=given)
            assert answer.status_code == 200, answer.text
            seen = server.seen[-1]
            assert (seen.body, seen.query) == (body, "beta=true")
            assert {name: seen.header(name) for name in KEYS | given} == KEYS | given
            assert answer.headers["x-ullage-outcome"] == "verbatim"
    held = b'event: x\ndata: {"type":"message_start"}\n\n: ping\n\ndata: {"type":"what"}\n\ndata: half'
    server.fail(events(held))
    assert (await web.post(url, json=request_body(api, LONG[:24], stream=True))).content == held


async def _overflows(server: Stub, url: str, web: httpx.AsyncClient, api: str) -> None:
    """Whole, streamed or inside a 200: an overflow is answered with something smaller."""
    for at, (stream, inside) in enumerate([(False, False), (True, False), (True, True)]):
        server.forget()
        server.rules = Rules(window=WINDOW, overflow_in_stream=inside, **APIS[api])
        body = request_body(api, LONG, model="told-wrong", **({"stream": True} if stream else {}))
        answer = await web.post(url, json=body, headers={"x-api-key": f"sk-{at}"})  # of whom nothing was learned
        assert answer.status_code == 200
        assert "Understood" in answer.text
        assert [seen.verdict for seen in server.chats()] == ["overflow", "ok"], (stream, inside)
        assert answer.headers["x-ullage-outcome"] == "compacted"


async def _refused(server: Stub, url: str, web: httpx.AsyncClient, api: str) -> None:
    """System text above the window gets a 400 that clients of the API recognise as an overflow."""
    chat = [{"role": "system", "content": prose(1, WINDOW + 500)}, *SHORT]
    answer = await web.post(url, json=request_body(api, chat))
    assert answer.status_code == 400
    said = answer.json()["error"]
    if api == "messages":
        assert (answer.json()["type"], said["type"]) == ("error", "invalid_request_error")
        assert said["message"].startswith("prompt is too long: ")
        assert f"> {WINDOW} maximum" in said["message"]
    else:
        assert (said["code"], said["param"]) == ("context_length_exceeded", "input")
        assert "maximum context length is" in said["message"]
    broken = await web.post(url, content=b"{")
    assert broken.json()["error"]["type"] == "invalid_request_error"
    assert server.chats() == []


async def test_counts_keys_and_sessions_of_messages(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """Counts speak of what would be sent, keys go where they are looked for, a session has one name for each tenant."""
    server = await stub(window=WINDOW, counts=True, **APIS["messages"])
    other = {"name": "claude", "base_url": server.url, "api_key": "sk-own", "api_key_header": "x-api-key"}
    rules = [{"name": "claude*", "upstream": "claude"}, {"name": "*", "context_window": WINDOW}]
    upstreams = [{"name": "stub", "base_url": server.url}, other]
    front = await proxy(server.url, config={"upstreams": upstreams, "models": rules})
    for step in (_counts, _keys, _sessions):
        server.forget()
        await step(server, f"{front.url}/messages", web)


async def _counts(server: Stub, url: str, web: httpx.AsyncClient) -> None:
    for chat in (SHORT, agent_session(4, 300), agent_session(40, 300)):
        body = request_body("messages", chat, AGENT_TOOLS)
        del body["max_tokens"]
        told = (await web.post(f"{url}/count_tokens", json=body)).json()["input_tokens"]
        assert told == server.seen[-1].tokens < WINDOW
        server.fail(error(404))
        ours = (await web.post(f"{url}/count_tokens", json=body)).json()["input_tokens"]
        assert abs(ours - told) <= 0.1 * told + 20
    assert messages.request_tokens(body) > WINDOW


async def _keys(server: Stub, url: str, web: httpx.AsyncClient) -> None:
    assert (await web.post(url, json=request_body("messages", SHORT, model="claude-9"))).status_code == 200
    assert (server.seen[-1].header("x-api-key"), server.seen[-1].header("authorization")) == ("sk-own", "")


async def _sessions(server: Stub, url: str, web: httpx.AsyncClient) -> None:
    names = []
    for key, session, chat in (("a", "s-1", SHORT), ("a", "s-1", LONG), ("b", "s-1", SHORT), ("a", "s-2", SHORT)):
        headers = {"x-api-key": key, "x-claude-code-session-id": session}
        answer = await web.post(url, json=request_body("messages", chat), headers=headers)
        names.append(answer.headers["x-ullage-conversation"])
        assert server.seen[-1].header("x-claude-code-session-id") == session
    assert names[0] == names[1]
    assert len(set(names)) == 3


PLACES = [
    ("/v1", "/openai/v1/responses?api-version=preview", "/v1/responses"),
    ("/openai/v1", "/openai/v1/chat/completions", "/openai/v1/chat/completions"),
    ("/openai", "/openai/deployments/up2/chat/completions?a=1", "/openai/deployments/up2/chat/completions"),
    ("/openai/v1", "/openai/deployments/up3/responses", "/openai/deployments/up3/responses"),
    ("", "/messages", "/v1/messages"),
    ("/v1", "/anthropic/v1/messages", "/v1/messages"),
    ("/anthropic", "/v1/messages", "/anthropic/v1/messages"),
]
"""An upstream's path, a client's path, and where it arrives."""


async def test_managed_on_every_path_and_with_stored_histories(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Whatever root client and upstream have, a route is managed; a history that only the provider has may go on."""
    server = await stub(window=WINDOW)
    upstreams = [{"name": f"up{at}", "base_url": server.root + base} for at, (base, _, _) in enumerate(PLACES)]
    rules = [{"name": each["name"], "upstream": each["name"], "context_window": WINDOW} for each in upstreams]
    front = await proxy(server.root, config={"upstreams": upstreams, "models": rules})
    for at, (_, path, arrives) in enumerate(PLACES):
        api = next((name for name in APIS if name in path), "chat")
        named = {} if "deployments" in path else {"model": f"up{at}"}
        answer = await web.post(front.root + path, json=request_body(api, LONG, **named))
        assert answer.headers["x-ullage-window"] == str(WINDOW)
        assert answer.headers["x-ullage-outcome"] == "compacted"
        assert (server.seen[-1].path, server.seen[-1].verdict) == (arrives, "ok")
    await _stored(server, f"{front.root}/v1/responses", web)


async def _stored(server: Stub, url: str, web: httpx.AsyncClient) -> None:
    server.script = lambda seen: Answer(prose(seen.number, 400))
    before: dict[str, str] = {}
    for turn in range(12):
        asked = {"model": "up0", "input": prose(turn, 600), **before}
        answer = await web.post(url, json=asked)
        assert answer.status_code == 200, answer.text
        before = {"previous_response_id": answer.json()["id"]}
    assert server.chats("ok")[-1].parsed["truncation"] == "auto"
    assert answer.headers["x-ullage-stages"] == "truncation"
    refused = await web.post(url, json={**asked, "truncation": "disabled"})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"

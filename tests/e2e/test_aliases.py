"""Other names for models and headers for them, through a running proxy, in each API."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer
from tests.support.chat_client import ChatClient
from tests.support.loopback import loopback_client
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, prose

WINDOW = 8192
BODIES: dict[str, list[bytes]] = {
    "/chat/completions": [
        b'{ "model" : "fast",\n "messages":[{"role":"user","content":"the model is \\"fast\\""}], "x": 1.10 }',
        b'{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f"}}],"model":"fast"}',
        '{"user":"ä","messages":[{"role":"user","content":"é\\ud83d"}],"metadata":{"model":"fast"},"m\\u006fdel":"fast","ß":"ü"}'.encode(),
    ],
    "/messages": [b'{"max_tokens":9,"model":"fast","messages":[{"role":"user","content":"hi"}],"system":"fast"}'],
    "/responses": [
        b'{"input":"say \\"model\\":\\"fast\\"","instructions":"x","store":false,"model":"fast","temperature":1.0}',
        b'{"model":"fast","store":false,"input":[{"role":"user","content":"hi"}]}',
    ],
}


async def test_another_name(stub: StartStub, proxy: StartProxy) -> None:
    """The request goes on under the model's own name, every other byte as it was, with its headers, and fits."""
    server, other = await stub(window=WINDOW), await stub(window=WINDOW)
    upstreams = [
        {"name": "other", "base_url": other.url},
        {"name": "up", "base_url": server.url, "headers": {"x-team": "all"}},
    ]
    models = [
        {"name": "fast", "model": "gpt-4o-mini", "headers": {"x-team": "blue", "X-Tier": "flex"}},
        {"name": "gpt-4o-mini", "upstream": "up", "context_window": WINDOW, "headers": {"x-tier": "own", "x-key": "7"}},
    ]
    front = await proxy("", config={"upstreams": upstreams, "models": models})
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "x-tier": "mine"}
    async with loopback_client(base_url=front.url, headers=headers) as client:
        for path, bodies in BODIES.items():
            for body in bodies:
                answer = await client.post(path, content=body)
                seen = server.seen[-1]
                assert seen.body == _renamed(body), path
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "gpt-4o-mini"
                assert [seen.header(name) for name in ("x-team", "x-tier", "x-key")] == ["blue", "flex", "7"]
        await client.post(
            "/chat/completions", json={"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "x"}]}
        )
        assert (server.seen[-1].header("x-team"), server.seen[-1].header("x-tier")) == ("all", "own")
        await client.post(
            "/chat/completions", json={"model": "unheard-of", "messages": [{"role": "user", "content": "x"}]}
        )
        assert other.seen[-1].model == "unheard-of"
        for path in ("/embeddings", "/completions", "/responses/input_tokens"):
            answer = await client.post(path, content=b'{"input":"x", "model" : "fast","dimensions":1.0}')
            assert answer.status_code == 200
            seen = server.seen[-1]
            assert seen.body == b'{"input":"x", "model" : "gpt-4o-mini","dimensions":1.0}'
            assert [seen.header(name) for name in ("x-team", "x-tier", "x-key")] == ["blue", "flex", "7"]
        listed: list[dict[str, Any]] = (await client.get("/models")).json()["data"]
        assert {entry["id"]: entry.get("context_length") for entry in listed}["fast"] == WINDOW
    for api in ("chat", "messages", "responses"):
        server.forget()
        server.script = lambda seen: Answer(prose(seen.number, 200))
        asked = {"max_tokens": 256, "tools": AGENT_TOOLS}
        async with ChatClient(front.url, server, agent_session(14, 500), asked, model="fast", api=api) as talk:
            await talk.ask(chat_turn(1, 100)[0])
            assert talk.ledger.compacted == 1
        assert {seen.model for seen in server.chats()} == {"gpt-4o-mini"}
        assert server.chats("overflow") == []


def _renamed(body: bytes) -> bytes:
    """*body* with the value of its last or only top-level ``model`` replaced, found from the parser's own view."""
    changed = [
        body[:at] + b'"gpt-4o-mini"' + body[at + 6 :] for at in range(len(body)) if body[at : at + 6] == b'"fast"'
    ]
    (right,) = [each for each in changed if _parsed(each) == {**_parsed(body), "model": "gpt-4o-mini"}]
    return right


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

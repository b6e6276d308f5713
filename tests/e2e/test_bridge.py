"""Chat clients in front of a provider that does not speak OpenAI's API, over LiteLLM, through a running proxy."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Call, Seen, Stub
from tests.stub.faults import Fault, rate_limited
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy, until
from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, log
from tests.support.sdk_clients import KEY, OpenAIClient

WINDOW = 8192
MODEL = "claude-sonnet-4-5"
UNKNOWN = "claude-opus-4-1"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


async def bridged(proxy: StartProxy, server: Stub) -> Proxy:
    """A proxy whose only upstream is *server*'s Messages API; it is wrong about the window of all models but one."""
    claude = {"name": "claude", "provider": "anthropic", "base_url": server.url}
    models = [{"name": MODEL, "context_window": WINDOW}, {"name": "*", "context_window": 25 * WINDOW}]
    # What nobody asked for must not be spent: these are the surroundings of a developer's machine.
    surroundings = {"ANTHROPIC_API_KEY": "sk-the-operators", "ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}
    return await proxy(server.url, config={"upstreams": [claude], "models": models}, environment=surroundings)


def rounds(count: int) -> Any:
    """A model that calls two tools at once in each of its first *count* answers, and then is done."""
    made = iter(range(count))

    def script(_seen: Seen) -> Answer:
        at = next(made, None)
        if at is None:
            return Answer("Done.")
        calls = (Call("read_file", json.dumps({"path": f"src/{at}_{number}.py"})) for number in range(2))
        return Answer(f"Step {at}.", tuple(calls))

    return script


async def session(sdk: OpenAIClient, model: str, count: int, *, stream: bool) -> None:
    """A whole session of *count* tool rounds."""
    task = {"role": "user", "content": [{"type": "text", "text": AGENT_TASK}, PICTURE]}
    history: list[dict[str, Any]] = [{"role": "system", "content": AGENT_SYSTEM}, task]
    asked = {"model": model, "max_tokens": 256, "tools": AGENT_TOOLS}
    for at in range(count + 1):
        history += await sdk.ask(asked, history, stream=stream)
        called = sdk.calls(history[-1:])
        assert bool(called) == (at < count), "the model's calls did not arrive as they were made"
        history += sdk.results(called, [log(at * 2 + number, 250) for number in range(len(called))])


async def test_an_agent_session_crosses_the_window(stub: StartStub, proxy: StartProxy) -> None:
    """Parallel tool rounds with a picture reach the provider in its own strict form, whatever was known before."""
    server = await stub(window=WINDOW, wording="anthropic")
    front = await bridged(proxy, server)
    async with OpenAIClient(front.url) as sdk:
        for model, stream in ((MODEL, True), (UNKNOWN, False)):
            server.forget()
            server.script = rounds(20)
            await session(sdk, model, 20, stream=stream)
            assert {seen.path for seen in server.chats()} == {"/v1/messages"}
            assert [seen.why for seen in server.chats("invalid")] == []
            sizes = [seen.tokens for seen in server.chats("ok")]
            assert sum(now < before for before, now in pairwise(sizes)) >= 2, "it never crossed the window"
            assert server.chats("overflow") or model == MODEL, "the wrong window was never contradicted"
            assert {seen.header("x-api-key") for seen in server.chats()} == {KEY}
    await until(lambda: any(seen.verdict == "ok" for seen in server.summaries), 60)  # those go over the bridge, too


async def test_errors_and_refusals_reach_clients(stub: StartStub, proxy: StartProxy) -> None:
    """Refusals, unknown members, missing keys: each has its status. Who leaves ends the call. No word is logged."""
    server = await stub(window=WINDOW, wording="anthropic")
    server.script = lambda seen: Answer("word " * 500)
    front = await bridged(proxy, server)
    small = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "Say the secret xylophone."}]}
    async with loopback_client(base_url=front.url) as client:
        key = {"authorization": f"Bearer {KEY}"}
        server.fail(rate_limited("7"))
        limited = await client.post("/chat/completions", headers=key, json=small)
        assert (limited.status_code, limited.headers["retry-after"]) == (429, "7")
        assert limited.json()["error"]["message"] == "Rate limit reached for requests"
        for extra in ({"api_base": "http://127.0.0.1:9"}, {"mock_response": "hello"}, {"logit_bias": {"1": 2}}):
            refused = await client.post("/chat/completions", headers=key, json={**small, **extra})
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
            assert next(iter(extra)) in refused.json()["error"]["message"]
        keyless = await client.post("/chat/completions", json=small)
        assert (keyless.status_code, keyless.json()["error"]["type"]) == (401, "authentication_error")
        assert len(server.chats()) == 1, "what was refused here was sent all the same"
        models = await client.get("/models", headers=key)
        assert [model["id"] for model in models.json()["data"]] == ["gpt-4o-mini", MODEL]
        straight = await client.post("/messages", headers={"x-api-key": "sk-a", "anthropic-version": "1"}, json=small)
        assert straight.json()["type"] == "message"
        lost = await client.post("/chat/completions", headers=key, json={**small, "messages": []})
        assert lost.status_code == 400
        server.fail(Fault(gap=0.05))
        async with client.stream("POST", "/chat/completions", headers=key, json={**small, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: server.chats()[-1].aborted_at is not None)
    assert front.end() == 0
    told = front.log.read_text()
    assert "Unclosed" not in told
    assert "Traceback" not in told
    assert "xylophone" not in told
    assert KEY not in told

"""A proxy that nobody told the window: it asks the server, and nobody waits for the answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.conftest import StartProxy, StartStub
from tests.stub import Stub
from tests.support.chat_client import ChatClient
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import prose

MODEL = "local-model"
WINDOW = 8192


async def status(proxy: Proxy) -> dict[str, Any]:
    async with loopback_client() as client:
        answer = await client.get(f"{proxy.root}/ullage/api/status")
        return dict(answer.raise_for_status().json())


async def status_with_windows(proxy: Proxy, stub: Stub) -> dict[str, Any]:
    """The status, as soon as it tells of a window: after a request that is worth asking for."""
    async with ChatClient(proxy.url, stub, model=MODEL) as talk:
        await talk.ask({"role": "user", "content": prose(99, 600)})
    async with asyncio.timeout(60):
        while not (found := await status(proxy))["windows"]:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.05)
    return found


async def grow(proxy: Proxy, stub: Stub, turns: int) -> ChatClient:
    """A conversation of *turns* turns, twice the window in all."""
    async with ChatClient(proxy.url, stub, model=MODEL) as talk:
        for turn in range(turns):
            await talk.ask({"role": "user", "content": prose(turn, 2 * WINDOW // turns)})
        return talk


async def test_what_the_server_tells_is_fitted_ahead(stub: StartStub, proxy: StartProxy) -> None:
    """A window that the list of models tells is kept without a single overflow, and shown with its origin."""
    server = await stub(window=WINDOW, tells=True)
    server.models = [MODEL]
    running = await proxy(server.url)
    found = await status_with_windows(running, server)
    shown = {key: found["windows"][0][key] for key in ("model", "context_window", "how")}
    assert shown == {"model": MODEL, "context_window": WINDOW, "how": "/v1/models max_model_len"}
    talk = await grow(running, server, 12)
    assert talk.overflows == 0
    assert talk.views[-1].tokens < WINDOW
    assert {seen.path for seen in server.probes} == {"/v1/models"}
    assert all(not seen.header("authorization") for seen in server.probes), "a client's key went into a question"


async def test_the_configuration_wins(stub: StartStub, proxy: StartProxy) -> None:
    """A configured window holds whatever the server tells, and then the server is not even asked."""
    server = await stub(window=4 * WINDOW, tells=True)
    server.models = [MODEL]
    running = await proxy(server.url, window=WINDOW)
    talk = await grow(running, server, 12)
    assert max(view.tokens for view in talk.views) <= WINDOW
    assert server.probes == []
    assert (await status(running))["windows"] == []


async def test_probing_can_be_turned_off(stub: StartStub, proxy: StartProxy) -> None:
    """With ``probe: false`` a server is never asked; its window is learned from the first overflow as before."""
    server = await stub(window=WINDOW, tells=True)
    server.models = [MODEL]
    upstreams = [{"name": "stub", "base_url": server.url, "probe": False}]
    talk = await grow(await proxy(server.url, config={"upstreams": upstreams}), server, 12)
    assert server.probes == []
    assert talk.overflows == 1


async def test_a_server_that_hangs_on_questions_delays_no_request(proxy: StartProxy) -> None:
    """While every question about windows hangs, requests are served, and start-up does not wait."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST /v1/chat/completions"):
            body = b'{"choices":[{"message":{"role":"assistant","content":"here"}}]}'
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        took: list[float] = []
        # The deadline of the questions is 3 s. A busy machine delays some of several requests, a wait for them all.
        while min(took, default=3.0) > 2.5 and len(took) < 5:
            running = await proxy(f"http://127.0.0.1:{port}/v1")
            async with loopback_client() as client:
                begun = time.monotonic()
                asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
                answer = await client.post(f"{running.url}/chat/completions", json=asked)
                took.append(time.monotonic() - begun)
                assert answer.json()["choices"][0]["message"]["content"] == "here"
        assert min(took) < 2.5, took
    finally:
        server.close()

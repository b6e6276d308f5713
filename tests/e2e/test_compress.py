"""Views without forwarding, over HTTP: ``/v1/compress`` and ``/v1/retrieve``, and a real gateway that calls them.

The gateway is opt-in, since ``litellm[proxy]`` pins some hundred packages that nothing else here needs. One command
runs it, given the ``litellm`` of an environment in which ``pip install 'litellm[proxy]==1.106.2'`` was done::

    ULLAGE_LITELLM=FOLDER/bin/litellm python -m pytest tests/e2e/test_compress.py
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import StartProxy, StartStub
from tests.features.compress.test_feature import conversation
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

WINDOW = 8_192
GATEWAY = os.environ.get("ULLAGE_LITELLM", "")
MASTER_KEY = "sk-" + "0f" * 32
KEY = {"authorization": "Bearer mine"}
PATIENCE = 300
"""Seconds for a gateway's start: it imports for ten seconds of CPU."""
ROUTES = (
    ("/chat/completions", "chat", "house-model"),
    ("/chat/completions", "chat", "claude"),
    ("/messages", "messages", "claude"),
    ("/responses", "responses", "house-model"),
)
"""LiteLLM's routes, the API of the request, and its model: LiteLLM calls OpenAI's and Anthropic's API upstream."""


async def post(url: str, body: object, **headers: str) -> httpx.Response:
    """The answer to a POST of *body* as JSON."""
    async with loopback_client() as client:
        return await client.post(url, json=body, headers={**KEY, **headers})


async def get(url: str, key: str = "mine") -> httpx.Response:
    """The answer to a GET."""
    async with loopback_client() as client:
        return await client.get(url, headers={"authorization": f"Bearer {key}"})


async def read_json(url: str) -> dict[str, Any]:
    """What a GET answers, as soon as it is there: it is written behind answers."""
    async with asyncio.timeout(60):
        while (answer := await get(url)).status_code == 404:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)
    content: dict[str, Any] = answer.json()
    return content


async def a_fold(front: Proxy, name: str) -> str:
    """The reference of what the newest fold of a conversation took out."""
    async with asyncio.timeout(60):
        while True:
            shown = await read_json(f"{front.root}/ullage/api/conversations/{name}")
            folds = shown["threads"][0]["folds"]
            if folds and folds[-1]["archive"]:
                return str(folds[-1]["archive"])
            await asyncio.sleep(0.05)


async def test_a_view_is_answered_and_what_left_it_can_be_retrieved(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """Nothing reaches the upstream; originals come back to their own caller alone; a refusal speaks the body's API."""
    server = await stub(window=WINDOW)
    config = {"archive": {"enabled": True}, "summaries": {"mode": "off"}, "telemetry": {"log": {"format": "json"}}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    messages = conversation(40)
    answer = await post(f"{front.url}/compress", {"model": "m", "messages": messages})
    assert answer.status_code == 200
    view = answer.json()
    assert (view["outcome"], view["stages"]) == ("compacted", ["fold"])
    assert answer.headers["x-ullage-outcome"] == "compacted"
    assert view["tokens_after"] <= WINDOW
    again = await post(f"{front.url}/compress", {"model": "m", "messages": messages})
    assert again.json() == view
    listed = await read_json(f"{front.url}/retrieve/{await a_fold(front, view['conversation'])}")
    assert json.dumps(messages[2])[:200].replace(" ", "") in listed["original_content"].replace(" ", "")
    assert (await get(f"{front.url}/retrieve/{listed['hash']}", "other")).status_code == 404
    assert (await get(f"{front.url}/retrieve/0123456789abcdef")).status_code == 404
    refused = await post(f"{front.url}/compress", {"model": "m", "messages": messages, "system": "s", "window": "9"})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    refused = await post(f"{front.url}/compress", {"model": "m"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert server.chats() == []
    front.end()
    lines = [json.loads(line) for line in front.log.read_text().splitlines() if line.startswith("{")]
    done = [line for line in lines if line["event"] == "proxy.request_done"]
    assert [line["api"] for line in done] == ["compress"] * 4
    assert [line["outcome"] for line in done] == ["compacted", "compacted", "refused", "refused"]


@asynccontextmanager
async def gateway(folder: Path, config: dict[str, Any]) -> AsyncIterator[str]:
    """LiteLLM's proxy with *config*; its base URL."""
    file, port = folder / "gateway.yaml", free_port()
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    command = [GATEWAY, "--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        async with asyncio.timeout(PATIENCE), loopback_client() as client:
            while True:
                assert process.poll() is None, (folder / "gateway.log").read_text()[-4000:]
                try:
                    if (await client.get(f"http://127.0.0.1:{port}/health/liveliness")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.timeout(PATIENCE + 60)
@pytest.mark.skipif(not GATEWAY, reason="ULLAGE_LITELLM is not set")
async def test_litellm_compresses_with_this_proxy(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """Its guardrail for compression, pointed here: what is too long for a model arrives whole and fits, in any API."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=4_000, home=home)
    house = {"model": "openai/house-model", "api_base": server.url, "api_key": "sk-x"}
    claude = {"model": "anthropic/claude-sonnet-4-5", "api_base": server.root, "api_key": "sk-x"}
    models = {"house-model": house, "claude": claude}
    guardrail = {"guardrail": "headroom", "mode": "pre_call", "api_base": front.root, "default_on": True}
    config = {
        "model_list": [{"model_name": name, "litellm_params": given} for name, given in models.items()],
        "general_settings": {"master_key": MASTER_KEY},
        "guardrails": [{"guardrail_name": "ullage", "litellm_params": guardrail}],
    }
    messages = conversation(40)
    async with gateway(home, config) as url:
        for route, api, model in ROUTES:
            for stream in (False, True):
                server.forget()
                body = request_body(api, messages, model=model, stream=stream)
                if api == "chat":
                    body["max_tokens"] = 64  # for Claude, LiteLLM asks for the longest answer if none is named
                answer = await post(f"{url}{route}", body, authorization=f"Bearer {MASTER_KEY}")
                assert answer.status_code == 200, answer.text
                assert "ullage" in answer.headers["x-litellm-applied-guardrails"]
                (seen,) = server.chats("ok")
                assert seen.tokens < WINDOW
                kept = (json.dumps(messages[at]["content"])[1:-1] for at in (1, -1))
                assert all(words in seen.body.decode() for words in kept)
                if seen.path == "/v1/chat/completions":
                    assert [each["role"] for each in seen.messages] == [each["role"] for each in messages]

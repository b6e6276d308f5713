"""The proxy in front of a real llama.cpp server with a real window of 8,192 tokens; opt-in.

One command runs it, given a ``llama-server`` binary and any chat model of its format (random weights will do, the
window and the errors are as real)::

    ULLAGE_LLAMA_SERVER=/path/to/llama-server ULLAGE_LLAMA_MODEL=/path/to/model.gguf \
        python -m pytest tests/e2e/test_real_server.py -m real_server -s
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli.doctor import examine
from proxy.settings import load
from tests.conftest import StartProxy
from tests.support.api_formats import request_body
from tests.support.chat_client import read_chat_stream
from tests.support.loopback import loopback_client
from tests.support.ports import free_port
from tests.support.proxy_process import Client
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, chat_turn

BINARY, MODEL = os.environ.get("ULLAGE_LLAMA_SERVER", ""), os.environ.get("ULLAGE_LLAMA_MODEL", "")
WINDOW = 8192
TURNS = 40
ENDS = {"messages": '"output_tokens"', "responses": '"completed"'}
"""What stands at the end of every answer."""
TOLD = [pytest.param(WINDOW, id="window_told"), pytest.param(None, id="window_unknown")]
pytestmark = [
    pytest.mark.real_server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BINARY and MODEL), reason="ULLAGE_LLAMA_SERVER and ULLAGE_LLAMA_MODEL are not set"),
]


@pytest.fixture
async def llama(tmp_path: Path) -> AsyncIterator[str]:
    """The base URL of a running llama.cpp server with one slot of 8,192 tokens."""
    port = free_port()
    options = ["-c", str(WINDOW), "-np", "1", "-t", "1", "--host", "127.0.0.1", "--port", str(port), "--jinja"]
    with (tmp_path / "llama.log").open("wb") as log:
        process = await asyncio.to_thread(_spawn, [BINARY, "-m", MODEL, *options], log)
    try:
        await _healthy(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


def _spawn(command: list[str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=log, stderr=log)


async def _healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(120), loopback_client() as client:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the server ended at once with code {process.returncode}")


async def ask(client: Any, messages: list[dict[str, Any]], **options: Any) -> tuple[dict[str, Any], str]:
    """What a streamed answer spells, and the model's reason to stop."""
    stream = await client.chat.completions.create(
        model="local", messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}, **options
    )
    answer, finish, usage = await read_chat_stream(stream)
    assert usage, "the usage that was asked for did not come"
    return answer, finish


async def test_the_server_alone_refuses(llama: str) -> None:
    """Without the proxy the same conversation is an error, so the tests below prove something."""
    async with Client(llama) as client:
        with pytest.raises(Exception, match="exceed"):
            await ask(client, agent_session(TURNS, 450), tools=AGENT_TOOLS)


@pytest.mark.parametrize("window", TOLD)
async def test_an_agent_loop(
    llama: str, proxy: StartProxy, record_property: Callable[[str, object], None], window: int | None
) -> None:
    """Forty streamed tool rounds reach the model without an error, whether the proxy knows the window or learns it."""
    front = await proxy(llama, window=window)
    messages = agent_session(0, 0)
    async with Client(front.url, timeout=300) as client:
        for turn in range(TURNS):
            messages += agent_round(turn + 1, 450)
            _, finish = await ask(client, messages, tools=AGENT_TOOLS)
            assert finish, f"round {turn} ended without a finish reason"
        await _report(client, messages, record_property)


@pytest.mark.parametrize("window", TOLD)
async def test_a_chat(llama: str, proxy: StartProxy, window: int | None) -> None:
    """Forty streamed chat turns, three windows in all, are answered without an error."""
    front = await proxy(llama, window=window)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
    async with Client(front.url, timeout=300) as client:
        for turn in range(TURNS):
            asked, spoken = chat_turn(turn, 300)
            messages.append(asked)
            answer, finish = await ask(client, messages)
            assert finish, f"turn {turn} ended without a finish reason"
            messages.append({"role": "assistant", "content": f"{spoken['content']} {answer['content']}".strip()})


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_the_other_apis(llama: str, proxy: StartProxy, api: str) -> None:
    """An agent's session of three windows is answered in each API, streaming and not."""
    front = await proxy(llama)
    headers = {"anthropic-version": "2023-06-01", "authorization": "Bearer mine"}
    limit = {"messages": "max_tokens", "responses": "max_output_tokens"}[api]
    async with loopback_client(timeout=300) as client:
        for rounds in range(5, TURNS + 1, 5):
            for stream in (False, True):
                body = request_body(api, agent_session(rounds, 450), AGENT_TOOLS, model="local", stream=stream)
                answer = await client.post(f"{front.url}/{api}", json={**body, limit: 24}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert ENDS[api] in answer.text
    assert answer.headers["x-ullage-outcome"] == "compacted"


async def test_the_doctor_finds_it_well(llama: str) -> None:
    """A real server's window, usage, streams and overflow are told, and nothing stands in the way."""
    settings = load(None, {("upstreams",): [{"name": "llama", "base_url": llama}]}, {})
    found = await examine(settings, None, key="", oversize=False, seconds=120.0)
    assert found.healthy
    texts = {finding.topic: (finding.level, finding.text) for finding in found.findings}
    assert texts["window"] == ("ok", "8,192 tokens, by server: /v1/models meta.n_ctx")
    assert texts["limit"] == ("ok", "the error states 8,192 tokens")
    assert {level for level, _ in texts.values()} == {"ok"}


async def _report(client: Any, messages: list[dict[str, Any]], note: Callable[[str, object], None]) -> None:
    """Ask once more for the server's own word on how much of the prompt it had in its cache."""
    messages += agent_round(99, 100)
    reply = await client.chat.completions.create(model="local", messages=messages, max_tokens=4, tools=AGENT_TOOLS)
    cached = reply.usage.prompt_tokens_details.cached_tokens if reply.usage.prompt_tokens_details else 0
    print(f"\nthe server's prompt: {reply.usage.prompt_tokens} tokens, {cached} of them from its cache")
    note("cached_share", round(cached / reply.usage.prompt_tokens, 3))

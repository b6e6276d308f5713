"""A running proxy whose configuration changes: no request fails, and what was fixed stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import StartProxy, StartStub
from tests.features.compress.test_feature import conversation
from tests.stub import Stub
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy


async def status(front: Proxy) -> dict[str, Any]:
    """What a worker's status says of its configuration."""
    async with loopback_client() as client:
        answer = await client.get(f"{front.root}/ullage/api/status", headers={"authorization": "Bearer admin"})
    state: dict[str, Any] = answer.json()["configuration"]
    return state


async def reached(front: Proxy, generation: int, workers: int) -> None:
    """Return when every worker has this generation: a row of fresh connections met no other."""
    async with asyncio.timeout(60):
        row = 0
        while row < 8 * workers:
            row = row + 1 if (await status(front))["generation"] == generation else 0
            await asyncio.sleep(0.02)


def longest(server: Stub) -> list[dict[str, Any]]:
    """The messages of the longest view that reached an upstream."""
    views: list[list[dict[str, Any]]] = [json.loads(seen.body)["messages"] for seen in server.chats()]
    return max(views, key=len)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_running_proxy_changes_without_a_failed_request(
    stub: StartStub, home: Path, proxy: StartProxy, workers: int
) -> None:
    """Under load, by file and by signal: no request fails, fixed views stay, a key that is gone is refused at once."""
    first, second = await stub(window=8_192), await stub(window=8_192)
    config: dict[str, Any] = {
        "server": {"workers": workers, "admin_key": "admin", "access_keys": ["one", "both"]},
        "upstreams": [{"name": "a", "base_url": first.url}],
        "models": [{"name": "*", "context_window": 8_192}],
        "summaries": {"mode": "off"},
        "store": {"path": f"{home}/data"},
    }
    front = await proxy(first.url, config=config, home=home)
    file, failed = home / "ullage.yaml", []

    async def ask(client: httpx.AsyncClient, rounds: int, key: str = "both") -> int:
        body = {"model": "m", "messages": conversation(rounds)}
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post(f"{front.url}/chat/completions", json=body, headers=headers)
        return answer.status_code

    async def load_forever() -> None:
        async with loopback_client() as client:
            while True:
                code = await ask(client, 2)
                if code != 200:
                    failed.append(code)

    def change(**sections: Any) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({**config, **sections}))
        fresh.replace(file)

    running = [asyncio.ensure_future(load_forever()) for _ in range(4)]
    async with loopback_client() as client:
        assert await ask(client, 40) == 200
        fixed = longest(first)
        assert await ask(client, 2, "one") == 200
        change(
            upstreams=[{"name": "a", "base_url": second.url}],
            server={**config["server"], "access_keys": ["both"], "limits": {"body": 2**20}},
            compression={"high_mark": 0.85, "low_mark": 0.2},
        )
        await reached(front, 2, workers)
        assert await ask(client, 2, "one") == 401  # on the connection on which it was admitted before
        assert await ask(client, 41) == 200
        assert longest(second)[: len(fixed)] == fixed
        shown = await status(front)
        assert shown["changed"] == ["compression.high_mark", "compression.low_mark", "server.access_keys", "upstreams"]
        assert shown["needs_restart"] == ["server.limits.body"]
        file.write_text("compresion: {}\n")
        os.kill(front.pid, signal.SIGUSR1)
        async with asyncio.timeout(60):
            while not (shown := await status(front))["problems"]:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.02)
        assert (shown["generation"], "there is no such key" in shown["problems"][0]) == (2, True)
        assert await ask(client, 2) == 200
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert failed == []
    assert len(second.chats()) > 20
    assert front.end() == 0
    events = [json.loads(line) for line in front.log.read_text().splitlines() if line.startswith("{")]
    changes = [line for line in events if line["event"].startswith("config.")]
    assert {"config.changed", "config.needs_restart", "config.refused"} <= {line["event"] for line in changes}
    assert not [line for line in events if line["event"] in ("config.failed", "task.failed")]

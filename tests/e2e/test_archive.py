"""The archive of running proxies: what left the view can be read again by its own client, wherever it asks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_conversations import OTHER, get, thread_once
from tests.e2e.test_store import frozen
from tests.store.conftest import Valkey
from tests.support.agent_loop import WINDOW, AgentLoop
from tests.support.process_inspection import metrics, total
from tests.support.proxy_process import Proxy

ON = {"archive": {"enabled": True}, "summaries": {"mode": "off"}}


async def everything(front: Proxy, ref: str) -> list[dict[str, Any]]:
    """All items of a list, page by page."""
    found: list[dict[str, Any]] = []
    at: int | None = 0
    while at is not None:
        page = (await get(front, f"/archive/{ref}?offset={at}&limit=10")).json()
        found += page["items"]
        at = page["next_offset"]
    return found


async def until(front: Proxy, name: str, least: float, **labels: str) -> None:
    """Return when the proxy's figure is at least so much; raises ``TimeoutError``."""
    async with asyncio.timeout(60):
        while total(await metrics(front), name, **labels) < least:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)


ITEMS = "ullage_archive_items_total"


async def test_what_left_the_view_can_be_read_from_every_worker_and_replica(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """After some compactions each item that is not in the view is in the archive, as the client sent it, sealed."""
    server = await stub(window=WINDOW)
    config = {**ON, "store": {"url": remote.url}}
    fronts = []
    for name, workers in (("a", 2), ("b", 1)):
        (home / name).mkdir()
        arguments = ["--workers", str(workers)]
        started = await proxy(server.url, window=WINDOW, config=config, arguments=arguments, home=home / name)
        fronts.append(started)
    async with AgentLoop(server, fronts, 600) as loop:
        while len(loop.events) < 3:
            await loop.ask()
        name = loop.headers[-1]["x-ullage-conversation"]
        told = await thread_once(fronts[0], name, lambda told: len(told["folds"]) == 3)
        refs = [fold["archive"] for fold in told["folds"]]
        assert all(refs)
        pages: list[dict[str, Any]] = []
        for ref in refs:
            async with asyncio.timeout(60):
                while (await get(fronts[1], f"/archive/{ref}")).status_code == 404:  # noqa: ASYNC110
                    await asyncio.sleep(0.25)  # written behind the answer
            pages += await everything(fronts[1], ref)
        by_index = {each["index"]: each for each in pages}
        assert len(by_index) == len(pages)
        gone = range(2, told["folds"][-1]["to"])
        assert set(gone) <= set(by_index)
        usual = (await get(fronts[0], f"/archive/{refs[0]}")).json()
        assert len(usual["items"]) == 3
        for index in (gone[0], gone[-1]):
            entry = by_index[index]
            item = (await get(fronts[0], f"/archive/{entry['ref']}?limit=100000")).json()
            assert item["content"] == json.dumps(loop.messages[index])
            assert item["total"] == len(item["content"])
            assert (await get(fronts[0], f"/archive/{entry['ref']}", OTHER)).status_code == 404
        for _ in range(2):
            assert (await get(fronts[1], f"/archive/{refs[0]}", OTHER)).status_code == 404
        assert "archive" not in loop.shown()
        dump = remote.directory.glob("appendonlydir/*.aof")
        assert b"ledger_401" not in b"".join(path.read_bytes() for path in dump)
        remote.kill()
        answer = await get(fronts[1], f"/archive/{refs[0]}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_store_that_hangs_costs_originals_and_no_request(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """With the store frozen every request is answered, and originals are given up and counted."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, config={**ON, "store": {"url": remote.url}}, home=home)
    async with AgentLoop(server, [front], 600) as loop:
        while not loop.events:
            await loop.ask()
        await until(front, ITEMS, 1, outcome="kept")
        frozen(remote)
        before = len(loop.events)
        while len(loop.events) == before:
            await loop.ask()
        assert loop.headers[-1]["x-ullage-outcome"].startswith("compacted")
        await until(front, ITEMS, 1, outcome="failed")


async def test_nothing_is_archived_unless_it_is_wanted(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """As shipped no original reaches the store, and no fold has a reference."""
    server = await stub(window=WINDOW)
    config = {"summaries": {"mode": "off"}, "store": {"url": remote.url}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    async with AgentLoop(server, [front], 600) as loop:
        while not loop.events:
            await loop.ask()
        name = loop.headers[-1]["x-ullage-conversation"]
        told = await thread_once(front, name, lambda told: bool(told["folds"]))
        assert told["folds"][0]["archive"] is None
        assert ":a:" not in remote.say("KEYS *")

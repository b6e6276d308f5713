"""Compactions that are asked for, and what a caller is told of its conversations, on running proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.store.conftest import Valkey
from tests.stub.summariser import Behaviour
from tests.support.agent_loop import KEY, WINDOW, AgentLoop, replicas
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy

NOW = {"x-ullage-compact": "now"}
OTHER = "sk-test-of-somebody-else-000"


async def get(front: Proxy, path: str, key: str = KEY) -> httpx.Response:
    async with loopback_client(base_url=f"{front.root}/ullage/api") as client:
        return await client.get(path, headers={"authorization": f"Bearer {key}"})


async def request_compaction(front: Proxy, conversation: str, key: str = KEY) -> httpx.Response:
    async with loopback_client(base_url=f"{front.root}/ullage/api") as client:
        return await client.post(
            "/compact", json={"conversation": conversation}, headers={"authorization": f"Bearer {key}"}
        )


async def thread(front: Proxy, conversation: str) -> dict[str, Any]:
    """What is told of a conversation that has one thread; empty while nothing is told."""
    got = await get(front, f"/conversations/{conversation}")
    if got.status_code == 404:
        return {}
    assert got.status_code == 200, got.text
    (found,) = got.json()["threads"]
    return dict(found)


async def thread_once(front: Proxy, conversation: str, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What is told of a conversation once *ready* says so: it is written behind the answers."""
    record = await thread(front, conversation)
    async with asyncio.timeout(60):
        while not record or not ready(record):
            await asyncio.sleep(0.25)  # no more often than one may ask
            record = await thread(front, conversation)
    return record


def ageless(record: Mapping[str, Any]) -> dict[str, Any]:
    """*record* without what differs from one second to the next."""
    found = dict(record)
    for name in ("last", "folds", "summaries"):
        found[name] = [{key: value for key, value in each.items() if "seconds" not in key} for each in record[name]]
    return found


@pytest.mark.parametrize(
    ("mode", "behaviour"), [("background", "honest"), ("background", "failing"), ("inline", "honest")]
)
async def test_a_requested_compaction_waits_for_its_summary(
    stub: StartStub, home: Path, proxy: StartProxy, mode: str, behaviour: Behaviour
) -> None:
    """With the header the very answer is of a view with a model's summary; by rule alone where the model fails."""
    server = await stub(window=WINDOW)
    server.summariser = behaviour
    front = await proxy(server.url, window=WINDOW, home=home, config={"summaries": {"mode": mode}})
    async with AgentLoop(server, [front]) as loop:
        for _ in range(10):
            await loop.ask()
        assert not server.summaries
        assert not loop.events
        await loop.ask(more=NOW)
        assert len(loop.events) == 1
        assert loop.headers[-1]["x-ullage-stages"] == "fold"
        assert len(server.summaries) == 1
        assert ("as a model summed it up" in loop.shown()) is (behaviour == "honest")
        assert (loop.spent > 0) is (behaviour == "honest")


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_other_apis_are_compacted_on_request_as_well(
    stub: StartStub, home: Path, proxy: StartProxy, api: str
) -> None:
    """The header works alike in every API, and so does what is told afterwards, by the API's own credential."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, home=home)
    async with AgentLoop(server, [front], api=api) as loop:
        for _ in range(10):
            await loop.ask()
        await loop.ask(more=NOW)
        assert len(loop.events) == 1
        assert len(server.summaries) == 1
        assert loop.spent > 0
        credential = "x-api-key" if api == "messages" else "authorization"
        value = KEY if api == "messages" else f"Bearer {KEY}"
        path = f"{front.root}/ullage/api/conversations/{loop.headers[-1]['x-ullage-conversation']}"
        async with loopback_client() as client, asyncio.timeout(60):
            got = await client.get(path, headers={credential: value})
            while got.status_code == 404 or not got.json()["threads"][0]["folds"]:
                await asyncio.sleep(0.25)
                got = await client.get(path, headers={credential: value})
        (fold,) = got.json()["threads"][0]["folds"]
        assert (fold["by"], fold["state"]) == ("gpt-4o-mini", "active")
        other = {"authorization": f"Bearer {KEY}"} if api == "messages" else {"x-api-key": KEY}
        async with loopback_client() as client:
            assert (await client.get(path, headers=other)).status_code == 404


async def test_no_model_is_called_if_none_may_be(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """With summaries off a compaction asked for is written by rule, without a call."""
    server = await stub(window=WINDOW)
    config = {"summaries": {"mode": "off"}}
    front = await proxy(server.url, window=WINDOW, home=home, config=config)
    async with AgentLoop(server, [front]) as loop:
        for _ in range(10):
            await loop.ask()
        await loop.ask(more=NOW)
        assert len(loop.events) == 1
        assert not server.summaries
        assert loop.spent == 0


async def test_a_wish_is_known_to_every_replica_and_granted_once(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """Told one replica, the next request compacts on the other, with a summary; the one after it goes on as usual."""
    server = await stub(window=WINDOW)
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home)) as loop:
        for _ in range(10):
            await loop.ask()
        name = loop.headers[-1]["x-ullage-conversation"]
        one, two = loop.fronts
        replica = loop.fronts[(loop.rounds + 1) % 2]
        got = await request_compaction(replica, name)
        assert got.status_code == 202, got.text
        assert got.json()["threads"] == 1
        assert (await thread(one, name))["compaction_wished"]
        assert (await thread(two, name))["compaction_wished"]
        await loop.ask()
        assert loop.events == [loop.rounds - 1]
        assert "as a model summed it up" in loop.shown()
        for _ in range(3):
            await loop.ask()
        assert len(loop.events) == 1
        assert not (await thread(one, name))["compaction_wished"]


async def test_a_conversation_is_shown_alike_everywhere(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """Every replica tells the same folds and summaries, to the conversation's own tenant alone, by its name."""
    server = await stub(window=WINDOW)
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home)) as loop:
        while len(loop.events) < 2:
            await loop.ask()
        one, two = loop.fronts
        name = loop.headers[-1]["x-ullage-conversation"]
        record = await thread_once(one, name, lambda record: len(record["folds"]) == 2)
        assert ageless(record) == ageless(await thread(two, name))
        first, second = record["folds"]
        assert (first["state"], second["state"]) == ("past", "active")
        assert (second["from"], second["new_from"]) == (0, first["to"])
        assert 0 < first["to"] < second["to"] <= second["at"] <= record["last"][0]["items"]
        assert second["tokens_in"] > second["tokens_out"] > 0
        assert {first["by"], second["by"]} <= {"heuristic", "gpt-4o-mini"}
        assert "gpt-4o-mini" in (first["by"], second["by"])
        (last,) = record["last"]
        assert last["window"] == WINDOW
        assert last["outcome"] == "compacted"
        assert {each["state"] for each in record["summaries"]} <= {"used", "unused", "ready", "pending", "skipped"}
        assert "used" in {each["state"] for each in record["summaries"]}
        (listed,) = (await get(two, "/conversations")).json()["conversations"]
        assert listed["conversation"] == name
        for key in (OTHER,):
            assert (await get(one, f"/conversations/{name}", key)).status_code == 404
            assert (await request_compaction(one, name, key)).status_code == 404
            assert (await get(one, "/conversations", key)).json() == {"conversations": []}
        text = str(record)
        assert "shard" not in text
        assert "ledger_" not in text
        remote.kill()
        assert (await get(one, f"/conversations/{name}")).status_code == 503


def tried_again(summary: dict[str, Any]) -> bool:
    """Whether *summary* failed and says when the next try is."""
    return summary["state"] == "failed" and (summary["retry_in_seconds"] or 0) > 0


async def test_a_failed_summary_and_a_lost_record_are_shown(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """A model that fails shows as failed with the time of the next try; records that are gone show as lost."""
    server = await stub(window=WINDOW)
    server.summariser = "failing"
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home, "a"), 600) as loop:
        while not loop.events:
            await loop.ask()
        name = loop.headers[-1]["x-ullage-conversation"]
        record = await thread_once(
            loop.fronts[0],
            name,
            # When it is tried again is noted a moment after that it failed.
            lambda record: bool(record["folds"]) and any(map(tried_again, record["summaries"])),
        )
        failed = next(filter(tried_again, record["summaries"]))
        assert failed["reason"]
        assert record["folds"][0]["by"] == "heuristic"
        (event,) = [key for key in remote.say("KEYS *:e:*").split() if ":e:" in key]
        remote.say(f"DEL {event}")
        assert (await thread(loop.fronts[0], name))["folds"][0]["state"] == "lost"

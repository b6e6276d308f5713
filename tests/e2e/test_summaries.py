"""Summaries by a model on running proxies: ready before they are needed, the same for every replica, harmless."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_store import frozen, full, lost
from tests.store.conftest import Valkey, eventually
from tests.stub.summariser import INJECTED, PLANTED, Behaviour
from tests.support.agent_loop import KEY, WINDOW, AgentLoop, replicas
from tests.support.process_inspection import log_lines, metrics, status, total
from tests.support.proxy_process import Proxy, until

CONSTRAINTS = tuple(
    f"Constraint {n}: never touch shard_{500 + n} without a backup of zone_{700 + n}." for n in range(15)
)


async def test_two_replicas_write_one_summary_for_each_event(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey, record_property: Any
) -> None:
    """Sixty rounds on two replicas in turn: at most one call per event, used by the next one, and no view differs.

    Every request reaches the upstream as one request, and none is answered after a summary was: whoever waited for one
    would wait for ever. Each view begins with all of the one before it, but for those that are told as compactions.
    """
    server = await stub(window=WINDOW)
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home), gated=True) as loop:
        for _ in range(60):
            await loop.ask()
        assert 3 <= len(loop.events) <= 6, loop.events
        assert 1 < len(server.summaries) <= len(loop.events) + 1
        assert all(seen.verdict == "ok" for seen in server.summaries), "a call was too big for its own window"
        assert loop.spent > 0
        assert "as a model summed it up" in loop.shown()
        costs = [int(headers.get("x-ullage-summary-tokens", 0)) for headers in loop.headers]
        assert costs == sorted(costs)
        sent = sum(seen.tokens for seen in server.chats())
        took = sum(seen.tokens + 200 for seen in server.summaries)
        record_property("summaries", f"{len(server.summaries)} calls, {took / sent:.3f} of the tokens sent")
        assert took <= 0.12 * sent
        await loop.settled()
        figures = [await metrics(front) for front in loop.fronts]
        assert sum(total(each, "ullage_summaries_total", outcome="failed") for each in figures) == 0
        assert sum(total(each, "ullage_compactions_total") for each in figures) == len(loop.events)
        (client,) = (await status(loop.fronts[0]))["summaries"]["clients"]
        assert 0 < client["spent_tokens"] <= 1.2 * client["allowed_tokens"]
        assert total(figures[0], "ullage_summary_tokens_total", tenant=client["tenant"]) > 0


async def test_a_call_goes_out_with_the_requests_own_key(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """The summariser is asked with the caller's key and model, without tools, and the key is in no log."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, home=home)
    async with AgentLoop(server, [front], 600) as loop:
        while not server.summaries:
            await loop.ask()
        await loop.settled()
    (seen,) = server.summaries
    assert seen.header("authorization") == f"Bearer {KEY}"
    assert seen.model == "gpt-4o-mini"
    assert "tools" not in seen.parsed
    assert seen.messages[1]["content"].count("tool result:\n| ") >= 2
    await until(lambda: any(line["event"] == "summary.done" for line in log_lines(front)))
    (line,) = [line for line in log_lines(front) if line["event"] == "summary.done"]
    assert line["outcome"] == "written"
    assert "sk-test" not in front.log.read_text()
    assert "Note 1" not in front.log.read_text()


async def test_a_killed_holder_holds_nobody_up(stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey) -> None:
    """The replica that writes is killed in the middle: the other answers every request, over the next events."""
    server = await stub(window=WINDOW)
    server.summariser = "hanging"
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home), 600) as loop:
        while not server.summaries:
            await loop.ask(settle=False)
        assert ":k:" in remote.say("KEYS *")
        holder = await _holder(loop.fronts)
        holder.end(signal.SIGKILL)
        loop.fronts = [front for front in loop.fronts if front is not holder]
        while not loop.events:
            await loop.ask(settle=False)
        assert len(server.summaries) == 1, "the lease of a dead replica was taken before its time"
        while len(loop.events) < 3:
            await loop.ask(settle=False)
        _end_at_once(loop.fronts)


def _end_at_once(fronts: Sequence[Proxy]) -> None:
    """End *fronts* without a drain, which would wait for a summary that never comes."""
    for front in fronts:
        front.end(signal.SIGKILL)


async def _holder(fronts: Sequence[Proxy]) -> Proxy:
    """The one of *fronts* that runs a job; its figure is told once a second."""
    while True:
        running = [front for front in fronts if total(await metrics(front), "ullage_summaries_running")]
        if len(running) == 1:
            return running[0]


@pytest.mark.parametrize("spoil", [frozen, full, lost])
async def test_a_broken_store_costs_no_request(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey, spoil: Callable[[Valkey], None]
) -> None:
    """A store that freezes, fills up or is emptied while summaries are written and used: every request is answered."""
    server = await stub(window=WINDOW)
    async with AgentLoop(server, await replicas(proxy, server, remote.url, home), 600) as loop:
        while not loop.events:
            await loop.ask()
        spoil(remote)
        for _ in range(14):
            await loop.ask(settle=False)
        for front in loop.fronts:
            failed = [line for line in log_lines(front) if line["event"] in ("proxy.task_failed", "proxy.loop_error")]
            assert failed == []


async def test_a_restart_of_everything_changes_no_view(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """Proxies and store stopped and started again: the next view begins with all of the last one, summary included."""
    server = await stub(window=WINDOW)
    fronts = await replicas(proxy, server, remote.url, home)
    async with AgentLoop(server, fronts, 600) as loop:
        while not loop.events or not loop.spent:
            await loop.ask()
        calls, events, spent = len(server.summaries), len(loop.events), loop.spent
        for front in fronts:
            assert await asyncio.to_thread(front.end) == 0
        remote.signal(signal.SIGTERM)
        assert remote.process is not None
        remote.process.wait(60)
        remote.start()
        for front in fronts:
            await front.start()
        await loop.ask(settle=False)
        assert len(loop.events) == events
        assert loop.spent == spent
        assert len(server.summaries) == calls


async def test_what_is_being_written_is_finished_on_drain(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """On SIGTERM a summary under way is finished and kept, its client long gone, and its lease given back."""
    server = await stub(window=WINDOW)
    server.summariser = "slow"
    (front,) = await replicas(proxy, server, remote.url, home, "a")
    async with AgentLoop(server, [front], 600) as loop:
        while not server.summaries:
            await loop.ask(settle=False)
    # In a thread: the upstream that still answers the summary lives in this one.
    assert await asyncio.to_thread(front.end) == 0
    assert ":s:" in remote.say("KEYS *")
    assert ":k:" not in remote.say("KEYS *")


@pytest.mark.parametrize("behaviour", ["honest", "lossy", "hostile", "empty", "hanging"])
async def test_constraints_survive_and_nobody_is_commanded(
    stub: StartStub, home: Path, proxy: StartProxy, behaviour: Behaviour, record_property: Any
) -> None:
    """Over six events, whatever the summariser does, all 15 constraints stand in every view and no invented order does.

    Orders that tools gave stand in nobody's name: only as quotes. How many of 40 facts are left at the end is reported.
    """
    server = await stub(window=WINDOW)
    server.summariser = behaviour
    front = await proxy(server.url, window=WINDOW, home=home)
    async with AgentLoop(server, [front], 500, planted=PLANTED) as loop:
        told, quoted = 0, 0
        while len(loop.events) < 6 or loop.rounds <= 41:
            said = CONSTRAINTS[told] if loop.rounds % 2 and told < len(CONSTRAINTS) else ""
            told += bool(said)
            await loop.ask(text=said, settle=behaviour != "hanging")
            shown = loop.shown()
            assert [rule for rule in CONSTRAINTS[:told] if rule not in shown] == []
            assert [order for order in INJECTED if order in shown] == []
            unquoted = loop.outside_quotes()
            assert [order for order in PLANTED if order in unquoted] == []
            quoted += f"“{PLANTED[1]}”" in shown
        facts = [f"Note {n}: the shard of ledger_{400 + n} is {9400 + n}." for n in range(1, 41)]
        whole, named = sum(fact in shown for fact in facts), sum(str(9400 + n) in shown for n in range(1, 41))
        record_property("facts", f"{behaviour}: of {len(facts)}, {whole} whole and {named} figures")
        assert (loop.spent > 0) is (behaviour in ("honest", "lossy", "hostile"))
        assert bool(quoted) is (behaviour == "hostile"), "the summariser's orders were not put to the test"
    assert server.summaries
    if behaviour == "hanging":
        _end_at_once([front])


async def test_off_asks_nobody(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """With ``mode: off`` a conversation is compacted and no model is ever asked."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, config={"summaries": {"mode": "off"}}, home=home)
    async with AgentLoop(server, [front], 900) as loop:
        while len(loop.events) < 2:
            await loop.ask()
    assert server.summaries == []
    assert "no model is called" in front.log.read_text()


async def test_inline_a_compaction_waits_for_its_summary(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """With ``mode: inline`` the very first compaction has its summary, written for just its prefix."""
    server = await stub(window=WINDOW)
    config = {"summaries": {"mode": "inline", "spend": 1.0}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    async with AgentLoop(server, [front], 600) as loop:
        while not loop.events:
            assert server.summaries == []
            await loop.ask()
        assert len(server.summaries) <= 2, "the prefix takes two calls at most in this window"
        assert total(await metrics(front), "ullage_summaries_total", outcome="written") == 1
        assert loop.spent > 0


async def test_inline_a_hanging_summariser_costs_its_timeout_and_no_more(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """A compaction that waits in vain is sent without a summary."""
    server = await stub(window=WINDOW)
    server.summariser = "hanging"
    config = {"summaries": {"mode": "inline", "spend": 1.0, "timeout": 0.3}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    async with AgentLoop(server, [front], 900) as loop:
        while len(loop.events) < 2:
            await loop.ask(settle=False)
        assert loop.spent == 0
    _end_at_once([front])


@pytest.mark.parametrize("key", ["sk-ant-oat01-abc", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"])
async def test_subscription_tokens_are_not_used(stub: StartStub, home: Path, proxy: StartProxy, key: str) -> None:
    """With an OAuth or subscription token no model is asked for a summary, and the reason is counted."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, home=home)
    async with AgentLoop(server, [front], 600, key) as loop:
        while not total(await metrics(front), "ullage_summaries_total", reason="subscription"):
            await loop.ask()
    assert server.summaries == []


async def test_another_model_on_another_upstream_writes_for_those_who_may(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """A configured summariser gets its own upstream's key, never the caller's, and only listed callers' words."""
    server, other = await stub(window=WINDOW), await stub(window=16384)
    config = {
        "upstreams": [
            {"name": "main", "base_url": server.url},
            {"name": "cheap", "base_url": other.url, "api_key": "sk-of-the-house"},
        ],
        "models": [
            {"name": "small-1", "upstream": "cheap", "context_window": 16384},
            {"name": "*", "upstream": "main", "context_window": WINDOW},
        ],
        "summaries": {"model": "small-1", "allow": ["sk-allowed-000000000"]},
    }
    front = await proxy(server.url, config=config, home=home)
    async with AgentLoop(server, [front], 700) as loop:
        # Who is not listed is summed up by the model that has the words already.
        while not server.summaries:
            await loop.ask()
    assert other.summaries == []
    calls = len(server.summaries)
    async with AgentLoop(server, [front], 700, "sk-allowed-000000000") as loop:
        while not other.summaries:
            await loop.ask(settle=False)
        await eventually(lambda: any(line.get("upstream") == "cheap" for line in log_lines(front) if "calls" in line))
    assert len(server.summaries) == calls
    assert {seen.header("authorization") for seen in other.summaries} == {"Bearer sk-of-the-house"}
    assert {seen.verdict for seen in other.summaries} == {"ok"}
    assert {seen.model for seen in other.summaries} == {"small-1"}

"""One job for each stretch of a conversation, over all replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.core.conversation import ItemText
from proxy.engine.ports import SummaryRequest
from proxy.store.operations import MemoryBackend
from tests.conftest import StartStub
from tests.store.conftest import Opener, Valkey
from tests.stub.summariser import Behaviour
from tests.support.proxy_process import until
from tests.support.summary_fixtures import (
    ROUTE,
    SINCE,
    TENANT,
    SummaryReplica,
    entries_of,
    summary_request_of,
    summary_table,
)


async def settled(*benches: SummaryReplica) -> None:
    await until(lambda: not any(bench.jobs.running for bench in benches))


async def test_a_summary_is_ready_when_it_is_needed(stub: StartStub) -> None:
    """A prepared wanted is found afterwards, on another replica too, and of a longer one as its newest prefix."""
    server, table = await stub(), summary_table(MemoryBackend())
    first, second = SummaryReplica(server, table), SummaryReplica(server, table)
    entries = entries_of(12)
    wanted = summary_request_of(entries).up_to(16)
    assert await first.jobs.ready(wanted) is None
    first.jobs.prepare(wanted)
    await settled(first)
    for bench in (first, second):
        found = await bench.jobs.ready(summary_request_of(entries))
        assert found is not None
        assert found.length == 16
        assert found.tokens_spent > 0
    assert not first.jobs.is_due(wanted.client_request, ROUTE, SINCE)
    second.jobs.prepare(summary_request_of(entries))
    await settled(second)
    assert [report.outcome for report in first.reports + second.reports] == ["written", "adopted"]
    assert len(server.summaries) == 1
    await first.close()
    await second.close()


async def test_eight_replicas_ask_once(stub: StartStub) -> None:
    """However many replicas and requests ask at the same moment, one call goes out."""
    server, table = await stub(), summary_table(MemoryBackend())
    server.summariser = "slow"
    benches = [SummaryReplica(server, table) for _ in range(8)]
    for _ in range(25):
        for bench in benches:
            bench.jobs.prepare(summary_request_of(entries_of(8)))
    await settled(*benches)
    assert len(server.summaries) == 1
    assert sorted(report.reason for bench in benches for report in bench.reports) == [""] + ["elsewhere"] * 7
    for bench in benches:
        await bench.close()


async def test_a_compaction_that_waits_gets_the_summary_of_another_replica(stub: StartStub) -> None:
    """Inline, the second replica adopts the first one's text; a shorter one does when there is none in time."""
    server, table = await stub(), summary_table(MemoryBackend())
    server.summariser = "slow"
    benches = [SummaryReplica(server, table, mode="inline") for _ in range(2)]
    for bench in benches:
        task = bench.tasks.spawn(_advance(bench), "clock")
        del task
    wanted = summary_request_of(entries_of(8))
    found = await asyncio.gather(*(bench.jobs.write(wanted) for bench in benches))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].text == found[1].text
    assert len(server.summaries) == 1
    assert not benches[0].jobs.is_due(wanted.client_request, ROUTE, SINCE), "inline nothing is prepared"
    for bench in benches:
        await bench.close()


async def test_one_request_waits_once(stub: StartStub) -> None:
    """A request that comes back for a summary of a longer prefix has no more time than the first time left it."""
    server = await stub()
    bench = SummaryReplica(server, summary_table(MemoryBackend()), mode="inline", timeout=0.3, seconds=30.0)
    server.gate.clear()
    entries = entries_of(12)
    first, longer = summary_request_of(entries).up_to(16), summary_request_of(entries)
    assert await bench.jobs.write(first) is None
    bench.now += 0.3
    server.gate.set()
    await settled(bench)
    calls = len(server.summaries)
    found = await bench.jobs.write(longer)
    assert found is None or found.length == 16
    assert len(server.summaries) == calls, "a text was begun that nobody waits for"
    another = replace(longer, client_request=structs.replace(longer.client_request, request_id="another"))
    written = await bench.jobs.write(another)
    assert written is not None
    assert written.length == len(entries)
    await bench.close()


async def _advance(bench: SummaryReplica) -> None:
    for _ in range(500):
        await asyncio.sleep(0.01)
        bench.now += 0.01
        if bench.reports:
            return


@pytest.mark.parametrize("behaviour", ["empty", "failing", "hostile"])
async def test_three_failures_open_the_breaker(stub: StartStub, behaviour: Behaviour) -> None:
    """A failed stretch is left alone for a minute; after three failures nobody of this tenant is asked, then one is."""
    server = await stub()
    server.summariser = behaviour
    bench = SummaryReplica(server, summary_table(MemoryBackend()), timeout=1.0)
    for at in range(4):
        bench.jobs.prepare(_elsewhere(at))
        await settled(bench)
        assert not bench.jobs.is_due(summary_request_of(entries_of(8)).client_request, ROUTE, bytes([at]) * 16)
    if behaviour == "hostile":
        assert len(server.summaries) == 4, "orders taken out, the rest of it is used"
    else:
        assert len(server.summaries) == 3
        assert [report.reason for report in bench.reports][3] == "breaker"
        assert bench.jobs.open_breakers == 1
        (broken,) = bench.jobs.status()["breakers"]
        assert broken == {"tenant": TENANT[:2].hex(), "summariser": "stub,gpt-4o-mini,chat", "state": "open"}
        server.summariser = "honest"
        bench.now += 100.0
        bench.jobs.prepare(_elsewhere(9))
        await settled(bench)
        assert bench.reports[-1].outcome == "written"
        assert bench.jobs.open_breakers == 0
        assert bench.jobs.status()["breakers"] == []
    await bench.close()


def _elsewhere(at: int) -> SummaryRequest:
    """The wanted of another conversation."""
    wanted, name = summary_request_of(entries_of(8)), bytes([at]) * 8
    cuts = tuple(structs.replace(cut, prefix_hash=name + cut.prefix_hash[8:]) for cut in wanted.prefixes)
    return replace(wanted, last_compaction=name * 2, root_hash=name * 2, prefixes=cuts)


async def test_a_limit_pauses_all_summaries_of_a_tenant(stub: StartStub) -> None:
    """After a 429 nothing is asked on this tenant's behalf, on no replica."""
    server, table = await stub(), summary_table(MemoryBackend())
    server.summariser = "limited"
    bench, other = SummaryReplica(server, table), SummaryReplica(server, table)
    bench.jobs.prepare(_elsewhere(1))
    await settled(bench)
    for each in (bench, other):
        each.jobs.prepare(_elsewhere(2))
        await settled(each)
        assert each.reports[-1].reason == "paused"
    assert len(server.summaries) == 1
    await bench.close()
    await other.close()


async def test_a_dead_replicas_lease_is_taken_over(stub: StartStub, valkey: Valkey, opener: Opener) -> None:
    """When the holder of a lease is gone for good, another replica writes as soon as the lease has run out."""
    server = await stub()
    store = await opener(valkey.url)
    bench = SummaryReplica(server, store.summaries, lease_seconds=0.5)
    wanted = summary_request_of(entries_of(8))
    policy = bench.jobs._job(wanted, waits=False).policy
    assert await store.summaries.lease(wanted.root_hash, policy, wanted.last_compaction, 0.5) is not None
    bench.jobs.prepare(wanted)
    await settled(bench)
    assert [report.reason for report in bench.reports] == ["elsewhere"]

    async def again() -> None:
        while bench.reports[-1].outcome != "written":
            bench.now += 1.0
            bench.jobs.prepare(wanted)
            await settled(bench)

    await asyncio.wait_for(again(), 60)
    assert len(server.summaries) == 1
    await bench.close()


async def test_a_job_that_is_cancelled_gives_its_lease_back(stub: StartStub) -> None:
    """When the time to finish is over, a running job ends and its lease is free."""
    server, table = await stub(), summary_table(MemoryBackend())
    server.summariser = "hanging"
    bench = SummaryReplica(server, table, timeout=60.0)
    wanted = summary_request_of(entries_of(8))
    lease = (wanted.root_hash, bench.jobs._job(wanted, waits=False).policy, wanted.last_compaction, 1.0)
    bench.jobs.prepare(wanted)
    await until(lambda: bool(server.summaries))
    assert await table.lease(*lease) is None
    await bench.jobs.finish(0.05)
    assert await table.lease(*lease) is not None
    assert not bench.jobs.is_due(summary_request_of(entries_of(8)).client_request, ROUTE, SINCE)
    await bench.close()


async def test_subscription_tokens_of_an_upstream_are_respected(stub: StartStub) -> None:
    """An upstream whose own key is a subscription token is asked only where that is allowed."""
    server = await stub()
    for allowed in (False, True):
        bench = SummaryReplica(
            server,
            summary_table(MemoryBackend()),
            subscription_upstreams=frozenset({"stub"}),
            allow_subscriptions=allowed,
        )
        bench.jobs.prepare(summary_request_of(entries_of(8)))
        await settled(bench)
        assert bench.reports[0].reason == ("" if allowed else "subscription")
        await bench.close()


async def test_a_fault_of_ours_is_reported_and_not_paid_for_again(
    stub: StartStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error nobody foresaw ends the job, reaches whoever keeps tasks, and starts no second job for that stretch."""
    bench = SummaryReplica(await stub(), summary_table(MemoryBackend()))

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.writer, "write", broken)
    bench.jobs.prepare(summary_request_of(entries_of(8)))
    await settled(bench)
    assert [type(error) for _, error in bench.failed] == [ZeroDivisionError]
    assert not bench.jobs.is_due(summary_request_of(entries_of(8)).client_request, ROUTE, SINCE)
    bench.failed.clear()
    await bench.close()


async def test_more_items_than_a_client_may_pay_for_are_not_read(stub: StartStub) -> None:
    """That a transcript of many items is too expensive is known by their number; none of them is read."""
    replica = SummaryReplica(await stub(), summary_table(MemoryBackend()), sent=200)
    wanted = summary_request_of(entries_of(50))
    read: list[tuple[int, int]] = []

    def read_entries(start: int, stop: int) -> list[ItemText]:
        read.append((start, stop))
        return entries_of(50)[start:stop]

    replica.jobs.prepare(replace(wanted, read_entries=read_entries))
    await settled(replica)
    assert [(report.outcome, report.reason) for report in replica.reports] == [("skipped", "budget")]
    assert read == []
    await replica.close()

"""The contract that summaries have with every store, and a cluster of six."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from proxy.store import Store
from proxy.store.key_names import ARCHIVED, LEASE, NOTES, SUMMARY, key_name, record_name
from proxy.store.operations import Claim, Read, Remove
from proxy.store.summary_table import SLOT, SLOTS
from tests.store.conftest import Opener, Valkey, eventually
from tests.support.valkey_groups import cluster_whole, keys_of, six_nodes

TENANT, OTHER, ROOT, POLICY = b"t" * 32, b"o" * 32, b"r" * 16, b"p" * 8
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
NOW = 1_800_000_000.0


@pytest.fixture(params=["memory", "unix"])
async def store(request: pytest.FixtureRequest, opener: Opener) -> Store:
    """An open, empty store of each kind."""
    if request.param == "memory":
        return await opener("memory")
    server: Valkey = request.getfixturevalue("valkey")
    return await opener(server.url)


async def test_the_first_summary_holds_and_the_newest_is_found(store: Store) -> None:
    """The first text kept for a prefix is everybody's; of several prefixes the one named first is returned."""
    table = store.summaries
    assert await table.newest(TENANT, ROOT, POLICY, [A, B]) is None
    assert await table.save(TENANT, ROOT, POLICY, A, b"first") == b"first"
    assert await table.save(TENANT, ROOT, POLICY, A, b"second") == b"first"
    await table.save(TENANT, ROOT, POLICY, B, b"longer")
    assert await table.newest(TENANT, ROOT, POLICY, [C, B, A]) == (1, b"longer")


async def test_other_tenants_and_policies_see_nothing(store: Store) -> None:
    """A text is found by its own tenant under its own policy only."""
    table = store.summaries
    await table.save(TENANT, ROOT, POLICY, A, b"mine")
    assert await table.newest(TENANT, ROOT, b"q" * 8, [A]) is None
    assert await table.newest(OTHER, ROOT, POLICY, [A]) is None


async def test_one_holder_at_a_time(store: Store) -> None:
    """A lease is given once, renewed by its holder alone, and free again when it is given back or has run out."""
    table = store.summaries
    lease = await table.lease(ROOT, POLICY, A, 60)
    assert lease is not None
    assert await table.lease(ROOT, POLICY, A, 60) is None
    assert await table.lease(ROOT, POLICY, B, 60) is not None
    assert await lease.renew(60)
    await lease.release()
    assert not await lease.renew(60)
    short = await table.lease(ROOT, POLICY, A, 0.05)
    assert short is not None
    next_one = None
    async with asyncio.timeout(60):
        while next_one is None:
            next_one = await table.lease(ROOT, POLICY, A, 60)
    await short.release()
    assert await table.lease(ROOT, POLICY, A, 60) is None, "who lost a lease gave somebody else's back"


async def test_a_refusal_and_a_pause_are_seen_by_all(store: Store) -> None:
    """Marks made in the background are there soon, for their own conversation and tenant."""
    table = store.summaries
    assert not await table.is_refused(ROOT, POLICY, A)
    table.refuse(ROOT, POLICY, A, 60)
    table.pause(TENANT, 60)
    async with asyncio.timeout(60):
        while not await table.is_refused(ROOT, POLICY, A) or not (await table.spending(TENANT, NOW))[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not await table.is_refused(ROOT, POLICY, B)
    assert await table.spending(OTHER, NOW) == (0, 0, False)


async def test_the_last_hour_is_added_up(store: Store) -> None:
    """Tokens count for an hour in slots of ten minutes, sent and spent apart; a later hour starts afresh."""
    table = store.summaries
    for at in (0, SLOT, SLOT * SLOTS):
        table.count(TENANT, "in", 1000, NOW + at)
    table.count(TENANT, "out", 300, NOW)
    table.count(TENANT, "out", -100, NOW)
    async with asyncio.timeout(60):
        while await table.spending(TENANT, NOW + SLOT * SLOTS) != (3000, 200, False):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await table.spending(TENANT, NOW + SLOT * (SLOTS + 1)) == (2000, 0, False)
    assert await table.spending(OTHER, NOW) == (0, 0, False)


@pytest.mark.usefixtures("impatient")
async def test_a_hung_store_gives_nothing_and_takes_no_harm(valkey: Valkey, opener: Opener) -> None:
    """While the server is frozen there is no text, no lease, no figure, and nothing is raised."""
    store = await opener(valkey.url)
    table = store.summaries
    lease = await table.lease(ROOT, POLICY, A, 60)
    assert lease is not None
    valkey.signal(signal.SIGSTOP)
    try:
        assert await table.newest(TENANT, ROOT, POLICY, [A]) is None
        assert await table.save(TENANT, ROOT, POLICY, A, b"mine") == b"mine"
        assert await table.lease(ROOT, POLICY, B, 60) is None
        assert not await table.is_refused(ROOT, POLICY, A)
        assert await table.spending(TENANT, NOW) == (0, 0, False)
        assert await lease.renew(60), "a store that does not answer takes no lease away"
        await lease.release()
        table.count(TENANT, "in", 5, NOW)
        table.pause(TENANT, 60)
        table.refuse(ROOT, POLICY, A, 60)
    finally:
        valkey.signal(signal.SIGCONT)


@pytest.mark.slow
async def test_a_cluster_of_six_has_a_conversation_on_one_node(short_path: Path, opener: Opener) -> None:
    """Three masters and three replicas: everything of a conversation is in one slot, and a lost master is replaced."""
    async with six_nodes(short_path) as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        store = await opener(f"redis+cluster://{hosts}", key=b"one master key for all of them!!")
        assert store.state().up
        table, roots = store.summaries, [bytes([at]) * 16 for at in range(12)]
        for root in roots:
            assert await store.records.save(TENANT, root, "r", A, b"event") == b"event"
            assert await table.save(TENANT, root, POLICY, B, b"text") == b"text"
            lease = await table.lease(root, POLICY, A, 60)
            assert lease is not None
            assert await lease.renew(60)
            assert await table.lease(root, POLICY, A, 60) is None
            store.conversations.save_note(TENANT, root, "z", b"note", long_lived=True)
            await store.conversations.request_compaction(TENANT, root, 60)
            assert await store.archive.save(TENANT, root, A, b"original", 60)
            await store.records.newest(TENANT, root, "r", [B, A])
            assert await store.records.pop_request(TENANT, root), "a wish comes along with the look for records"
        table.count(TENANT, "in", 7, NOW)
        held = [keys_of(server) for server in servers[:3]]
        assert all(held), "the conversations are not spread over the masters"
        for root in roots:
            names = {
                record_name(root, "r", A),
                key_name(root, SUMMARY, POLICY, B),
                key_name(root, LEASE, POLICY, A),
            }
            names |= {key_name(root, NOTES), key_name(root, ARCHIVED, A)}
            assert sum(names <= found for found in held) == 1
        await eventually(lambda: sum(keys_of(server) == held[0] for server in servers) == 2)
        servers[0].kill()
        await cluster_whole(servers[1:])
        async with asyncio.timeout(60):
            for root in roots:
                while await table.newest(TENANT, root, POLICY, [B]) != (0, b"text"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert await table.lease(roots[0], POLICY, A, 60) is None, "a lease was lost with its master"


def _slot_of(server: Valkey, root: bytes) -> int:
    return int(server.say(f"CLUSTER KEYSLOT {record_name(root, 'r', A)}")[1:])


@pytest.mark.slow
async def test_a_cluster_that_is_resharded_keeps_every_record(short_path: Path, opener: Opener) -> None:
    """While a slot moves from one master to another its conversation is read and written, on either side, and after."""
    async with six_nodes(short_path) as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        store = await opener(f"redis+cluster://{hosts}", key=b"one master key for all of them!!")
        there, onward = servers[0], servers[1]
        roots = [root for at in range(60) if _slot_of(there, root := bytes([at]) * 16) <= 5460][:4]
        for root in roots:
            assert await store.records.save(TENANT, root, "r", A, b"event") == b"event"
        ids = [server.say("CLUSTER MYID").splitlines()[1] for server in (there, onward)]
        for root in roots:
            slot = _slot_of(there, root)
            assert onward.say(f"CLUSTER SETSLOT {slot} IMPORTING {ids[0]}").startswith("+OK")
            assert there.say(f"CLUSTER SETSLOT {slot} MIGRATING {ids[1]}").startswith("+OK")
            # Half-way: what is there is read, what is not is asked of the other side, and nothing takes long.
            async with asyncio.timeout(60):
                await store.records.newest(TENANT, root, "r", [B, A])
                assert await store.records.save(TENANT, root, "r", B, b"meanwhile") == b"meanwhile"
            names = [name for name in there.say(f"CLUSTER GETKEYSINSLOT {slot} 100").splitlines() if "ullage1" in name]
            for name in names:
                moved = there.say(f"MIGRATE 127.0.0.1 {onward.port} {name} 0 2000 REPLACE")
                assert moved.startswith("+OK"), moved
            for server in (onward, there, *servers[2:3]):
                assert server.say(f"CLUSTER SETSLOT {slot} NODE {ids[1]}").startswith("+OK")
        async with asyncio.timeout(60):
            for root in roots:
                while await store.records.newest(TENANT, root, "r", [A]) != (0, b"event"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        await eventually(lambda: store.state().up, 60)
        assert all(record_name(root, "r", A) in keys_of(onward) for root in roots)


@pytest.mark.slow
async def test_a_server_that_evicts_anything_never_gives_a_wrong_answer(valkey: Valkey, opener: Opener) -> None:
    """Two replicas on a server that throws keys away at random: a miss at worst, and what one fixed the other sees."""
    valkey.say("CONFIG SET maxmemory-policy allkeys-random")
    one, two = await opener(valkey.url, key=b"k" * 32), await opener(valkey.url, key=b"k" * 32)
    used = int(valkey.say("INFO memory").partition("used_memory:")[2].split()[0])
    assert valkey.say(f"CONFIG SET maxmemory {used + 600_000}").startswith("+OK")
    missed = found = 0
    for at in range(400):
        root = at.to_bytes(16, "big")
        record = root * 200 + os.urandom(4_000)
        held = await one.records.save(TENANT, root, "r", A, record)
        theirs = await two.records.save(TENANT, root, "r", A, b"another")
        assert held == record
        assert theirs in (record, b"another"), "only an eviction in between may let the second one win"
        older = (at // 2).to_bytes(16, "big")
        seen = await two.records.newest(TENANT, older, "r", [A])
        missed, found = missed + (seen is None), found + (seen is not None)
        if seen is not None:
            assert seen[1] == b"another" or seen[1].startswith(older * 200), "a record of another conversation"
    assert missed > 20
    assert found > 20
    assert one.state().breaker == two.state().breaker == "closed"
    assert "integrity" not in {**one.state().errors, **two.state().errors}


async def test_a_record_sealed_by_a_later_version_is_a_miss(valkey: Valkey, opener: Opener) -> None:
    """A replica of this version beside a later one: neither fails, both end with one record that both can read."""
    store = await opener(valkey.url, key=b"k" * 32)
    name = record_name(ROOT, "r", A)
    assert await store.records.save(TENANT, ROOT, "r", A, b"old") == b"old"
    sealed = (await store._access.backend.run(Read([name])))[0]
    assert sealed is not None
    await store._access.backend.run(Remove(name))
    await store._access.backend.run(Claim(name, b"\x03" + sealed[1:], 60))
    assert await store.records.newest(TENANT, ROOT, "r", [A]) is None
    assert await store.records.save(TENANT, ROOT, "r", A, b"ours") == b"ours"
    assert await store.records.newest(TENANT, ROOT, "r", [A]) == (0, b"ours")

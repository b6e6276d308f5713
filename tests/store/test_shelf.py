"""The contract that summaries have with every store, and a cluster of six."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxy.store import Store, keys
from proxy.store.shelf import SLOT, SLOTS
from tests.store.conftest import Opener, Valkey, eventually

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
    shelf = store.shelf
    assert await shelf.newest(TENANT, ROOT, POLICY, [A, B]) is None
    assert await shelf.keep(TENANT, ROOT, POLICY, A, b"first") == b"first"
    assert await shelf.keep(TENANT, ROOT, POLICY, A, b"second") == b"first"
    await shelf.keep(TENANT, ROOT, POLICY, B, b"longer")
    assert await shelf.newest(TENANT, ROOT, POLICY, [C, B, A]) == (1, b"longer")


async def test_other_tenants_and_policies_see_nothing(store: Store) -> None:
    """A text is found by its own tenant under its own policy only."""
    shelf = store.shelf
    await shelf.keep(TENANT, ROOT, POLICY, A, b"mine")
    assert await shelf.newest(TENANT, ROOT, b"q" * 8, [A]) is None
    assert await shelf.newest(OTHER, ROOT, POLICY, [A]) is None


async def test_one_holder_at_a_time(store: Store) -> None:
    """A lease is given once, renewed by its holder alone, and free again when it is given back or has run out."""
    shelf = store.shelf
    lease = await shelf.lease(ROOT, POLICY, A, 60)
    assert lease is not None
    assert await shelf.lease(ROOT, POLICY, A, 60) is None
    assert await shelf.lease(ROOT, POLICY, B, 60) is not None
    assert await lease.renew(60)
    await lease.release()
    assert not await lease.renew(60)
    short = await shelf.lease(ROOT, POLICY, A, 0.05)
    assert short is not None
    next_one = None
    async with asyncio.timeout(10):
        while next_one is None:
            next_one = await shelf.lease(ROOT, POLICY, A, 60)
    await short.release()
    assert await shelf.lease(ROOT, POLICY, A, 60) is None, "who lost a lease gave somebody else's back"


async def test_a_refusal_and_a_pause_are_seen_by_all(store: Store) -> None:
    """Marks made in the background are there soon, for their own conversation and tenant."""
    shelf = store.shelf
    assert not await shelf.is_refused(ROOT, POLICY, A)
    shelf.refuse(ROOT, POLICY, A, 60)
    shelf.pause(TENANT, 60)
    async with asyncio.timeout(10):
        while not await shelf.is_refused(ROOT, POLICY, A) or not (await shelf.spending(TENANT, NOW))[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not await shelf.is_refused(ROOT, POLICY, B)
    assert await shelf.spending(OTHER, NOW) == (0, 0, False)


async def test_the_last_hour_is_added_up(store: Store) -> None:
    """Tokens count for an hour in slots of ten minutes, sent and spent apart; a later hour starts afresh."""
    shelf = store.shelf
    for at in (0, SLOT, SLOT * SLOTS):
        shelf.count(TENANT, "in", 1000, NOW + at)
    shelf.count(TENANT, "out", 300, NOW)
    shelf.count(TENANT, "out", -100, NOW)
    async with asyncio.timeout(10):
        while await shelf.spending(TENANT, NOW + SLOT * SLOTS) != (3000, 200, False):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await shelf.spending(TENANT, NOW + SLOT * (SLOTS + 1)) == (2000, 0, False)
    assert await shelf.spending(OTHER, NOW) == (0, 0, False)


async def test_a_hung_store_gives_nothing_and_takes_no_harm(valkey: Valkey, opener: Opener) -> None:
    """While the server is frozen there is no text, no lease, no figure, and nothing is raised."""
    store = await opener(valkey.url)
    shelf = store.shelf
    lease = await shelf.lease(ROOT, POLICY, A, 60)
    assert lease is not None
    valkey.signal(signal.SIGSTOP)
    try:
        assert await shelf.newest(TENANT, ROOT, POLICY, [A]) is None
        assert await shelf.keep(TENANT, ROOT, POLICY, A, b"mine") == b"mine"
        assert await shelf.lease(ROOT, POLICY, B, 60) is None
        assert not await shelf.is_refused(ROOT, POLICY, A)
        assert await shelf.spending(TENANT, NOW) == (0, 0, False)
        assert await lease.renew(60), "a store that does not answer takes no lease away"
        await lease.release()
        shelf.count(TENANT, "in", 5, NOW)
        shelf.pause(TENANT, 60)
        shelf.refuse(ROOT, POLICY, A, 60)
    finally:
        valkey.signal(signal.SIGCONT)


async def test_a_cluster_of_six_keeps_a_conversation_in_one_place(short_path: Path, opener: Opener) -> None:
    """Three masters and three replicas: everything of a conversation is in one slot, and a lost master is replaced."""
    servers = []
    ports = _free_ports(12)
    for at in range(6):
        home = short_path / str(at)
        home.mkdir()
        bus, port = ports[at], ports[at + 6]
        settings = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "1000")
        servers.append((Valkey(home, *settings, "--cluster-replica-validity-factor", "0", port=port), bus))
    try:
        await asyncio.to_thread(lambda: [server.start() for server, _ in servers])
        await _joined(servers)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server, _ in servers)
        store = await opener(f"redis+cluster://{hosts}")
        assert store.state().up
        shelf, roots = store.shelf, [bytes([at]) * 16 for at in range(12)]
        for root in roots:
            assert await store.fix(TENANT, root, "r", A, b"event") == b"event"
            assert await shelf.keep(TENANT, root, POLICY, B, b"text") == b"text"
            lease = await shelf.lease(root, POLICY, A, 60)
            assert lease is not None
            assert await lease.renew(60)
            assert await shelf.lease(root, POLICY, A, 60) is None
        shelf.count(TENANT, "in", 7, NOW)
        held = [_keys(server) for server, _ in servers[:3]]
        assert all(held), "the conversations are not spread over the masters"
        for root in roots:
            names = {keys.event(root, "r", A), keys.summary(root, POLICY, B), keys.lease(root, POLICY, A)}
            assert sum(names <= found for found in held) == 1
        await eventually(lambda: sum(_keys(server) == held[0] for server, _ in servers) == 2)
        servers[0][0].kill()
        await eventually(lambda: all("cluster_state:ok" in server.say("CLUSTER INFO") for server, _ in servers[1:]), 30)
        async with asyncio.timeout(30):
            for root in roots:
                while await shelf.newest(TENANT, root, POLICY, [B]) != (0, b"text"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert await shelf.lease(roots[0], POLICY, A, 60) is None, "a lease was lost with its master"
    finally:
        for server, _ in servers:
            server.kill()


def _free_ports(count: int) -> list[int]:
    """Different loopback ports that nobody listens on now."""
    with ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def _joined(servers: list[tuple[Valkey, int]]) -> None:
    """Make the first three of *servers* masters and each of the others a replica of one."""
    first = servers[0][0]
    for server, bus in servers[1:]:
        assert first.say(f"CLUSTER MEET 127.0.0.1 {server.port} {bus}").startswith("+OK")
    for at, slots in enumerate(("0 5460", "5461 10922", "10923 16383")):
        servers[at][0].say(f"CLUSTER ADDSLOTSRANGE {slots}")
    names = [server.say("CLUSTER MYID").splitlines()[1] for server, _ in servers[:3]]
    for (server, _), name in zip(servers[3:], names, strict=True):
        await eventually(lambda server=server, name=name: server.say(f"CLUSTER REPLICATE {name}").startswith("+OK"))  # type: ignore[misc]
    known = [f"{kind}={count}" for kind, count in (("cluster_known_nodes", 6), ("cluster_size", 3))]
    wanted = [text.replace("=", ":") for text in known] + ["cluster_state:ok"]
    await eventually(lambda: all(all(w in server.say("CLUSTER INFO") for w in wanted) for server, _ in servers), 20)
    await eventually(
        lambda: all("master_link_status:up" in server.say("INFO replication") for server, _ in servers[3:]), 20
    )


def _keys(server: Valkey) -> set[str]:
    return {line for line in server.say("KEYS *").splitlines() if line.startswith("ullage1:")}

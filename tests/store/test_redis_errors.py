"""Each error has a kind, and only some kinds open the breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import exceptions

from proxy.store import key_names
from proxy.store.backend import BREAKING, REFUSALS
from proxy.store.key_names import CONVERSATIONS, ROOTS
from proxy.store.redis import FAULTS, kind_of
from tests.store.conftest import Opener, Valkey, eventually
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("error", "kind", "breaks"),
    [
        (exceptions.OutOfMemoryError(), "oom", False),
        (exceptions.MaxConnectionsError(), "pool", False),
        (exceptions.NoPermissionError(), "permission", False),
        (exceptions.ReadOnlyError(), "readonly", False),
        (exceptions.ResponseError("WRONGTYPE Operation against"), "wrongtype", False),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "disk", False),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), "replicas", False),
        (exceptions.MasterDownError("MASTERDOWN"), "loading", True),
        (exceptions.ResponseError("something"), "error", False),
        (exceptions.AuthenticationError(), "auth", True),
        (exceptions.BusyLoadingError(), "loading", True),
        (exceptions.ClusterDownError("CLUSTERDOWN"), "cluster", True),
        (exceptions.RedisClusterException("Redis Cluster cannot be connected."), "cluster", True),
        (exceptions.SlotNotCoveredError("Slot is not covered."), "cluster", True),
        (exceptions.TimeoutError(), "slow", True),
        (TimeoutError(), "slow", True),
        (exceptions.ConnectionError(), "down", True),
        (ConnectionResetError(), "down", True),
        (ValueError(), "protocol", True),
    ],
)
def test_every_failure_has_a_name(error: BaseException, kind: str, breaks: bool) -> None:
    """Errors of the library and of sockets have fixed kinds; those that are the server's fault open the breaker."""
    assert isinstance(error, FAULTS)
    assert kind_of(error) == kind
    assert (kind in BREAKING) is breaks


TENANT, ROOT, ROUTE, A, B = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16, b"b" * 16


def _tell(server: Valkey, *lines: str) -> None:
    for line in lines:
        assert server.say(line).startswith("+"), line


def _full(server: Valkey) -> Callable[[], None]:
    _tell(server, "CONFIG SET maxmemory-policy noeviction", "CONFIG SET maxmemory 1")
    return lambda: _tell(server, "CONFIG SET maxmemory 0")


def _read_only(server: Valkey) -> Callable[[], None]:
    _tell(server, f"REPLICAOF 127.0.0.1 {free_port()}")
    return lambda: _tell(server, "REPLICAOF NO ONE")


def _no_permission(server: Valkey) -> Callable[[], None]:
    _tell(server, "ACL SETUSER default -@write")
    return lambda: _tell(server, "ACL SETUSER default +@write")


def _no_scripts(server: Valkey) -> Callable[[], None]:
    _tell(server, "ACL SETUSER default -eval")
    return lambda: _tell(server, "ACL SETUSER default +eval")


def _too_few_replicas(server: Valkey) -> Callable[[], None]:
    _tell(server, "CONFIG SET min-replicas-to-write 1")
    return lambda: _tell(server, "CONFIG SET min-replicas-to-write 0")


def _no_disk(server: Valkey) -> Callable[[], None]:
    (server.directory / "dump.rdb").mkdir()  # in the way of the snapshot, for the administrator as well
    _tell(server, 'CONFIG SET save "3600 1"', "BGSAVE")

    def mended() -> None:
        (server.directory / "dump.rdb").rmdir()
        _tell(server, "BGSAVE")

    return mended


@pytest.mark.parametrize(
    ("spoil", "kind", "event"),
    [
        (_full, "oom", "store.full"),
        (_read_only, "readonly", "store.refused"),
        (_no_permission, "permission", "store.refused"),
        (_no_scripts, "permission", "store.refused"),
        (_too_few_replicas, "replicas", "store.refused"),
        (_no_disk, "disk", "store.refused"),
    ],
)
@pytest.mark.slow
async def test_a_server_that_refuses_is_not_up_until_it_accepts(
    valkey: Valkey, opener: Opener, spoil: Callable[[Valkey], Callable[[], None]], kind: str, event: str
) -> None:
    """Records are read on, the store is not up, one line says what to do, and mended it is up with no request."""
    store = await opener(valkey.url, key=b"k" * 32)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    store.conversations.save_conversation(TENANT, "talk", ROOT, 1.0, long_lived=False)
    await eventually(lambda: all(valkey.say(f"KEYS *:{kind}").startswith("*1") for kind in (ROOTS, CONVERSATIONS)))
    mended = spoil(valkey)
    # A snapshot fails in a process of its own, a moment later.
    for _ in range(200):
        assert await store.records.save(TENANT, ROOT, ROUTE, B, b"y") == b"y"
        store.conversations.save_conversation(TENANT, "talk", ROOT, 2.0, long_lived=False)
        await asyncio.sleep(0.02)
        if not store.state().up:
            break
        valkey.say(f"UNLINK {key_names.record_name(ROOT, ROUTE, B)}")
    assert (store.state().up, store.state().refusal, store.state().breaker) == (False, kind, "closed")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    for _ in range(5):
        await store.records.save(TENANT, ROOT, ROUTE, B, b"y")
    mended()
    await eventually(lambda: store.state().up and len(opener.events) > 1, 60)
    assert opener.events == [event, "store.up"]
    assert opener.warned[0][1] == {"kind": kind, "advice": REFUSALS[kind]}


async def test_an_idle_store_is_tried(valkey: Valkey, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops taking writes is noticed although no request needs one, then and at the start."""
    monkeypatch.setattr("proxy.store.store._CHECK_BROKEN", 0.05)
    monkeypatch.setattr("proxy.store.store._CHECK_WORKING", 0.05)
    store = await opener(valkey.url, key=b"k" * 32)
    assert store.state().up
    mended = _read_only(valkey)
    await eventually(lambda: not store.state().up)
    late = await opener(valkey.url, key=b"k" * 32)
    assert (late.state().up, late.state().refusal) == (False, "readonly")
    mended()
    await eventually(lambda: store.state().up and late.state().up)


async def test_a_replica_without_a_key_is_down_with_its_remedy(short_path: Path, opener: Opener) -> None:
    """If not even a master key can be stored, the store is down, and the log says what to do."""
    server = Valkey(short_path, "--replicaof", f"127.0.0.1 {free_port()}")
    server.start()
    try:
        store = await opener(server.url)
        assert not store.state().up
        assert opener.warned == [("store.down", {"cause": "readonly", "advice": REFUSALS["readonly"]})]
    finally:
        server.kill()


async def test_a_cluster_that_is_not_there_is_a_store_that_is_down(
    valkey_on_tcp: Valkey, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node that can be reached, or one that is in no cluster: the store opens, is down, and is tried again."""
    monkeypatch.setattr("proxy.store.store._CHECK_BROKEN", 0.05)
    for port in (free_port(), valkey_on_tcp.port):
        store = await opener(f"redis+cluster://127.0.0.1:{port}", key=b"k" * 32)
        assert not store.state().up
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
        await eventually(lambda store=store: store.state().errors["cluster"] > 1)
    assert opener.warned == [("store.down", {"cause": "cluster"})] * 2


@pytest.mark.slow
async def test_a_replica_that_serves_nothing_is_left_alone(valkey: Valkey, opener: Opener) -> None:
    """A replica that lost its master and may not show old data counts as a server that cannot serve."""
    store = await opener(valkey.url, key=b"k" * 32)
    _tell(valkey, "CONFIG SET replica-serve-stale-data no", f"REPLICAOF 127.0.0.1 {free_port()}")
    for n in range(8):
        assert await store.records.newest(TENANT, ROOT, ROUTE, [bytes((n,)) * 16]) is None
    await eventually(lambda: store.state().breaker == "open")
    _tell(valkey, "REPLICAOF NO ONE")
    await eventually(lambda: store.state().up, 60)

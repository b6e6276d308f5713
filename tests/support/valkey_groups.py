"""Servers that stand in for each other: a master with a replica under a Sentinel, and a cluster of six."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.store.conftest import Valkey, eventually
from tests.support.ports import free_port

AT_ONCE = ("--repl-diskless-sync-delay", "0")
"""A replica is given the data as soon as it asks, and not seconds later in case others ask too."""

SLOTS = ("0 5460", "5461 10922", "10923 16383")


@dataclass(frozen=True)
class WatchedMaster:
    """A *master*, its *replica*, and the store URL by which a Sentinel is asked for whichever is master now."""

    master: Valkey
    replica: Valkey
    url: str


@asynccontextmanager
async def watched_master(home: Path) -> AsyncIterator[WatchedMaster]:
    """A master and its replica, in step, and one Sentinel that replaces the master half a second after it is gone."""
    ports = [free_port() for _ in range(3)]
    master = Valkey(_created_folder(home / "master"), *AT_ONCE, port=ports[0])
    replica = Valkey(_created_folder(home / "replica"), "--replicaof", f"127.0.0.1 {ports[0]}", *AT_ONCE, port=ports[1])
    sentinel = Valkey(_created_folder(home / "sentinel"), port=ports[2])
    settings = sentinel.directory / "sentinel.conf"
    about = {"monitor main": f"127.0.0.1 {ports[0]} 1", "down-after-milliseconds main": "500"}
    about["failover-timeout main"] = "2000"
    settings.write_text("".join(f"sentinel {key} {value}\n" for key, value in about.items()))
    try:
        await asyncio.to_thread(master.start)
        await asyncio.to_thread(replica.start)
        arguments = ("--sentinel", "--port", str(ports[2]), "--unixsocket", str(sentinel.socket))
        await asyncio.to_thread(sentinel.start_as, str(settings), *arguments)
        await eventually(lambda: "master_link_status:up" in replica.say("INFO replication"), 60)
        await eventually(lambda: "slaves=1" in sentinel.say("INFO sentinel"), 60)
        yield WatchedMaster(master, replica, f"redis+sentinel://127.0.0.1:{ports[2]}/main/0")
    finally:
        for server in (sentinel, replica, master):
            server.kill()


@asynccontextmanager
async def six_nodes(home: Path) -> AsyncIterator[list[Valkey]]:
    """A cluster of three masters and, in the same order, a replica of each; a lost master is replaced in seconds."""
    servers, ports = [], [free_port() for _ in range(12)]
    for at in range(6):
        settings = ("--cluster-enabled", "yes", "--cluster-port", str(ports[at]), "--cluster-node-timeout", "1000")
        factor = ("--cluster-replica-validity-factor", "0")
        servers.append(Valkey(_created_folder(home / str(at)), *settings, *factor, *AT_ONCE, port=ports[at + 6]))
    try:
        await asyncio.to_thread(lambda: [server.start() for server in servers])
        await _join(servers, ports)
        yield servers
    finally:
        for server in servers:
            server.kill()


async def cluster_whole(servers: list[Valkey]) -> None:
    """Return once every one of *servers* sees a cluster that serves all slots."""
    await eventually(lambda: all("cluster_state:ok" in server.say("CLUSTER INFO") for server in servers), 60)


def keys_of(server: Valkey) -> set[str]:
    """The names of ours that *server* holds."""
    return {line for line in server.say("KEYS *").splitlines() if line.startswith("ullage1:")}


def _created_folder(path: Path) -> Path:
    path.mkdir()
    return path


async def _join(servers: list[Valkey], buses: list[int]) -> None:
    """Make the first three of *servers* masters and each of the others a replica of one."""
    first = servers[0]
    for server, bus in zip(servers[1:], buses[1:], strict=False):
        assert first.say(f"CLUSTER MEET 127.0.0.1 {server.port} {bus}").startswith("+OK")
    for at, slots in enumerate(SLOTS):
        servers[at].say(f"CLUSTER ADDSLOTSRANGE {slots}")
    names = [server.say("CLUSTER MYID").splitlines()[1] for server in servers[:3]]
    for server, name in zip(servers[3:], names, strict=True):
        await eventually(lambda server=server, name=name: server.say(f"CLUSTER REPLICATE {name}").startswith("+OK"))  # type: ignore[misc]
    wanted = ("cluster_known_nodes:6", "cluster_size:3", "cluster_state:ok")
    await eventually(lambda: all(all(w in server.say("CLUSTER INFO") for w in wanted) for server in servers), 60)
    await eventually(
        lambda: all("master_link_status:up" in server.say("INFO replication") for server in servers[3:]), 60
    )

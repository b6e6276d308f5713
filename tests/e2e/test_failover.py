"""The store's master is lost and replaced under running proxies: conversations and their summaries go on."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_store import until_up
from tests.store.conftest import eventually
from tests.support.agent_loop import WINDOW, AgentLoop, replicas
from tests.support.process_inspection import log_lines, metrics, total
from tests.support.valkey_groups import keys_of, six_nodes, watched_master


@asynccontextmanager
async def working(stub: StartStub, proxy: StartProxy, url: str, home: Path) -> AsyncIterator[AgentLoop]:
    """An agent at work through two proxies of the store at *url*, whose view has a summary in it."""
    server = await stub(window=WINDOW)
    async with AgentLoop(server, await replicas(proxy, server, url, home), 900) as loop:
        while not loop.spent:
            await loop.ask()
            assert loop.rounds < 40
        yield loop


async def goes_on(loop: AgentLoop, replaced: Callable[[], bool]) -> None:
    """Requests are answered while the store has no master and after it was *replaced*; then all is as it was.

    New summaries are written and used, and only compactions change what was sent before, for both proxies alike.
    """
    for _ in range(6):
        await loop.ask(settle=False)
    await eventually(replaced, 60)
    spent, calls = loop.spent, len(loop.stub.summaries)
    while loop.spent <= spent or len(loop.stub.summaries) <= calls:
        for front in loop.fronts:
            await until_up(front, True)
        await loop.ask()
        assert loop.rounds < 90
    for front in loop.fronts:
        assert not [line for line in log_lines(front) if line["event"] in ("proxy.task_failed", "proxy.loop_error")]
    # What a proxy could not be told of meanwhile it learns by one more look at the store.
    await loop.ask()
    await loop.ask()
    events, told = len(loop.events), await compactions(loop)
    for _ in range(8):
        await loop.ask()
    assert len(loop.events) - events == await compactions(loop) - told <= 2


async def compactions(loop: AgentLoop) -> float:
    """How many compactions the proxies tell of."""
    return sum([total(await metrics(front), "ullage_compactions_total") for front in loop.fronts])


async def test_a_sentinel_names_another_master(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """A master that hangs is replaced by its replica: every request is answered, and the new one is used."""
    async with watched_master(home) as store, working(stub, proxy, store.url, home) as loop:
        held = keys_of(store.master)
        await eventually(lambda: held <= keys_of(store.replica))
        store.master.signal(signal.SIGSTOP)
        await goes_on(loop, lambda: "role:master" in store.replica.say("INFO replication"))
        assert any(":s:" in name for name in keys_of(store.replica) - held), "nothing was written since"


async def test_a_cluster_replaces_a_lost_master(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """The node that has the conversation is killed: its replica takes over, and no request is lost or wrong."""
    async with six_nodes(home) as servers:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        async with working(stub, proxy, url, home) as loop:
            at = next(at for at, server in enumerate(servers[:3]) if any(":e:" in name for name in keys_of(server)))
            held = keys_of(servers[at])
            await eventually(lambda: held <= keys_of(servers[at + 3]))
            servers[at].kill()
            await goes_on(loop, lambda: "role:master" in servers[at + 3].say("INFO replication"))
            assert any(":s:" in name for name in keys_of(servers[at + 3]) - held), "nothing was written since"

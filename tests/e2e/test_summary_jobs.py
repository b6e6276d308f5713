"""What becomes of a summary that is being written when its client, or its proxy, goes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.conftest import StartProxy, StartStub
from tests.store.conftest import Valkey, eventually
from tests.support.agent_loop import WINDOW, AgentLoop, replicas
from tests.support.process_inspection import metrics, request_lines, total
from tests.support.proxy_process import until


async def test_a_client_that_leaves_takes_no_summary_along(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """A client that hangs up while its compaction waits has its summary finished, and used when it asks again."""
    server = await stub(window=WINDOW)
    config = {"summaries": {"mode": "inline", "spend": 1.0}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    async with AgentLoop(server, [front], 900) as loop:
        server.gate.clear()
        while not server.summaries:
            waiting = asyncio.ensure_future(loop.ask(settle=False))
            await until(lambda asked=waiting: asked.done() or bool(server.summaries))  # type: ignore[misc]
        waiting.cancel()
        await eventually(lambda: request_lines(front)[-1]["reason"] == "client_left")
        server.gate.set()
        await loop.settled()
        calls = len(server.summaries)
        await loop.ask(again=True)
        assert loop.spent > 0
        assert len(server.summaries) == calls
        assert total(await metrics(front), "ullage_summaries_total", outcome="written") == 1


async def test_a_drain_gives_back_what_it_cannot_finish(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """A proxy that is told to stop ends a summary that takes longer than its drain; another one writes the next."""
    server = await stub(window=WINDOW)
    server.summariser = "hanging"
    fronts = await replicas(proxy, server, remote.url, home, server={"drain": 0.5})
    async with AgentLoop(server, fronts[:1], 600) as loop:
        while not server.summaries:
            await loop.ask(settle=False)
        assert ":k:" in remote.say("KEYS *")
        assert await asyncio.to_thread(fronts[0].end, signal.SIGTERM) == 0
        assert ":k:" not in remote.say("KEYS *"), "the right to write died with its holder"
        server.summariser = "honest"
        loop.fronts, loop.answered = fronts[1:], len(server.summaries)
        while not loop.spent:
            await loop.ask(settle=False)
            assert loop.rounds < 60

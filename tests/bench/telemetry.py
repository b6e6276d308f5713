"""What log, metrics and page cost: ``python -m tests.bench.telemetry [--rounds N]`` prints a table.

Three proxies serve the same conversations in turn, round by round: one with all of it off, one with all of it on, and
one whose page is open in addition, read by a client that takes what it gets. CPU is that of the proxy's process with
its threads. What is on is compared with what is off in the same round, in changing order; the median of all rounds
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import httpx

from tests.bench.cpu import cpu_seconds
from tests.bench.programs import program
from tests.support.page_scene import Scene, configuration
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

OFF = {"log": {"level": "error"}, "metrics": False, "advice": False, "page": {"enabled": False}}
KINDS: dict[str, dict[str, Any]] = {"off": OFF, "on": {}, "on, page open": {}}


def bodies(number: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """The requests of one round: agents that grow until they were compacted, and as many short chats."""
    chat = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Hello. " * 100}]}
    for each in range(8):
        scene = Scene(f"round-{number}-{each}", "qwen3-coder", "bench", tuple(range(2, 34)))
        for body in scene.bodies():
            yield body, scene.headers
            yield json.dumps(chat).encode(), {}


async def serve_round(proxy: Proxy, number: int) -> tuple[int, float]:
    """Send one round of requests; return their number, and the CPU seconds that the proxy took."""
    requests = list(bodies(number))
    headers = {"authorization": "Bearer sk-bench", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, headers=headers, timeout=60) as client:
        before = cpu_seconds([proxy.pid])
        for body, own in requests:
            (await client.post("/chat/completions", content=body, headers=own)).raise_for_status()
        return len(requests), cpu_seconds([proxy.pid]) - before


async def look(proxy: Proxy) -> None:
    """Read the events of *proxy*'s page until cancelled."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
        client.stream("GET", f"{proxy.root}/ullage/events") as answer,
    ):
        async for _ in answer.aiter_raw():
            pass


async def measure(rounds: int) -> None:
    """Print the CPU of a request by kind, and that of an open page nobody sends requests beside."""
    port = free_port()
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(program("tests.bench.mock", str(port)))
        proxies = {}
        for kind, telemetry in KINDS.items():
            config = configuration(f"http://127.0.0.1:{port}/v1", telemetry=telemetry)
            proxies[kind] = await opened.enter_async_context(Proxy("", config=config))
        looking = asyncio.ensure_future(look(proxies["on, page open"]))
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in random.sample(list(KINDS), len(KINDS)):
                count, seconds = await serve_round(proxies[kind], number)
                if number:  # the first round fills the caches
                    spent[kind].append(1e6 * seconds / count)
        for kind, each in spent.items():
            more = median(own / off for own, off in zip(each, spent["off"], strict=True)) - 1
            print(f"{kind:<16} {median(each):7.0f} us a request  {100 * more:+6.1f} %")
        before = cpu_seconds([proxies["on, page open"].pid])
        idle = cpu_seconds([proxies["on"].pid])
        await asyncio.sleep(10)
        page = cpu_seconds([proxies["on, page open"].pid]) - before - cpu_seconds([proxies["on"].pid]) + idle
        print(f"an open page      {100 * page:6.1f} ms a second, without requests")
        looking.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.telemetry", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args().rounds))

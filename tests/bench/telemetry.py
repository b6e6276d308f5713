"""What telemetry costs: ``python -m tests.bench.telemetry [--rounds N] [--kinds KIND ...]`` prints a table.

One proxy of each of ``KINDS`` serves the same conversations in turn, round by round: with all of it
off, with log, metrics, page and budget log on, with a page open in addition, which a client reads that takes what it
gets, and with traces in addition, of all requests and of none. CPU is that of the proxy's process with its threads.
What is on is compared with what is off in the same round, in changing order; the median of all rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.bench.cpu import cpu_seconds
from tests.bench.programs import program
from tests.support.page_scene import Scene, configuration
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy


class Kind(NamedTuple):
    """What is on in one proxy; ``sampler`` is that of its traces, empty without any."""

    telemetry: Mapping[str, Any]
    is_watched: bool = False
    sampler: str = ""


OFF: Final = {"log": {"level": "error"}, "metrics": False, "advice": False, "page": {"enabled": False}}
KINDS: Final[Mapping[str, Kind]] = {
    "off": Kind(OFF),
    "on": Kind({}),
    "on, page open": Kind({}, is_watched=True),
    "and traces": Kind({"traces": True}, sampler="always_on"),
    "traces, sampled out": Kind({"traces": True}, sampler="always_off"),
}


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """The URL of a collector that throws away what it gets."""

    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/traces", take)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def serving(kind: Kind, upstream: str, traces_to: str, folder: Path) -> AsyncIterator[Proxy]:
    """A proxy of *kind* in front of *upstream*; its budget log is below *folder*."""
    telemetry = dict(kind.telemetry)
    if kind.telemetry is not OFF:
        telemetry["budget_log"] = {"path": str(folder / "budget.jsonl")}
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": traces_to, "OTEL_TRACES_SAMPLER": kind.sampler or "always_off"}
    config = configuration(upstream, telemetry=telemetry)
    async with Proxy("", config=config, environment=environment) as proxy:
        if not kind.is_watched:
            yield proxy
            return
        looking = asyncio.ensure_future(look(proxy))
        yield proxy
        looking.cancel()


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


async def measure(rounds: int, kinds: Sequence[str]) -> None:
    """Print the CPU of a request by kind, and that of an open page without requests."""
    port = free_port()
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        await opened.enter_async_context(program("tests.bench.mock", str(port)))
        traces_to = await opened.enter_async_context(collector())
        proxies = {}
        for number, name in enumerate(kinds):
            serves = serving(KINDS[name], f"http://127.0.0.1:{port}/v1", traces_to, folder / str(number))
            proxies[name] = await opened.enter_async_context(serves)
        spent = await all_rounds(proxies, rounds)
        for name, each in spent.items():
            more = median(own / off for own, off in zip(each, spent["off"], strict=True)) - 1
            print(f"{name:<20} {median(each):7.0f} us a request  {100 * more:+6.1f} %")
        if "on, page open" in proxies:
            milliseconds = await page_cost(proxies["on, page open"], proxies["on"])
            print(f"an open page          {milliseconds:6.1f} ms a second, without requests")


async def all_rounds(proxies: Mapping[str, Proxy], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of CPU of a request for each proxy and round."""
    spent: dict[str, list[float]] = {name: [] for name in proxies}
    for number in range(rounds + 1):
        for name in random.sample(list(proxies), len(proxies)):
            count, seconds = await serve_round(proxies[name], number)
            if number:  # the first round fills the caches
                spent[name].append(1e6 * seconds / count)
    return spent


async def page_cost(watched: Proxy, other: Proxy) -> float:
    """Return the milliseconds that an open page takes in a second, without requests."""
    before, idle = cpu_seconds([watched.pid]), cpu_seconds([other.pid])
    await asyncio.sleep(10)
    return 100 * (cpu_seconds([watched.pid]) - before - cpu_seconds([other.pid]) + idle)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.telemetry", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS)[1:], default=list(KINDS)[1:])
    given = parser.parse_args()
    asyncio.run(measure(given.rounds, ["off", *given.kinds]))

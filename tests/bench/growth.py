"""How cost grows: ``python -m tests.bench.growth [--parts WORD ...] [--neighbours FOLDER] [--svg FILE] [--json FILE]``.

``length``: CPU of a request of 1K to 1M tokens, for the relay, and for Ullage far below the window, counted (a session
that grows by one round with each request) and compacted before. ``memory``: resident bytes for each live conversation.
``streams``: a thousand at once. ``idle``: ten thousand idle connections. ``rate``: requests a second on one worker and
on two. Neighbours (``tests/bench/subjects.py``) take part in ``length`` and ``rate``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.bodies import CHAT, LONG, TIGHT, WINDOWS, Kind, session
from tests.bench.cpu import cpu_seconds, resident_bytes
from tests.bench.load import Connection
from tests.bench.overload import Generator
from tests.bench.programs import idle, listening, program
from tests.bench.subjects import Subject, relay, started, ullage
from tests.support.ports import free_port

LENGTHS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
"""Tokens of a request."""

BYTES_A_TOKEN = 2.91
REQUESTS, TIMES = 10, 5
"""Requests of a session that are measured, and sessions of each length."""

FAR_BELOW = 4_000_000
"""A window that the bytes of no body reach."""

COUNTED, OVER = 1.25, 0.45
"""Windows in lengths: one in which a session lies between the marks, and one that it has outgrown twice."""

LIVE = {50_000: 100, 400_000: 30}
"""Live conversations of so many bytes, for their memory."""

STREAMS, GAP = 1_000, 0.1
"""Streams at once, and seconds between two events of each."""

IDLE_CONNECTIONS, IDLE_SECONDS = 10_000, 3.0
CLIENTS, RATE_SECONDS = 48, 5.0
"""Connections that ask one thing after the other, and for how long."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """Some figures of one subject."""

    part: str
    subject: str
    case: str
    figures: Figures


@lru_cache(maxsize=4)
def bodies_of(tokens: int, model: str, number: int) -> list[bytes]:
    """A session that ends with *tokens*: one body to warm up, and those that are measured."""
    size = round(tokens * BYTES_A_TOKEN)
    if tokens < 4_000:
        return session(Kind("", size, 0, REQUESTS, 1, model), number)
    grows = min(8_000, max(600, size // 50))
    return session(Kind("", size, grows, REQUESTS, 1, model), number)


def model_of(tokens: int, way: str) -> str:
    """The model of requests of *tokens* that go one *way*."""
    return f"bench-{way}-{tokens}"


def windows_of_lengths() -> dict[str, int]:
    """The windows of all models of ``length``."""
    windows = {}
    for tokens in LENGTHS:
        windows[model_of(tokens, "fits")] = FAR_BELOW
        windows[model_of(tokens, "counted")] = round(tokens * COUNTED + 1_000)
        windows[model_of(tokens, "compacted")] = max(2_048, round(tokens * OVER))
    return windows


async def cost(subject: Subject, tokens: int, way: str, times: int = TIMES) -> float:
    """The median CPU milliseconds of a request; the first two of each session are not counted."""
    samples = []
    for number in range(times):
        bodies = bodies_of(tokens, model_of(tokens, way), number)
        link = Connection(*await asyncio.open_connection("127.0.0.1", subject.port))
        await link.ask(bodies[0])
        await idle(subject.pids)
        before = cpu_seconds(subject.pids)
        for body in bodies[1:]:
            await link.ask(body)
        samples.append((cpu_seconds(subject.pids) - before) * 1e3 / (len(bodies) - 1))
        link.close()
    return statistics.median(samples)


async def length(neighbours: Path | None) -> list[Row]:
    """CPU of a request against its tokens."""
    async with AsyncExitStack() as stack:
        upstream = await _upstream(stack)
        limits = {"limits": {"body": "64MiB"}}
        bare = await stack.enter_async_context(relay(upstream))
        ours = await stack.enter_async_context(ullage(upstream, windows_of_lengths(), server=limits))
        others = await started(stack, upstream, neighbours) if neighbours else []
        rows = []
        for tokens in LENGTHS:
            found = {"relay": await cost(bare, tokens, "fits")}
            for way in ("fits", "counted", "compacted"):
                # Below 4,000 tokens there is no session to compact.
                if way == "fits" or tokens >= 4_000:
                    found[f"ullage, {way}"] = await cost(ours, tokens, way)
            for other in others:
                try:
                    found[other.name] = await asyncio.wait_for(cost(other, tokens, "fits", 1), 60)
                except (RuntimeError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                    print(f"{other.name} at {tokens} tokens: {str(error)[:200]}", file=sys.stderr)
            rows += [Row("length", name, f"{tokens} tokens", {"cpu_ms": value}) for name, value in found.items()]
            print(f"{tokens} tokens done", file=sys.stderr)
        return rows


async def memory(neighbours: Path | None) -> list[Row]:
    """Resident bytes that each live conversation adds."""
    async with AsyncExitStack() as stack:
        upstream = await _upstream(stack)
        ours = await stack.enter_async_context(ullage(upstream, WINDOWS))
        rows = []
        for size, count in LIVE.items():
            kind = Kind("", size, 1_200 if size < 100_000 else 8_000, 1, 1, TIGHT if size < 100_000 else LONG)
            await _hold_conversations(ours, kind, range(-20, 0))
            before = resident_bytes(ours.pids)
            await _hold_conversations(ours, kind, range(count))
            added = (resident_bytes(ours.pids) - before) / count / 1024
            rows.append(Row("memory", "ullage", f"{count} of {size // 1000} KB", {"kib_each": added}))
        return rows


async def _hold_conversations(subject: Subject, kind: Kind, numbers: range) -> None:
    link = Connection(*await asyncio.open_connection("127.0.0.1", subject.port))
    for number in numbers:
        for body in await asyncio.to_thread(session, kind, 7_000 + number):
            await link.ask(body)
    await idle(subject.pids)
    link.close()


async def streams(neighbours: Path | None) -> list[Row]:
    """What a thousand streams at once cost."""
    body = session(Kind("", 1_000, 0, 1, 1, CHAT, stream=True), 1)[0]
    async with AsyncExitStack() as stack:
        upstream = await _upstream(stack, "0", str(GAP))
        bare = await stack.enter_async_context(relay(upstream))
        ours = await stack.enter_async_context(
            ullage(upstream, WINDOWS, server={"limits": {"in_flight": 2 * STREAMS, "connections": 2 * STREAMS}})
        )
        rows = []
        for subject in (bare, ours):
            links = [Connection(*await asyncio.open_connection("127.0.0.1", subject.port)) for _ in range(STREAMS)]
            await idle(subject.pids)
            before, memory_before, began = cpu_seconds(subject.pids), resident_bytes(subject.pids), time.monotonic()
            asking = asyncio.gather(*(link.ask(body) for link in links))
            await asyncio.sleep(4)
            held = (resident_bytes(subject.pids) - memory_before) / STREAMS / 1024
            answers = await asking
            events, seconds = sum(events for _, events in answers), time.monotonic() - began
            used = cpu_seconds(subject.pids) - before
            figures = {"us_an_event": used * 1e6 / events, "cores": used / seconds, "kib_each": held}
            figures |= {"events": events, "seconds": seconds}
            rows.append(Row("streams", subject.name, f"{STREAMS} at once", figures))
            for link in links:
                link.close()
        return rows


async def idle_connections(neighbours: Path | None) -> list[Row]:
    """What ten thousand idle connections cost, and what a request beside them takes."""
    body = session(Kind("", 1_000, 0, 1, 1, CHAT), 1)[0]
    async with AsyncExitStack() as stack:
        upstream = await _upstream(stack)
        bare = await stack.enter_async_context(relay(upstream))
        limits = {"limits": {"connections": IDLE_CONNECTIONS + 100}}
        ours = await stack.enter_async_context(ullage(upstream, WINDOWS, server=limits))
        rows = []
        for subject in (bare, ours):
            link = Connection(*await asyncio.open_connection("127.0.0.1", subject.port))
            alone = statistics.median([(await link.ask(body))[0] for _ in range(50)])
            before = resident_bytes(subject.pids)
            began, cpu_before = time.monotonic(), cpu_seconds(subject.pids)
            writers = []
            for _ in range(IDLE_CONNECTIONS // 100):
                opening = (asyncio.open_connection("127.0.0.1", subject.port) for _ in range(100))
                writers += [writer for _, writer in await asyncio.gather(*opening)]
            await idle(subject.pids)
            connecting, accepting = time.monotonic() - began, cpu_seconds(subject.pids) - cpu_before
            held = (resident_bytes(subject.pids) - before) / IDLE_CONNECTIONS / 1024
            cpu_before = cpu_seconds(subject.pids)
            await asyncio.sleep(IDLE_SECONDS)
            resting = (cpu_seconds(subject.pids) - cpu_before) / IDLE_SECONDS
            beside = statistics.median([(await link.ask(body))[0] for _ in range(50)])
            closed = sum(writer.transport.is_closing() for writer in writers)
            figures = {"kib_each": held, "accept_us": accepting * 1e6 / IDLE_CONNECTIONS, "idle_cores": resting}
            figures |= {"p50_alone_us": alone * 1e6, "p50_beside_us": beside * 1e6, "closed": closed}
            rows.append(Row("idle", subject.name, f"{IDLE_CONNECTIONS} connections", {**figures, "s": connecting}))
            for writer in writers:
                writer.close()
            link.close()
        return rows


async def rate(neighbours: Path | None) -> list[Row]:
    """Requests a second of a small chat."""
    body = session(Kind("", 1_000, 0, 1, 1, CHAT), 1)[0]
    async with AsyncExitStack() as stack:
        upstream = await _upstream(stack)
        everyone = [("", await stack.enter_async_context(relay(upstream)))]
        for workers in (1, 2):
            ours = await stack.enter_async_context(ullage(upstream, WINDOWS, workers))
            everyone.append((f", workers {workers}", ours))
        if neighbours:
            everyone += [("", other) for other in await started(stack, upstream, neighbours)]
        rows = []
        for suffix, subject in everyone:
            generator = Generator(subject.port, [body])
            await generator.closed(RATE_SECONDS / 5, CLIENTS)
            before = cpu_seconds(subject.pids)
            tally = await generator.closed(RATE_SECONDS, CLIENTS)
            cores = (cpu_seconds(subject.pids) - before) / RATE_SECONDS
            generator.close()
            figures = {"a_second": tally.statuses["200"] / RATE_SECONDS, "cores": cores}
            rows.append(Row("rate", f"{subject.name}{suffix}", "1 KB chat", figures))
        return rows


async def _upstream(stack: AsyncExitStack, *arguments: str) -> str:
    port = free_port()
    await stack.enter_async_context(program("tests.bench.mock", str(port), *arguments))
    await listening(port)
    return f"http://127.0.0.1:{port}"


PARTS: dict[str, Callable[[Path | None], Awaitable[list[Row]]]] = {
    "length": length,
    "memory": memory,
    "streams": streams,
    "idle": idle_connections,
    "rate": rate,
}


def plot(rows: list[Row], file: Path) -> None:
    """Write the costs by length to *file* as an SVG, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ullage", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in dict.fromkeys(row.subject for row in rows if row.part == "length"):
        own = [row for row in rows if row.part == "length" and row.subject == name]
        tokens = [int(row.case.split()[0]) for row in own]
        axes.plot(tokens, [row.figures["cpu_ms"] for row in own], marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the request", ylabel="CPU of a request, ms")
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def show(rows: list[Row]) -> None:
    """Print *rows* as a table."""
    grid = Table("part", "subject", "case", "figures", title=f"Growth; load {os.getloadavg()[0]:.1f}")
    for row in rows:
        grid.add_row(row.part, row.subject, row.case, "  ".join(f"{k} {v:,.3g}" for k, v in row.figures.items()))
    Console(width=150).print(grid)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--neighbours", type=Path, help="folder of other proxies' environments")
    parser.add_argument("--svg", type=Path, help="write the plot of costs by length to this file")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * IDLE_CONNECTIONS)), hard))
    rows = []
    for name in given.parts:
        rows += uvloop.run(PARTS[name](given.neighbours))
        show([row for row in rows if row.part == name])
    if given.svg and "length" in given.parts:
        plot(rows, given.svg)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

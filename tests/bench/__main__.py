"""What the proxy costs beside a minimal relay: ``python -m tests.bench [--rounds N] [--json FILE]``.

Starts a canned upstream, the relay and a real ``ullage serve``; runs short slices of the same traffic through each, and
straight to the upstream, in changing order; prints medians. Read the ratios, not the microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.bodies import KINDS, WINDOWS, Kind
from tests.bench.cpu import cpu_seconds, family
from tests.support.proxy_process import ROOT, Proxy, free_port

SUBJECTS = ("direct", "relay", "ullage")


@dataclass
class Samples:
    """Figures of one subject and kind, one entry a slice: microseconds of CPU, and latencies."""

    cpu: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def added(self, direct: Samples) -> dict[str, float]:
        """The medians of what this subject adds to the latencies of *direct*."""
        pairs = {"p50": (self.p50, direct.p50), "p99": (self.p99, direct.p99)}
        return {name: statistics.median(own) - statistics.median(bare) for name, (own, bare) in pairs.items()}


@asynccontextmanager
async def program(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running ``python -m module``, ended on the way out."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def listening(port: int) -> None:
    """Return when *port* accepts connections."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def slice_of(kind: Kind, port: int, pid: int, seed: int) -> tuple[float, list[float]]:
    """Microseconds of CPU per request (or event, for a stream), and the latencies, of one slice."""
    async with program("tests.bench.load", str(port), kind.name, str(seed)) as load:
        assert load.stdin is not None
        assert load.stdout is not None
        if (await load.stdout.readline()).strip() != b"ready":
            raise RuntimeError("the load generator failed; its message is above")
        pids = family(pid)
        before = cpu_seconds(pids)
        load.stdin.write(b"go\n")
        done = json.loads(await load.stdout.readline())
        used = cpu_seconds(pids) - before
        latencies: list[float] = json.loads(await load.stdout.readline())
    return used * 1e6 / (done["events"] if kind.stream else done["requests"]), latencies


async def run(rounds: int) -> dict[str, dict[str, Samples]]:
    """All samples by kind and subject."""
    ports = {name: free_port() for name in ("direct", "relay")}
    upstream = f"http://127.0.0.1:{ports['direct']}"
    models = [
        {"name": m, "upstream": "mock", "context_window": w, "tokenizer": "o200k_base"} for m, w in WINDOWS.items()
    ]
    config = {"upstreams": [{"name": "mock", "base_url": f"{upstream}/v1"}], "models": models}
    samples: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(Samples))
    async with (
        program("tests.bench.mock", str(ports["direct"])) as mock,
        program("tests.bench.relay", str(ports["relay"]), upstream) as relay,
        Proxy(f"{upstream}/v1", config=config) as proxy,
    ):
        await asyncio.gather(*map(listening, ports.values()))
        pids = {"direct": mock.pid, "relay": relay.pid, "ullage": proxy.pid}
        ports["ullage"] = proxy.port
        order = random.Random(1)
        for number in range(rounds + 1):
            for kind in KINDS:
                for subject in order.sample(SUBJECTS, len(SUBJECTS)):
                    cpu, latencies = await slice_of(kind, ports[subject], pids[subject], number)
                    if number:
                        _note(samples[kind.name][subject], cpu, latencies)
            print(f"round {number} of {rounds} done", file=sys.stderr)
    return samples


def _note(samples: Samples, cpu: float, latencies: list[float]) -> None:
    samples.cpu.append(cpu)
    if not latencies:
        return
    samples.p50.append(latencies[len(latencies) // 2])
    samples.p99.append(latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))])


def table(samples: dict[str, dict[str, Samples]]) -> list[dict[str, Any]]:
    """A row of medians and ratios for each kind; microseconds."""
    rows = []
    for kind in KINDS:
        direct, relay, ours = (samples[kind.name][subject] for subject in SUBJECTS)
        # Slices of one round lie seconds apart: their ratio is steadier than the ratio of two medians.
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours.cpu, relay.cpu, strict=True))
        middle = {"relay_cpu": statistics.median(relay.cpu), "ullage_cpu": statistics.median(ours.cpu)}
        row: dict[str, Any] = {"kind": kind.name, **middle, "cpu": ratio}
        if not kind.stream:
            theirs, mine = relay.added(direct), ours.added(direct)
            for name in ("p50", "p99"):
                row |= {f"relay_{name}": theirs[name], f"ullage_{name}": mine[name]}
                row[name] = mine[name] / theirs[name] if theirs[name] > 0 else None
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print *rows* as a table."""
    columns = (
        "kind",
        "relay_cpu",
        "ullage_cpu",
        "cpu",
        "relay_p50",
        "ullage_p50",
        "p50",
        "relay_p99",
        "ullage_p99",
        "p99",
    )
    grid = Table(title="CPU us a request (or event); added latency us; ratios ullage / relay")
    for column in columns:
        grid.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        grid.add_row(*(_cell(column, row.get(column)) for column in columns))
    Console(width=140).print(grid)


def _cell(column: str, value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}x" if column in {"cpu", "p50", "p99"} else f"{value:.0f}"


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured slices of each kind and subject")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    rows = table(asyncio.run(run(given.rounds)))
    show(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

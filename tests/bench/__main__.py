"""What the proxy costs beside a minimal relay: ``python -m tests.bench [--rounds N] [--kinds WORD ...] [--json FILE]``.

Starts a canned upstream, the relay and a real ``ullage serve``; runs short slices of the same traffic through each, and
straight to the upstream, in changing order; prints medians. CPU is that of a process and all its threads. A slice
begins when nothing is left to do of what came before it, summaries among that. Read the ratios, not the microseconds.

``--kinds`` takes parts of the names below, and ``start``. ``--neighbours FOLDER`` measures other proxies as well, each
installed in an environment in FOLDER (``tests/bench/subjects.py`` names them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.bodies import KINDS, WINDOWS, Kind
from tests.bench.cpu import cpu_seconds, family, resident_bytes
from tests.bench.load import loaded
from tests.bench.programs import idle, listening, program
from tests.bench.subjects import Subject, configuration, subjects
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

START = "start"
"""The kind that is no traffic: what a process costs until it is ready."""

OWN = ("direct", "relay", "ullage")
"""The subjects that must not fail."""

STARTS, SETTLED_AFTER = 3, 10.0
"""Processes that are started one after the other, and seconds from a start until its memory is read."""

BEHIND = 0.4
"""Seconds after a slice in which what happens behind the answers of bodies never seen still belongs to it."""

HELD_SLICES = 2
"""Slices in which the holds of the loop are looked at, by a process of its own: looking costs something."""


@dataclass
class Samples:
    """Figures of one subject and kind, one entry a slice: microseconds of CPU, and of the median latency."""

    cpu: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Row:
    """One kind: microseconds of CPU for each request or event, and the ratio to the relay with its quartiles.

    ``added_p50`` is the ratio of the latencies added to those of the upstream. ``held_ms`` are the longest hold of the
    loop in each slice of bodies never seen.
    """

    kind: str
    subject: str
    relay_us: float
    us: float
    ratio: float
    lower: float
    upper: float
    added_p50: float | None
    outcomes: list[str]
    held_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StartRow:
    """What starting costs: CPU seconds until ready and after ten seconds, and MiB resident then."""

    kind: str
    ready_cpu_s: float
    settled_cpu_s: float
    resident_mib: float


class SliceFailed(Exception):
    """A slice did not end: its subject refused a request, or went away."""


@dataclass
class Load:
    """The load generator's process."""

    process: asyncio.subprocess.Process

    async def slice_of(self, kind: Kind, subject: Subject, seed: int) -> tuple[float, list[float], list[str]]:
        """Microseconds of CPU per request (or event, for a stream), latencies, and outcomes of one slice."""
        await self._send(json.dumps({"port": subject.port, "kind": kind.name, "seed": seed, "most": subject.most}))
        await self._line()
        await idle(subject.pids)
        before = cpu_seconds(subject.pids)
        await self._send("go")
        done = json.loads(await self._line())
        if kind.fresh:
            await asyncio.sleep(BEHIND)
        used = cpu_seconds(subject.pids) - before
        latencies: list[float] = json.loads(await self._line())
        units = done["events"] if kind.stream else done["requests"]
        if not units:
            raise SliceFailed("a stream without events")
        return used * 1e6 / units, latencies, done["outcomes"]

    async def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended; its message is above")
        if line.startswith(b'{"failed"'):
            raise SliceFailed(line.decode().strip())
        return line


Measured = dict[str, dict[str, Samples]]
"""Samples by kind and subject."""


async def run(rounds: int, kinds: list[Kind], neighbours: Path | None) -> tuple[Measured, list[float]]:
    """All samples, and the longest holds of the loop."""
    port = free_port()
    samples: Measured = defaultdict(lambda: defaultdict(Samples))
    async with AsyncExitStack() as stack:
        mock = await stack.enter_async_context(program("tests.bench.mock", str(port)))
        await listening(port)
        everyone = await stack.enter_async_context(subjects(mock.pid, port, neighbours))
        load = Load(await stack.enter_async_context(program("tests.bench.load")))
        order, failed = random.Random(1), set[tuple[Kind, str]]()
        for number in range(rounds + 1):  # the first round warms up
            for kind in kinds:
                for subject in order.sample(everyone, len(everyone)):
                    if (kind, subject.name) not in failed:
                        await _slice(load, kind, subject, number, samples[kind.name][subject.name], failed)
            print(f"round {number} of {rounds} done", file=sys.stderr)
        fresh = next((kind for kind in kinds if kind.fresh), None)
        held = await holds(load, fresh, f"http://127.0.0.1:{port}") if fresh else []
    return samples, held


async def _slice(
    load: Load, kind: Kind, subject: Subject, number: int, samples: Samples, failed: set[tuple[Kind, str]]
) -> None:
    """Add one slice to *samples*; a neighbour that fails is left out of the kind from there on."""
    try:
        cpu, latencies, outcomes = await load.slice_of(kind, subject, number)
    except SliceFailed as error:
        if subject.name in OWN:
            raise
        print(f"{subject.name}, {kind.name}: {error}", file=sys.stderr)
        failed.add((kind, subject.name))
        return
    if not number:
        return
    samples.cpu.append(cpu)
    samples.outcomes.update(filter(None, outcomes))
    if latencies:
        samples.p50.append(statistics.median(latencies))


async def holds(load: Load, kind: Kind, upstream: str) -> list[float]:
    """The longest hold of the loop in each of a few slices, in milliseconds, by a process that looks at itself."""
    with tempfile.TemporaryDirectory(prefix="ulg-") as folder:
        file = Path(folder) / "lags"
        file.touch()
        under = (sys.executable, "-m", "tests.bench.beat", str(file))
        async with Proxy(f"{upstream}/v1", config=configuration(upstream, WINDOWS), under=under) as proxy:
            subject, longest = Subject("held", proxy.port, family(proxy.pid)), []
            await loaded(subject.port, subject.pids)
            for number in range(HELD_SLICES + 1):  # the first one warms up
                before = len(file.read_text())
                await load.slice_of(kind, subject, 500 + number)
                longest.append(max(map(float, file.read_text()[before:].split()), default=0.0) * 1e3)
        return longest[1:]


async def starts() -> StartRow:
    """What starting a process costs, as the median of a few.

    An installed package has its bytecode beside it. So a first start, which is not measured, writes that of a checkout.
    """
    ready, settled, memory = [], [], []
    loop, upstream = asyncio.get_running_loop(), f"http://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        begun = []
        bytecode = stack.enter_context(tempfile.TemporaryDirectory(prefix="ulg-"))
        environment = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        async with Proxy(f"{upstream}/v1", config=configuration(upstream, WINDOWS), environment=environment) as first:
            await idle(family(first.pid))
        for _ in range(STARTS):
            moment = loop.time()
            proxy = Proxy(f"{upstream}/v1", config=configuration(upstream, WINDOWS), environment=environment)
            await stack.enter_async_context(proxy)
            ready.append(cpu_seconds(family(proxy.pid)))
            begun.append((moment, family(proxy.pid)))
            await idle(begun[-1][1])
        for moment, pids in begun:
            await asyncio.sleep(max(0.0, moment + SETTLED_AFTER - loop.time()))
            settled.append(cpu_seconds(pids))
            memory.append(resident_bytes(pids) / 2**20)
    return StartRow("start", *map(statistics.median, (ready, settled, memory)))


def rows_of(samples: Measured, held: list[float]) -> list[Row]:
    """The medians and ratios of each kind and subject."""
    rows = []
    for name, by_subject in samples.items():
        for subject, own in by_subject.items():
            if subject in ("direct", "relay") or not own.cpu:
                continue
            # Slices of one round lie seconds apart: their ratio is steadier than the ratio of two medians.
            ratios = [mine / theirs for mine, theirs in zip(own.cpu, by_subject["relay"].cpu, strict=False)]
            lower, middle, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            medians = statistics.median(by_subject["relay"].cpu), statistics.median(own.cpu)
            figures = (middle, lower, upper, _added(by_subject, own), sorted(own.outcomes))
            is_fresh = next(kind for kind in KINDS if kind.name == name).fresh
            rows.append(Row(name, subject, *medians, *figures, held if is_fresh and subject == "ullage" else []))
    return rows


def _added(by_subject: dict[str, Samples], own: Samples) -> float | None:
    """The ratio of what a subject and what the relay add to the median latency; None if the relay adds nothing."""
    if not own.p50:
        return None
    direct, theirs = (statistics.median(by_subject[name].p50) for name in ("direct", "relay"))
    return (statistics.median(own.p50) - direct) / (theirs - direct) if theirs > direct else None


def show(rows: list[Row], start: StartRow | None) -> None:
    """Print *rows* and *start* as tables."""
    grid = Table(title=f"CPU of a request (or event), and its ratio to the relay; load {os.getloadavg()[0]:.1f}")
    for column in ("kind", "subject", "relay us", "us", "ratio", "quartiles", "added P50", "held ms", "outcomes"):
        grid.add_column(column, justify="left" if column in {"kind", "subject", "outcomes"} else "right")
    for row in rows:
        cells = [row.kind, row.subject, f"{row.relay_us:.0f}", f"{row.us:.0f}", f"{row.ratio:.2f}"]
        cells += [f"{row.lower:.2f}-{row.upper:.2f}", "" if row.added_p50 is None else f"{row.added_p50:.1f}"]
        grid.add_row(*cells, " ".join(f"{each:.0f}" for each in row.held_ms), " ".join(row.outcomes))
    console = Console(width=150)
    if rows:
        console.print(grid)
    if start is not None:
        figures = f"ready after {start.ready_cpu_s:.2f} CPU seconds; after {SETTLED_AFTER:.0f} s "
        console.print(f"{figures}{start.settled_cpu_s:.2f} CPU seconds, {start.resident_mib:.0f} MiB resident")


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured slices of each kind and subject")
    names = ", ".join(kind.name for kind in KINDS)
    parser.add_argument("--kinds", nargs="+", default=[""], help=f"parts of the names of the kinds: {names}, {START}")
    parser.add_argument("--neighbours", type=Path, help="folder of other proxies' environments")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    start = asyncio.run(starts()) if any(word in START for word in given.kinds) else None
    kinds = [kind for kind in KINDS if any(word in kind.name for word in given.kinds)]
    rows = rows_of(*asyncio.run(run(given.rounds, kinds, given.neighbours))) if kinds else []
    show(rows, start)
    if given.json:
        written: list[Any] = [asdict(row) for row in rows]
        given.json.write_text(json.dumps([*written, asdict(start)] if start else written, indent=1))


if __name__ == "__main__":
    main()

"""Whether memory stays where it is: ``python -m tests.bench.soak [--minutes N] [--full] [--json FILE]``.

New conversations begin all the time, grow over their window and end, streams among them, at a pace that leaves the
machine alone. The caches are made small (``tests.bench.small``), so that they are full when warming up is over;
``--full`` leaves them as they are, which takes hours to fill. Every few seconds the proxy's processes are looked at
from outside: resident memory, descriptors, threads. The first third warms up. Of the rest a line is fitted; the exit
code is 1 if its slope is more than ``MOST_PER_100K``, if descriptors or threads grew, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.bodies import CHAT, ROOMY, TIGHT, Kind, session
from tests.bench.cpu import PROC, family
from tests.bench.load import Connection
from tests.bench.programs import listening, program
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

MIB = 2**20
MOST_PER_100K = 64 * MIB
"""Bytes by which 100,000 requests may let resident memory grow: an allocator's noise over minutes, and no leak of
bodies, of which each is 1 to 100 KB."""

SPARE = 8
"""Descriptors and threads more at the end than after warming up that are no growth: idle connections come and go."""

EVERY, PAUSE, CONNECTIONS = 5.0, 0.02, 4
"""Seconds between two looks, seconds a connection rests after each request, and connections of each kind."""

WINDOWS = {CHAT: 24_576, ROOMY: 24_576, TIGHT: 8_192}
KINDS = (
    Kind("chat", 1_000, 0, 20, CONNECTIONS, CHAT),
    Kind("agent", 60_000, 2_500, 16, CONNECTIONS, TIGHT),
    Kind("long agent", 160_000, 9_000, 14, CONNECTIONS),
    Kind("stream", 1_000, 0, 1, CONNECTIONS, CHAT, stream=True),
)


@dataclass(frozen=True)
class Look:
    """The proxy's processes at one moment: *seconds* since the start, *requests* so far, bytes, and counts."""

    seconds: float
    requests: int
    memory: int
    descriptors: int
    threads: int


@dataclass
class Traffic:
    """What was sent so far, and what failed."""

    requests: int = 0
    failed: int = 0
    first_failure: str = ""


def look(pid: int, began: float, requests: int) -> Look:
    """Return what the proxy *pid* and its workers take now."""
    memory = descriptors = threads = 0
    for each in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            status = dict(line.split(":", 1) for line in (PROC / str(each) / "status").read_text().splitlines())
            memory += int(status["VmRSS"].split()[0]) * 1024
            threads += int(status["Threads"])
            descriptors += len(list((PROC / str(each) / "fd").iterdir()))
    return Look(round(time.monotonic() - began, 1), requests, memory, descriptors, threads)


async def talk(port: int, kind: Kind, number: int, until: float, traffic: Traffic) -> None:
    """Hold one conversation after the other over one connection each until the time *until*."""
    seed = number
    while time.monotonic() < until:
        bodies = await asyncio.to_thread(session, kind, seed)
        seed += 1_000
        link = Connection(*await asyncio.open_connection("127.0.0.1", port))
        try:
            for body in bodies:
                traffic.requests += 1
                await link.ask(body)
                await asyncio.sleep(PAUSE)
                if time.monotonic() >= until:
                    break
        except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
            traffic.failed += 1
            traffic.first_failure = traffic.first_failure or f"{kind.name}: {error}"
        finally:
            link.close()


async def run(minutes: float, workers: int, *, full: bool) -> tuple[list[Look], Traffic]:
    """Return a look every few seconds of *minutes* of traffic, and what the traffic was."""
    upstream, looks, traffic = free_port(), [], Traffic()
    models = [{"name": name, "context_window": window, "tokenizer": "o200k_base"} for name, window in WINDOWS.items()]
    config = {"upstreams": [{"name": "mock", "base_url": f"http://127.0.0.1:{upstream}/v1"}], "models": models}
    under = () if full else (sys.executable, "-m", "tests.bench.small")
    arguments = ["--workers", str(workers)]
    async with (
        program("tests.bench.mock", str(upstream)),
        Proxy(f"http://127.0.0.1:{upstream}/v1", config=config, arguments=arguments, under=under) as proxy,
    ):
        await listening(upstream)
        began = time.monotonic()
        until = began + minutes * 60
        tasks = [
            asyncio.ensure_future(talk(proxy.port, kind, at * 10 + number, until, traffic))
            for at, kind in enumerate(KINDS)
            for number in range(kind.connections)
        ]
        while time.monotonic() < until:
            await asyncio.sleep(EVERY)
            looks.append(look(proxy.pid, began, traffic.requests))
            print(_line(looks[-1]), file=sys.stderr, flush=True)
        await asyncio.gather(*tasks)
    return looks, traffic


def slope(looks: Sequence[Look]) -> float:
    """Return the bytes of memory that 100,000 requests add, by a straight line through *looks*."""
    line = statistics.linear_regression([look.requests for look in looks], [look.memory for look in looks])
    return line.slope * 100_000


def complaints(looks: Sequence[Look], traffic: Traffic) -> list[str]:
    """Return what is wrong with a soak; *looks* are those after warming up."""
    found = []
    if traffic.failed:
        found.append(f"{traffic.failed} of {traffic.requests} requests failed, first {traffic.first_failure}")
    if (grown := slope(looks)) > MOST_PER_100K:
        found.append(f"memory grows by {grown / MIB:.1f} MiB in 100,000 requests")
    third = max(1, len(looks) // 3)
    for name in ("descriptors", "threads"):
        first, last = ([getattr(each, name) for each in part] for part in (looks[:third], looks[-third:]))
        if min(last) > max(first) + SPARE:
            found.append(f"{name} grew from {max(first)} to {min(last)}")
    return found


def _line(found: Look) -> str:
    return (
        f"{found.seconds:7.0f} s  {found.requests:8,} requests  {found.memory / MIB:7.1f} MiB  "
        f"{found.descriptors:4} descriptors  {found.threads:3} threads"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    looks, traffic = asyncio.run(run(given.minutes, given.workers, full=given.full))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in looks]))
    warm = looks[len(looks) // 3 :]
    if len(warm) < 3:
        sys.exit("too short to say anything: give more --minutes")
    print(f"{traffic.requests:,} requests; {slope(warm) / MIB:+.1f} MiB in 100,000 requests after warming up")
    found = complaints(warm, traffic)
    print("\n".join(found) or "flat")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

"""Three times the capacity: ``python -m tests.bench.overload [--seconds N] [--times X] [--json FILE]``.

For each case: as many connections as may be under way, which ask one thing after the other, find how many requests a
second a real ``ullage serve`` answers. Then requests begin by the clock, so many times as often, whether or not those
before them were answered. Goodput is what comes back as 200 within ``DEADLINE`` seconds of when it was due. The rest
has to be refused with 503 and Retry-After. The exit code is 1 if goodput falls below what the case has to keep, if a
refusal names no time, or if a request gets neither.

If the upstream takes its time, ``server.limits.in_flight`` is the capacity, and a refusal costs nobody anything. If it
answers at once, the proxy's processor is, each refusal takes a share of it, and so does the generator of a small
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import uvloop

from tests.bench.bodies import CHAT, WINDOWS, Kind, session
from tests.bench.cpu import cpu_seconds, family
from tests.bench.load import HEAD
from tests.bench.programs import listening, program
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

DEADLINE = 2.0
"""Seconds after which an answer is of no use."""

MOST_CONNECTIONS, MOST_REQUESTS, TICK = 1_900, 200_000, 0.002
"""Bounds of the generator, and seconds between two looks at what is due."""

UNSENT = "no connection left"
"""What became of a request that the generator had no connection for."""

ROUNDS, SETTLE, END = 4, 1.0, 15.0
"""Slices of each kind, seconds at a slice's beginning that are not counted, and those that wait for last answers."""

SMALL_CHAT, AGENT = Kind("1 KB chat", 1_000, 0, 1, 200, CHAT), Kind("50 KB agent", 50_000, 1_200, 12, 24)


@dataclass(frozen=True)
class Case:
    """Requests of a *kind*, how long the upstream takes, how many may be under way, and what has to be kept."""

    kind: Kind
    after: float
    in_flight: int
    least: float

    @property
    def name(self) -> str:
        """The case in a few words."""
        return f"{self.kind.name}, upstream {self.after * 1000:.0f} ms"


CASES = (
    Case(SMALL_CHAT, 0.25, 64, 0.9),
    Case(AGENT, 0.25, 64, 0.9),
    Case(SMALL_CHAT, 0.0, 16, 0.3),
    Case(AGENT, 0.0, 16, 0.3),
)


@dataclass
class Tally:
    """What became of requests: answers by status, those in time, their seconds, and refusals with no Retry-After."""

    sent: int = 0
    good: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    unnamed: int = 0

    def add(self, other: Tally) -> None:
        """Count what *other* has counted."""
        self.sent += other.sent
        self.good += other.good
        self.statuses += other.statuses
        self.answered += other.answered
        self.refused += other.refused
        self.unnamed += other.unnamed

    def note(self, status: str, seconds: float, *, named: bool) -> None:
        """Count one answer."""
        self.statuses[status] += 1
        if status == "200":
            self.good += seconds <= DEADLINE
            self.answered.append(seconds)
        elif status == "503":
            self.refused.append(seconds)
            self.unnamed += not named


@dataclass(frozen=True)
class Row:
    """Figures of one case: requests a second, seconds, and counts; *cpu* in processors.

    *kept* is the part of the capacity that is left.
    """

    case: str
    capacity: float
    offered: float
    goodput: float
    kept: float
    refused: float
    answered_p99: float
    refused_p50: float
    refused_p99: float
    unnamed: int
    unsent: int
    lost: int
    cpu: float


class Asker(asyncio.Protocol):
    """One connection: sends one request at a time, and says what came back."""

    def __init__(self) -> None:
        self._done: Callable[[str, bool, bool], None] | None = None
        self._data = b""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes, done: Callable[[str, bool, bool], None]) -> None:
        """Send *request*; *done* gets the status, whether it names a time, and whether the connection stays."""
        self._done, self._data = done, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        head = head.lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) >= length:
            stays = b"connection: close" not in head
            self._end(head[9:12].decode(), named=b"retry-after:" in head, stays=stays)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end("lost", named=False, stays=False)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _end(self, status: str, *, named: bool, stays: bool) -> None:
        done, self._done = self._done, None
        if not stays:
            self._transport.close()
        if done is not None:
            done(status, named, stays)


class Generator:
    """Sends the same requests in turn to one port, over as many connections as it takes."""

    def __init__(self, port: int, bodies: list[bytes]) -> None:
        self._port = port
        self._requests = itertools.cycle([(HEAD % len(body)).encode() + body for body in bodies])
        self._idle: deque[Asker] = deque()
        self._connections = 0
        self.waiting = 0

    async def closed(self, seconds: float, connections: int) -> Tally:
        """Keep so many *connections* busy for *seconds*."""
        tally = Tally()
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._follow(until, tally) for _ in range(connections)))
        return tally

    async def open(self, rate: float, seconds: float, after: float = 0.0) -> Tally:
        """Begin *rate* requests a second for *seconds*, and count those that are due *after* the beginning."""
        tally, ignored, tasks = Tally(), Tally(), set[asyncio.Task[None]]()
        began, count = time.perf_counter(), 0
        while (gone := time.perf_counter() - began) < seconds and count < MOST_REQUESTS:
            while count < gone * rate:
                due = began + count / rate
                where = tally if count / rate >= after else ignored
                where.sent += 1
                count += 1
                if asker := self._spare():
                    self._begin(asker, due, where)
                elif self._connections < MOST_CONNECTIONS:
                    tasks.add(task := asyncio.ensure_future(self._connect_and_ask(due, where)))
                    task.add_done_callback(tasks.discard)
                else:
                    where.note(UNSENT, 0.0, named=False)
            await asyncio.sleep(TICK)
        if tasks:
            await asyncio.wait(set(tasks), timeout=END)
        await self._quiet(END)
        return tally

    def close(self) -> None:
        """Close the connections that are spare."""
        while self._idle:
            self._idle.pop().close()

    async def _quiet(self, seconds: float) -> None:
        """Wait until nothing is under way, at most so many *seconds*."""
        until = time.perf_counter() + seconds
        for _ in range(round(seconds / TICK)):
            if not self.waiting or time.perf_counter() >= until:
                return
            await asyncio.sleep(TICK)

    def _spare(self) -> Asker | None:
        """Return the connection that was used last, if there is one that the proxy has not closed meanwhile."""
        while self._idle:
            asker = self._idle.pop()
            if not asker.closed:
                return asker
            self._connections -= 1
        return None

    async def _connect(self) -> Asker:
        self._connections += 1
        try:
            _, asker = await asyncio.get_running_loop().create_connection(Asker, "127.0.0.1", self._port)
        except OSError:
            self._connections -= 1
            raise
        return asker

    async def _follow(self, until: float, tally: Tally) -> None:
        while time.perf_counter() < until:
            asker = self._spare() or await self._connect()
            tally.sent += 1
            await self._begin(asker, time.perf_counter(), tally)

    async def _connect_and_ask(self, due: float, tally: Tally) -> None:
        try:
            asker = await self._connect()
        except OSError:
            tally.note("not connected", 0.0, named=False)
            return
        await self._begin(asker, due, tally)

    def _begin(self, asker: Asker, due: float, tally: Tally) -> asyncio.Future[None]:
        self.waiting += 1
        over = asyncio.get_running_loop().create_future()

        def done(status: str, named: bool, stays: bool) -> None:
            self.waiting -= 1
            tally.note(status, time.perf_counter() - due, named=named)
            if stays:
                self._idle.append(asker)
            else:
                self._connections -= 1
            over.set_result(None)

        asker.ask(next(self._requests), done)
        return over


async def measure(case: Case, port: int, pid: int, seconds: float, times: float) -> Row:
    """Return the figures of *case* on a proxy at *port*.

    Other jobs make a machine faster and slower: each slice of too much lies between two slices of the capacity, and is
    compared with their mean.
    """
    bodies = [body for seed in range(case.kind.connections) for body in session(case.kind, seed)[1:]]
    generator, pids = Generator(port, bodies), family(pid)
    part = seconds / ROUNDS
    await generator.closed(part, case.in_flight)  # warms up
    capacities, kept, used, whole = [await _capacity(generator, part / 2, case)], [], 0.0, Tally()
    for _ in range(ROUNDS):
        task = asyncio.ensure_future(generator.open(capacities[-1] * times, part + SETTLE, SETTLE))
        await asyncio.sleep(SETTLE)
        before = cpu_seconds(pids)
        await asyncio.sleep(part)
        used += cpu_seconds(pids) - before
        tally = await task
        capacities.append(await _capacity(generator, part / 2, case))
        kept.append(tally.good / part / statistics.mean(capacities[-2:]))
        whole.add(tally)
    generator.close()
    return Row(
        case.name,
        statistics.median(capacities),
        (whole.sent - whole.statuses[UNSENT]) / seconds,
        whole.good / seconds,
        statistics.median(kept),
        whole.statuses["503"] / seconds,
        _percentile(whole.answered, 0.99),
        _percentile(whole.refused, 0.5),
        _percentile(whole.refused, 0.99),
        whole.unnamed,
        whole.statuses[UNSENT],
        whole.sent - sum(whole.statuses[known] for known in ("200", "503", UNSENT)),
        used / seconds,
    )


async def _capacity(generator: Generator, seconds: float, case: Case) -> float:
    return (await generator.closed(seconds, case.in_flight)).good / seconds


def complaints(row: Row, least: float) -> list[str]:
    """Return what is wrong with *row*, which has to keep *least* of the capacity."""
    found = []
    if row.kept < least:
        found.append(f"{row.case}: goodput is {row.kept:.0%} of the capacity")
    if row.unnamed:
        found.append(f"{row.case}: {row.unnamed} refusals without Retry-After")
    if row.lost:
        found.append(f"{row.case}: {row.lost} requests got neither an answer nor a refusal")
    return found


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[int((len(values) - 1) * part)] if values else 0.0


def _line(row: Row) -> str:
    return (
        f"{row.case}: capacity {row.capacity:.0f}/s, offered {row.offered:.0f}/s: goodput {row.goodput:.0f}/s "
        f"({row.kept:.0%}), refused {row.refused:.0f}/s; p99 of answers {row.answered_p99 * 1000:.0f} ms, refusals "
        f"{row.refused_p50 * 1000:.1f} ms (p99 {row.refused_p99 * 1000:.0f} ms); unsent {row.unsent}, lost {row.lost}; "
        f"{row.cpu:.2f} cores"
    )


async def run(case: Case, seconds: float, times: float) -> Row:
    """Return the figures of *case* on a proxy of its own."""
    upstream = free_port()
    models = [{"name": name, "context_window": window, "tokenizer": "o200k_base"} for name, window in WINDOWS.items()]
    config = {
        "server": {"limits": {"in_flight": case.in_flight}},
        "upstreams": [{"name": "mock", "base_url": f"http://127.0.0.1:{upstream}/v1"}],
        "models": models,
    }
    async with (
        program("tests.bench.mock", str(upstream), str(case.after)),
        Proxy(f"http://127.0.0.1:{upstream}/v1", config=config, arguments=["--workers", "1"]) as proxy,
    ):
        await listening(upstream)
        return await measure(case, proxy.port, proxy.pid, seconds, times)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, found = [], []
    for case in CASES:
        rows.append(row := uvloop.run(run(case, given.seconds, given.times)))
        found += complaints(row, case.least)
        print(_line(row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows]))
    print("\n".join(found) or "held")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

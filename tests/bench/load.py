"""The load generator: a process that runs one slice of traffic for each line on its standard input.

A line is a JSON object: ``port``, ``kind``, ``seed`` and ``most``, the requests of a connection at most. The answers
are ``ready`` once the sessions are warm; after another line of input, a JSON object when the busy part is done; and a
list with the latencies of a connection that is alone, in microseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import lru_cache

from uvloop import run

from tests.bench.bodies import KINDS, Kind, session
from tests.bench.programs import idle

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-bench\r\n"
    "content-type: application/json\r\naccept: application/json\r\nuser-agent: OpenAI/Python 2.0\r\n"
    "content-length: %d\r\n\r\n"
)

LOADED_AFTER = 2.0
"""Seconds after a first request in which all has begun that is loaded with it."""

LONGEST_SLICE = 180.0
"""Seconds after which a slice has failed."""

OUTCOME = b"x-ullage-outcome:"

cached_session = lru_cache(maxsize=32)(session)
"""The bodies of a session: each subject of a round gets the same ones."""


class Connection:
    """One keep-alive connection that sends a body and reads the whole answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.outcome = ""

    async def ask(self, body: bytes) -> tuple[float, int]:
        """Seconds until the answer's last byte, and the number of events it held."""
        before = time.perf_counter()
        self._writer.write((HEAD % len(body)).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"not answered: {head[:200]!r} {await self._reader.read(400)!r}")
        self.outcome = head.partition(OUTCOME)[2].partition(b"\r\n")[0].strip().decode()
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        events = 0
        if length:
            events = (await self._reader.readexactly(int(length))).count(b"data: ")
        else:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                events += (await self._reader.readexactly(size + 2)).count(b"data: ")
            await self._reader.readexactly(2)
        return time.perf_counter() - before, events

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def loaded(port: int, pids: list[int], seconds: float = 30.0) -> None:
    """Return when *pids*, which listen on *port*, have what they count with, or after *seconds*.

    Ullage loads it with its first request, and gigatoken once nothing was counted for a second.
    """
    link = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await link.ask(session(KINDS[0], 0)[0])
    link.close()
    await asyncio.sleep(LOADED_AFTER)
    await idle(pids, seconds)


async def drive(link: Connection, bodies: list[bytes]) -> list[tuple[float, int]]:
    """The seconds and events of every body but the first, which warmed the connection up."""
    return [await link.ask(body) for body in bodies[1:]]


async def opened(port: int, kind: Kind, seeds: range, most: int) -> list[tuple[Connection, list[bytes]]]:
    """A warm connection and its session for each seed."""
    links = []
    for seed in seeds:
        link = Connection(*await asyncio.open_connection("127.0.0.1", port))
        bodies = cached_session(kind, seed)[: most + 1]
        if not kind.stream:
            await link.ask(bodies[0])
        links.append((link, bodies))
    return links


async def measure(port: int, kind: str, seed: int, most: int) -> None:
    """Run one slice and print what the module says."""
    traffic = next(each for each in KINDS if each.name == kind)
    first = seed * 100
    links = await opened(port, traffic, range(first, first + traffic.connections), most)
    alone = []
    if not traffic.stream and not traffic.fresh:
        alone = await opened(port, traffic, range(first + 99, first + 100), most)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async with asyncio.timeout(LONGEST_SLICE):
        rows = await asyncio.gather(*(drive(link, bodies) for link, bodies in links))
        answers = [answer for row in rows for answer in row]
        outcomes = sorted({link.outcome for link, _ in links})
        events = sum(events for _, events in answers)
        print(json.dumps({"requests": len(answers), "events": events, "outcomes": outcomes}), flush=True)
        waits = [seconds for link, bodies in alone for seconds, _ in await drive(link, bodies)]
    print(json.dumps(sorted(round(seconds * 1e6, 1) for seconds in waits)), flush=True)
    for link, _ in links + alone:
        link.close()


async def serve() -> None:
    """Run slices until the input ends; one that fails prints an object with ``failed``."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            await measure(**json.loads(line))
        except (RuntimeError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), flush=True)


if __name__ == "__main__":
    run(serve())

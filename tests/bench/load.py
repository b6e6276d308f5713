"""The load generator: bounded, in its own process, over raw connections.

Prints ``ready`` when its sessions are warm and starts at the next line on its standard input. Prints a line of JSON
when its busy part is done (requests and events), and another with the latencies of a connection that is alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from uvloop import run

from tests.bench.bodies import KINDS, Kind, session

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-bench\r\n"
    "content-type: application/json\r\naccept: application/json\r\nuser-agent: OpenAI/Python 2.0\r\n"
    "content-length: %d\r\n\r\n"
)


class Connection:
    """One keep-alive connection that sends a body and reads the whole answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, body: bytes) -> tuple[float, int]:
        """Seconds until the answer's last byte, and the number of events it held."""
        before = time.perf_counter()
        self._writer.write((HEAD % len(body)).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"not answered: {head[:200]!r} {await self._reader.read(400)!r}")
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        events = 0
        if length:
            await self._reader.readexactly(int(length))
        else:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                events += (await self._reader.readexactly(size + 2)).count(b"data: ")
            await self._reader.readexactly(2)
        return time.perf_counter() - before, events

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def drive(link: Connection, bodies: list[bytes]) -> list[tuple[float, int]]:
    """What every body but the first, which warmed the connection up, took and brought."""
    return [await link.ask(body) for body in bodies[1:]]


async def opened(port: int, kind: Kind, seeds: range) -> list[tuple[Connection, list[bytes]]]:
    """A warm connection and its session for each seed."""
    found = []
    for seed in seeds:
        link, bodies = Connection(*await asyncio.open_connection("127.0.0.1", port)), session(kind, seed)
        if not kind.stream:
            await link.ask(bodies[0])
        found.append((link, bodies))
    return found


async def measure(port: int, kind: Kind, seed: int) -> None:
    """Say ``ready``, keep all connections busy, say what was done; then say how long one connection alone waits."""
    links = await opened(port, kind, range(seed * 100, seed * 100 + kind.connections))
    alone = [] if kind.stream else await opened(port, kind, range(seed * 100 + 99, seed * 100 + 100))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async with asyncio.timeout(120):
        rows = await asyncio.gather(*(drive(link, bodies) for link, bodies in links))
        answers = [answer for row in rows for answer in row]
        print(json.dumps({"requests": len(answers), "events": sum(events for _, events in answers)}), flush=True)
        waits = [seconds for link, bodies in alone for seconds, _ in await drive(link, bodies)]
    print(json.dumps(sorted(round(seconds * 1e6, 1) for seconds in waits)), flush=True)
    for link, _ in links + alone:
        link.close()


def main() -> None:
    """Run one slice: port, name of the kind, seed."""
    port, name, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    kind = next(kind for kind in KINDS if kind.name == name)
    run(measure(port, kind, seed))


if __name__ == "__main__":
    main()

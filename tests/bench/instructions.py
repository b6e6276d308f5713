"""Instructions of a request, which no other job on the machine moves: ``python -m tests.bench.instructions``.

Runs the relay and a real ``ullage serve`` under valgrind's callgrind (https://valgrind.org/docs/manual/cl-manual.html),
which counts the instructions of a process and all its threads; those of the kernel are not seen. A session is warm
before its requests are counted. Each kind is counted a few times with other sessions, and the smallest figure holds.
Without valgrind it says so and does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from tests.bench.bodies import KINDS, WINDOWS, Kind, session
from tests.bench.load import Connection, loaded
from tests.bench.programs import command, idle, listening, program
from tests.bench.subjects import configuration
from tests.support.ports import free_port

QUIET = asyncio.subprocess.DEVNULL

SLOWEST_START, SLOWEST_REST = 240.0, 120.0
"""Seconds until a process under valgrind listens, and in which it ends what a request began."""

TIMES, MOST = 3, 20
"""Sessions of each kind, and their requests at most."""

WARM_UP = 2
"""Requests of a connection before any is counted: the second one is the first of a warm session."""


@dataclass(frozen=True)
class Row:
    """Instructions for each request (or event) of one kind, in thousands, and the ratio to the relay."""

    kind: str
    relay: float
    ullage: float

    @property
    def ratio(self) -> float:
        """The ratio to the relay."""
        return self.ullage / self.relay


class Counted:
    """A process under callgrind that listens on *port*, and writes what it counts to *folder*."""

    def __init__(self, pid: int, port: int, folder: Path) -> None:
        self._pid = pid
        self._port = port
        self._folder = folder

    async def kind(self, kind: Kind) -> float:
        """The least instructions for each request (or event) of *kind*, in thousands."""
        return min([await self._once(kind, seed) for seed in range(TIMES)])

    async def _once(self, kind: Kind, seed: int) -> float:
        link = Connection(*await asyncio.open_connection("127.0.0.1", self._port))
        warm_up = 1 if kind.fresh or kind.stream else WARM_UP
        bodies = session(kind, 1_000 + seed)[: MOST + warm_up]
        for body in bodies[:warm_up]:
            await link.ask(body)
        await idle([self._pid], SLOWEST_REST)
        await self._control("--instr=on")
        await self._control("--zero")
        answers = [await link.ask(body) for body in bodies[warm_up:]]
        await idle([self._pid], SLOWEST_REST)
        await self._control("--instr=off")
        await self._control("--dump")
        link.close()
        return self._newest_total() / 1e3 / sum(events if kind.stream else 1 for _, events in answers)

    async def _control(self, option: str) -> None:
        words = ("callgrind_control", option, str(self._pid))
        process = await asyncio.create_subprocess_exec(*words, stdout=QUIET, stderr=QUIET)
        if await process.wait():
            raise RuntimeError(f"failed: {' '.join(words)}")

    def _newest_total(self) -> int:
        """The instructions in the last dump, which is removed."""
        total = 0
        for file in self._folder.glob(f"counts.{self._pid}.*"):
            lines = file.read_text(errors="replace").splitlines()
            total = next((int(line.split()[1]) for line in lines if line.startswith("totals:")), total)
            file.unlink()
        if not total:
            raise RuntimeError("callgrind has dumped nothing")
        return total


@asynccontextmanager
async def counted(folder: Path, port: int, *words: str) -> AsyncIterator[Counted]:
    """``python WORDS`` under callgrind, which counts nothing yet."""
    valgrind = f"valgrind --quiet --tool=callgrind --instr-atstart=no --callgrind-out-file={folder}/counts.%p"
    line = f"exec {valgrind} {sys.executable} {' '.join(words)} >> {folder}/log 2>&1"
    # One seed of the hashes: sets and dictionaries are walked in the same order each time.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "HOME": str(folder)}
    async with command("sh", "-c", line, environment=environment) as process:
        await listening(port, SLOWEST_START)
        await loaded(port, [process.pid], SLOWEST_REST)
        yield Counted(process.pid, port, folder)


async def run(kinds: list[Kind]) -> list[Row]:
    """A row for each kind."""
    upstream, relay_port, port = free_port(), free_port(), free_port()
    address = f"http://127.0.0.1:{upstream}"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ulg-", ignore_cleanup_errors=True)))
        file = folder / "ullage.yaml"
        file.write_text(yaml.safe_dump(configuration(address, WINDOWS, store={"path": f"{folder}/data"})))
        await stack.enter_async_context(program("tests.bench.mock", str(upstream)))
        await listening(upstream)
        relay_words = ("-m", "tests.bench.relay", str(relay_port), address)
        relay = await stack.enter_async_context(counted(folder, relay_port, *relay_words))
        words = ("-m", "proxy.cli", "serve", "--config", str(file), "--port", str(port))
        ullage = await stack.enter_async_context(counted(folder, port, *words))
        rows = []
        for kind in kinds:
            rows.append(Row(kind.name, await relay.kind(kind), await ullage.kind(kind)))
            print(f"{kind.name} done", file=sys.stderr)
        return rows


def show(rows: list[Row]) -> None:
    """Print *rows* as a table."""
    grid = Table("kind", title="Thousands of instructions of a request (or event)")
    for column in ("relay", "ullage", "ratio"):
        grid.add_column(column, justify="right")
    for row in rows:
        grid.add_row(row.kind, f"{row.relay:,.0f}", f"{row.ullage:,.0f}", f"{row.ratio:.2f}")
    Console(width=100).print(grid)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["1 KB", "50 KB"], help="parts of the names of kinds")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        print("valgrind is not installed: nothing was counted")
        return
    rows = asyncio.run(run([kind for kind in KINDS if any(word in kind.name for word in given.kinds)]))
    show(rows)
    if given.json:
        given.json.write_text(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()

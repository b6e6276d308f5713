"""Programs that run beside a measurement, and waiting for them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.bench.cpu import cpu_seconds
from tests.support.proxy_process import ROOT

IDLE_SHARE, LOOK = 0.03, 0.1
"""Share of a processor below which a process counts as idle, and the seconds of one look."""

LINE_LIMIT = 2**24
"""Bytes of the longest line that a program prints: a line may hold thousands of latencies."""


@asynccontextmanager
async def program(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running ``python -m module``, ended on the way out."""
    async with command(sys.executable, "-m", module, *arguments) as process:
        yield process


@asynccontextmanager
async def command(
    *words: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command, ended on the way out."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def listening(port: int, seconds: float = 20) -> None:
    """Return when *port* accepts connections; raises ``TimeoutError`` after *seconds*."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def idle(pids: list[int], seconds: float = 5.0) -> None:
    """Return when *pids* have nothing to do, or after *seconds*: what earlier requests began is over then."""
    for _ in range(round(seconds / LOOK)):
        before = cpu_seconds(pids)
        await asyncio.sleep(LOOK)
        if cpu_seconds(pids) - before < IDLE_SHARE * LOOK:
            return

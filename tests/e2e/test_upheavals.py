"""What happens to a machine once in its life: clocks that jump, a root that cannot be written."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_store import WINDOW, ask, chatting, grows, over_an_event, until_up
from tests.store.conftest import Valkey
from tests.support.process_inspection import kill_all, log_lines, metrics, processes_below, total

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
READ_ONLY = """
mount --make-rprivate /
for place in $(awk '{print $2}' /proc/mounts); do
  case $place in /proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$place" 2>/dev/null ;; esac
done
exec "$@"
"""
"""Makes everything read-only that is mounted, for one process and its children, then becomes what it is given."""


def _may_unshare() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-m", "true"], capture_output=True).returncode == 0


@pytest.fixture
def home(short_path: Path) -> Any:
    """A home in which nothing lives on after the test."""
    yield short_path
    kill_all(short_path)


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime, a package of the distribution")
@pytest.mark.parametrize("own", [True, False])
async def test_a_clock_that_jumps_costs_no_request(stub: StartStub, home: Path, proxy: StartProxy, own: bool) -> None:
    """Days forward and back under a running proxy: every request is answered, and the view goes on.

    With a store of its own the server's clock jumps as well.
    """
    clock = home / "clock"
    clock.write_text("+0\n")
    environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_CACHE_DURATION": "1"}
    environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1"}
    folder = home / "remote"
    folder.mkdir()
    remote = Valkey(folder)
    if not own:
        await asyncio.to_thread(remote.start)
    try:
        async with chatting(stub) as (server, talk):
            arguments = [] if own else ["--store", remote.url]
            front = await proxy(server.url, window=WINDOW, arguments=arguments, environment=environment, home=home)
            turn = await over_an_event(talk, front)
            for jump in ("+30d", "-30d", "+1h", "+0"):
                clock.write_text(f"{jump}\n")
                await asyncio.sleep(1.5)  # it is looked at once a second
                for _ in range(3):
                    await ask(talk, front, turn)
                    turn += 1
            assert talk.overflows == 0
            times = [line["timestamp"] for line in log_lines(front) if line["event"] == "proxy.request_done"]
            assert len({time[:10] for time in times}) >= 2, "the proxy's clock did not jump"
            await until_up(front, True)
            assert (await asyncio.to_thread(front.end)) == 0
            clock.write_text("+2d\n")
            front.window = WINDOW + 1500  # so that only what was stored can say where the cut is
            await front.start()
            await ask(talk, front, turn)
            assert grows(talk)
    finally:
        remote.kill()


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a mount namespace")
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_root_that_cannot_be_written_is_served_from_memory(
    stub: StartStub, home: Path, proxy: StartProxy, workers: int
) -> None:
    """With no place to write at all the proxy serves, says what it lacks, and is not up as to its store."""
    async with chatting(stub) as (server, talk):
        under = ("unshare", "-m", "sh", "-c", READ_ONLY, "sh")
        front = await proxy(server.url, window=WINDOW, arguments=["--workers", str(workers)], under=under, home=home)
        for turn in range(20):
            await ask(talk, front, turn)
        assert talk.ledger.compacted > 0
        assert talk.overflows == 0
        (line,) = [line for line in log_lines(front) if line["event"] == "store.memory_instead"]
        assert "Read-only file system" in line["cause"]
        if workers == 1:
            assert total(await metrics(front), "ullage_store_up") == 0
        assert (await asyncio.to_thread(front.end, signal.SIGTERM)) == 0
        assert not processes_below(home)

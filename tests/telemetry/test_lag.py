"""The watch over the event loop: the lag that it measures, and the frames that it names."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from proxy.tasks import LARGE, offload
from proxy.telemetry.lag import LagWatch
from tests.support.proxy_process import until


class Seen:
    """The results of a watch."""

    def __init__(self) -> None:
        self.under_way = {"a request"}
        self.lags: list[float] = []
        self.lines: list[tuple[float, tuple[str, ...]]] = []

    def watch(self, too_late: float) -> LagWatch:
        def warn(lag: float, ran: Sequence[str]) -> None:
            self.lines.append((lag, tuple(ran)))

        return LagWatch(self.under_way, self.lags.append, warn, too_late)


def hold_the_loop(seconds: float) -> None:
    """Keep the calling thread busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.slow
async def test_a_busy_loop_is_measured_and_named() -> None:
    """A beat that comes too late is one line, with its seconds and the function that ran."""
    seen = Seen()
    watch = seen.watch(0.3)
    watch.start()
    await until(lambda: bool(seen.lags))
    hold_the_loop(1.0)
    await until(lambda: any(lag > 0.3 for lag, _ in seen.lines))
    watch.stop()
    assert max(seen.lags) == max(lag for lag, _ in seen.lines) > 0.3
    assert any(frame.endswith(" hold_the_loop") for _, ran in seen.lines for frame in ran)


async def test_an_idle_loop_is_measured_and_not_named() -> None:
    """Beats that come in time are measured; no line is written for them."""
    seen = Seen()
    watch = seen.watch(30.0)
    watch.start()
    await until(lambda: len(seen.lags) >= 3)
    watch.stop()
    assert seen.lines == []


@pytest.mark.slow
async def test_a_proxy_with_nothing_to_do_is_left_alone() -> None:
    """Without a request there is a beat in a second, and many as soon as there is one."""
    seen = Seen()
    seen.under_way.clear()
    watch = seen.watch(30.0)
    began = time.monotonic()
    watch.start()
    await until(lambda: len(seen.lags) == 3)
    assert time.monotonic() - began > 1.5
    seen.under_way.add("a request")
    began = time.monotonic()
    await until(lambda: len(seen.lags) >= 30)
    watch.stop()
    assert time.monotonic() - began < 27


async def test_a_stopped_watch_leaves_nothing_behind() -> None:
    """After it was stopped nothing is measured, and its thread ends."""
    seen = Seen()
    watch = seen.watch(30.0)
    watch.start()
    watch.stop()
    watch.stop()
    await until(lambda: all(thread.name != "loop lag" for thread in threading.enumerate()))
    count = len(seen.lags)
    await asyncio.sleep(0.15)
    assert len(seen.lags) == count


@pytest.mark.slow
async def test_what_reads_a_large_body_is_named_too() -> None:
    """A thread that reads a large body while the loop is late is in the line as well."""
    seen = Seen()
    watch = seen.watch(0.3)
    watch.start()
    busy = asyncio.ensure_future(offload(LARGE, read_a_body))
    await asyncio.sleep(0.1)
    hold_the_loop(1.0)
    await busy
    await until(lambda: bool(seen.lines))
    watch.stop()
    assert any(frame.endswith(" read_a_body") for _, ran in seen.lines for frame in ran)


def read_a_body() -> None:
    """Stands for work on a body."""
    hold_the_loop(1.5)

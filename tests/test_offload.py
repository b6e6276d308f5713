"""Work on a body: on the event loop while it is small, on a thread of its own pool else."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from proxy import offload as offloading
from proxy.offload import LARGE, THREADS, in_background, offload
from tests.support.proxy_process import until


async def test_small_work_stays_on_the_loop_and_large_work_leaves_it() -> None:
    """The size decides; arguments and result are the same either way."""
    ran = {size: await offload(size, lambda a, b: (a + b, threading.get_ident()), 2, 3) for size in (LARGE - 1, LARGE)}
    assert [value for value, _ in ran.values()] == [5, 5]
    assert ran[LARGE - 1][1] == threading.get_ident() != ran[LARGE][1]


@pytest.mark.parametrize("size", [0, LARGE])
async def test_what_is_raised_arrives(size: int) -> None:
    """An exception of the work is the caller's, wherever it ran."""
    with pytest.raises(ZeroDivisionError):
        await offload(size, lambda: 1 // 0)


async def test_the_loop_goes_on_meanwhile_and_few_threads_work_at_once() -> None:
    """Ten large bodies at once take no more threads than there are, and the loop runs beside them."""
    gate, running, most = threading.Event(), [], 0

    def work() -> None:
        running.append(threading.get_ident())
        gate.wait(60)

    jobs = [asyncio.ensure_future(offload(LARGE, work)) for _ in range(10)]
    await until(lambda: bool(running))
    await asyncio.sleep(0.1)  # for more than there may be
    most = len(running)
    gate.set()
    await asyncio.gather(*jobs)
    assert 1 <= most <= THREADS
    assert len(running) == 10
    assert len(set(running)) <= THREADS


async def test_work_in_the_background_runs_one_after_the_other_and_holds_up_no_large_work() -> None:
    """Ten jobs take one thread, which is none of those of large bodies."""
    gate, running = threading.Event(), []

    def work() -> None:
        running.append(threading.get_ident())
        gate.wait(60)

    jobs = [asyncio.ensure_future(in_background(work)) for _ in range(10)]
    await until(lambda: bool(running))
    large = await offload(LARGE, threading.get_ident)
    most = len(running)
    gate.set()
    await asyncio.gather(*jobs)
    assert most == 1
    assert len(running) == 10
    assert {threading.get_ident(), large}.isdisjoint(running)
    assert len(set(running)) == 1


async def test_nothing_is_collected_during_large_work() -> None:
    """A collection looks at all objects in one go, so there is none while a large body makes a million of them."""
    assert gc.isenabled()
    assert await asyncio.gather(*[offload(LARGE, gc.isenabled) for _ in range(4)]) == [False] * 4
    with pytest.raises(ZeroDivisionError):
        await offload(LARGE, lambda: 1 // 0)
    assert gc.isenabled()
    assert await offload(LARGE - 1, gc.isenabled)


async def test_large_work_without_end_is_collected_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one large body follows on the other without a pause, what the loop throws away does not pile up."""
    monkeypatch.setattr(offloading, "UNCOLLECTED_SECONDS", 0)
    gate = threading.Event()
    first = asyncio.ensure_future(offload(LARGE, gate.wait, 10))
    await asyncio.sleep(0)
    assert await offload(LARGE, gc.isenabled)
    gate.set()
    await first
    assert gc.isenabled()

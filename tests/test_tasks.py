"""Background tasks: referenced, named, reported, ended together. Large work: on threads of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import pytest

from proxy import tasks as tasks_module
from proxy.tasks import LARGE, THREADS, Faults, Tasks, in_background, offload
from tests.support.proxy_process import until


async def test_a_task_gives_its_value_and_is_released():
    """The result of a task can be awaited, and an ended task is no longer referenced."""
    tasks = Tasks(lambda name, error: None)

    async def work():
        await asyncio.sleep(0)
        return 5

    task = tasks.spawn(work(), "five")
    assert (len(tasks), task.get_name()) == (1, "five")
    assert await task == 5
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_a_failure_is_reported_by_name():
    """A task that fails without being awaited is reported, with its name, and once."""
    failures = []
    tasks = Tasks(lambda name, error: failures.append((name, str(error))))

    async def work():
        raise OSError("gone")

    tasks.spawn(work(), "refresh")
    await tasks.finish(5)
    await asyncio.sleep(0)
    gc.collect()
    assert failures == [("refresh", "gone")]


async def test_tasks_survive_without_another_reference():
    """A task without any other reference still runs to its end."""
    tasks = Tasks(lambda name, error: None)
    ended = asyncio.Event()

    async def work():
        await asyncio.sleep(0.01)
        ended.set()

    tasks.spawn(work(), "kept")
    gc.collect()
    await asyncio.wait_for(ended.wait(), 60)


async def test_finish_waits_and_then_cancels():
    """Tasks that end in time do so; later ones are cancelled, which is no failure, and may clean up."""
    failures, ended = [], []
    tasks = Tasks(lambda name, error: failures.append(name))

    async def work(seconds, name):
        try:
            await asyncio.sleep(seconds)
            ended.append(name)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ended.append(f"{name} cancelled")
            raise

    tasks.spawn(work(0.01, "quick"), "quick")
    tasks.spawn(work(60, "slow"), "slow")
    await asyncio.sleep(0)
    await tasks.finish(0.5)
    await asyncio.sleep(0)
    assert ended == ["quick", "slow cancelled"]
    assert (failures, len(tasks)) == ([], 0)


async def test_finish_without_tasks_returns():
    """Ending nothing takes no time and raises nothing."""
    await asyncio.wait_for(Tasks(lambda name, error: None).finish(60), 60)


def test_an_attempt_gives_its_result_or_the_default() -> None:
    """Work that fails gives the default; every report gets the fault once, and nothing of other work."""
    reported: list[tuple[str, str, str]] = []
    faults = Faults(*[lambda *facts, at=at: reported.append((at, *facts[:2])) for at in ("log", "metric")])
    assert faults.attempt("answer", "r1", lambda: 1, 2) == 1
    assert reported == []
    assert faults.attempt("answer", "r1", lambda: 1 // 0, 2) == 2
    assert reported == [("log", "answer", "r1"), ("metric", "answer", "r1")]


def test_what_cuts_a_process_short_is_no_fault() -> None:
    """A cancellation or an interrupt goes on."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Faults().attempt("answer", "r1", interrupted, 2)


def test_without_a_report_of_its_own_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing fails silently: the library log has the exception, and no text of its own quotes it."""
    with caplog.at_level(logging.ERROR):
        Faults().attempt("after", "r1", lambda: 1 // 0, None)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert "division" not in record.getMessage()


# Large work.


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
    monkeypatch.setattr(tasks_module, "UNCOLLECTED_SECONDS", 0)
    gate = threading.Event()
    first = asyncio.ensure_future(offload(LARGE, gate.wait, 10))
    await asyncio.sleep(0)
    assert await offload(LARGE, gc.isenabled)
    gate.set()
    await first
    assert gc.isenabled()

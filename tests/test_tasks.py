"""Background tasks: referenced, named, reported, ended together."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from proxy.tasks import Faults, Tasks


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

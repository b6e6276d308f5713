"""Background tasks: kept, named, reported, ended together."""

import asyncio
import gc

from proxy.tasks import Tasks


async def test_a_task_gives_its_value_and_is_let_go():
    """What a task returns can be awaited, and an ended task is no longer held."""
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
    """A task that fails while nobody awaits it is reported, with its name, and once."""
    failures = []
    tasks = Tasks(lambda name, error: failures.append((name, str(error))))

    async def work():
        raise OSError("gone")

    tasks.spawn(work(), "refresh")
    await tasks.finish(5)
    await asyncio.sleep(0)
    gc.collect()
    assert failures == [("refresh", "gone")]


async def test_tasks_survive_without_anyone_holding_them():
    """A task nobody keeps a reference to still runs to its end."""
    tasks = Tasks(lambda name, error: None)
    ended = asyncio.Event()

    async def work():
        await asyncio.sleep(0.01)
        ended.set()

    tasks.spawn(work(), "kept")
    gc.collect()
    await asyncio.wait_for(ended.wait(), 5)


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
    await asyncio.wait_for(Tasks(lambda name, error: None).finish(60), 5)

import asyncio
import os
import signal

import pytest

from proxy.signals import Ending


async def signalled(ending, *numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
    return ending.asked.is_set(), ending.at_once.is_set()


@pytest.fixture
def restored():
    """What signals do outside of the test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_first_signal_asks_and_the_second_hurries(restored, first):
    """Any of the three asks for an end; another one that is no hang-up asks for it at once."""
    ending = Ending()
    ending.listen()
    assert await signalled(ending, first) == (True, False)
    assert await signalled(ending, signal.SIGTERM) == (True, True)


async def test_a_closed_terminal_tells_twice_and_means_it_once(restored):
    """Shell and kernel each send a hang-up when a terminal is closed: running requests still get their time."""
    ending = Ending()
    ending.listen()
    assert await signalled(ending, signal.SIGHUP, signal.SIGHUP, signal.SIGHUP) == (True, False)


async def test_under_nohup_a_hang_up_stays_ignored(restored):
    """A process that was started to outlive its terminal does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ending = Ending()
    ending.listen()
    assert await signalled(ending, signal.SIGHUP) == (False, False)


async def test_a_second_signal_cuts_a_drain_short():
    """Work is awaited to its end, or only until the end shall be at once; either way nothing is left running."""
    ending, done = Ending(), []

    async def work(seconds):
        await asyncio.sleep(seconds)
        done.append(seconds)

    running = asyncio.all_tasks()
    await ending.unless_at_once(work(0.01))
    asyncio.get_running_loop().call_later(0.05, ending.at_once.set)
    async with asyncio.timeout(5):
        await ending.unless_at_once(work(60))
    assert done == [0.01]
    assert asyncio.all_tasks() == running

"""How long one caller waits for the store in vain."""

from __future__ import annotations

import asyncio
import gc

import pytest

from proxy.store.deadlines import FULL_AGAIN, REQUEST, WaitBudget

pytestmark = pytest.mark.usefixtures("impatient")


async def test_a_caller_has_one_patience_for_all_its_operations() -> None:
    """Seconds waited in vain are taken off the next waits of the same task, and come back after a while."""
    now = [50.0]
    waits = WaitBudget(lambda: now[0])
    assert waits.remaining(0.06) == 0.06
    waits.spend(0.06)
    waits.spend(0.06)
    assert waits.remaining(0.06) == pytest.approx(REQUEST - 0.12)
    waits.spend(0.03)
    assert waits.remaining(0.06) == 0
    now[0] += FULL_AGAIN
    assert waits.remaining(0.06) == 0.06
    waits.spend(0.01)
    assert waits.remaining(REQUEST) == pytest.approx(REQUEST - 0.01)


async def test_others_are_as_patient_as_ever() -> None:
    """One task's waiting is none of another's, and a task that ended leaves nothing behind."""
    waits = WaitBudget(lambda: 50.0)

    async def wait() -> float:
        waits.spend(REQUEST)
        return waits.remaining(0.06)

    assert await asyncio.ensure_future(wait()) == 0
    assert waits.remaining(0.06) == 0.06
    await asyncio.sleep(0)  # until then the loop still knows the task
    gc.collect()
    assert len(waits._spent) == 0

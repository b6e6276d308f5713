"""What look-alikes of an overflow cost an ordinary conversation, and which overflows are cured, by the whole engine."""

from __future__ import annotations

import pytest

from tests.support.overflow_claims import claims
from tests.support.overflow_costs import ROUTES, Meter

MOST_RETRIED = {"stated": 5, "table": 49, "unknown": 61}
"""Look-alikes that cost a retry, of 1,641, by what is known of the window. A ratchet: no change raises a number.

Without the last two sets 2, 30 and 41 of 1,522. Of the five with a stated window one quotes figures of a cache file
that are near this conversation's, one those of a server's settings, one a limit that this conversation exceeds, and two
have codes in an overflow's words.
"""

MOST_TAUGHT = {"stated": 3, "table": 7, "unknown": 9}
"""Look-alikes after which a window is believed that they state: figures of something else that this chat exceeds."""

SETS = ("twenty-fourth", "twenty-fifth", "twenty-sixth", "twenty-seventh", "twenty-eighth")
MOST_MISSED = 9
"""Overflows of the last five sets that are not cured, of 156."""


@pytest.mark.parametrize("known", ROUTES)
async def test_look_alikes_cost_little(known: str) -> None:
    """Look-alikes cost few retries, none costs two, and few teach a window, even if the retry is answered."""
    meter = Meter(known)
    others = [claim for claim in claims() if not claim.is_overflow]
    costs = [(claim.body, await meter.cost(claim)) for claim in others]
    retried = [body for body, cost in costs if cost.retries]
    assert len(others) > 1_500
    assert len(retried) <= MOST_RETRIED[known], retried
    assert max(cost.retries for _, cost in costs) == 1
    taught = [body for body, cost in costs if cost.taught]
    assert len(taught) <= MOST_TAUGHT[known], taught


async def test_overflows_are_cured() -> None:
    """Overflows are cured without a known window, however far their figures are from this conversation's size."""
    meter = Meter("unknown")
    overflows = [claim for claim in claims() if claim.half in SETS and claim.is_overflow]
    costs = [(claim.body, await meter.cost(claim)) for claim in overflows]
    missed = [body for body, cost in costs if not cost.retries]
    assert len(overflows) > 90
    assert len(missed) <= MOST_MISSED, missed
    assert sum(cost.taught for _, cost in costs) > 30

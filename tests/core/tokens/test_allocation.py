"""Soft shares of a window: what a part does not use is lent, and what it borrows is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tokens.allocation import PARTS, Allocation, borrowed, used

TYPICAL = Allocation(system=0.05, tools=0.10, memory=0.05, summary=0.10, recent=0.30, older=0.10, reserve=0.30)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    """Shares that add up to one at most."""
    weights = [draw(st.integers(0, 10)) for _ in PARTS]
    whole = max(1, sum(weights) + draw(st.integers(0, 10)))
    return Allocation(**{part: weight / whole for part, weight in zip(PARTS, weights, strict=True)})


regions = st.dictionaries(
    st.sampled_from(["system", "tools", "format", "memory", "summary", "user", "assistant", "tool", "reserve"]),
    st.integers(0, 5000),
)


@pytest.mark.parametrize("bad", [{"system": 0.6, "recent": 0.5}, {"tools": -0.1}, {"reserve": 1.1}])
def test_shares_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    """No allocation of more than the whole, and none of a negative share, can be made."""
    with pytest.raises(ValueError, match="add up to at most 1"):
        Allocation(**bad)


@given(allocations(), st.integers(0, 10**6), st.integers(0, 10**6), regions)
def test_what_is_lent_is_there(shares: Allocation, window: int, fixed: int, by_region: dict[str, int]) -> None:
    """Whole tokens of all shares fit the window; messages get their own and what is left, never the answer's."""
    own = sum(shares.tokens(part, window) for part in PARTS)
    assert own + shares.spare(window) == window
    assert shares.spare(window) >= 0
    history, block = shares.for_history(window, fixed), shares.for_block(window, fixed)
    assert shares.tokens("summary", window) <= block <= history <= window - shares.tokens("reserve", window)
    if fixed <= window:
        assert history + min(fixed, window - history) <= window
    assert shares.tokens("tools", window) <= shares.for_tools(window, fixed) <= window
    parts = used(by_region, shares, window)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == sum(by_region.values())
    over = borrowed(by_region, shares, window)
    assert all(parts[part] - tokens == shares.tokens(part, window) for part, tokens in over.items())


def test_unused_shares_are_lent() -> None:
    """What system text and tools leave goes to messages; where they take more than theirs, messages keep their own."""
    assert TYPICAL.for_history(10_000, 2_000) == 5_000
    assert TYPICAL.for_history(10_000, 500) == 6_500
    assert TYPICAL.for_history(10_000, 9_000) == 5_000
    assert TYPICAL.for_block(10_000, 2_000) == 1_000
    assert TYPICAL.for_tools(10_000, 400) == 1_600
    assert TYPICAL.for_tools(10_000, 4_000) == 1_000


def test_messages_beyond_the_recent_share_are_older() -> None:
    """The newest messages fill their share; only what is beyond both can have been borrowed."""
    by_region = {"user": 500, "assistant": 1_000, "tool": 3_000, "tools": 1_500, "reserve": 1_000}
    parts = used(by_region, TYPICAL, 10_000)
    assert (parts["recent"], parts["older"]) == (3_000, 1_500)
    assert borrowed(by_region, TYPICAL, 10_000) == {"tools": 500, "older": 500}

"""Plans: what goes upstream fits, keeps its pairs and its bytes, grows at its end, and is the same on every replica."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compression.schedule import Demand
from tests import strategies
from tests.fits import Desk, plan_problems

windows = st.one_of(st.sampled_from([256, 512, 1024, 2048, 4096, 8192, 32768]), st.integers(256, 32768))
figures = st.sampled_from([None, None, 1, 64, 300, 1024, 4000, 100_000])


@st.composite
def asked(draw: st.DrawFn, **options: Any) -> bytes:
    """A request's bytes with tools or none and any output figure."""
    request = draw(strategies.requests(**options))
    request.pop("max_tokens", None)
    if (figure := draw(figures)) is not None:
        request[draw(st.sampled_from(["max_tokens", "max_completion_tokens"]))] = figure
    return strategies.encode(draw, request)


@settings(max_examples=150)
@given(asked(with_orphans=True, max_size=24), windows, st.booleans())
async def test_a_plan_fits_or_refuses(body: bytes, window: int, force: bool) -> None:
    """Whatever comes, a plan is a faithful view that fits by an independent count, or a refusal for length."""
    plan = await Desk().plan(body, window, Demand(force=force))
    assert plan_problems(body, plan, window) == []

"""How much room there is: reserve, budget and marks. What uses it: nothing is counted twice, and nothing left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import Injected, Item
from proxy.core.tokens.budget import (
    DEFAULT_RESERVE,
    REGIONS,
    SCALED_BELOW,
    Buffers,
    Marks,
    Members,
    RoleTotals,
    Shares,
    TokenBudget,
    add_up,
    answer_reserve,
    economy_cap,
    regions,
    to_our_tokens,
    to_provider_tokens,
)
from proxy.core.tokens.counting import INJECTED

windows = st.integers(1, 2_000_000)


@pytest.mark.parametrize(
    ("requested", "most", "window", "held"),
    [
        (1_000, 100, 8_192, 1_000),
        (9_000, None, 8_192, 9_000),
        (None, None, 8_192, 1_024),
        (None, 500, 8_192, 500),
        (None, None, 1_000_000, DEFAULT_RESERVE),
        (None, 128_000, 1_000_000, DEFAULT_RESERVE),
        (None, 128_000, 128_000, 16_000),
        (0, None, 8_192, 1_024),
        (-5, None, 8_192, 1_024),
        (None, 0, 8_192, 1_024),
    ],
)
def test_reserve(requested: int | None, most: int | None, window: int, held: int) -> None:
    """What a request asks for is held unclamped; else the least of the model's limit, an eighth, and 16K."""
    assert answer_reserve(requested, most, window) == held


@given(st.none() | st.integers(1, 10**6), windows)
def test_a_default_reserve_is_small(most: int | None, window: int) -> None:
    """Without a figure of the request at most an eighth of the window is held."""
    assert 0 <= answer_reserve(None, most, window) <= window // 8


@pytest.mark.parametrize("marks", [(0.9, 0.4, 0.6), (0.9, 0.9, 0.4), (1.1, 0.6, 0.4), (0.9, 0.6, 0.0), (0.4, 0.6, 0.9)])
def test_marks_must_rise(marks: tuple[float, float, float]) -> None:
    """Marks out of order or out of bounds cannot be made."""
    with pytest.raises(ValueError, match="rise from low to soft to high"):
        Marks(*marks)
    with pytest.raises(ValueError):
        Marks(high=float("nan"))


def test_the_measured_defaults() -> None:
    """The defaults are those that were measured."""
    assert Marks() == Marks(high=0.90, soft=0.60, low=0.40)
    assert Shares() == Shares(pins=0.20, digest=0.14, steps=0.06, block=0.40)


def test_a_chat_goes_down_less_far() -> None:
    """The low mark of a conversation without tool results is a fifth of the way up, or the configured one."""
    assert Marks().of_chats.low == pytest.approx(0.50)
    assert Marks(chat_low=0.45).of_chats.low == 0.45
    assert Marks(high=0.5, soft=0.21, low=0.2).of_chats.low <= 0.21
    with pytest.raises(ValueError, match="chats"):
        Marks(chat_low=0.3)


@given(windows, st.integers(0, 2_000_000), st.integers(0, 2_000_000))
def test_budgets(window: int, held: int, fixed: int) -> None:
    """The budget is what the reserve leaves, never below zero; past places keep a budget of their own."""
    figures = TokenBudget(window, held, fixed)
    assert figures.input == max(0, window - held)
    assert figures.baseline == window - window // 32
    assert TokenBudget(window, 0, fixed).baseline == figures.baseline


@given(windows, st.integers(0, 2_000_000))
def test_steps_of_the_fixed_part(window: int, fixed: int) -> None:
    """The fixed part is rounded up to whole steps of a sixty-fourth of the window."""
    stepped = TokenBudget(window, 0, fixed).quantised_fixed
    step = max(1, window // 64)
    assert stepped % step == 0
    assert 0 <= stepped - fixed < step


@given(windows, st.integers(0, 2_000_000), st.floats(0, 1), st.floats(0, 1))
def test_marks_rise_with_their_share(window: int, fixed: int, one: float, two: float) -> None:
    """A mark lies between the fixed part and the budget, and a larger share lies higher."""
    figures = TokenBudget(window, 0, fixed)
    low, high = sorted((one, two))
    assert figures.mark(low, figures.input) <= figures.mark(high, figures.input)
    assert figures.quantised_fixed <= figures.mark(low, figures.input)
    assert figures.mark(high, figures.input) <= max(figures.quantised_fixed, figures.input)
    assert figures.mark(1, figures.input) == max(figures.quantised_fixed, figures.input)


def test_a_mark() -> None:
    """A mark is the fixed part plus its share of the rest."""
    assert TokenBudget(window=6_400, reserve=400, fixed=1_000).mark(0.5, 6_000) == 1_000 + 2_500


@pytest.mark.parametrize(("tokens", "factor", "ours"), [(8_192, 1.0, 8_192), (9_000, 1.5, 6_000), (10, 3.0, 3)])
def test_a_providers_figure_in_ours(tokens: int, factor: float, ours: int) -> None:
    """A provider that counts more than we do leaves us fewer of our own tokens."""
    assert to_our_tokens(tokens, factor) == ours


@pytest.mark.parametrize(
    ("reserve", "max_input", "budget", "lasting"),
    [
        (16_000, None, 384_000, 387_500),
        (16_000, 272_000, 272_000, 272_000),
        (128_000, 272_000, 272_000, 272_000),
        (200_000, 272_000, 200_000, 272_000),
        (500_000, 272_000, 0, 272_000),
        (16_000, 390_000, 384_000, 387_500),
    ],
)
def test_an_input_limit_beside_the_window(reserve: int, max_input: int | None, budget: int, lasting: int) -> None:
    """The input may use the least of its own limit and what the answer leaves of the window, at every place."""
    figures = TokenBudget(400_000, reserve, 1_000, max_input=max_input)
    assert (figures.input, figures.baseline) == (budget, lasting)
    assert figures.ceiling <= lasting


USUAL = Buffers(reserve=16_000, warning=24_000, auto_compact=12_000, blocking=3_000)
MARKS = Marks()


def levels(figures: TokenBudget) -> tuple[int, int, int, int]:
    return (
        figures.low(MARKS, figures.baseline),
        figures.soft(MARKS, figures.baseline),
        figures.high(MARKS, figures.baseline),
        figures.ceiling,
    )


def test_buffers_of_a_large_window() -> None:
    """In a window of 200,000 the usual buffers stand at 160,000, 172,000 and 181,000; the smaller threshold wins."""
    figures = TokenBudget(200_000, 16_000, 0, 16_000, buffers=USUAL)
    full = Marks(high=1.0, soft=0.99, low=0.4)
    assert figures.soft(full, figures.baseline) == 160_000
    assert figures.high(full, figures.baseline) == 172_000
    assert figures.ceiling == 181_000
    assert figures.high(Marks(high=0.5, soft=0.4, low=0.2), figures.baseline) == figures.baseline // 2


@pytest.mark.parametrize(("window", "fixed"), [(4_096, 0), (4_096, 2_000), (8_192, 0), (32_768, 0), (32_768, 17_000)])
def test_buffers_shrink_with_a_small_room(window: int, fixed: int) -> None:
    """Small windows, also beside large tools, keep thresholds in order with room between them."""
    figures = TokenBudget(window, window // 8, fixed, window // 8, buffers=USUAL)
    low, soft, high, ceiling = levels(figures)
    room = window - figures.quantised_fixed
    assert figures.quantised_fixed + room // 8 < low < soft < high < ceiling < window
    assert high - low > room // 5


@given(st.integers(512, 2_000_000), st.floats(0, 0.95), st.booleans(), st.none() | st.integers(1000, 10**6))
def test_thresholds_are_in_order_whatever_the_window(window: int, share: float, cheap: bool, tier: int | None) -> None:
    """Low, soft and high rise and stay inside the window, with buffers and with a cap, and fixed text lowers none."""
    cap = economy_cap(window, tier) if cheap else None
    figures = TokenBudget(window, window // 8, int(share * window), window // 8, None, cap, USUAL)
    low, soft, high, ceiling = levels(figures)
    assert low <= soft <= high <= window
    assert ceiling <= window
    if figures.quantised_fixed < figures.baseline:
        assert figures.quantised_fixed <= low
    bare = TokenBudget(window, window // 8, 0, window // 8, None, cap, USUAL)
    assert bare.low(MARKS, bare.baseline) <= max(low, figures.quantised_fixed)


def test_no_buffers_change_nothing() -> None:
    """Without buffers the marks alone decide."""
    figures = TokenBudget(SCALED_BELOW, 0, 0)
    assert figures.high(MARKS, figures.baseline) == figures.mark(MARKS.high, figures.baseline)
    assert figures.low(MARKS, figures.baseline) == figures.mark(MARKS.low, figures.baseline)


def test_buffers_must_shrink_towards_the_end() -> None:
    """Buffers out of order cannot be made."""
    with pytest.raises(ValueError, match="shrink from warning"):
        Buffers(warning=3_000, blocking=3_000)
    with pytest.raises(ValueError, match="shrink from warning"):
        Buffers(auto_compact=2_000, blocking=3_000)


@pytest.mark.parametrize(
    ("window", "tier", "cap"),
    [(128_000, None, 64_000), (1_000_000, None, 120_000), (1_000_000, 200_000, 120_000), (1_000_000, 100_000, 90_000)],
)
def test_the_cap_of_economy(window: int, tier: int | None, cap: int) -> None:
    """Half the window, 120,000 tokens, or a tenth below a dearer price: whichever is least."""
    assert economy_cap(window, tier) == cap


def test_a_cap_beside_large_tools_leaves_a_quarter_of_the_room() -> None:
    """Tools above the cap do not make every request a compaction."""
    figures = TokenBudget(400_000, 16_000, 150_000, 16_000, price_cap=120_000)
    room = figures.baseline - figures.quantised_fixed
    assert figures.high(MARKS, figures.baseline) == figures.quantised_fixed + int(0.9 * int(0.25 * room))
    assert figures.input == 384_000


# What uses the budget.

sizes = st.integers(0, 500)
items = st.lists(
    st.builds(
        lambda role, tokens, media, region, part: Item(
            role, tokens + media + part, media, b"", injected=(Injected(region, part, part),)
        ),
        st.sampled_from(["system", "user", "assistant", "tool"]),
        sizes,
        sizes,
        st.sampled_from(INJECTED),
        sizes,
    ),
    max_size=20,
)


@given(items, st.integers(0, 20))
def test_totals_continue_from_a_prefix(given_items: list[Item], at: int) -> None:
    """The totals of all items are the same however far they were added up before."""
    whole = add_up(given_items)
    assert add_up(given_items, add_up(given_items[:at])) == whole
    assert whole.history + whole.system == sum(item.tokens for item in given_items)
    assert whole.media == sum(item.media for item in given_items)


@given(items, sizes, sizes, sizes, sizes)
def test_regions_add_up_to_the_view(given_items: list[Item], tools: int, system: int, rest: int, summary: int) -> None:
    """The regions without the reserve are the view's tokens; each has a name of the list."""
    kept = add_up(given_items)
    members = Members(tools, system, (Injected("skills", system // 2, 0),))
    found = regions(kept, members, fixed=kept.system + tools + system + rest, summary=summary, reserve=77)
    assert found.keys() <= set(REGIONS)
    assert found.pop("reserve") == 77
    assert sum(found.values()) == kept.system + kept.history + tools + system + rest + summary


def test_what_is_injected_is_taken_out_of_the_role_it_stands_in() -> None:
    """Injected texts are regions of their own, in system text, in user items and beside results of tools."""
    totals = RoleTotals(3, 100, 60, 0, 30, 0, {("system", "memory"): 30, ("user", "skills"): 20, ("tool", "skills"): 5})
    found = regions(totals, Members(), fixed=100, summary=0, reserve=0)
    assert found == {"system": 70, "memory": 30, "skills": 25, "user": 40, "tool": 25}
    members = Members(system=50, injected=(Injected("memory", 10, 1), Injected("knowledge", 5, 2)))
    found = regions(totals, members, fixed=150, summary=0, reserve=0)
    assert found == {"system": 105, "memory": 40, "knowledge": 5, "skills": 25, "user": 40, "tool": 25}
    assert to_provider_tokens(found, 2.0) == {name: 2 * tokens for name, tokens in found.items()}

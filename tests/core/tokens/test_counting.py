"""Tokens by region: nothing is counted twice, and nothing is left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import Injected, Item
from proxy.core.tokens.counting import (
    REGIONS,
    SHORT,
    Members,
    Meter,
    RoleTotals,
    add_up,
    long_paragraphs,
    prices_of,
    regions,
    to_provider_tokens,
    total_tokens,
    unremembered,
)
from proxy.core.tokens.injected import INJECTED
from proxy.core.tokens.media import DEFAULT_PRICES, prices

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


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("one two", ["one two"]),
        ("one\n\ntwo\n\nthree", ["one\n\ntwo\n\nthree"]),
        ("one\n\na long one\n\ntwo\n\nthree\n\nfour", ["one\n\n", "a long one\n\n", "two\n\nthree\n\nfour"]),
        ("a long one\n\na long one", ["a long one\n\n", "a long one"]),
        ("one\n\n a long one\n\n/two", ["one\n\n a long one\n\n/two"]),
    ],
)
def test_only_a_long_paragraph_stands_alone(text: str, pieces: list[str]) -> None:
    """Short ones between two long ones stay together; white space or a slash does not begin a paragraph."""
    assert list(long_paragraphs(text, len("a long one"))) == pieces


def test_a_meter_counts_and_knows_its_prices() -> None:
    """A meter is used like the function it holds; a plain function means the usual prices."""
    meter = Meter(len, prices("claude-3-haiku"))
    assert meter("four") == 4
    assert prices_of(meter) is prices("claude-3-haiku")
    assert prices_of(len) is DEFAULT_PRICES


def test_short_texts_are_remembered() -> None:
    """A short text is counted once by a meter, a longer one each time; a plain function remembers nothing."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    short, long = "read_file", "x" * (SHORT + 1)
    meter = Meter(count, DEFAULT_PRICES)
    assert total_tokens([short, long, short, long], meter) == 2 * len(short + long)
    assert total_tokens([short], meter) == meter(short) == len(short)
    assert counted == [short, long, long]
    assert total_tokens([short, short], count) == 2 * len(short)
    assert unremembered(meter)(short) == unremembered(count)(short) == len(short)
    assert counted[3:] == [short] * 4

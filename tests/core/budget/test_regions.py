"""Tokens by region: nothing is counted twice, and nothing is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget.regions import HISTORY, REGIONS, Members, Totals, add_up, regions, scaled_up
from proxy.core.conversation.items import Item

sizes = st.integers(0, 500)
items = st.lists(
    st.builds(
        lambda role, tokens, media, memory: Item(
            role, tokens + media + memory, media, b"", memory=memory if role in ("system", "user") else 0
        ),
        st.sampled_from(["system", *HISTORY]),
        sizes,
        sizes,
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
def test_regions_add_up_to_the_view(given_items: list[Item], tools: int, said: int, rest: int, summary: int) -> None:
    """The regions without the reserve are the view's tokens; each has a name of the list."""
    kept = add_up(given_items)
    members = Members(tools, said, said // 2)
    found = regions(kept, members, fixed=kept.system + tools + said + rest, summary=summary, reserve=77)
    assert found.keys() <= set(REGIONS)
    assert found.pop("reserve") == 77
    assert sum(found.values()) == kept.system + kept.history + tools + said + rest + summary


def test_memories_are_taken_out_of_the_role_they_stand_in() -> None:
    """What was injected is a region of its own, wherever it was put."""
    totals = Totals(3, 100, 60, 0, 0, 0, (30, 20))
    found = regions(totals, Members(), fixed=100, summary=0, reserve=0)
    assert found == {"system": 70, "memory": 50, "user": 40}
    members = Members(system=50, remembered=10)
    assert regions(totals, members, fixed=150, summary=0, reserve=0) == {"system": 110, "memory": 60, "user": 40}
    assert scaled_up(found, 1.5) == {"system": 105, "memory": 75, "user": 60}

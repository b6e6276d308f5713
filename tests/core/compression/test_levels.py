"""How far items are cut: to one level, older ones first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compression.levels import Spared, clip_levels, fair_level

SIZES = st.dictionaries(st.integers(0, 9), st.integers(1, 5_000), min_size=1)


@given(SIZES, st.integers(0, 20_000))
def test_a_level_is_the_largest_that_fits(sizes: dict[int, int], room: int) -> None:
    """Cut to the level all of them fit the room, if their floors do; one token more would not."""
    floors = {i: min(size, 48) for i, size in sizes.items()}
    level = fair_level(sizes, floors, room)
    taken = [sum(max(floors[i], min(size, at)) for i, size in sizes.items()) for at in (level, level + 1)]
    assert taken[0] <= room or level == 0
    assert taken[1] > room or level >= max(sizes.values())


def test_what_is_older_gives_way_first() -> None:
    """Older items are cut for all that is wanted, then for what is needed; unread ones and users' words after them."""
    sizes, spared = {0: 500, 1: 2_000, 2: 2_000}, Spared({0}, {2})
    floors = dict.fromkeys(sizes, 48)
    assert clip_levels(sizes, floors, spared, 1_500, 1_000, 300) == {0: 500, 1: 500, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 1_900, 1_800, 300) == {0: 500, 1: 200, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 3_000, 2_800, 300) == {0: 500, 1: 600, 2: 600}
    assert clip_levels(sizes, floors, spared, 4_000, 3_900, 300) == {0: 200, 1: 200, 2: 200}
    assert clip_levels(sizes, floors, Spared({0}, ()), 4_000, 3_900, 300) == {0: 166, 1: 166, 2: 166}

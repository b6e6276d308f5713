"""Large values are written in calls of bounded size, and the text is what one call makes of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import stepwise
from proxy.core.conversation.stepwise import MOST, dismantle, encoded

SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
PLAIN = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=60)


@given(VALUES, st.integers(1, 12), st.integers(1, 4))
def test_the_text_is_that_of_one_call(value: Any, most: int, batch: int) -> None:
    """Whatever is written at once, each encoder's own text comes of it, sorted or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepwise, "MOST", most)
        patch.setattr(stepwise, "_BATCH", batch)
        assert encoded(value, PLAIN.encode) == PLAIN.encode(value)
        assert encoded(value, SORTED.encode, ordered=True) == SORTED.encode(value)
        text = encoded(value, lambda part: msgspec.json.encode(part, order="deterministic").decode(), ordered=True)
        assert text == msgspec.json.encode(value, order="deterministic").decode()


def chain(levels: int, end: Any) -> Any:
    """*end* under so many objects."""
    for _ in range(levels):
        end = {"a": end, "b": 1}
    return end


@pytest.mark.parametrize(
    "value",
    [
        {"all": [chain(100, "end") for _ in range(500)]},
        [1] * 100_000,
        [[]] * 100_000,
        {f"k{at}": {} for at in range(50_000)},
        chain(200, [{"a": "b"}] * 30_000),
        chain(200, [chain(20, 1) for _ in range(2_000)]),
    ],
    ids=["deep", "figures", "lists", "members", "chain", "chains"],
)
def test_no_call_writes_much_and_few_are_made(value: Any) -> None:
    """Each call gets at most so many values, and there are not many more calls than that takes."""
    sizes: list[int] = []

    def encode(part: Any) -> str:
        sizes.append(nodes(part))
        return PLAIN.encode(part)

    assert encoded(value, encode) == PLAIN.encode(value)
    assert max(sizes) <= 2 * MOST
    assert len(sizes) < nodes(value) / 10 + 10_000


def nodes(value: Any) -> int:
    """How many values there are in *value*."""
    count, stack = 0, [value]
    while stack:
        node = stack.pop()
        count += 1
        stack.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    return count


@given(VALUES)
def test_small_values_are_left_alone(value: Any) -> None:
    """What is freed quickly is not taken apart."""
    before = PLAIN.encode(value)
    dismantle(value)
    assert PLAIN.encode(value) == before


@pytest.mark.parametrize("levels", [0, 100])
def test_large_values_are_taken_apart(levels: int) -> None:
    """The long lists in a large value are emptied, wherever they stand."""
    lists = [[{"a": at} for at in range(9_000)] for _ in range(3)]
    value = chain(levels, {"all": lists[0], "more": [lists[1], lists[2]]})
    dismantle(value)
    assert not value
    assert not lists[0]
    assert levels or not any(lists)

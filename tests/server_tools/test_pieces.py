"""Members of a message that arrive in pieces."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.server_tools.pieces import add_piece, assembled
from tests.support.linear_time import is_linear


def together(*pieces: Any, key: str = "content") -> Any:
    value = None
    for piece in pieces:
        value = add_piece(key, value, piece)
    return assembled(value)


def test_pieces_of_a_member_are_put_together() -> None:
    """Texts are joined, objects and lists grow by their members, names come whole, and another type replaces."""
    assert together("a", None, "b", "c") == "abc"
    assert together("read", "", "read_file", key="name") == "read_file"
    assert together({"a": "x", "id": "1"}, {"a": "y", "b": [1]}, {"id": "2", "b": [2]}) == {
        "a": "xy",
        "id": "2",
        "b": [1, 2],
    }
    assert together("a", {"b": 1}) == {"b": 1}
    assert together(None, None) is None


def test_elements_of_a_list_are_distinguished_by_index_and_type() -> None:
    """A piece with an index and type seen before adds to the element that has them last; others are elements."""
    first = {"index": 0, "type": "reasoning.text", "text": "a"}
    pieces = [[first], [{"index": 0, "type": "reasoning.text", "text": "b"}], [{"index": 0, "type": "other"}], [{}, {}]]
    assert together(*pieces) == [{**first, "text": "ab"}, {"index": 0, "type": "other"}, {}, {}]
    assert together([{"index": [1]}], [{"index": [1]}]) == [{"index": [1]}, {"index": [1]}]


@given(
    st.lists(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            max_leaves=8,
        ),
        max_size=5,
    )
)
def test_what_came_is_never_changed(pieces: Any) -> None:
    """Events wait to be passed on as they came, whatever is made of them meanwhile."""
    before = copy.deepcopy(pieces)
    together(*pieces)
    assert pieces == before


@pytest.mark.slow
def test_a_member_grows_in_even_steps() -> None:
    """Text, members of objects and elements of lists are put together in time that grows with them and no faster."""
    assert is_linear(lambda size: together(*["x" * 50] * size), 60_000)
    assert is_linear(lambda size: together({str(n): 1 for n in range(size)}, *[{"a": "b"}] * size), 30_000)
    assert is_linear(lambda size: together(*[[{"index": n, "text": "x"}] for n in range(size)]), 20_000)

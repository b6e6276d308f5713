"""Pages: as full as their room allows, never fuller."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.features.recall.page import BESIDE, FRAME_TOKENS, NEIGHBOUR_TOKENS, Page, shown_item
from proxy.features.recall.pieces import Piece
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import log


def page_of(*texts: str, room: int = 2_000, with_neighbours: bool = True) -> Page:
    pieces = [Piece(at, "user", text) for at, text in enumerate(texts, 1)]
    return Page(pieces, room, count_tokens, with_neighbours=with_neighbours)


def test_a_result_stands_between_its_neighbours() -> None:
    """One before, two after, in the order of the conversation."""
    page = page_of("far", "before", "here", "after", "then", "further")
    assert page.add(2, 0, remaining=1)
    (text,) = page.texts
    assert text.replace(BESIDE, "") == "\n".join(
        f"[item {at}: user]\n{said}" for at, said in [(2, "before"), (3, "here"), (4, "after"), (5, "then")]
    )
    assert text.count(BESIDE) == 3


def test_a_list_has_no_neighbours() -> None:
    """Without a query every item is a result."""
    page = page_of("before", "here", "after", with_neighbours=False)
    page.add(1, 0, remaining=1)
    assert page.texts == ["[item 2: user]\nhere"]


def test_what_was_shown_whole_is_not_shown_again() -> None:
    """It counts as shown, and takes no room; what was cut short is shown."""
    page = page_of("here", "after", log(1, 900))
    assert page.add(0, 0, remaining=3)
    assert page.add(1, 0, remaining=2)
    assert len(page.texts) == 1
    assert page.add(2, 0, remaining=1)
    assert len(page.texts) == 2


def test_a_neighbour_is_cut_short() -> None:
    """A long one shows its beginning, and how to read on."""
    page = page_of("here", log(1, 900))
    page.add(0, 0, remaining=1)
    assert count_tokens(page.texts[0]) < NEIGHBOUR_TOKENS + FRAME_TOKENS
    assert "goes on with item 2, offset" in page.texts[0]


def test_of_three_results_each_gets_a_third() -> None:
    """Long results of equal length take about as much room each; one alone takes all."""
    texts = [log(at, 2_000) for at in range(5)]
    page = page_of(texts[0], "", texts[1], "", texts[2], room=1_500, with_neighbours=False)
    for left, index in enumerate((0, 2, 4)):
        assert page.add(index, 0, remaining=3 - left)
    assert all(250 < count_tokens(text) < 550 for text in page.texts)
    alone = page_of(texts[0], room=1_500)
    alone.add(0, 0, remaining=1)
    assert count_tokens(alone.texts[0]) > 1_200


def test_a_full_page_takes_no_more() -> None:
    """False once what is left would show too little."""
    page = page_of(log(1, 900), "x", log(2, 900), room=300, with_neighbours=False)
    assert page.add(0, 0, remaining=1)
    assert not page.add(2, 0, remaining=1)
    assert len(page.texts) == 1


@given(st.lists(st.text(max_size=300), min_size=1, max_size=12), st.integers(60, 600), st.booleans())
def test_no_page_is_larger_than_its_room(texts: list[str], room: int, with_neighbours: bool) -> None:
    """Whatever the items are, their parts together stay within the room, but for what a heading needs."""
    page = page_of(*texts, room=room, with_neighbours=with_neighbours)
    for index in range(len(texts)):
        page.add(index, 0, remaining=len(texts) - index)
    assert sum(map(count_tokens, page.texts)) <= room + FRAME_TOKENS


def test_an_item_says_where_it_begins_and_goes_on() -> None:
    """Its notes lead to all of it."""
    text = log(3, 900)
    shown = shown_item(Piece(7, "tool", text), 100, 200, count_tokens)
    assert shown.startswith("[item 7: tool]\n" + text[100:120])
    assert "begins at character 100" in shown
    assert f"of {len(text)}]" in shown
    assert shown_item(Piece(7, "tool", "short"), 0, 200, count_tokens) == "[item 7: tool]\nshort"

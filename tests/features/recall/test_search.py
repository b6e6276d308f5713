"""Finding what left the view, and pages that never exceed their room."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.features.recall.page import LEAST_RESULT_TOKENS
from proxy.features.recall.pieces import Piece
from proxy.features.recall.search import (
    NO_ROOM,
    NOTHING,
    NOTHING_LEFT_OUT,
    UNREADABLE,
    Arguments,
    answer,
    read_arguments,
)
from proxy.features.recall.tool import MOST_RESULTS
from proxy.server_tools.ranking import MOST_QUERY_WORDS
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import log

PIECES = [
    Piece(1, "user", "Find the code word of the vault. Never touch vendor.", hidden=False),
    *(Piece(at, f"result of read_file({at})", log(at, 120)) for at in range(2, 30)),
    Piece(30, "result of read_file(notes.txt)", log(99, 200) + "\nThe code word is kingfisher.\n" + log(98, 200)),
    Piece(31, "assistant", "I decoded words of the vaulted encoder."),
]


def ask(tokens: int = 2000, usual: int = 3, pieces: list[Piece] | None = None, **arguments: Any) -> str:
    wanted = read_arguments(json.dumps(arguments), usual)
    return answer(wanted, PIECES if pieces is None else pieces, tokens, count_tokens).text


def shown(text: str) -> list[int]:
    """The numbers of the items that a page has as results, in order."""
    return [int(line[6 : line.index(":")]) for line in text.splitlines() if line.startswith("[item ")]


def beside(text: str) -> list[int]:
    """The numbers of the items that a page has beside its results."""
    start = len("[beside it, item ")
    return [int(line[start : line.index(":")]) for line in text.splitlines() if line.startswith("[beside it, item ")]


def test_the_best_match_comes_first_and_shows_the_place() -> None:
    """Rare whole words win over pieces of words, and what was looked for is among what is shown."""
    page = ask(query="code word kingfisher", tokens=400)
    assert shown(page)[0] == 30
    assert "The code word is kingfisher." in page
    assert 1 not in shown(page), "what the view holds need not be found"


def test_a_page_has_as_many_results_as_are_wanted_and_says_how_to_go_on() -> None:
    """The limit, at most thirty; and an offset that leads to the rest without overlap."""
    page = ask(query="took", tokens=4000)
    assert "1 to 3 shown; more with offset 3" in page
    following = ask(query="took", tokens=90_000, offset=3, limit=50)
    both = {*shown(page), *beside(page), *shown(following), *beside(following)}
    assert both == set(range(2, 32)), "all that hold it, and those before and behind"
    assert not set(shown(page)) & set(shown(following))
    assert "4 to 30 shown.)" in following
    many = [Piece(at, "user", f"I took number {at}.") for at in range(1, 60)]
    assert f"1 to {MOST_RESULTS} shown" in ask(query="took", tokens=9_000, limit=50, pieces=many)
    assert len(shown(ask(query="took", tokens=4000, usual=5))) > len(shown(page))
    assert shown(ask(query="took", tokens=4000, offset=500)) == []


TALK = [
    "What is new with the kayak?",
    "I sold it on Friday, for 240 euros.",
    "Somebody came by train to fetch it.",
    *(f"Then let us speak of number {at}." for at in range(40)),
]


def talk_pieces(texts: list[str]) -> list[Piece]:
    return [Piece(number, "user", text) for number, text in enumerate(texts, 1)]


def test_what_stands_beside_a_result_is_shown_with_it() -> None:
    """The turn before and the two after it, in their order: an answer has few words of its question."""
    page = ask(query="the kayak", pieces=talk_pieces(["Hello.", *TALK]), tokens=1000, limit=1)
    assert page.index("Hello.") < page.index("kayak?") < page.index("240 euros") < page.index("by train")
    assert beside(page) == [1, 3, 4]


def test_what_stayed_in_the_view_parts_what_stood_side_by_side() -> None:
    """An item that follows in the search, but not in the conversation, is no neighbour."""
    pieces = talk_pieces(TALK)
    page = ask(query="kayak", pieces=[pieces[0], *pieces[3:]], tokens=1000, limit=1)
    assert beside(page) == []


def test_short_results_fill_the_page() -> None:
    """As many results as are wanted, where there is room for them."""
    page = ask(query="number", pieces=talk_pieces(TALK), tokens=4000, usual=10)
    assert "1 to 10 shown" in page


def test_a_long_result_leaves_room_for_others() -> None:
    """Three long results of equal length share the page."""
    pieces = [Piece(at * 2, "tool", log(at, 900) + "\nkingfisher\n" + log(at, 900)) for at in range(1, 4)]
    page = ask(query="kingfisher", pieces=pieces, tokens=1500)
    assert sorted(shown(page)) == [2, 4, 6]
    assert page.count("kingfisher") == 3


def test_nothing_is_shown_twice() -> None:
    """A result that stood beside an earlier one is not repeated."""
    page = ask(query="euros kayak", pieces=talk_pieces(TALK), tokens=4000)
    assert page.count("240 euros") == 1


def test_without_a_query_what_left_the_view_is_listed_in_order() -> None:
    """No query and no item: all that was left out, oldest first."""
    assert shown(ask(tokens=4000)) == [2, 3, 4]
    assert shown(ask(tokens=4000, offset=28)) == [30, 31]


def test_a_query_of_many_words_costs_no_more_than_one_of_some() -> None:
    """Every word is a walk over all that was left out, so no more than so many are looked for."""
    many = [f"zq{at}" for at in range(MOST_QUERY_WORDS)]
    assert "is kingfisher." in ask(query=" ".join([*many[1:], "kingfisher"]))
    assert ask(query=" ".join([*many, "kingfisher"])).startswith(NOTHING)


def test_an_item_is_read_from_any_place() -> None:
    """Following the offsets that pages give reads an item whole, in order, without a gap."""
    text, read, offset = PIECES[29].text, "", 0
    for _ in range(40):
        page = ask(item=30, offset=offset, tokens=150)
        body = page.split("\n", 1)[1]
        read += body[: body.rindex("\n[")] if "\n[" in body else body
        if "goes on with" not in page:
            break
        offset = int(page.rsplit("offset ", 1)[1].split(" ", 1)[0])
    assert read == text
    assert "There is no item 77" in ask(item=77)
    assert str(len(text)) in ask(item=30, offset=10**6)


def test_an_item_in_the_view_can_be_read_too() -> None:
    """A number names any item of the history."""
    assert "Never touch vendor" in ask(item=1)


@pytest.mark.parametrize("query", ["nothing like this 9x7q", "zzz"])
def test_no_match_is_said_plainly(query: str) -> None:
    """A search without results does not say that there is nothing; it may have been said in other words."""
    assert ask(query=query).startswith(NOTHING)
    assert ask(pieces=[]) == ask(query=query, pieces=[]) == NOTHING_LEFT_OUT


def test_arguments_that_cannot_be_read_are_answered() -> None:
    """The answer to arguments that are no JSON object names what to write."""
    for text in ("{", "[]", '"x"', "nonsense"):
        assert answer(read_arguments(text, 3), PIECES, 500, count_tokens).text == UNREADABLE


def test_without_room_nothing_is_shown() -> None:
    """If nothing fits, the answer says so, in no more tokens than there are."""
    assert answer(Arguments(), PIECES, LEAST_RESULT_TOKENS - 1, count_tokens).text == NO_ROOM


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Arguments()),
        ('{"query":"  a b "}', Arguments("a b")),
        ('{"item":"12","offset":-5,"limit":0}', Arguments(item=12, limit=1)),
        ('{"limit":1e9,"offset":2.0}', Arguments(limit=MOST_RESULTS, offset=2)),
        ('{"limit":true,"item":null,"query":7}', Arguments()),
    ],
)
def test_arguments_are_brought_inside_their_bounds(text: str, wanted: Arguments) -> None:
    """Figures as text or fractions are taken, odd ones are bounded or left out."""
    assert read_arguments(text, 3) == wanted


PIECE = st.builds(
    lambda number, words, times, hidden: Piece(number, "tool", f"{words}\n" * times, hidden),
    st.integers(1, 99),
    st.text(max_size=60),
    st.integers(0, 40),
    st.booleans(),
)
ARGUMENTS = st.one_of(
    st.text(max_size=20),
    st.fixed_dictionaries(
        {},
        optional={
            "query": st.text(max_size=20),
            "item": st.integers(-5, 120),
            "offset": st.integers(-5, 4000),
            "limit": st.integers(-5, 100),
        },
    ).map(json.dumps),
)


@given(st.lists(PIECE, max_size=12), ARGUMENTS, st.integers(6, 900), st.integers(1, 10))
def test_no_answer_exceeds_its_room_or_its_results(pieces: list[Piece], text: str, tokens: int, usual: int) -> None:
    """Any arguments and any history give at most so many tokens, and at most ten results."""
    found = answer(read_arguments(text, usual), pieces, tokens, count_tokens).text
    assert count_tokens(found) <= tokens
    assert found
    assert found.count("[item ") <= MOST_RESULTS + sum(piece.text.count("[item ") for piece in pieces)

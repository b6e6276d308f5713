"""Which texts a query is about, and in which order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.server_tools.ranking import MOST_QUERY_WORDS, _pattern, _phrases, ranked
from tests.support.sample_conversations import prose

FAR = [prose(seed, 30) for seed in range(6)]
"""Texts about nothing, so that what stands between two others is no neighbour of either."""


def best(query: str, *texts: str) -> str:
    """The text that *query* finds first; empty if it finds none."""
    apart = [part for text in texts for part in (text, *FAR)]
    ranking = ranked(query, [""] * len(apart), apart)
    return apart[ranking[0][0]] if ranking else ""


@given(st.text("ab1_-. ", max_size=40), st.text("ab1_-. ", min_size=1, max_size=5))
def test_a_word_is_found_where_it_begins(text: str, word: str) -> None:
    """A word matches everywhere but behind a letter or a figure."""
    wanted = re.compile(f"(?<![a-z0-9]){re.escape(word)}")
    assert [hit.span() for hit in _pattern(word).finditer(text)] == [hit.span() for hit in wanted.finditer(text)]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("visited", "Shall we visit them?"),
        ("visits", "We visited them all."),
        ("planning", "It was planned by her."),
        ("studies", "She studied them."),
        ("classes", "The class was full."),
        ("bus", "No bus today."),
        ("028", "The flight is HAT028."),
    ],
)
def test_a_word_is_found_in_its_other_forms(query: str, text: str) -> None:
    """Endings do not matter; what begins no word anywhere is found inside words."""
    assert best(query, "Nothing of that kind.", text, "Something else entirely.") == text


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("金庫の合言葉は何ですか", "合言葉はカワセミです。"),
        ("故宫的门票价格", "门票六十元。"),
        ("ราคาตั๋วเท่าไร", "ตั๋วราคาหกสิบ"),
    ],
)
def test_a_query_without_spaces_finds_what_shares_pairs_of_characters(query: str, text: str) -> None:
    """A whole question, of which no text holds all."""
    assert best(query, "天気がいいですね。", text, "今天下雨了。") == text


def test_the_turn_after_the_words_wins_over_one_that_only_mentions_them() -> None:
    """Words that stand in an item and its neighbours count more than the same words alone."""
    exchange = ["About the telescope: what did you pay?", "The telescope was 90 euros."]
    texts = ["I like the telescope.", *FAR, *exchange, *FAR]
    ranking = ranked("pay for telescope", [""] * len(texts), texts)
    assert [texts[index] for index, _ in ranking[:2]] == exchange


def test_rare_words_count_more_than_common_ones() -> None:
    """A word that every item has decides nothing."""
    common = [f"The plan is number {at}." for at in range(30)]
    ranking = ranked("plan kingfisher", [""] * 31, [*common, "kingfisher"])
    assert ranking[0][0] == 30


def test_a_short_item_wins_over_a_long_one() -> None:
    """One hit in a line says more than one in a file."""
    assert best("kingfisher", prose(1, 900) + " kingfisher", "the kingfisher") == "the kingfisher"


def test_reading_begins_at_the_rarest_and_longest_part() -> None:
    """The position is that of the whole query if it is there, else of its rarest word."""
    text = "clear the cache, then /clear and go"
    ((_, position),) = ranked("/clear", [""], [text])
    assert text[position:].startswith("/clear")


@given(st.text(max_size=400))
def test_no_query_is_looked_for_in_more_parts_than_so_many(query: str) -> None:
    """Every part is a walk over all that was left out; and none is empty but that of an empty query."""
    phrases = _phrases(query.lower())
    assert len(phrases) <= MOST_QUERY_WORDS + 1
    assert all(phrases) or not query


def test_a_long_query_has_its_first_words_only() -> None:
    """The parts of a long query are its first words, and the whole query."""
    words = [f"word{at}x" for at in range(2 * MOST_QUERY_WORDS)]
    assert _phrases(" ".join(words)) == [*words[:MOST_QUERY_WORDS], " ".join(words)]


def test_of_equal_texts_the_later_is_better() -> None:
    """It is nearer to what the model is doing."""
    ranking = ranked("kingfisher", ["", "", ""], ["kingfisher", "x", "kingfisher"], with_neighbours=False)
    assert [index for index, _ in ranking] == [2, 0]


@given(st.lists(st.text(max_size=40), max_size=8), st.text(min_size=1, max_size=20))
def test_every_place_is_inside_its_item(texts: list[str], query: str) -> None:
    """Any query over any texts gives each piece at most once, and a position in it."""
    ranking = ranked(query, [""] * len(texts), texts)
    assert len({index for index, _ in ranking}) == len(ranking)
    assert all(0 <= position <= len(texts[index]) for index, position in ranking)


def test_a_heading_is_searched_too_and_neighbours_only_on_request() -> None:
    """A name decides as the text does; a list of tools has no neighbours."""
    assert ranked("kingfisher", ["kingfisher", "", ""], ["a", "b", "c"], with_neighbours=False) == [(0, 0)]
    assert [index for index, _ in ranked("kingfisher", ["kingfisher", "", ""], ["a", "b", "c"])] == [0, 1]

"""Ranks: constraints before requests; the first round, the newest ones and conclusions before chatter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.sentence_ranking import NEWEST, round_scores, rounds_of, sentence_rank
from proxy.core.conversation import ItemText

CALL = ("read", '{"path": "a"}')


def spoken(text: str, *calls: tuple[str, str]) -> ItemText:
    return ItemText("assistant", text, calls)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Never touch vendor.", 2),
        ("Use tabs, please.", 1),
        ("The weather is fine.", 0),
        ("Nicht den Ordner löschen.", 2),
        ("Bitte den Test dazu.", 1),
        ("Нельзя менять схему.", 2),
        ("不要修改数据库结构", 2),
        ("请帮我看看", 1),
        ("必ずテストを書く", 2),
        ("반드시 테스트를 작성해", 2),
        ("He addressed the mustard.", 0),
        ("DON'T YOU DARE", 2),
        ("YALNIZCA okumak", 2),
        ("S'il te plait, un test", 1),
        ("s'il vous plaît, un test", 1),
    ],
)
def test_sentences_are_weighed_in_the_main_languages(sentence: str, expected: int) -> None:
    """A constraint weighs two, a request one, talk nothing; words count whole."""
    assert sentence_rank(sentence) == expected


@given(
    st.sampled_from(["never", "yalnızca", "müssen", "at least", "don't", "keep", "please", "s'il te plaît", "go"]),
    st.sampled_from([str.upper, str.lower, str.title]),
    st.text(st.sampled_from("x _.1\n")),
)
def test_no_rank_depends_on_other_letters(word: str, case: Callable[[str], str], before: str) -> None:
    """ASCII sentences, which are searched by a pattern of their own, rank as those with another letter far away."""
    sentence = before + case(word)
    assert sentence_rank(sentence) == sentence_rank(sentence + " é")


def test_a_conclusion_needs_no_known_word() -> None:
    """Words right before the user speaks again rank above the same words amid the model's work."""
    rounds = rounds_of([spoken("Hm."), *[spoken("Ndiyo.")] * 9, ItemText("user", "?"), *[spoken("Ndiyo.")] * 9])
    worth = round_scores(rounds)
    assert worth[9] > worth[10]
    assert worth[9] > worth[8] + 5


def test_silent_calls_are_worth_least() -> None:
    """A round of calls without a word is worth less than one that says why."""
    rounds = rounds_of([spoken("Start."), spoken("", *[CALL] * 4), spoken("Why.", *[CALL] * 4), *[spoken("x")] * 9])
    worth = round_scores(rounds)
    assert worth[1] < worth[2] < worth[0]


def test_first_and_newest_are_worth_most() -> None:
    """Neither the first round nor one of the newest is worth less than any in the middle without a cue."""
    worth = round_scores(rounds_of([spoken("Hm.")] * 30))
    assert min(worth[0], *worth[-NEWEST:]) > max(worth[1:-NEWEST])


@given(st.lists(st.builds(ItemText, st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=30)), max_size=30))
def test_every_round_has_one_score_in_bounds(entries: list[ItemText]) -> None:
    """Each thing the model said is one round, in order, worth 0 to 100."""
    rounds = rounds_of(entries)
    assert [each.spoken for each in rounds] == [entry for entry in entries if entry.role == "assistant"]
    assert all(0 <= score <= 100 for score in round_scores(rounds))

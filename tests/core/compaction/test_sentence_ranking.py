"""Ranks of sentences, conclusions, and the rounds of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.sentence_ranking import has_conclusion, rounds_of, sentence_rank
from proxy.core.conversation import ItemText


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Never touch vendor.", 2),
        ("Use tabs, please.", 1),
        ("The weather is fine.", 0),
        ("Nicht den Ordner löschen.", 2),
        ("Bitte den Test dazu.", 1),
        ("Нельзя менять схему.", 2),
        ("不要改这个文件。", 2),
        ("要不要改这个文件？", 0),
        ("能不能请你看一下？", 1),
        ("可不可以用空格？", 0),
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


@pytest.mark.parametrize("sentence", ["The root cause is a stale lock.", "Die Ursache ist klar.", "原因是锁没有释放。"])
def test_conclusions_are_found_in_several_languages(sentence: str) -> None:
    """A sentence that says why or what is done concludes; one that says what is tried does not."""
    assert has_conclusion(sentence)
    assert not has_conclusion("Let me look at the next file.")


@given(st.lists(st.builds(ItemText, st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=30)), max_size=30))
def test_each_text_of_the_model_is_a_round(entries: list[ItemText]) -> None:
    """Each thing the model said is one round, in order; it is answered if a user item follows."""
    rounds = rounds_of(entries)
    assert [each.spoken for each in rounds] == [entry for entry in entries if entry.role == "assistant"]
    following = [after.role for entry, after in pairwise(entries) if entry.role == "assistant"]
    assert [each.answered for each in rounds][: len(following)] == [role == "user" for role in following]


def test_outcomes_go_to_the_round_of_their_call() -> None:
    """They stand in the order of all calls, of whatever round."""
    entries = [
        ItemText("assistant", "", (("a", ""), ("b", ""))),
        ItemText("tool", ""),
        ItemText("assistant", "no call"),
        ItemText("assistant", "", (("c", ""),)),
    ]
    assert [each.outcomes for each in rounds_of(entries, ["1", "2", "3"])] == [("1", "2"), (), ("3",)]

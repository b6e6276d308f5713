"""Ranks of sentences, rounds, and the steps of a block: lines of the newest rounds, then more of what says most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.steps import MOST_ROUNDS, Round, Steps, has_conclusion, overtaken, rounds_of, sentence_rank
from proxy.core.conversation import ItemText
from proxy.core.tool_calls import read_all_arguments
from proxy.core.tool_table import NO_TALK, TalkRules
from proxy.settings import tool_map
from proxy.settings.tools import Tools
from tests.support.engine_fixtures import count_tokens

OPENER = "Let me look at that now."


def answer(text: str, *calls: tuple[str, str]) -> ItemText:
    return ItemText("assistant", text, calls)


def word(number: int) -> str:
    """A made-up word for each number."""
    return "".join(chr(97 + number // 26**at % 26) for at in range(5))


def steps_of(*entries: ItemText, known: str = "") -> Steps:
    return steps_in(rounds_of(entries), known)


def steps_in(rounds: Sequence[Round], known: str = "", talk: TalkRules = NO_TALK) -> Steps:
    """The steps of *rounds*."""
    return Steps(rounds, count_tokens, read_all_arguments([each.spoken for each in rounds]), known, talk)


def test_a_line_is_the_sentence_that_says_most() -> None:
    """A sentence of one round wins over a sentence that every round has."""
    facts = ["The mutex is released twice.", "Postgres drops the advisory lock.", "A retry hides the timeout."]
    lines = steps_of(*(answer(f"{OPENER} {fact} {OPENER}") for fact in facts)).lines(30)
    assert lines == facts


def test_a_round_that_says_much_has_a_line_before_newer_ones() -> None:
    """Behind the newest rounds room goes to what says most, however old it is; calls alone have what is left."""
    fact = "Postgres drops the advisory lock."
    silent = answer("", ("run", '{"command": "make"}'))
    rounds = [*[silent] * 21, answer(fact), *[silent] * 20]
    lines = steps_of(*rounds).lines(60)
    assert lines[21] == fact
    shown = [at for at, line in enumerate(lines) if line]
    assert shown == [0, 21, *range(44 - len(shown), 42)]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"command": ["bash", "-lc", "pytest -q tests"], "workdir": "/src"}', "pytest -q tests"),
        ('{"command": ["/bin/sh", "-c", "make"]}', "make"),
        ('{"cmd": ["git", "log", "-3"]}', "git log -3"),
        ('{"commands": ["git status", {"command": "make"}]}', "git status; make"),
        ('{"command": "bash -lc make"}', "bash -lc make"),
        ('{"path": "a.py", "command": ["view"]}', "view"),
        ('{"path": "a.py", "command": []}', "a.py"),
    ],
)
def test_a_command_in_parts_is_shown_as_a_whole(arguments: str, shown: str) -> None:
    """Its first part alone is the name of a shell, or one command of several."""
    assert steps_of(answer("", ("run", arguments))).lines(200) == [f"run({shown})"]


def test_a_sentence_is_said_once() -> None:
    """A round whose words another one says has its calls alone."""
    call = ("run", '{"command": "make"}')
    lines = steps_of(answer(OPENER, call), answer(OPENER, call), answer(OPENER, call)).lines(200)
    assert lines == ["run(make)", "run(make)", f"{OPENER} -> run(make)"]


def test_a_call_of_which_nothing_is_known_is_shown_once() -> None:
    """The newest stays; with an argument or an outcome each one tells something."""
    calls = [("snapshot", "{}"), ("run", '{"command": "make"}'), ("snapshot", "{}"), ("run", '{"command": "make"}')]
    lines = steps_of(*[answer("", call) for call in calls]).lines(200)
    assert lines == ["snapshot()", "run(make)", "", "run(make)"]


def test_one_word_tells_nothing() -> None:
    """An exclamation is left out, in Latin letters; where words have no spaces it may be a sentence."""
    call = ("run", '{"command": "make"}')
    lines = steps_of(answer("Perfect!", call), answer("已完成！", call), answer("Très bien!", call)).lines(200)
    assert lines == ["run(make)", "已完成！ -> run(make)", "Très bien! -> run(make)"]


def test_a_long_path_keeps_the_name_of_its_file() -> None:
    """Of a long text that is no path nothing is shown."""
    path = "/home/dev/" + "projects/" * 10 + "lib/spotter/tmux.ex"
    lines = steps_of(answer("", ("Read", f'{{"path": "{path}"}}')), answer("", ("Say", f'"{"x" * 99}"'))).lines(200)
    assert lines == ["Read([...]/tmux.ex)", "Say([...])"]


def test_words_that_are_shown_already_count_for_nothing() -> None:
    """A sentence of the pins is not said again if the round says something else too."""
    first, second = "The mutex is released twice.", "Gradle caches the manifest."
    entry = answer(f"{first} {second}")
    assert steps_of(entry, answer(OPENER), known=first).lines(200)[0] == second


def test_further_sentences_are_those_that_say_most() -> None:
    """Left-over room goes to sentences with new words, in their order, with a sign where some are left out."""
    text = (
        f"Alpha beta gamma delta. {OPENER} Kubernetes evicted pods overnight. {OPENER} Certificates expired yesterday."
    )
    steps = steps_of(answer(OPENER), answer(text), answer(OPENER))
    longer = steps.lines(40)
    steps.extend(40)
    assert "Kubernetes evicted pods overnight." in longer[1]
    assert "Certificates expired yesterday." in longer[1]
    assert OPENER not in longer[1]
    assert "[...]" in longer[1]


def test_a_sentence_before_the_user_speaks_is_worth_more() -> None:
    """Of two rounds that say equally much, the one that was answered is given the room, in any language."""
    silent = [answer("")] * 8
    rounds = [answer("Tunaendelea haraka kufanya."), answer("Tumemaliza kabisa shughuli.")]
    plain = steps_of(*silent, *rounds)
    answered = steps_of(*silent, rounds[0], ItemText("user", "?"), rounds[1])
    plain.extend(14)
    answered.extend(14)
    assert [bool(size) for size in plain.sizes[8:]] == [False, True]
    assert [bool(size) for size in answered.sizes[8:]] == [True, False]


def test_a_conclusion_is_worth_more() -> None:
    """Of two sentences with as many new words, the one that constrains is shown, though it is longer."""
    plain, concluding = "Locks drop rows fast.", "You must never ever touch it."
    for text in (f"{plain} {concluding}", f"{concluding} {plain}"):
        assert steps_of(answer(text)).lines(12) == [concluding]


def test_a_silent_round_shows_its_calls() -> None:
    """A round without words is its calls with their first arguments."""
    assert steps_of(answer("", ("run", '{"command": "make"}'))).lines(50) == ["run(make)"]


@given(st.lists(st.builds(ItemText, st.just("assistant"), st.text(max_size=60)), max_size=20), st.integers(0, 80))
def test_steps_keep_to_their_room(entries: list[ItemText], tokens: int) -> None:
    """The lines take at most the room they are given, and what is added at most what is left."""
    steps = steps_of(*entries)
    longer = steps.lines(tokens)
    lines = list(longer)
    assert sum(steps.sizes) == sum(count_tokens(line) + 2 for line in lines if line) <= tokens
    steps.extend(tokens)
    assert sum(steps.sizes) == sum(count_tokens(line) + 2 for line in longer if line) <= 2 * tokens
    assert [bool(line) for line in lines if line] == [
        bool(new) for line, new in zip(lines, longer, strict=True) if line
    ]


def test_old_rounds_beyond_the_most_cost_nothing() -> None:
    """Of thousands of rounds the newest are looked through, and the first."""
    texts = [f"Plain {word(at)} {word(at * 31 + 7)} there." for at in range(MOST_ROUNDS * 4)]
    steps = steps_of(*map(answer, texts))
    longer = steps.lines(100)
    steps.extend(100_000)
    shown = [at for at, line in enumerate(longer) if line]
    assert shown[0] == 0
    assert 100 < len(shown) <= MOST_ROUNDS + 1


def test_a_call_says_how_it_ended() -> None:
    """Its outcome stands behind its argument; where nothing is known, nothing does."""
    entry = answer("", ("Bash", '{"command": "mix test"}'), ("Read", '{"path": "a.py"}'), ("Edit", '{"path": "b.py"}'))
    rounds = rounds_of([answer(OPENER), entry], ["2 failures", "", "failed"])
    assert steps_in(rounds).lines(200)[1] == "Bash(mix test): 2 failures, Read(a.py), Edit(b.py): failed"


TALK = tool_map(Tools()).work.talk


@pytest.mark.parametrize(
    ("sentences", "gone"),
    [
        (["Now I will fix the parser.", "It parses.", "Let me run it."], [True, False, False]),
        (["Great, now let's see it run:", "Done."], [True, False]),
        (["Perfect! Let me check.", "I'll use SQLite only.", "Ok."], [True, False, False]),
        (["I'll close it, since the root cause is a lock.", "Ok."], [False, False]),
        (["3 of 10 done", "The parser fails on tabs.", "7 of 10 done."], [True, False, False]),
        (["Running the tests...", "Step 2/3"], [True, False]),
        (["Progress: 40 %", "It works."], [False, False]),
        (["Ich werde die Datei lesen.", "让我看看这个文件", "Fertig."], [True, True, False]),
        (["The file has 3 of 10 columns that break the parser when they are empty or quoted.", "1/2"], [False, False]),
        (["I will not touch vendor.", "Ok."], [False, False]),
        (["Let me read why the lexer drops tabs.", "Ok."], [False, False]),
    ],
)
def test_what_later_words_overtake(sentences: list[str], gone: list[bool]) -> None:
    """Intents are overtaken by what follows, a report of progress by the next one; rules and conclusions hold."""
    texts = [[each] for each in sentences]
    assert [bool(indexes) for indexes in overtaken(texts, [True] * len(texts), TALK)] == gone


def test_without_rules_every_sentence_holds() -> None:
    """Nothing is overtaken if no pattern says how such sentences begin."""
    texts = [["Let me see."], ["3 of 10 done"], ["4 of 10 done"]]
    assert overtaken(texts, [True] * 3, TalkRules()) == [frozenset()] * 3


def test_an_intent_that_nothing_shows_to_be_done_holds() -> None:
    """Without a call in its round "I'll send it" may still be to do; a report of progress needs none."""
    assert overtaken([["Let me see.", "1/2"], ["Ok.", "2/2"]], [False, False], TALK) == [frozenset([1]), frozenset()]


@given(st.lists(st.lists(st.sampled_from(["Let me see.", "3 of 10 done", "It fails.", "Never push."]), max_size=4)))
def test_the_newest_words_are_never_overtaken(texts: list[list[str]]) -> None:
    """The last report of progress holds, and so do the intents of the last text; nothing else of talk is left."""
    kept = [
        [sentence for index, sentence in enumerate(sentences) if index not in gone]
        for sentences, gone in zip(texts, overtaken(texts, [True] * len(texts), TALK), strict=True)
    ]
    everything = [sentence for sentences in texts for sentence in sentences]
    left = [sentence for sentences in kept for sentence in sentences]
    assert left.count("3 of 10 done") == min(1, everything.count("3 of 10 done"))
    assert left.count("It fails.") == everything.count("It fails.")
    assert left.count("Never push.") == everything.count("Never push.")
    assert all("Let me see." not in sentences for sentences in kept[:-1])
    assert not texts or kept[-1].count("Let me see.") == texts[-1].count("Let me see.")


def test_what_holds_has_the_room_before_what_was_overtaken() -> None:
    """A round's line is the sentence that still holds, though an intent beside it says a little more."""
    intent, fact = "Let me rewrite parsers quickly.", "It is the tokens: it leaks a lot."
    rounds = rounds_of([answer(f"{intent} {fact}", ("bash", "{}")), answer("")])
    assert steps_in(rounds).lines(18)[0].startswith(intent)
    assert steps_in(rounds, talk=TALK).lines(18)[0].startswith(fact)


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
        ("报价一律写含税价", 2),
        ("别再推荐深色的了", 2),
        ("特别好吃，别人也这么说", 0),
        ("结果不准确", 0),
        ("周末我不准备去", 0),
        ("不准改动接口", 2),
        ("不許改動接口", 2),
        ("这个判别式写得别扭", 0),
        ("营收有三千万", 0),
        ("千万记得备份", 2),
        ("我记得那是周三", 0),
        ("还记得那家店吗", 0),
        ("记住周三没有空", 1),
        ("作業を入れてはいけません", 2),
        ("倉庫には触らないでください", 2),
        ("報告しなければならない", 2),
        ("早く帰りたいんだけど", 0),
        ("非常に良い結果です", 0),
        ("処理は正常に終わりました", 0),
        ("常に絶対値を返す", 2),
        ("絶対パスが表示された", 0),
        ("一日では調べきれない", 0),
        ("先に調べるべきです", 1),
        ("型番を書いてください", 1),
        ("専門用語は避けてほしい", 1),
        ("매운 음식은 추천하지 마세요", 2),
        ("그 뒤로는 잡으면 안 됩니다", 2),
        ("시간은 지켜야 합니다", 2),
        ("비싼 식당은 빼 주세요", 1),
        ("와 줘서 고마워", 0),
        ("산꼭대기에서 만났어", 0),
        ("꼭 확인해", 2),
        ("현금지급 내역이 나왔다", 0),
        ("사용금지 목록이다", 2),
        ("절대 경로가 나온다", 0),
        ("안녕하세요", 0),
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

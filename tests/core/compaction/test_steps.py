"""The steps of a block: lines of the newest rounds, each the sentence that says most, then more of the best."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.sentence_ranking import rounds_of
from proxy.core.compaction.steps import MOST_ROUNDS, Steps
from proxy.core.conversation import ItemText
from tests.support.engine_fixtures import count_tokens

OPENER = "Let me look at that now."


def spoken(text: str, *calls: tuple[str, str]) -> ItemText:
    return ItemText("assistant", text, calls)


def word(number: int) -> str:
    """A made-up word for each number."""
    return "".join(chr(97 + number // 26**at % 26) for at in range(5))


def steps_of(*entries: ItemText, known: str = "") -> Steps:
    return Steps(rounds_of(entries), count_tokens, known)


def test_a_line_is_the_sentence_that_says_most() -> None:
    """A sentence of one round wins over a sentence that every round has."""
    facts = ["The mutex is released twice.", "Postgres drops the advisory lock.", "A retry hides the timeout."]
    lines = steps_of(*(spoken(f"{OPENER} {fact} {OPENER}") for fact in facts)).lines(200)
    assert lines == facts


def test_words_that_are_shown_already_count_for_nothing() -> None:
    """A sentence of the pins is not said again if the round says something else too."""
    first, second = "The mutex is released twice.", "Gradle caches the manifest."
    entry = spoken(f"{first} {second}")
    assert steps_of(entry, spoken(OPENER), known=first).lines(200)[0] == second


def test_further_sentences_are_those_that_say_most() -> None:
    """Left-over room goes to sentences with new words, in their order, with a sign where some are left out."""
    text = (
        f"Alpha beta gamma delta. {OPENER} Kubernetes evicted pods overnight. {OPENER} Certificates expired yesterday."
    )
    steps = steps_of(spoken(OPENER), spoken(text), spoken(OPENER))
    longer = steps.extended(steps.lines(40), 40)
    assert "Kubernetes evicted pods overnight." in longer[1]
    assert "Certificates expired yesterday." in longer[1]
    assert OPENER not in longer[1]
    assert "[...]" in longer[1]


def test_a_sentence_before_the_user_speaks_is_worth_more() -> None:
    """Of two rounds that say equally much, the one that was answered is given the room, in any language."""
    silent = [spoken("")] * 8
    rounds = [spoken("Tunaendelea haraka kufanya."), spoken("Tumemaliza kabisa shughuli.")]
    plain = steps_of(*silent, *rounds).extended([""] * 10, 14)
    answered = steps_of(*silent, rounds[0], ItemText("user", "?"), rounds[1]).extended([""] * 10, 14)
    assert [bool(line) for line in plain[8:]] == [False, True]
    assert [bool(line) for line in answered[8:]] == [True, False]


def test_a_conclusion_is_worth_more() -> None:
    """Of two sentences with as many new words, the one that constrains is shown, though it is longer."""
    plain, concluding = "Locks drop rows fast.", "You must never ever touch it."
    for text in (f"{plain} {concluding}", f"{concluding} {plain}"):
        assert steps_of(spoken(text)).lines(200) == [concluding]


def test_a_silent_round_shows_its_calls() -> None:
    """A round without words is its calls with their first arguments."""
    assert steps_of(spoken("", ("run", '{"command": "make"}'))).lines(50) == ["run(make)"]


@given(st.lists(st.builds(ItemText, st.just("assistant"), st.text(max_size=60)), max_size=20), st.integers(0, 80))
def test_steps_keep_to_their_room(entries: list[ItemText], tokens: int) -> None:
    """The lines take at most the room they are given, and what is added at most what is left."""
    steps = steps_of(*entries)
    lines = steps.lines(tokens)
    assert sum(count_tokens(line) + 2 for line in lines if line) <= tokens
    longer = steps.extended(lines, tokens)
    assert sum(count_tokens(line) + 2 for line in longer if line) <= 2 * tokens
    assert [bool(line) for line in lines if line] == [
        bool(new) for line, new in zip(lines, longer, strict=True) if line
    ]


def test_old_rounds_beyond_the_most_cost_nothing() -> None:
    """Of thousands of rounds the newest are looked through, and the first."""
    texts = [f"Plain {word(at)} {word(at * 31 + 7)} there." for at in range(MOST_ROUNDS * 4)]
    longer = (steps := steps_of(*map(spoken, texts))).extended(steps.lines(100), 100_000)
    shown = [at for at, line in enumerate(longer) if line]
    assert shown[0] == 0
    assert 100 < len(shown) <= MOST_ROUNDS + 1


def test_a_call_says_how_it_ended() -> None:
    """Its outcome stands behind its argument; where nothing is known, nothing does."""
    entry = spoken("", ("Bash", '{"command": "mix test"}'), ("Read", '{"path": "a.py"}'), ("Edit", '{"path": "b.py"}'))
    rounds = rounds_of([spoken(OPENER), entry], ["2 failures", "", "failed"])
    assert Steps(rounds, count_tokens).lines(200)[1] == "Bash(mix test): 2 failures, Read(a.py), Edit(b.py): failed"

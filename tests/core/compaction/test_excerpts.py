"""Quotes of a chat: of either side, by what they tell, within their room, and never anything that was not said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.excerpts import MOST_TEXTS, SHORT, Excerpts, sentences_of, talk_as_equals
from proxy.core.compaction.stages import BLOCK_FRAME
from proxy.core.compaction.steps import BULLET
from proxy.core.compaction.truncate import OMITTED
from proxy.core.conversation import ItemText
from tests.support.engine_fixtures import count_tokens
from tests.support.linear_time import is_linear

TALK = ("That sounds great!", "I am so happy to hear that.", "Thank you, that means a lot to me.")
FACTS = (
    "My sister moved to Bergen in June.",
    "We adopted a tortoise called Ines.",
    "The choir sings Fauré on Tuesday.",
)


def quotes(users: list[str], model: list[str], tokens: int, known: str = "") -> list[str]:
    chosen = Excerpts(users, model, count_tokens, known)
    chosen.choose(chosen.choose_directing(tokens))
    return [line for line in (*chosen.user_lines(), *chosen.model_lines()) if line]


@given(st.lists(st.text(max_size=400), max_size=12), st.lists(st.text(max_size=400), max_size=12), st.integers(0, 200))
def test_quotes_keep_to_their_room_and_are_literal(users: list[str], model: list[str], tokens: int) -> None:
    """Whatever was said, lines take no more than their room, and each run of sentences stands in its text."""
    chosen = Excerpts(users, model, count_tokens, "")
    left = chosen.choose(chosen.choose_directing(tokens))
    lines = [*chosen.user_lines(), *chosen.model_lines()]
    assert left >= 0
    assert sum(count_tokens(line) + BULLET for line in lines if line) <= tokens - left
    for text, line in zip([*users, *model], lines, strict=True):
        runs = [run.strip() for run in line.split(OMITTED)]
        assert all(run in text for run in runs) or OMITTED in text


def test_facts_of_either_side_outlive_small_talk() -> None:
    """What tells something is quoted, whoever said it and however long ago."""
    users = [FACTS[0], *TALK * 30, FACTS[1], *TALK * 30]
    model = [*TALK * 10, FACTS[2], *TALK * 40]
    found = quotes(users, model, 60)
    assert set(FACTS) <= set(found)


@pytest.mark.parametrize(
    ("asks", "tells"),
    [
        ("Who took the violin to Bergen at last?", "It was Kofi, by train."),
        ("你上次说的古筝后来到底怎么样了呢", "修好了，是孙姐帮的忙。"),
        ("あの三味線は結局どうなったのですか。", "林さんが引き取りました。"),
        ("그 가야금은 결국 어떻게 되었어?", "신 원장님이 사 갔어."),
    ],
)
def test_an_answer_tells_more_than_its_question(asks: str, tells: str) -> None:
    """Of a question and its answer the second is quoted if there is room for one, though the first has more words."""
    room = count_tokens(asks) + BULLET
    assert quotes([asks], [tells], room) == [tells]


def test_what_was_said_twice_is_quoted_once() -> None:
    """Equal sentences do not take room twice."""
    found = quotes([FACTS[0]] * 9, [FACTS[0]] * 9, 400)
    assert found == [FACTS[0]]


def test_what_is_known_gives_way() -> None:
    """A text whose words the block shows anyway comes after one that is new."""
    assert quotes([FACTS[0], FACTS[1]], [], 12) != quotes([FACTS[0], FACTS[1]], [], 12, known=FACTS[1])
    assert quotes([FACTS[0], FACTS[1]], [], 12, known=FACTS[1]) == [FACTS[0]]


@pytest.mark.parametrize("rule", ["You must never book a flight before noon.", "请不要预订早上的航班。"])
def test_what_the_user_forbids_comes_first(rule: str) -> None:
    """A constraint outlives facts, also one that is older than the texts that are looked through for facts."""
    users = [rule, *(f"In {year} I painted the harbour of Lisbon {year} times." for year in range(MOST_TEXTS + 9))]
    assert rule in quotes(users, [], 40)


EQUALS = (
    (["Thank you for always listening.", "We met Ida."], ["You should have seen it!", "It rained."]),
    (["我一直都必须早起。", "昨天下雨了。"], ["你只能这样想。", "他来了。"]),
    (["Du musst immer lachen!", "Es war kalt."], ["Man soll niemals aufgeben.", "Wir waren da."]),
)
"""Talks in which both sides use words of orders alike."""


@pytest.mark.parametrize(("users", "model"), EQUALS)
def test_equals_use_words_of_orders_alike(users: list[str], model: list[str]) -> None:
    """Two people are equals; not if one of them writes twice as much at a time, or uses such words twice as often."""
    assert talk_as_equals(users, model)
    assert not talk_as_equals(users, [text * 3 for text in model])
    assert not talk_as_equals([text * 3 for text in users], model)
    assert not talk_as_equals(users[:1] * 2, model)
    assert not talk_as_equals(users, model[:1] * 2)


def test_a_talk_without_words_of_orders_is_none_of_equals() -> None:
    """Nothing is known of two sides that direct nobody, of one side alone, and of none."""
    assert not talk_as_equals(["We met Ida."], ["It rained."])
    assert not talk_as_equals(["You must never book a flight."], [])
    assert not talk_as_equals([], [])


def test_between_equals_thanks_leave_half_of_the_room_to_facts() -> None:
    """What only sounds like an order comes first in half of the room if both sides talk so, else in all of it."""
    thanks = [f"Thank you, {word} you must always be." for word in ("kind", "glad", "proud", "happy")]
    users, equal = [*thanks, *FACTS], ["You must be so glad of that.", "You must be so proud of it.", "It is cold."]
    room = 2 * sum([count_tokens(fact) + BULLET for fact in FACTS])
    assert set(FACTS) <= set(quotes(users, equal, room))
    assert set(thanks) & set(quotes(users, equal, room))
    assert set(thanks) <= set(quotes(users, ["It is booked."], room))


def test_a_long_text_gives_single_sentences() -> None:
    """A short text is quoted whole; of a long one the sentences that tell most, with a sign of what went."""
    long = f"{TALK[0]} " * 4 + FACTS[0] + f" {TALK[1]}" * 9
    assert len(long) > SHORT
    assert quotes([], [*TALK * 3, long], 14) == [f"{FACTS[0]} {OMITTED}"]
    assert quotes([], [f"{TALK[0]} {FACTS[0]}"], 40) == [f"{TALK[0]} {FACTS[0]}"]


@pytest.mark.parametrize(
    "sentence",
    [
        "Der Vertrag beginnt am 12. Oktober und endet am 3. März.",
        "Wir treffen z. B. Dr. Weiss in St. Pauli.",
        "Ask Mrs. J. R. Tolkien, e.g. about maps.",
        "1. Open the file.",
    ],
)
def test_a_full_stop_may_end_no_sentence(sentence: str) -> None:
    """Ordinals, initials and titles have one, too: half of a date is no quote."""
    texts = [each.text for each in sentences_of(f"{sentence} So do I. It went up to 100. Good.", 0)]
    assert texts == [sentence, "So do I.", "It went up to 100.", "Good."]


def test_a_chats_block_quotes_both_sides() -> None:
    """Where no tool was used the block quotes facts of user and model; all texts of the user stay if they fit."""
    entries = [ItemText(("user", "assistant")[at % 2], TALK[at % 3]) for at in range(120)]
    entries[11], entries[40] = ItemText("assistant", FACTS[0]), ItemText("user", FACTS[1])
    users = tuple(entry.text for entry in entries if entry.role == "user")
    made = render_block(FoldedItems(tuple(entries), users), BLOCK_FRAME + 200, 100, count_tokens)
    assert f"- {FACTS[0]}" in made
    assert f"- {FACTS[1]}" in made
    assert made.count(TALK[0]) <= 2
    few = render_block(FoldedItems(tuple(entries), users[:3]), BLOCK_FRAME + 200, 100, count_tokens)
    assert all(f"- {text}" in few for text in users[:3])


def test_a_sentence_that_stands_twice_in_a_long_text_is_quoted_once() -> None:
    """A list of one line a thousand times is no thousand lines of a block."""
    found = quotes([], ["Step one is not done.\n" * 1000, FACTS[0]], 200)
    assert found == [f"Step one is not done. {OMITTED}", FACTS[0]]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["- [ ] do it now\n", "- [ ] do it now with {} apples\n"])
def test_the_cost_of_a_long_text_of_short_lines_grows_with_its_length(line: str) -> None:
    """The line of a text was counted anew for each sentence, and each quote gave all others a new value."""

    def choose(lines: int) -> None:
        text = "".join(line.format(at) for at in range(lines))
        Excerpts((), [text], count_tokens, "").choose(10**6)

    assert is_linear(choose, 1_000)

"""The benchmark of recall: its questions can be answered, and the page answers them."""

from __future__ import annotations

import pytest

from proxy.features.recall.settings import Recall
from tests.bench import metrics
from tests.bench.recall import AGENTS, SHARE, Conversation, answers, conversations
from tests.bench.recall_questions import drawn, entities_needed, talk
from tests.bench.sessions import chat

GOAL = 0.75


def test_questions_are_the_same_every_time_and_have_their_evidence_in_the_chat() -> None:
    """The draw is seeded; every evidence stands in one of the turns."""
    messages = chat(3)
    questions = drawn("one", messages)
    assert questions == drawn("one", messages) != drawn("another", messages)
    assert questions
    assert all(any(one.evidence in metrics.content(message) for message in messages) for one in questions)
    turns, about_it = talk(5)
    assert about_it == talk(5)[1]
    assert all(sum(one.evidence == metrics.content(message) for message in turns) == 1 for one in about_it)


def test_an_entity_inside_a_longer_word_is_not_asked_for() -> None:
    """The figures of a flight's number are no name of their own."""
    history = [{"role": "tool", "content": "Flight HAT028 is on time, flight 4471 is late."}]
    future = [{"role": "assistant", "content": "I take 028 and 4471."}]
    assert [one.query for one in entities_needed(history, future, [])] == ["4471"]


@pytest.mark.slow
def test_three_quarters_of_the_questions_are_answered_and_every_entity_is() -> None:
    """The goal, on the generated conversations (all of an agent's, a talk, and the chats)."""
    chosen = [one for one in conversations(None) if not one.name.startswith("talk-")][-6:]
    chosen.append(Conversation("talk", *talk(1)))
    results = [each for one in chosen for each in answers(one, SHARE, Recall())]
    agents = [each.shown for each in results if each.group == AGENTS]
    chats = [each.shown for each in results if each.group != AGENTS]
    assert len(chats) > 40
    assert all(agents)
    assert sum(chats) >= GOAL * len(chats)
    assert all(each.tokens <= Recall().max_tokens for each in results)

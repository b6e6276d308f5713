"""Which memories a conversation is given."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.features.memories.memory import DAY_SECONDS, Memory
from proxy.features.memories.selection import (
    MOST_MEMORIES,
    MOST_QUERY_CHARACTERS,
    MOST_SESSIONS,
    MOST_WORKING,
    choose,
    matching,
    query_of,
    ranked,
    score,
)

NOW = 1_795_392_000.0
OLD = int(NOW) - 100 * DAY_SECONDS


def memory(title: str, content: str = "nothing", **fields: Any) -> Memory:
    return Memory(title, **{"type": "project", "title": title, "content": content, "created_at": OLD, **fields})


def total(each: Memory, query: str = "", terms: tuple[tuple[str, bool], ...] = ()) -> int:
    return score(each, query, terms, NOW)


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({}, 50 + 35),
        ({"class_": "priority"}, 80 + 35),
        ({"type": "user"}, 50 + 30),
        ({"type": "decision"}, 50 + 25),
        ({"type": "session"}, 50 + 10),
        ({"pinned": True}, 50 + 35 + 40),
        ({"type": "decision", "created_at": int(NOW) - 6 * DAY_SECONDS}, 50 + 25 + 18),
        ({"type": "decision", "created_at": int(NOW) - 29 * DAY_SECONDS}, 50 + 25 + 10),
        ({"class_": "working", "created_at": int(NOW) - 6 * DAY_SECONDS}, 20 + 35),
        ({"class_": "working", "created_at": int(NOW) - 8 * DAY_SECONDS}, 20 + 35 - 20),
        ({"class_": "working", "created_at": int(NOW) - 12 * DAY_SECONDS}, 20 + 35 - 35),
    ],
)
def test_what_a_memory_is_has_its_weight(fields: dict[str, Any], weight: int) -> None:
    """As the documentation lists it."""
    assert total(memory("Title", **fields)) == weight


@pytest.mark.parametrize(
    ("query", "terms", "weight"),
    [
        ("name of the queue", (), 70),
        ("of the queue", (), 45),
        ("until march", (), 20),
        ("elsewhere", (("queue", False),), 30),
        ("elsewhere", (("march", False),), 15),
        ("elsewhere", (("heron-7", True),), 24),
        ("elsewhere", (("queue", True),), 42),
        ("elsewhere", (("other", True),), 0),
    ],
)
def test_the_query_and_its_words_have_weights(query: str, terms: tuple[tuple[str, bool], ...], weight: int) -> None:
    """The query as a whole, and each word of it."""
    queue = memory("Name of the queue", "heron-7 until March")
    assert total(queue, query, terms) - total(queue) == weight


def test_so_many_are_given_those_with_priority_first() -> None:
    """Six, five working ones and three conversations."""
    many = [memory(f"durable {number}", "heron queue") for number in range(9)]
    many += [memory(f"working {number}", class_="working") for number in range(9)]
    many += [memory(f"session {number}", type="session", class_="working") for number in range(9)]
    many.append(memory("last", class_="priority"))
    chosen = choose(many, "What is the heron queue?", NOW)
    assert (MOST_MEMORIES, MOST_WORKING, MOST_SESSIONS) == (6, 5, 3)
    kinds = ["last", *["durable"] * 5, *["working"] * 5, *["session"] * 3]
    assert [each.title.split()[0] for each in chosen] == kinds


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("where is MAX_ROWS set", "rows"),
        ("look at src/app.py please", "file"),
        ("キャッシュのポートは?", "cache"),
        ("决定用什么缓存", "store"),
    ],
)
def test_words_of_the_query_decide(query: str, best: str) -> None:
    """Names, and writing without spaces."""
    many = [
        memory("rows", "MAX_ROWS is 5,000."),
        memory("file", "src/app.py starts it."),
        memory("cache", "キャッシュはポート6380を使う。"),
        memory("store", "决定使用 Redis 作为缓存。"),
    ]
    assert ranked(many, query, NOW)[0].title == best
    assert matching(many, query, NOW)[0].title == best


def test_the_same_memories_are_chosen_everywhere() -> None:
    """Whatever their order; of equally good ones the newest."""
    many = [memory(f"m{number}", created_at=OLD + number) for number in range(10)]
    assert choose(many, "x", NOW) == choose(many[::-1], "x", NOW)
    assert choose(many, "x", NOW)[0].title == "m9"


def test_a_query_is_the_beginning_of_the_newest_messages() -> None:
    """Three of them, 1,200 characters together."""
    assert query_of(["a", "b", "c", "d"]) == "b\nc\nd"
    assert query_of([]) == ""
    assert len(query_of(["x" * 5_000])) == MOST_QUERY_CHARACTERS
    assert len(query_of(["x" * 5_000] * 3)) <= MOST_QUERY_CHARACTERS + 2
    assert matching([memory("a"), memory("b")], "", NOW)

"""What fills a window without need: paragraphs that stand in it more than once, and fresh results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from proxy.core.apis import chat
from proxy.core.compaction.record import NO_COMPACTION, Compaction, Placeholder
from proxy.core.conversation import Call, Injected, Item, ItemFacts, Result
from proxy.core.tool_calls import pairs_of
from proxy.core.waste import (
    EXCERPT,
    SHORTEST,
    FreshResults,
    excerpt,
    files_read,
    fresh_results,
    needless_items,
    paragraphs,
    repeated_paragraphs,
    repeated_skills,
)
from tests.support.engine_fixtures import count_tokens, read_one, tool_map_of_package

RULE = "Run the tests before you say that it works. " * 6
OTHER = "Name the file and the line of what you changed. " * 6


def words(text: str) -> int:
    return len(text.split())


def test_a_paragraph_ends_at_an_empty_line() -> None:
    """Short ones do not count, and neither does the space around one, whatever ends a line."""
    text = f"short\n\n  {RULE}\n\n\n{OTHER}\r\n\r\nshort again"
    assert list(paragraphs(text)) == [RULE.strip(), OTHER.strip()]
    assert list(paragraphs("x" * (SHORTEST - 1))) == []


def test_what_stands_more_than_once_is_counted() -> None:
    """All but the first of each are too many, across texts, and those that waste most come first."""
    texts = [f"{RULE}\n\n{OTHER}", f"Once only {RULE}", OTHER, f"{OTHER}\n\n{RULE}"]
    repeated = repeated_paragraphs(texts, words)
    assert [(each.times, each.wasted) for each in repeated] == [(3, 2 * words(OTHER)), (2, words(RULE))]
    assert repeated[0].excerpt == excerpt(OTHER)
    assert repeated_paragraphs([RULE, OTHER], words) == []


def test_an_excerpt_is_one_short_line() -> None:
    """Line ends become spaces, and a long text ends in an ellipsis."""
    assert excerpt("one\n  two") == "one two"
    assert len(excerpt("word\n" * 100)) == EXCERPT
    assert excerpt("word " * 100).endswith("…")


def item(tokens: int, *, answers: str = "") -> Item:
    return Item("tool" if answers else "user", tokens, 0, b"", answers=(answers,) if answers else ())


def test_fresh_results_stand_at_the_end() -> None:
    """Only results behind the last item that is none are fresh, and the room is what was left before them."""
    items = [item(10), item(50, answers="a"), item(20), item(300, answers="b"), item(100, answers="c")]
    fresh = fresh_results(items, total=480, room=1080)
    assert fresh.tokens == ((3, 300), (4, 100))
    assert (sum(tokens for _, tokens in fresh.tokens), fresh.room) == (400, 1000)
    assert fresh.share(300) == 0.3
    assert fresh_results(items[:3], total=80, room=1080).tokens == ()


def test_without_room_there_is_no_share() -> None:
    """A request that was too long without its results says nothing of them."""
    assert FreshResults(((0, 10),), -5).share(10) == 0.0


SKILL, LIST, NOTE = Injected("skills", 300, 1), Injected("skills", 50, 2), Injected("memory", 80, 3)


def given(digest: bytes, *injected: Injected) -> Item:
    return Item("user", 400, 0, digest, injected=injected)


def test_a_skill_that_was_sent_before_is_one_too_many() -> None:
    """R000.15: all but the first of equal skills count, those of system text included; memories are no skills."""
    assert repeated_skills([given(b"a", SKILL, NOTE), given(b"b", LIST), given(b"c", NOTE)], ()) == 0
    assert repeated_skills([given(b"a", SKILL), given(b"b", NOTE, SKILL), given(b"c", SKILL, LIST)], ()) == 600
    assert repeated_skills([given(b"a", SKILL), given(b"b", LIST)], (LIST, NOTE)) == 50


def test_a_message_that_is_repeated_is_no_repeated_skill() -> None:
    """What is counted as a repeated message is not counted again."""
    assert repeated_skills([given(b"a", SKILL), given(b"a", SKILL)], ()) == 0


def conversation(*calls: tuple[str, dict[str, Any], str]) -> list[Item]:
    """The items of calls (tool, arguments, result), each with its result."""
    items = []
    for at, (tool, arguments, text) in enumerate(calls):
        call = {"id": f"c{at}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        for message in (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{at}", "content": text},
        ):
            items.append(read_one(chat, json.dumps(message).encode(), count_tokens, tool_map_of_package()))
    return items


def waste_of(items: list[Item]) -> dict[str, int]:
    """What a client could do without of *items*."""
    return needless_items(items, pairs_of(items, 0, len(items)), system=())


def test_files_are_counted_once() -> None:
    """Only readings that succeeded count, each file once, and not those that left the view."""
    items = conversation(
        ("Read", {"file_path": "a.py"}, "text"),
        ("Read", {"file_path": "b.py"}, "text"),
        ("Read", {"file_path": "./a.py"}, "text again"),
        ("Read", {"file_path": "gone.py"}, "Error: no such file"),
        ("Bash", {"command": "cat c.py"}, "text"),
    )
    pairs = pairs_of(items, 0, len(items))
    assert files_read(pairs, NO_COMPACTION) == 2
    assert files_read(pairs, Compaction(len(items), 4, 0)) == 1
    assert files_read(pairs, Compaction(len(items), 0, 0, placeholders=(Placeholder(3, "old"),))) == 1
    assert files_read([], NO_COMPACTION) == 0


def test_results_that_could_be_spared_are_counted() -> None:
    """A result that stood there before, and a long listing; short answers and other results are needed."""
    long, names = "some words of a file " * 60, "\n".join(f"src/folder/module_{at}.py" for at in range(200))
    items = conversation(
        ("Read", {"file_path": "a.py"}, long),
        ("Glob", {"pattern": "**"}, names),
        ("Read", {"file_path": "b.py"}, long),
        ("Bash", {"command": "make"}, "ok"),
        ("Bash", {"command": "make"}, "ok"),
        ("Glob", {"pattern": "*.md"}, "README.md"),
    )
    found = waste_of(items)
    assert found == {"repeated_result": items[5].tokens, "listing": items[3].tokens}
    assert waste_of(items[:2]) == {}


def test_messages_that_repeat_are_counted() -> None:
    """A message of some length that was sent before, however it is serialised; a short one may be sent twice."""
    rules = {"role": "user", "content": "Run the tests before you say that it works. " * 10}
    short = {"role": "user", "content": "Go on."}
    written = [json.dumps(rules), json.dumps(short), json.dumps(rules, indent=1), json.dumps(short), json.dumps(rules)]
    items = [read_one(chat, text.encode(), count_tokens, tool_map_of_package()) for text in written]
    assert waste_of(items) == {"repeated_message": 2 * items[0].tokens}


def test_the_results_of_an_item_are_added_up_once() -> None:
    """An item of thousands of results costs as much as thousands of items, not the square of it."""
    added_up = 0

    class Results(tuple[Result, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[Result]:
            nonlocal added_up
            added_up += 1
            return super().__iter__()

    names = tuple(map(str, range(50)))
    call = Call("file_read")
    results = Results(Result(digest=at, opening=0, ok=True, lines=1, size=400) for at in range(50))
    items = [
        Item("assistant", 10, 0, b"", names, facts=ItemFacts((call,) * 50)),
        Item("tool", 5_000, 0, b"", (), names, facts=ItemFacts((), results)),
    ]
    assert waste_of([*items, *items]) == {"repeated_result": 5_000}
    assert added_up <= 4

"""Repetitions: only what a later, successful and covering result makes superfluous."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.compression.dedup import Dedup, superseded
from proxy.core.conversation.entry import Entry
from proxy.core.conversation.facts import Pair, facts_of, pairs_of
from proxy.core.conversation.items import Item
from tests.support.engine_fixtures import tool_map_of_package

Step = tuple[str, dict[str, Any], str]


def pairs(*steps: Step) -> list[Pair]:
    items: list[Item] = []
    for number, (name, arguments, result) in enumerate(steps):
        call = facts_of(Entry("assistant", "", ((name, json.dumps(arguments)),)), tool_map_of_package().call)
        items.append(Item("assistant", 10, 0, b"", (str(number),), facts=call))
        items.append(
            Item(
                "tool",
                500,
                0,
                b"",
                (),
                (str(number),),
                facts=facts_of(Entry("tool", "", results=((result, False),)), tool_map_of_package().call),
            )
        )
    return pairs_of(items, 0, len(items))


def found(*steps: Step, rules: Dedup | None = None) -> list[tuple[int, str, int]]:
    """Which steps give way, why, and to which step."""
    swaps = superseded(pairs(*steps), rules or Dedup())
    return sorted((swap.index // 2, swap.why, swap.by // 2) for swap in swaps)


def listing(first: int, last: int, word: str = "x") -> str:
    return "\n".join(f"{n}\t{word}" for n in range(first, last + 1))


READ: dict[str, Any] = {"file_path": "src/a.py"}
PART = {**READ, "offset": 10, "limit": 11}
EDIT: Step = ("Edit", READ, "The file was updated.")


def test_exact_duplicates_give_way_to_the_newest() -> None:
    """Three equal calls with equal results leave the last one; another result or another tool leaves all."""
    step: Step = ("Grep", {"pattern": "x", "path": "src"}, "a.py: x")
    assert found(step, step, step) == [(0, "repeated", 2), (1, "repeated", 2)]
    assert found(step, ("Grep", step[1], "b.py: x")) == []
    shell: Step = ("Bash", {"command": "date"}, "today")
    assert found(shell, shell) == []


def test_a_read_before_a_change_gives_way_to_one_after() -> None:
    """Read, edit, read again: the first is stale, the edit's confirmation stays."""
    assert found(("Read", READ, listing(1, 50)), EDIT, ("Read", READ, listing(1, 51, "y"))) == [(0, "reread", 2)]


@pytest.mark.parametrize(
    "later",
    [
        ("Read", PART, listing(10, 20, "y")),
        ("Read", READ, "Error: file not found"),
        ("Read", READ, ""),
        ("Read", READ, listing(1, 30, "y") + "\n(output truncated)"),
        ("Read", {"file_path": "src/b.py"}, listing(1, 60, "y")),
    ],
)
def test_a_later_read_that_does_not_cover_leaves_the_earlier(later: Step) -> None:
    """A part, a failure, a cut listing or another file never stands for the whole."""
    assert found(("Read", READ, listing(1, 50)), EDIT, later) == []


def test_lines_decide_what_covers() -> None:
    """A part is covered by a whole, by a longer part and by the same part, not by a shorter one."""
    part: Step = ("Read", PART, listing(10, 20))
    whole: Step = ("Read", READ, listing(1, 50, "y"))
    assert found(part, whole) == [(0, "included", 1)]
    assert found(part, ("Read", {**READ, "offset": 5, "limit": 30}, listing(5, 34, "y"))) == [(0, "included", 1)]
    assert found(part, ("Read", {**READ, "offset": 12, "limit": 30}, listing(12, 41, "y"))) == []
    assert found(part, EDIT, ("Read", PART, listing(10, 20, "y"))) == [(0, "reread", 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"offset": 0, "length": 4096}, "y\n" * 2048),
        ({"offset": 0, "limit": 4096}, "y\n" * 2048),
        ({"offset": 0, "limit": 100}, "y\n" * 2048),
        ({"head": 100}, "y\n" * 100),
        ({"pages": "1-2"}, "y\n" * 100),
    ],
)
def test_a_reading_in_an_unknown_unit_covers_nothing(arguments: dict[str, object], text: str) -> None:
    """Bytes, pages and what else a range may count never stand for a longer reading, nor for one of lines."""
    later: Step = ("read_file", {**READ, **arguments}, text)
    assert found(("read_file", READ, listing(1, 300)), later) == []
    assert found(("read_file", {**READ, "offset": 10, "limit": 20}, "x\n" * 20), later) == []


def test_a_default_limit_is_no_whole_file() -> None:
    """A read that stopped at its tool's own limit covers only the lines it shows."""
    capped: Step = ("Read", READ, listing(1, 2000, "y"))
    assert found(("Read", {**READ, "offset": 1990, "limit": 50}, listing(1990, 2039)), capped) == []
    assert found(("Read", {**READ, "offset": 1900, "limit": 50}, listing(1900, 1949)), capped) == [(0, "included", 1)]


def test_a_search_in_a_file_that_is_read_whole_later() -> None:
    """A grep on one file gives way to a full read of it, not to a part, and never for a folder."""
    grep: Step = ("Grep", {"pattern": "x", "path": "src/a.py"}, "1: x")
    assert found(grep, ("Read", READ, listing(1, 50))) == [(0, "included", 1)]
    assert found(grep, ("Read", PART, listing(10, 20))) == []
    assert found(("Grep", {"pattern": "x", "path": "src"}, "a: x"), ("Read", READ, listing(1, 50))) == []


def test_nothing_gives_way_to_what_gave_way() -> None:
    """Of several readings each names the one that stays."""
    steps: list[Step] = []
    for version in range(4):
        steps += [("Read", READ, listing(1, 40, f"v{version}")), EDIT]
    steps.append(("Read", READ, listing(1, 40, "end")))
    assert {by for _, _, by in found(*steps)} == {8}


def test_each_rule_can_be_switched_off() -> None:
    """Without its switch a rule finds nothing."""
    same: Step = ("Grep", {"pattern": "x"}, "a")
    grep: Step = ("Grep", {"pattern": "x", "path": "src/a.py"}, "1: x")
    read: Step = ("Read", READ, listing(1, 50))
    assert found(same, same, rules=Dedup(exact=False)) == []
    assert found(read, EDIT, ("Read", READ, listing(1, 51)), rules=Dedup(stale_reads=False)) == []
    assert found(grep, read, rules=Dedup(grep_subsumed=False)) == []

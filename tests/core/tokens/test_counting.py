"""Tokens by region: nothing is counted twice, and nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import Item
from proxy.core.tokens import counting
from proxy.core.tokens.counting import (
    HISTORY,
    REGIONS,
    Members,
    RoleTotals,
    add_up,
    injected_memories,
    regions,
    to_provider_tokens,
)

sizes = st.integers(0, 500)
items = st.lists(
    st.builds(
        lambda role, tokens, media, counting: Item(
            role, tokens + media + counting, media, b"", memory=counting if role in ("system", "user") else 0
        ),
        st.sampled_from(["system", *HISTORY]),
        sizes,
        sizes,
        sizes,
    ),
    max_size=20,
)


@given(items, st.integers(0, 20))
def test_totals_continue_from_a_prefix(given_items: list[Item], at: int) -> None:
    """The totals of all items are the same however far they were added up before."""
    whole = add_up(given_items)
    assert add_up(given_items, add_up(given_items[:at])) == whole
    assert whole.history + whole.system == sum(item.tokens for item in given_items)
    assert whole.media == sum(item.media for item in given_items)


@given(items, sizes, sizes, sizes, sizes)
def test_regions_add_up_to_the_view(given_items: list[Item], tools: int, system: int, rest: int, summary: int) -> None:
    """The regions without the reserve are the view's tokens; each has a name of the list."""
    kept = add_up(given_items)
    members = Members(tools, system, system // 2)
    found = regions(kept, members, fixed=kept.system + tools + system + rest, summary=summary, reserve=77)
    assert found.keys() <= set(REGIONS)
    assert found.pop("reserve") == 77
    assert sum(found.values()) == kept.system + kept.history + tools + system + rest + summary


def test_memories_are_taken_out_of_the_role_they_stand_in() -> None:
    """Injected memories are a region of their own, in system and in user items."""
    totals = RoleTotals(3, 100, 60, 0, 0, 0, (30, 20))
    found = regions(totals, Members(), fixed=100, summary=0, reserve=0)
    assert found == {"system": 70, "memory": 50, "user": 40}
    members = Members(system=50, memories=10)
    assert regions(totals, members, fixed=150, summary=0, reserve=0) == {"system": 110, "memory": 60, "user": 40}
    assert to_provider_tokens(found, 1.5) == {"system": 105, "memory": 75, "user": 60}


BLOCK = "# Memories\n\n## Priority Context\n- tabs, never spaces\n\n## Previous Sessions\n[May] moved the parser\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"You are an agent.\n\n{BLOCK}# Rules\nBe brief.", BLOCK),
        (BLOCK, BLOCK),
        ("## User memory:\nlikes tea\n# Rules", "## User memory:\nlikes tea\n"),
        ("a <memory>likes tea</memory> b <memories>x</memories>", "<memory>likes tea</memory>\n<memories>x</memories>"),
        ("a <memory> that nobody closes", "<memory>"),
        ("My memories of that file are hazy. # Memories are made of this.", ""),
        ("#include <memory>\nint main() {}", "<memory>"),
        ("", ""),
    ],
)  # fmt: skip
def test_memories_are_found_by_heading_and_tag(text: str, found: str) -> None:
    """A block is its heading or tag and what belongs to it; talk of memories is none."""
    assert injected_memories(text) == found


@given(st.text(alphabet="#m <memory>/\nx", max_size=200))
def test_memories_are_a_part_of_the_text(text: str) -> None:
    """For any text, the memories consist of pieces of it in their order."""
    at = 0
    for line in injected_memories(text).split("\n"):
        at = text.index(line, at) + len(line)


def test_a_long_text_costs_little() -> None:
    """A megabyte of headings or of opened tags is searched in one pass."""
    assert len(injected_memories("# Memories\n" + "## x\n" * 200_000)) == 11 + 5 * 200_000
    assert injected_memories("<memory>" * 120_000) == "\n".join(["<memory>"] * 120_000)


PIECES = (
    *("# memory", "## Memories:", "# my memories \n", "\n", "<memory>", "</memory>", "<user_memories>"),
    *("</user_memories>", "<Relevant_Memories>", "</relevant_memories>", "#", "###### x", "\n# a", "\n## b", " ", "\t"),
    *("memory", "x", "\u0130", "<", "> ", "MEMORY", "<usermemories>", "memor", "\u017f", "\r"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_what_is_found_is_what_the_patterns_find(text: str) -> None:
    """The lines with the word are all that the patterns could find anything on."""
    assert injected_memories(text) == "\n".join(text[start:end] for start, end in searched(text))


def searched(text: str) -> Iterator[tuple[int, int]]:
    """The blocks of *text*, by a search of all of it."""
    at = 0
    unclosed: set[str] = set()
    heading = re.compile(r"^(#{1,6})[ \t]*\S", re.MULTILINE)
    while opening := counting._OPENING.search(text, at):
        if opening["tag"]:
            at = counting._end_of_tag(text, opening.end(), opening["tag"], unclosed)
        else:
            ends = (
                each.start() for each in heading.finditer(text, opening.end()) if len(each[1]) <= len(opening["level"])
            )
            at = next(ends, len(text))
        yield opening.start(), at

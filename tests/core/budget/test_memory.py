"""Injected memories: recognised by their headings and tags, and by nothing else."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget import memory
from proxy.core.budget.memory import memories

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
    assert memories(text) == found


@given(st.text(alphabet="#m <memory>/\nx", max_size=200))
def test_memories_are_a_part_of_the_text(text: str) -> None:
    """Whatever the text, what is found is made of pieces of it in their order."""
    at = 0
    for line in memories(text).split("\n"):
        at = text.index(line, at) + len(line)


def test_a_long_text_costs_little() -> None:
    """A megabyte of headings or of opened tags is searched in one pass."""
    assert len(memories("# Memories\n" + "## x\n" * 200_000)) == 11 + 5 * 200_000
    assert memories("<memory>" * 120_000) == "\n".join(["<memory>"] * 120_000)


PIECES = (
    *("# memory", "## Memories:", "# my memories \n", "\n", "<memory>", "</memory>", "<user_memories>"),
    *("</user_memories>", "<Relevant_Memories>", "</relevant_memories>", "#", "###### x", "\n# a", "\n## b", " ", "\t"),
    *("memory", "x", "\u0130", "<", "> ", "MEMORY", "<usermemories>", "memor", "\u017f", "\r"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_what_is_found_is_what_the_patterns_find(text: str) -> None:
    """The lines with the word are all that the patterns could find anything on."""
    assert memories(text) == "\n".join(text[start:end] for start, end in searched(text))


def searched(text: str) -> Iterator[tuple[int, int]]:
    """The blocks of *text*, by a search of all of it."""
    at = 0
    unclosed: set[str] = set()
    heading = re.compile(r"^(#{1,6})[ \t]*\S", re.MULTILINE)
    while opening := memory._OPENING.search(text, at):
        if opening["tag"]:
            at = memory._closed(text, opening.end(), opening["tag"], unclosed)
        else:
            ends = (
                each.start() for each in heading.finditer(text, opening.end()) if len(each[1]) <= len(opening["level"])
            )
            at = next(ends, len(text))
        yield opening.start(), at

"""Injected memories: recognised by their headings and tags, and by nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

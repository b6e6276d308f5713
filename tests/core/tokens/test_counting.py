"""Counting texts: once what comes again. Injected parts are found by heading, tag and line, in one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import Injected
from proxy.core.tokens.counting import (
    INJECTED,
    MOST_PARTS,
    NO_RULES,
    SHORT,
    InjectedMarks,
    InjectedRules,
    Meter,
    injected_in,
    long_paragraphs,
    prices_of,
    token_counts,
    unremembered,
)
from proxy.core.tokens.media import DEFAULT_PRICES, prices
from tests.support.linear_time import is_linear

MARKS = {
    "memory": InjectedMarks(("memory", "memories"), ("memory", "memories")),
    "skills": InjectedMarks(("skills", "loaded skills"), ("skill", "available_skills"), {"Base of this skill:": ""}),
    "knowledge": InjectedMarks(("knowledge base",), ("documents",), {"Context is below.": "Given the context"}),
    "related": InjectedMarks(("related issues",), ("related",)),
}
RULES = InjectedRules(MARKS)

BLOCK = "# Memories\n\n## Priority Context\n- tabs, never spaces\n\n## Previous Sessions\n[May] moved the parser\n"


def parts_of(text: str) -> list[tuple[str, str]]:
    """Region and text of each injected part of *text*."""
    return [(region, text[start:end]) for region, start, end in RULES.parts(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"You are an agent.\n\n{BLOCK}# Rules\nBe brief.", [("memory", BLOCK)]),
        (BLOCK, [("memory", BLOCK)]),
        ("## User memory:\nlikes tea\n# Rules", [("memory", "## User memory:\nlikes tea\n")]),
        ("a <memory>likes tea</memory> b <memories>x</memories>",
         [("memory", "<memory>likes tea</memory>"), ("memory", "<memories>x</memories>")]),
        ("a <memory> that nobody closes", []),
        ("My memories of that file are hazy. # Memories are made of this.", []),
        ("#include <memory>\nint main() {}", []),
        ("", []),
        ("### Loaded Skills\nuse tabs\n### End", [("skills", "### Loaded Skills\nuse tabs\n")]),
        ('x <skill name="a/b">do</skill> y', [("skills", '<skill name="a/b">do</skill>')]),
        ("<available_skills>\n<skill>a</skill>\n# Memory\n</available_skills> z",
         [("skills", "<available_skills>\n<skill>a</skill>\n# Memory\n</available_skills>")]),
        ("<skills>no such tag</skills><skillet>x</skillet>", []),
        ("Launched.\nBase of this skill: /a\n# Title\nDo it.",
         [("skills", "Base of this skill: /a\n# Title\nDo it.")]),
        ("The Base of this skill: is no beginning of a line", []),
        ("Context is below.\n---\nfacts\n---\nGiven the context, answer.",
         [("knowledge", "Context is below.\n---\nfacts\n---\nGiven the context")]),
        ("# Knowledge  Base\nfacts\n## Related issues:\n#12",
         [("knowledge", "# Knowledge  Base\nfacts\n## Related issues:\n#12")]),
        ("# Knowledge base\nfacts\n# Related Issues\n#12",
         [("knowledge", "# Knowledge base\nfacts\n"), ("related", "# Related Issues\n#12")]),
        ("# Memor\u0131es\n# \u017fkills\nx", [("skills", "# \u017fkills\nx")]),
    ],
)  # fmt: skip
def test_injected_texts_are_found_by_heading_tag_and_line(text: str, found: list[tuple[str, str]]) -> None:
    """A part is its mark and what belongs to it; talk of memories or skills is none."""
    assert parts_of(text) == found


def test_parts_are_counted_and_named() -> None:
    """Each part has its tokens, and equal parts have equal names; a text without a mark is not even cut apart."""
    meter = Meter(len, DEFAULT_PRICES, RULES)
    skill = "<skill>use tabs</skill>"
    [(first, second, other)] = injected_in([f"{skill} and {skill} and <skill>b</skill>"], meter)
    assert first == second == Injected("skills", len(skill), first.digest)
    assert other.digest != first.digest
    assert injected_in(["Use the skill of reading.", "", skill], meter)[:2] == [(), ()]
    assert injected_in([skill], len) == [()]


@pytest.mark.parametrize(
    ("before", "repeated", "after"),
    [
        ("# Memories\n", "## x\n", ""),
        ("", "<memory>", ""),
        ("", "<skill>a</skill>", ""),
        ("", "# Skills\n", ""),
        ("", "#", ""),
        ("\n# ", "skills ", ""),
        ("\n#", " ", "skills"),
        ("", "<skill ", ""),
        ("", "Base of this skill:\n", ""),
    ],
)
@pytest.mark.slow
def test_a_hostile_text_is_searched_in_one_pass(before: str, repeated: str, after: str) -> None:
    """A text that is made to be expensive is searched in one pass, and a bounded number of its parts is counted."""

    def search(size: int) -> int:
        return len(parts_of(before + repeated * (size // len(repeated)) + after))

    assert search(100_000) <= MOST_PARTS
    assert is_linear(search, 250_000)


PIECES = (
    *("# memory", "## Memories:", "# my memories \n", "\n", "<memory>", "</memory>", "<skill>", "</skill>"),
    *("<Skill a=1>", "</Skill>", "<related>", "</related>", "#", "###### x", "\n# a", "\n## b", " ", "\t"),
    *("memory", "x", "\u0130", "<", "> ", "MEMORY", "\nBase of this skill:", "Context is below.", "Given the context"),
    *("\u017fkills", "\r", "# skills\r\n", "# \u212anowledge base\n", "# loaded skills"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_parts_are_pieces_of_the_text_in_their_order(text: str) -> None:
    """For any text the parts are pieces of it that do not overlap; the quick look misses none of them."""
    at = 0
    for region, start, end in RULES.parts(text):
        assert region in INJECTED
        assert at <= start < end <= len(text)
        at = end
    assert bool(*injected_in([text], Meter(len, DEFAULT_PRICES, RULES))) == bool(at)


def test_without_rules_no_injected_part_is_found() -> None:
    """Without marks no text has a part."""
    assert list(NO_RULES.parts(BLOCK)) == []
    assert injected_in([BLOCK], Meter(len, DEFAULT_PRICES)) == [()]


# Counting a text.


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("one two", ["one two"]),
        ("one\n\ntwo\n\nthree", ["one\n\ntwo\n\nthree"]),
        ("one\n\na long one\n\ntwo\n\nthree\n\nfour", ["one\n\n", "a long one\n\n", "two\n\nthree\n\nfour"]),
        ("a long one\n\na long one", ["a long one\n\n", "a long one"]),
        ("one\n\n a long one\n\n/two", ["one\n\n a long one\n\n/two"]),
    ],
)
def test_only_a_long_paragraph_stands_alone(text: str, pieces: list[str]) -> None:
    """Short ones between two long ones stay together; white space or a slash does not begin a paragraph."""
    assert list(long_paragraphs(text, len("a long one"))) == pieces


def test_a_meter_counts_and_knows_its_prices() -> None:
    """A meter is used like the function it holds; a plain function means the usual prices."""
    meter = Meter(len, prices("claude-3-haiku"))
    assert meter("four") == 4
    assert prices_of(meter) is prices("claude-3-haiku")
    assert prices_of(len) is DEFAULT_PRICES


def test_short_texts_are_remembered() -> None:
    """A short text is counted once by a meter, a longer one each time; a plain function remembers nothing."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    short, long = "read_file", "x" * (SHORT + 1)
    meter = Meter(count, DEFAULT_PRICES)
    assert token_counts([short, long, short, long], meter) == [len(short), len(long)] * 2
    assert token_counts([short], meter) == [meter(short)] == [len(short)]
    assert counted == [short, long, long]
    assert token_counts([short, short], count) == [len(short)] * 2
    assert unremembered(meter)(short) == unremembered(count)(short) == len(short)
    assert counted[3:] == [short] * 4

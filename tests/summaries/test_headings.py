"""Headings of summaries: as the prompt has them, called alike, or translated."""

from __future__ import annotations

import pytest

from proxy.summaries.headings import MOST_HEADING_WORDS, SECTIONS, opened_section


@pytest.mark.parametrize(
    ("title", "section"),
    [
        ("Entscheidungen und Gründe", SECTIONS[0]),
        ("Décisions et raisons", SECTIONS[0]),
        ("决定及原因", SECTIONS[0]),
        ("Решения и причины", SECTIONS[0]),
        ("Estado actual", SECTIONS[1]),
        ("現在の状態", SECTIONS[1]),
        ("الحالة", SECTIONS[1]),
        ("En attente", SECTIONS[2]),
        ("**待办事项：**", SECTIONS[2]),
        ("Keskeneräiset asiat", SECTIONS[2]),
        ("Nächste Schritte", SECTIONS[3]),
        ("다음 단계", SECTIONS[3]),
        ("Далее", SECTIONS[3]),
        ("用户的指示", SECTIONS[4]),
    ],
)
def test_a_translated_heading_counts_as_the_requested_one(title: str, section: str) -> None:
    """Models translate headings although the prompt forbids it: they open the same sections."""
    assert opened_section(f"## {title}") == (section, 2)


@pytest.mark.parametrize("section", SECTIONS)
def test_each_heading_opens_its_section(section: str) -> None:
    """The headings of the prompt count at any level, in bold, and with a colon."""
    assert opened_section(f"### {section}:") == (section, 3)
    assert opened_section(f"**{section}**") == (section, 0)


@pytest.mark.parametrize(
    "line", ["## Übersicht", "## Overview", "Next", "- State", "## " + "next " * (MOST_HEADING_WORDS + 1)]
)
def test_other_lines_open_none(line: str) -> None:
    """A heading of the model's own, a line without the form of a heading, and a sentence open no section."""
    assert opened_section(line)[0] == ""

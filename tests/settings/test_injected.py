"""The marks of injected texts: the packaged file, an own file between, the configuration above."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from proxy.core.tokens.counting import INJECTED, InjectedRules
from proxy.settings import SettingsError, injected_rules, load
from proxy.settings.injected import InjectedTable, InjectedTexts
from tests.support.settings_files import write_settings


def regions_of(rules: InjectedRules, text: str) -> list[str]:
    """The regions of the injected parts of *text*."""
    return [region for region, _, _ in rules.parts(text)]


def configured(folder: Path, text: str) -> InjectedRules:
    """The rules of a configuration file that holds *text*."""
    return injected_rules(load(write_settings(folder, text), {}, {}).injected)


@pytest.mark.parametrize(
    ("text", "region"),
    [
        ("<skills_instructions>\n## Skills\n### Available skills\n- a\n</skills_instructions>", "skills"),  # Codex
        ("<available_skills>\n  <skill>\n  </skill>\n</available_skills>", "skills"),  # opencode, Qwen Code
        ('<skill_content name="a">\nuse tabs\n</skill_content>', "skills"),  # opencode
        ("<system-reminder>\nThe following skills are available for use:\n- a\n</system-reminder>", "skills"),
        ("Base directory for this skill: /a\n\n# Title\n\nUse tabs.", "skills"),  # Claude Code
        ("# Skills\n- a", "skills"),
        ("<references>\n[]\n</references>", "knowledge"),  # Agno
        ("Context information is below.\n-----\nGiven the context information, answer.", "knowledge"),  # LlamaIndex
        ("## Knowledge base:\nfacts", "knowledge"),
        ("## Related issues\n#12", "related"),
        ("<cross_issue_results>#12</cross_issue_results>", "related"),
        ("# Relevant memories\nlikes tea", "memory"),
    ],
)
def test_the_packaged_marks_know_clients_and_frameworks(text: str, region: str) -> None:
    """The texts that clients and agent frameworks inject belong to one region."""
    assert regions_of(injected_rules(InjectedTexts()), f"You are an agent.\n\n{text}") == [region]


def test_every_region_has_marks_of_its_own() -> None:
    """The packaged file names each region, and no mark twice."""
    table = InjectedTable()
    assert [region for region, _ in table.marks()] == list(INJECTED)
    assert regions_of(injected_rules(table), "# Memory\n# Skills\n# Knowledge\n# Related results\n") == list(INJECTED)


def test_marks_add_up_from_file_to_configuration(tmp_path: Path) -> None:
    """An own file adds to the packaged marks, the configuration to both."""
    (tmp_path / "mine.yaml").write_text("skills: {headings: [Recipes], tags: [recipe]}\n")
    rules = configured(tmp_path, 'injected: {file: mine.yaml, related: {lines: {"Seen before:": "---"}}}\n')
    text = "# Recipes\na\n# End\n<recipe>b</recipe>\n# Skills\nc\n# End\nSeen before:\nd\n---\ne"
    assert regions_of(rules, text) == ["skills", "skills", "skills", "related"]


def test_a_mark_moves_to_another_region(tmp_path: Path) -> None:
    """A mark that the configuration lists under another region is no longer what the packaged file says."""
    rules = configured(tmp_path, "injected: {related: {tags: [References]}, memory: {headings: [skills]}}\n")
    assert regions_of(rules, "<references>a</references>\n# Skills\nb") == ["related", "memory"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("skills: {tag: [a]}", "mine.yaml:1"), ("skils: {}", "skils"), ("- a", "not a mapping"), ("a: [", "YAML")],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    """A problem of the file names file, line and key."""
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(write_settings(tmp_path, "injected: {file: mine.yaml}\n"), {}, {})


@pytest.mark.parametrize("marks", [{"tags": ["<a>"]}, {"tags": [""]}, {"headings": [" "]}, {"lines": {"": "a"}}])
def test_an_empty_mark_or_a_tag_with_brackets_is_refused(marks: dict[str, object]) -> None:
    """A tag is a name without brackets, and no mark is empty."""
    with pytest.raises(ValidationError):
        InjectedTable.model_validate({"skills": marks})

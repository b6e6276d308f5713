"""The table of tools: packaged, a file of one's own, a section."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from proxy.settings import SettingsError, load, tool_map
from proxy.settings.tools import Tools, ToolTable
from tests.support.settings_files import write_settings


def test_the_packaged_table_knows_the_clients():
    """Every client's tools have kinds, and every rule can be used."""
    table = tool_map(Tools())
    names = ("Read", "read_file", "replace_in_file", "run_terminal_cmd", "ReadFile", "grep_search", "webfetch", "LS")
    kinds = [table.find(name).kind for name in names]
    assert kinds == ["file_read", "file_read", "file_edit", "shell", "file_read", "grep", "web_fetch", "list"]


def test_each_pattern_of_the_packaged_table_compiles():
    """No start of the proxy does that: a pattern is compiled at its first use."""
    table = tool_map(Tools())
    written, work = table.text_format, table.work
    patterns = (*written.call_patterns, *written.result_patterns, *work.checks, *work.changes)
    patterns += (*work.talk.intents, *work.talk.progress)
    assert len(patterns) > 40
    assert [pattern.pattern for pattern in patterns if pattern.search("\0")] == []


def test_a_section_and_a_file_are_laid_over_it(tmp_path):
    """The section wins over the file, the file over the packaged table; what neither names stays."""
    (tmp_path / "mine.yaml").write_text("map: {lookup: {kind: grep}, Bash: {kind: agent}}\nprotected: [Read]\n")
    text = "tools: {file: mine.yaml, map: {lookup: {kind: list}, TodoWrite: {kind: unknown}}, keys: {path: [where]}}\n"
    table = tool_map(load(write_settings(tmp_path, text), {}, {}).tools)
    kinds = {name: table.find(name).kind for name in ("lookup", "Bash", "Read", "TodoWrite", "Grep")}
    assert kinds == {"lookup": "list", "Bash": "agent", "Read": "protected", "TodoWrite": "unknown", "Grep": "grep"}
    assert table.targets("Grep", '{"where": "x", "path": "y"}') == ["x"]


def test_names_of_to_do_lists_are_laid_over_it(tmp_path):
    """What a section names replaces the usual names, one kind of name at a time."""
    text = "tools: {work: {todos: {lists: [Jot]}, checks: [frob]}}\n"
    work = tool_map(load(write_settings(tmp_path, text), {}, {}).tools).work
    assert work.todos.lists == {"jot"}
    assert "todos" in work.todos.items
    assert [pattern.pattern for pattern in work.checks] == ["frob"]
    assert work.changes


@pytest.mark.parametrize(
    ("text", "message"),
    [("map: {a: {kind: reading}}", "mine.yaml:1"), ("mapp: {}", "mapp"), ("- a", "not a mapping"), ("a: [", "YAML")],
)
def test_a_bad_file_says_where(tmp_path, text, message):
    """A problem of the file names file, line and key."""
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(write_settings(tmp_path, "tools: {file: mine.yaml}\n"), {}, {})


def test_a_missing_file_says_so(tmp_path):
    """A file that is not there is an error of the configuration."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load(write_settings(tmp_path, "tools: {file: none.yaml}\n"), {}, {})


def test_a_rule_may_have_rules_by_argument():
    """Cases are rules themselves; names may be written as one text."""
    table = ToolTable.model_validate({"map": {"pick": {"by": "do", "cases": {"show": {"kind": "file_read"}}}}})
    assert table.map["pick"].cases["show"].kind == "file_read"
    assert ToolTable.model_validate({"protected": "a, b"}).protected == ("a", "b")


@pytest.mark.parametrize("rule", [{"kind": "reading"}, {"base": 2}, {"limit": -1}, {"unit": "words"}, {"colour": 1}])
def test_what_a_rule_cannot_say(rule):
    """Unknown kinds, units, keys and impossible figures are refused."""
    with pytest.raises(ValidationError):
        ToolTable.model_validate({"map": {"a": rule}})

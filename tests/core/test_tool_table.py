"""The table of tools: what a call is, by names and arguments only."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tool_table import KINDS, NO_TOOLS, Tool, ToolMap
from tests.support.engine_fixtures import tool_map_of_package


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("Read", '{"file_path": "a.py"}', "file_read"),
        ("READ_FILE", '{"path": "a.py"}', "file_read"),
        ("developer__shell", '{"command": "ls"}', "shell"),
        ("functions.exec_command", '{"cmd": "ls"}', "shell"),
        ("mcp__files__read_text_file", '{"path": "a.py"}', "file_read"),
        ("mcp__files__read_lines_of", '{"path": "a.py"}', "file_read"),
        ("str_replace_editor", '{"command": "view", "path": "a.py"}', "file_read"),
        ("str_replace_editor", '{"command": "create", "path": "a.py"}', "file_write"),
        ("str_replace_editor", '{"command": "undo_edit", "path": "a.py"}', "file_edit"),
        ("str_replace_editor", '{"command": "vi', "unknown"),
        ("todo_anything", "{}", "protected"),
        ("TodoWrite", "{}", "protected"),
        ("search_github", "{}", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_a_tool_is_known_by_its_name(name: str, arguments: str, kind: str) -> None:
    """Exact names, server prefixes, any case, globs and switching arguments lead to the right kind."""
    assert tool_map_of_package().call(name, arguments).kind == kind


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({"file_path": "a"}, (1, 0)),
        ({"file_path": "a", "offset": 10, "limit": 5}, (10, 14)),
        ({"file_path": "a", "start_line": 3, "end_line": 9}, (3, 9)),
        ({"file_path": "a", "view_range": [4, -1]}, (4, 0)),
        ({"file_path": "a", "offset": -20}, (0, 0)),
        ({"file_path": "a", "view_range": ["x"]}, (0, 0)),
        ({"file_path": "a", "offset": None, "limit": True}, (1, 0)),
        ({"file_path": "a", "offset": "10", "limit": "5"}, (10, 14)),
        ({"file_path": "a", "encoding": "utf-8", "line_numbers": True}, (1, 0)),
    ],
)
def test_ranges_are_lines_counted_from_one(arguments: dict[str, object], lines: tuple[int, int]) -> None:
    """First and last line are read from every usual pair of arguments; zeros mean open or unknown."""
    call = tool_map_of_package().call("Read", json.dumps(arguments))
    assert (call.first, call.last) == lines


@pytest.mark.parametrize(
    "arguments",
    [
        {"offset": 0, "length": 4096},
        {"length": 4096},
        {"offset": 4096.5},
        {"offset": "end"},
        {"byte_offset": 100},
        {"lines": "10-20"},
        {"range": [10, 20]},
        {"pages": "2"},
        {"head": 10},
        {"files": [{"path": "a.py", "start": 3}]},
        {"symbol": "Parser.read"},
        {"mode": "outline"},
        {"summary": True},
        {"query": "the parser"},
    ],
)
def test_figures_of_an_unknown_meaning_are_no_range_of_lines(arguments: dict[str, object]) -> None:
    """A figure that may be bytes, pages or lines under another key makes the range unknown, as does a part's name."""
    call = tool_map_of_package().call("read_file", json.dumps({"path": "a.py", **arguments}))
    assert (call.first, call.last) == (0, 0)


def test_a_base_of_zero_and_a_range_of_bytes() -> None:
    """A tool that counts from zero is put right; a range in bytes is no range of lines."""
    keys = {"offset": 10, "limit": 5, "path": "a"}
    assert (
        tool_map_of_package().call("view", json.dumps(keys)).first,
        tool_map_of_package().call("view", json.dumps(keys)).last,
    ) == (11, 15)
    table = ToolMap({"peek": Tool("file_read", unit="bytes")}, (), tool_map_of_package()._keys)
    assert table.call("peek", json.dumps(keys)).first == 0


@pytest.mark.parametrize(
    ("name", "arguments", "paths"),
    [
        ("read_files", '{"files": [{"path": "a.py", "start_line": 1}, {"path": "b.py"}]}', ["a.py", "b.py"]),
        ("read_many_files", '{"include": ["a.py", "b.py"]}', ["a.py", "b.py"]),
        (
            "apply_patch",
            '{"input": "*** Update File: a.py\\n*** Move to: b.py\\n"}',
            ["a.py", "b.py"],
        ),
        ("apply_patch", "*** Add File: new.py\n+x", ["new.py"]),
        ("patch", '{"patch": "--- a/x.py\\n+++ b/x.py\\n"}', ["x.py"]),
        ("Bash", '{"command": "cat a.py"}', []),
        ("Read", '{"file_path": ["a.py"]}', []),
        ("codebase_search", '{"query": "where is it", "path": "src"}', ["src"]),
        ("codebase_search", '{"query": "where is it", "target_directories": ["src/"]}', ["src/"]),
    ],
)
def test_targets(name: str, arguments: str, paths: list[str]) -> None:
    """Single paths, lists, objects in lists and the headers of patches name what a call is about."""
    assert tool_map_of_package().targets(name, arguments) == paths
    assert len(tool_map_of_package().call(name, arguments).paths) == len(paths)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ('{"query": "limits of the parser", "top_k": 3}', "limits of the parser"),
        ('{"url": "https://example.org", "prompt": "x"}', "https://example.org"),
        ('{"query": ["x"]}', ""),
        ('{"query": " "}', ""),
        ("[]", ""),
        ("{", ""),
    ],
)
def test_a_call_without_a_path_is_about_its_query(arguments: str, about: str) -> None:
    """An address or a query says what a call was about."""
    assert tool_map_of_package().subject(arguments) == about


def test_one_file_has_one_name() -> None:
    """Dots and doubled or turned slashes do not make another file; another case does."""
    calls = [
        tool_map_of_package().call("Read", json.dumps({"file_path": path}))
        for path in ("./a/b.py", "a//b.py", "a\\b.py")
    ]
    assert len({call.paths for call in calls}) == 1
    assert tool_map_of_package().call("Read", '{"file_path": "A/b.py"}').paths != calls[0].paths


def test_equal_calls_are_equal_however_they_are_written() -> None:
    """Key order and spacing of arguments do not matter; a value does, and only for tools that change nothing."""
    same = {tool_map_of_package().call("Grep", text).repeat_key for text in ('{"a":1,"b":2}', '{"b": 2, "a": 1}')}
    assert len(same) == 1
    assert tool_map_of_package().call("Grep", '{"a":1}').repeat_key not in same
    assert tool_map_of_package().call("Bash", '{"command":"ls"}').repeat_key == 0


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e400", "1" * 40, "1" * 5_000])
def test_calls_with_values_that_only_the_standard_parser_reads_are_equal(value: str) -> None:
    """Lone surrogates, numbers that are none, and numbers of any size."""
    calls = [tool_map_of_package().call("Grep", text % value) for text in ('{"a":%s,"b":2}', '{"b": 2, "a": %s}')]
    assert calls[0] == calls[1]
    assert calls[0].repeat_key != 0


@given(st.text(max_size=20) | st.sampled_from(["Read", "apply_patch", "str_replace_editor"]), st.text(max_size=60))
def test_nothing_is_ever_an_error(name: str, arguments: str) -> None:
    """Any name with any arguments, whole or cut off, is a call of some kind."""
    whole = json.dumps({"file_path": arguments, "command": "view", "files": [arguments, 1], "offset": 2.5})
    for text in (arguments, whole, whole[: len(arguments)], f"[{json.dumps(arguments)}]", "[" * 5000):
        assert tool_map_of_package().call(name, text).kind in KINDS
        assert isinstance(tool_map_of_package().targets(name, text), list)
    assert NO_TOOLS.call(name, arguments).kind == "unknown"

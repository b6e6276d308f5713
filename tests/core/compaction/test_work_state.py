"""The state of the work: to-do items, outcomes of checks, files edited since, within a number of tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.work_state import (
    LONGEST_ARGUMENTS,
    FoldedCall,
    TodoItem,
    WorkState,
    outcome_line,
    outcome_words,
    work_state,
)
from proxy.core.tool_calls import read_arguments
from tests.support.engine_fixtures import count_tokens, tool_map_of_package

TOOLS = tool_map_of_package()


def shell(command: str, result: str = "", *, ok: bool | None = True) -> FoldedCall:
    """A call that runs *command*."""
    return FoldedCall("Bash", json.dumps({"command": command}), "shell", result, ok)


def edit(path: str, *, ok: bool = True) -> FoldedCall:
    """A call that edits *path*."""
    return FoldedCall("Edit", json.dumps({"file_path": path}), "file_edit", "", ok)


def shown(*calls: FoldedCall, tokens: int = 1_000) -> list[str]:
    """The lines after *calls*."""
    arguments = {call.arguments: read_arguments(call.arguments) for call in calls}
    return work_state(calls, TOOLS, arguments).lines(tokens, count_tokens)


def test_the_newest_outcome_of_each_check_is_shown() -> None:
    """Of equal commands the newest counts, with the line that tells the totals."""
    lines = shown(
        shell("cd web && npm test", "2 failed, 7 passed\nDone in 3 s"),
        shell("mix compile", "warning: unused\nCompiled 3 files"),
        shell("cd web && npm test 2>&1 | tail -5", "9 passed\nDone in 4 s"),
    )
    assert lines == ["`npm test`: “9 passed”", "`mix compile`"]


def test_a_check_without_a_telling_line_says_if_it_failed() -> None:
    """No line of the output tells the outcome: only whether it failed is known."""
    assert shown(shell("make", "oh", ok=False)) == ["`make` failed"]
    assert shown(shell("make", "oh", ok=None)) == ["`make`"]


def test_commands_that_change_something_stand_behind_the_checks() -> None:
    """A commit is shown, a listing is not."""
    lines = shown(shell("git commit -m x", "[main 1] x"), shell("ls -la"), shell("GIT=1 sudo pytest -q", "3 passed"))
    assert lines == ["`pytest -q`: “3 passed”", "`git commit -m x`"]


def test_a_tool_of_an_unknown_kind_may_run_a_check() -> None:
    """Its command is known by the name of the argument."""
    call = FoldedCall("my_runner", json.dumps({"command": "cargo test"}), "unknown", "test result: ok. 3 passed")
    assert shown(call) == ["`cargo test`: “test result: ok. 3 passed”"]


def test_files_edited_since_the_last_check_are_named() -> None:
    """What was edited before the check, or not edited after all, is not; the newest comes first."""
    lines = shown(edit("old.py"), shell("pytest", "1 passed"), edit("a.py"), edit("b.py"), edit("c.py", ok=False))
    assert lines == ["`pytest`: “1 passed”", "Edited and not checked since: b.py, a.py"]


def test_what_is_left_to_do_has_room_first() -> None:
    """In too little room open items stay, in their order, then outcomes; done items go."""
    todos = (TodoItem("read", "completed", is_done=True), TodoItem("write"), TodoItem("test", "in_progress"))
    state = WorkState(todos, (("make", " failed"),), (), ("a.py", "b.py"))
    whole = ["[x] read", "[ ] write", "[ ] (in_progress) test", "`make` failed"]
    assert state.lines(1_000, count_tokens) == [*whole, "Edited and not checked since: a.py, b.py"]
    open_items = sum(count_tokens(line) + 2 for line in whole[1:3])
    assert state.lines(open_items, count_tokens) == whole[1:3]
    assert state.lines(0, count_tokens) == []


def test_the_list_is_that_of_the_newest_call() -> None:
    """Calls before the last one that states the whole list do not count."""
    first = FoldedCall("TodoWrite", json.dumps({"todos": [{"content": "a"}]}), "protected")
    second = FoldedCall("TodoWrite", json.dumps({"todos": [{"content": "b"}]}), "protected")
    assert shown(first, second) == ["[ ] b"]


def test_the_outcome_is_a_line_of_the_output() -> None:
    """Totals tell more than a verdict, and a path with a number in it is none."""
    assert outcome_line("ok\ncreate mode 100644 test/a.py\n3 errors found\nfailed\n\n") == "3 errors found"
    assert outcome_line("create mode 100644 test/a.py") == ""
    assert outcome_line("BUILD FAILED\n" + "x" * 500) == "BUILD FAILED"


@given(st.lists(st.tuples(st.sampled_from(["pytest -q", "ls", "git push", "a; b && make"]), st.text(max_size=60))))
def test_nothing_is_invented_and_the_room_is_kept(outputs: list[tuple[str, str]]) -> None:
    """Every quotation is in an output, and the lines fit."""
    lines = shown(*(shell(command, result) for command, result in outputs), tokens=60)
    assert sum(count_tokens(line) + 2 for line in lines) <= 60
    text = "\n".join(result for _, result in outputs).replace("“", "'").replace("”", "'")
    for line in lines:
        quotation = line.partition("“")[2].rpartition("”")[0]
        assert quotation in text


# To-do lists.


def listed(*calls: tuple[str, object, str]) -> list[str]:
    """The list after *calls*: name, arguments and result of each."""
    folded = []
    for name, arguments, result in calls:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        folded.append(FoldedCall(name, text, "protected", result))
    return shown(*folded)


WHOLE = [
    ("TodoWrite", {"todos": [{"content": "a b", "status": "completed", "activeForm": "Doing"}, {"content": "c"}]}),
    ("mcp__todo__todo_write", {"todos": [{"id": "7", "content": "a b", "status": "done"}, {"content": "c"}]}),
    ("update_plan", {"explanation": "why", "plan": [{"step": "a b", "status": "completed"}, {"step": "c"}]}),
    ("write_todos", {"todos": [{"description": "a b", "status": "completed"}, {"description": "c"}]}),
    ("manage_todo_list", {"todoList": [{"id": 1, "title": "a b", "status": "completed"}, {"id": 2, "title": "c"}]}),
    ("SetTodoList", {"todos": [{"title": "a b", "status": "Done"}, {"title": "c", "status": "Pending"}]}),
    ("task_tracker", {"command": "plan", "task_list": [{"title": "a b", "status": "done"}, {"title": "c"}]}),
    ("update_todo_list", {"todos": "[x] a b\n[ ] c"}),
    ("focus_chain", {"task_progress": "- [X]  a b\n- [ ] c\n"}),
    ("execute_command", {"command": "ls", "task_progress": "1. [x] a b\n2. [ ] c"}),
]


@pytest.mark.parametrize(("name", "arguments"), WHOLE)
def test_a_call_states_the_whole_list(name: str, arguments: dict[str, object]) -> None:
    """Each client's shape is read, and nothing of an earlier list stays."""
    before = ("TodoWrite", {"todos": ["old"]}, "")
    assert listed(before, (name, arguments, "ok")) == ["[x] a b", "[ ] c"]


def test_a_status_that_says_more_is_shown_as_the_client_spells_it() -> None:
    """In progress, blocked and a checklist's own marks stand beside the text."""
    todos = [{"content": "a", "status": "in_progress"}, {"content": "b", "status": "blocked"}, {"content": "c"}]
    assert listed(("TodoWrite", {"todos": todos}, "")) == ["[ ] (in_progress) a", "[ ] (blocked) b", "[ ] c"]
    assert listed(("update_todo_list", {"todos": "[-] a"}, "")) == ["[-] a"]


def test_items_are_added_changed_and_dropped_one_by_one() -> None:
    """A new item has the number in its call's result; what a change does not name stays."""
    calls = [
        ("TaskCreate", {"subject": "a", "description": "long"}, "Task #4 created: a"),
        ("TaskCreate", {"subject": "b"}, "Task #5 created: b"),
        ("TaskCreate", {"subject": "c"}, "Task #6 created: c"),
        ("TaskUpdate", {"taskId": "4", "status": "completed"}, "ok"),
        ("TaskUpdate", {"taskId": 5, "subject": "b2"}, "ok"),
        ("TaskUpdate", {"taskId": "6", "status": "deleted"}, "ok"),
    ]
    assert listed(*calls) == ["[x] a", "[ ] b2"]


def test_a_list_that_is_merged_changes_only_what_it_names() -> None:
    """Cursor sends only the changed items with ``merge``."""
    first = {"merge": False, "todos": [{"id": "1", "content": "a"}, {"id": "2", "content": "b"}]}
    second = {"merge": True, "todos": [{"id": "2", "status": "completed"}]}
    assert listed(("todo_write", first, ""), ("todo_write", second, "")) == ["[ ] a", "[x] b"]


def test_an_empty_list_empties_it() -> None:
    """A client that clears its list has nothing left to do."""
    assert listed(("TodoWrite", {"todos": ["a"]}, ""), ("TodoWrite", {"todos": []}, "")) == []


@pytest.mark.parametrize("arguments", ["", "no json", "[1, 2", "3", '{"todos": 3}', '{"todos": [3, null, {}]}', "{}"])
def test_odd_arguments_raise_nothing(arguments: str) -> None:
    """A call that is cut off, or of another shape, leaves no item that it does not have."""
    assert listed(("TodoWrite", arguments, "")) == []


def test_other_calls_do_not_concern_a_list() -> None:
    """A read, and arguments too long to be a list, are no list."""
    assert listed(("read_file", {"path": "todos", "todos": ["a"]}, "")) == []
    assert listed(("TodoWrite", '{"todos": ["a"]}' + " " * LONGEST_ARGUMENTS, "")) == []


def test_each_call_has_an_outcome_of_a_word_or_two() -> None:
    """Totals of a command, those of failures first, else that it failed."""
    assert outcome_words("shell", "x\n3 failed, 9 passed in 2 s", ok=False) == "3 failed"
    assert outcome_words("shell", "0 failed, 9 passed", ok=True) == "9 passed"
    assert outcome_words("file_edit", "3 errors", ok=False) == "failed"
    assert outcome_words("shell", "done", ok=True) == ""

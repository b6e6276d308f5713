"""To-do lists are read from the calls of the common clients, as the last call left them."""

from __future__ import annotations

import json

import pytest

from proxy.core.todo_lists import LONGEST_ARGUMENTS, TodoItem, TodoList
from tests.support.engine_fixtures import tool_map_of_package

RULES = tool_map_of_package().work.todos


def lines(*calls: tuple[str, object, str]) -> list[str]:
    """The list after *calls*: name, arguments and result of each."""
    todo_list = TodoList(RULES)
    for name, arguments, result in calls:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert RULES.concern(name, text)
        todo_list.read(name, text, result)
    return [item.line for item in todo_list.items.values()]


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
    assert lines(before, (name, arguments, "ok")) == ["[x] a b", "[ ] c"]
    assert RULES.replace_all(name, json.dumps(arguments))


def test_a_status_that_says_more_is_shown_as_the_client_spells_it() -> None:
    """In progress, blocked and a checklist's own marks stand beside the text."""
    todos = [{"content": "a", "status": "in_progress"}, {"content": "b", "status": "blocked"}, {"content": "c"}]
    assert lines(("TodoWrite", {"todos": todos}, "")) == ["[ ] (in_progress) a", "[ ] (blocked) b", "[ ] c"]
    assert lines(("update_todo_list", {"todos": "[-] a"}, "")) == ["[-] a"]


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
    assert lines(*calls) == ["[x] a", "[ ] b2"]


def test_a_list_that_is_merged_changes_only_what_it_names() -> None:
    """Cursor sends only the changed items with ``merge``."""
    first = {"merge": False, "todos": [{"id": "1", "content": "a"}, {"id": "2", "content": "b"}]}
    second = {"merge": True, "todos": [{"id": "2", "status": "completed"}]}
    assert lines(("todo_write", first, ""), ("todo_write", second, "")) == ["[ ] a", "[x] b"]
    assert not RULES.replace_all("todo_write", json.dumps(second))


def test_an_empty_list_empties_it() -> None:
    """A client that clears its list has nothing left to do."""
    assert lines(("TodoWrite", {"todos": ["a"]}, ""), ("TodoWrite", {"todos": []}, "")) == []


@pytest.mark.parametrize("arguments", ["", "no json", "[1, 2", "3", '{"todos": 3}', '{"todos": [3, null, {}]}', "{}"])
def test_odd_arguments_raise_nothing(arguments: str) -> None:
    """A call that is cut off, or of another shape, leaves no item that it does not have."""
    assert lines(("TodoWrite", arguments, "")) == []


def test_other_calls_do_not_concern_a_list() -> None:
    """A read, and arguments too long to be a list, are not even parsed."""
    assert not RULES.concern("read_file", '{"path": "todos"}')
    assert not RULES.concern("TodoWrite", " " * (LONGEST_ARGUMENTS + 1))
    assert TodoItem("a", "x", is_done=True).line == "[x] a"

"""The state of the work: to-do items, outcomes of checks, files edited since, within a number of tokens."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.work_state import FoldedCall, WorkState, outcome_line, work_state
from proxy.core.todo_lists import TodoItem
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
    return work_state(calls, TOOLS).lines(tokens, count_tokens)


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

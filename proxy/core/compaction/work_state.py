"""Writes the state of an agent's work in folded rounds: its to-do list, the last checks, and files not checked since.

A summary of what happened does not tell what is left to do. The to-do list stands as the last call left it; of the
commands that test, build or change something stands the newest of each kind, with the line of its output that tells the
outcome. Every word but the few between the quotations is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxy.core.compaction.arguments import command_of
from proxy.core.compaction.digest import quoted
from proxy.core.compaction.truncate import shorten
from proxy.core.todo_lists import TodoItem, TodoList, TodoRules
from proxy.core.tool_table import ToolMap

Count = Callable[[str], int]

STATE = "State of the work after these steps"
"""The beginning of the heading."""

MOST_COMMANDS = 3
"""Checks, and commands that change something, that are shown of each sort."""

MOST_FILES = 8
"""Files that were edited and not checked since that are named."""

LONGEST_COMMAND, LONGEST_OUTCOME = 100, 120
"""Characters of a command, and of the line that tells its outcome."""

MOST_CALLS = 400
"""Calls, the newest, that are searched for commands and edited files."""

READ = 1_000
"""Characters of a command that are looked at: a longer one is mostly a document that it writes."""

END = 4_096
"""Characters at the end of an output that are searched for its outcome."""

_PARTS = re.compile(r"&&|\|\||[;&|\n]")
"""The signs between the commands of one line."""

_WRAPPERS = re.compile(
    r"\A(?:\s*(?:\w+=\S*|sudo|time|env|exec|nohup|timeout (?:-\S+ )*\S+|npx|bunx"
    r"|uv run|poetry run|pipenv run|bundle exec)\s)*\s*"
)
"""What may stand before a command without being one."""

_REDIRECTION = re.compile(r"\s+\d?>.*")
"""Where the output of a command goes."""

_TOTALS = re.compile(
    r"\b\d+ (?:\w+ )?(?:passed|passing|failed|failing|failures?|errors?|warnings?|tests?|examples?|issues?|problems?)\b(?![/.-]\w)"
    r"|\bno (?:errors|issues|problems)\b",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"\b(?:ok|pass(?:ed)?|fail(?:ed|ure)?|success(?:ful(?:ly)?)?|errors?|panicked|finished|done|exit(?:ed)?)\b"
    r"|✓|✔|✗|✘|错误|失败|成功|エラー",
    re.IGNORECASE,
)
"""What an outcome says: totals, which tell most, or one word."""


@dataclass(frozen=True, slots=True)
class FoldedCall:
    """One call of a folded round: its tool, the kind of it, and its result; ``ok`` is None if it has none."""

    name: str
    arguments: str
    kind: str
    result: str = ""
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class WorkState:
    """The state of the work: to-do items, command and outcome of the newest commands, files edited since a check."""

    todos: tuple[TodoItem, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    unchecked: tuple[str, ...] = ()

    def lines(self, tokens: int, count: Count) -> list[str]:
        """The lines that fit in *tokens*, what is left to do before all else."""
        chosen: list[tuple[int, str]] = []
        for place, line in self._ranked():
            size = count(line) + 2
            if size <= tokens:
                chosen.append((place, line))
                tokens -= size
        files = self._files(tokens, count)
        return [line for _, line in sorted(chosen)] + files

    def _files(self, tokens: int, count: Count) -> list[str]:
        """A line with as many of the unchecked files as fit in *tokens*, the newest first; none if not one fits."""
        for number in range(len(self.unchecked), 0, -1):
            line = "Edited and not checked since: " + ", ".join(self.unchecked[:number])
            if count(line) + 2 <= tokens:
                return [line]
        return []

    def _ranked(self) -> Iterator[tuple[int, str]]:
        """Place and text of each line, the most important first."""
        todos = list(enumerate(each.line for each in self.todos))
        yield from [todos[at] for at, each in enumerate(self.todos) if not each.is_done]
        place = len(todos)
        for number, (command, outcome) in enumerate((*self.checks, *self.changes)):
            yield place + number, f"`{command}`{outcome}"
        yield from [todos[at] for at in range(len(todos) - 1, -1, -1) if self.todos[at].is_done]


def work_state(calls: Sequence[FoldedCall], tools: ToolMap) -> WorkState:
    """The state of the work after *calls*."""
    rules = tools.work
    checks: dict[str, tuple[str, str]] = {}
    changes: dict[str, tuple[str, str]] = {}
    unchecked: dict[str, None] = {}
    for call in reversed(calls[-MOST_CALLS:]):
        if call.kind in ("file_edit", "file_write") and not checks and call.ok is not False:
            unchecked.update(dict.fromkeys(tools.targets(call.name, call.arguments)[:MOST_FILES]))
            continue
        command = _command(call)
        if found := _matching(command, rules.checks):
            _note(checks, found, call)
        elif found := _matching(command, rules.changes):
            _note(changes, found, call)
    return WorkState(
        _todos(calls, rules.todos),
        tuple(checks.values())[:MOST_COMMANDS],
        tuple(changes.values())[:MOST_COMMANDS],
        tuple(unchecked)[:MOST_FILES],
    )


def _todos(calls: Sequence[FoldedCall], rules: TodoRules) -> tuple[TodoItem, ...]:
    """The to-do list as *calls* left it, read from the last call on that states all of it."""
    concerned: list[FoldedCall] = []
    for call in reversed(calls):
        if rules.concern(call.name, call.arguments):
            concerned.append(call)
            if rules.replace_all(call.name, call.arguments):
                break
    todo_list = TodoList(rules)
    for call in reversed(concerned):
        todo_list.read(call.name, call.arguments, call.result)
    return tuple(todo_list.items.values())


def _command(call: FoldedCall) -> str:
    """The command that *call* runs; empty if it runs none. A tool of an unknown kind may run one, too."""
    if call.kind != "shell" and (call.kind != "unknown" or '"command"' not in call.arguments):
        return ""
    return command_of(call.arguments)[:READ]


def _matching(command: str, patterns: Sequence[re.Pattern[str]]) -> tuple[str, str] | None:
    """The first part of *command* whose beginning one of *patterns* matches: that beginning, and the part."""
    for part in _PARTS.split(command):
        bare = _WRAPPERS.sub("", part, count=1)
        for pattern in patterns:
            if match := pattern.match(bare):
                return match.group(), bare.strip()
    return None


def _note(noted: dict[str, tuple[str, str]], found: tuple[str, str], call: FoldedCall) -> None:
    """Note the command *found* in *call* and what is known of its outcome, unless a later one of its sort is noted."""
    key, command = found
    if key in noted:
        return
    outcome = ""
    if line := outcome_line(call.result):
        outcome = f": {quoted(line)}"
    elif call.ok is False:
        outcome = " failed"
    noted[key] = shorten(_REDIRECTION.sub("", command), LONGEST_COMMAND), outcome


def outcome_line(text: str) -> str:
    """The line at the end of a command's output that tells its outcome; empty if there is none."""
    best = ""
    for line in reversed(text[-END:].splitlines()):
        bare = line.strip()
        if not bare or len(bare) > LONGEST_OUTCOME:
            continue
        if _TOTALS.search(bare):
            return bare
        if not best and _VERDICT.search(bare):
            best = bare
    return best

"""Writes the state of an agent's work in folded rounds: its to-do list, the last checks, and files not checked since.

A summary of what happened does not tell what is left to do. The to-do list stands as the last call left it; of the
commands that test, build or change something stands the newest of each kind, with the line of its output that tells the
outcome. Every word but the few between the quotations is the client's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.core.compaction.digest import quoted
from proxy.core.compaction.steps import BULLET
from proxy.core.compaction.truncate import shorten
from proxy.core.conversation import Count
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_calls import Arguments
from proxy.core.tool_table import TodoRules, ToolMap

STATE = "State of the work after these steps"
"""The beginning of the heading."""

UNCHECKED = "Edited and not checked since: "

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

LONGEST_ARGUMENTS = 65_536
"""Most characters of a call's arguments that are read; a longer one is no to-do list."""

MOST_ITEMS = 200
"""Items of one list that are read."""

_CHECKBOX = lazy_pattern(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])?[ \t]*\[([^\]\n]{0,2})\][ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
"""A line of a checklist in Markdown: its mark, and its text."""

_NUMBER = lazy_pattern(r"\d{1,9}")

LAST = 200
"""Characters at the end of an output that are searched for totals, for the step of its round."""

END = 4_096
"""Characters at the end of an output that are searched for its outcome."""

_PARTS = lazy_pattern(r"&&|\|\||[;&|\n]")
"""The signs between the commands of one line."""

_WRAPPERS = lazy_pattern(
    r"\A(?:\s*(?:\w+=\S*|sudo|time|env|exec|nohup|timeout (?:-\S+ )*\S+|npx|bunx"
    r"|uv run|poetry run|pipenv run|bundle exec)\s)*\s*"
)
"""Words before a command that are no command."""

_REDIRECTION = lazy_pattern(r"\s+\d?>.*")
"""Where the output of a command goes."""

_TOTALS = lazy_pattern(
    r"\b\d+ (?:\w+ )?(?:passed|passing|failed|failing|failures?|errors?|warnings?|tests?|examples?|issues?|problems?)\b"
    r"(?![/.-]\w)"
    r"|\bno (?:errors|issues|problems)\b",
    re.IGNORECASE,
)
_FAILURES = lazy_pattern(r"(?!0 )\d+ (?:\w+ )?(?:fail|error)", re.IGNORECASE)
"""A total that says more than the others."""

_VERDICT = lazy_pattern(
    r"\b(?:ok|pass(?:ed)?|fail(?:ed|ure)?|success(?:ful(?:ly)?)?|errors?|panicked|finished|done|exit(?:ed)?)\b"
    r"|✓|✔|✗|✘|错误|失败|成功|エラー",
    re.IGNORECASE,
)
"""Outcomes in an output: totals, which say most, or one word."""


class FoldedCall(NamedTuple):
    """One call of a folded round: its tool, the kind of it, its result, and the outcome in a word or two.

    ``ok`` is None if it has no result.
    """

    name: str
    arguments: str
    kind: str
    result: str = ""
    ok: bool | None = None
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class TodoItem:
    """One item: its text, and its status as the client spells it; empty if it is merely open."""

    text: str
    status: str = ""
    is_done: bool = False

    @property
    def line(self) -> str:
        """The item as a line of a checklist."""
        if self.is_done:
            return f"[x] {self.text}"
        if len(self.status) == 1:
            return f"[{self.status}] {self.text}"
        if self.status:
            return f"[ ] ({self.status}) {self.text}"
        return f"[ ] {self.text}"


@dataclass(frozen=True, slots=True)
class WorkState:
    """The state of the work: to-do items, command and outcome of the newest commands, files edited since a check."""

    todos: tuple[TodoItem, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    unchecked: tuple[str, ...] = ()

    def lines(self, tokens: int, count: Count) -> list[str]:
        """The lines that fit in *tokens*, what is left to do before all else; of the files as many as fit."""
        chosen: list[tuple[int, str]] = []
        for place, line in self._ranked():
            size = count(line) + BULLET
            if size <= tokens:
                chosen.append((place, line))
                tokens -= size
        lines = [line for _, line in sorted(chosen)]
        for number in range(len(self.unchecked), 0, -1):
            files = UNCHECKED + ", ".join(self.unchecked[:number])
            if count(files) + BULLET <= tokens:
                return [*lines, files]
        return lines

    def _ranked(self) -> Iterator[tuple[int, str]]:
        """Place and text of each line, the most important first."""
        todos = list(enumerate(each.line for each in self.todos))
        yield from [todos[at] for at, each in enumerate(self.todos) if not each.is_done]
        place = len(todos)
        for number, (command, outcome) in enumerate((*self.checks, *self.changes)):
            yield place + number, f"`{command}`{outcome}"
        yield from [todos[at] for at in range(len(todos) - 1, -1, -1) if self.todos[at].is_done]


NO_STATE = WorkState()
"""The state of a conversation without calls."""


def work_state(calls: Sequence[FoldedCall], tools: ToolMap, arguments: Mapping[str, Arguments]) -> WorkState:
    """The state of the work after *calls*; *arguments* are theirs, by their text."""
    rules = tools.work
    checks: dict[str, tuple[str, str]] = {}
    changes: dict[str, tuple[str, str]] = {}
    unchecked: dict[str, None] = {}
    for call in reversed(calls[-MOST_CALLS:]):
        if call.kind in ("file_edit", "file_write") and not checks and call.ok is not False:
            unchecked.update(dict.fromkeys(tools.targets(call.name, call.arguments)[:MOST_FILES]))
            continue
        if call.kind != "shell" and (call.kind != "unknown" or '"command"' not in call.arguments):
            continue  # a tool of an unknown kind may run a command, too
        command = arguments[call.arguments].command[:READ]
        if match := _matching(command, rules.checks):
            _note(checks, match, call)
        elif match := _matching(command, rules.changes):
            _note(changes, match, call)
    return WorkState(
        _todos(calls, rules.todos),
        tuple(checks.values())[:MOST_COMMANDS],
        tuple(changes.values())[:MOST_COMMANDS],
        tuple(unchecked)[:MOST_FILES],
    )


def _todos(calls: Sequence[FoldedCall], rules: TodoRules) -> tuple[TodoItem, ...]:
    """The to-do list as *calls* left it, read from the last call on that states all of it."""
    tools, names = rules.lists | rules.adds | rules.changes, {call.name for call in calls}
    keys = [f'"{key}"' for key in rules.arguments]
    concerned = {name for name in names if any(tool in name.lower() for tool in tools)}
    writers = [call for call in calls if call.name in concerned or any(key in call.arguments for key in keys)]
    if not writers:
        return ()
    return _written_items([call for call in writers if _writes(call, rules, keys)], rules)


def _written_items(writers: Sequence[FoldedCall], rules: TodoRules) -> tuple[TodoItem, ...]:
    """The items of the list that *writers* left."""
    start = next((at for at in range(len(writers) - 1, -1, -1) if _states_all(writers[at], rules)), 0)
    todo_list = TodoList(rules)
    for call in writers[start:]:
        todo_list.read(call)
    return tuple(todo_list.items.values())


def _writes(call: FoldedCall, rules: TodoRules, keys: Sequence[str]) -> bool:
    """True if *call* writes a to-do list: by its tool, or by one of the arguments *keys* of any tool."""
    if len(call.arguments) > LONGEST_ARGUMENTS:
        return False
    tool = _bare(call.name)
    if tool in rules.lists or tool in rules.adds or tool in rules.changes:
        return True
    return any(key in call.arguments for key in keys)


def _states_all(call: FoldedCall, rules: TodoRules) -> bool:
    """True if *call*, which writes a to-do list, states all of it, so that no earlier call counts."""
    if _bare(call.name) in rules.adds | rules.changes:
        return False
    if any(f'"{key}"' in call.arguments for key in rules.merge):
        return False
    return any(f'"{key}"' in call.arguments for key in (*rules.items, *rules.arguments))


def _matching(command: str, patterns: Sequence[re.Pattern[str]]) -> tuple[str, str] | None:
    """The first part of *command* whose beginning one of *patterns* matches: that beginning, and the part."""
    for part in _PARTS.split(command):
        bare = _WRAPPERS.sub("", part, count=1)
        for pattern in patterns:
            if match := pattern.match(bare):
                return match.group(), bare.strip()
    return None


def _note(noted: dict[str, tuple[str, str]], match: tuple[str, str], call: FoldedCall) -> None:
    """Note the command *match* in *call* and what is known of its outcome, unless a later one of its sort is noted."""
    key, command = match
    if key in noted:
        return
    outcome = ""
    if line := outcome_line(call.result):
        outcome = f": {quoted(line)}"
    elif call.ok is False:
        outcome = " failed"
    noted[key] = shorten(_REDIRECTION.sub("", command), LONGEST_COMMAND), outcome


def outcome_words(kind: str, result: str, *, ok: bool) -> str:
    """A word or two on the outcome of a call: totals of a command, else "failed"; "" if there is nothing to say."""
    totals: list[str] = []
    if kind == "shell":
        totals = _TOTALS.findall(result[-LAST:])
    if failures := [total for total in totals if _FAILURES.match(total)]:
        return failures[-1]
    if totals:
        return totals[-1]
    if ok:
        return ""
    return "failed"


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


# To-do lists.


@dataclass(slots=True)
class TodoList:
    """A to-do list as the calls read so far left it: its items by their ids, or by their numbers."""

    rules: TodoRules
    items: dict[str, TodoItem] = field(default_factory=dict)

    def read(self, call: FoldedCall) -> None:
        """Change the list as *call* did. Its result may name the id of a new item."""
        try:
            values = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return
        tool = _bare(call.name)
        if isinstance(values, list) and tool in self.rules.lists:
            self._replace(values, merge=False)
        elif isinstance(values, dict):
            self._read_members(values, tool, call.result)

    def _read_members(self, values: dict[str, Any], tool: str, result: str) -> None:
        """Change the list as a call with the arguments *values* did."""
        rules = self.rules
        if tool in rules.adds:
            self._add(values, result)
        elif tool in rules.changes:
            self._set(*self._element(values))
        else:
            keys = rules.arguments
            if tool in rules.lists:
                keys = (*rules.items, *rules.arguments)
            self._replace(_first(values, keys), merge=_first(values, rules.merge) is True)

    def _replace(self, value: Any, *, merge: bool) -> None:
        """Take over the items in *value*: a list, or a checklist in Markdown. With *merge* the others stay."""
        elements = self._elements(value)[:MOST_ITEMS]
        if not merge and (elements or isinstance(value, list)):
            self.items.clear()
        for number, (key, text, status) in enumerate(elements, 1):
            self._set(key or str(number), text, status)

    def _elements(self, value: Any) -> list[tuple[str, str, str]]:
        """Id, text and status of each item in *value*, each empty if it has none."""
        if isinstance(value, str):
            return [("", text, mark.strip()) for mark, text in _CHECKBOX.findall(value)]
        if not isinstance(value, list):
            return []
        return [self._element(element) for element in value]

    def _element(self, value: Any) -> tuple[str, str, str]:
        """Id, text and status of one item: an object, or a text alone."""
        if not isinstance(value, dict):
            return "", _text(value), ""
        rules = self.rules
        key = _first(value, rules.id)
        if key is None or isinstance(key, (dict, list)):
            key = ""
        return str(key), _text(_first(value, rules.text)), _text(_first(value, rules.status))

    def _add(self, values: dict[str, Any], result: str) -> None:
        """Add one item; its id is the first number in *result*, or the number of items before it and one."""
        number = _NUMBER.search(result)
        _, text, status = self._element(values)
        self._set(number.group() if number else str(len(self.items) + 1), text, status)

    def _set(self, key: str, text: str, status: str) -> None:
        """Set the item *key*; what is empty stays as it was, and a dropped item goes."""
        known = self.items.get(key, TodoItem(""))
        text, folded = text or known.text, re.sub(r"[ -]", "_", status.lower())
        if not text or folded in self.rules.dropped:
            self.items.pop(key, None)
        elif not status:
            self.items[key] = replace(known, text=text)
        elif folded in self.rules.pending:
            self.items[key] = TodoItem(text)
        else:
            self.items[key] = TodoItem(text, status, is_done=folded in self.rules.done)


def _bare(name: str) -> str:
    """The tool *name* in lower case, without the prefix of its server."""
    return name.rpartition("__")[2].rpartition(".")[2].lower()


def _first(values: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first of *keys* that is there; None if there is none."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _text(value: Any) -> str:
    """*value* on one line; empty if it is no text."""
    if not isinstance(value, str):
        return ""
    return " ".join(value.split())

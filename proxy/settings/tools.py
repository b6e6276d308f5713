"""The table of tools: the packaged file, an own file and the section ``tools``, merged into one ``ToolMap``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from proxy.core.lazy_pattern import any_pattern, lazy_pattern
from proxy.core.tool_table import Keys, Kind, TalkRules, TodoRules, Tool, ToolMap, WorkRules
from proxy.core.written_calls import TextToolFormat
from proxy.settings.field_types import FilePath, Section, SomeSection, SplitText
from proxy.settings.packaged_data import packaged
from proxy.settings.yaml_source import parse_inline, read_table

Names = Annotated[tuple[str, ...], SplitText]


class ToolRule(Section):
    """A tool, or every tool that a glob matches."""

    kind: Kind = Field(default="unknown", description="The kind of tool.")
    path: Names = Field(default=(), description="Arguments that name its target; empty: the usual ones.")
    patch: Names = Field(default=(), description="Arguments that hold a patch with file headers.")
    base: int = Field(default=1, ge=0, le=1, description="The number of a file's first line.")
    limit: int = Field(default=0, ge=0, description="Lines that a call reads if it names no number; 0: all.")
    unit: Literal["lines", "bytes"] = Field(default="lines", description="The unit of a range.")
    by: str = Field(default="", description="The argument that selects one of the cases.")
    cases: dict[str, ToolRule] = Field(default={}, description="Rules by the value of that argument; '*' is any other.")


class ToolKeys(Section):
    """Usual names of arguments; the first that a call has is used."""

    path: Names = Field(default=(), description="Names of an argument with a path.")
    many: Names = Field(default=(), description="Names of an argument with paths, or objects with one.")
    about: Names = Field(default=(), description="Names of an argument with another target, for calls without a path.")
    first: Names = Field(default=(), description="Names of an argument with a range's first line.")
    count: Names = Field(default=(), description="Names of an argument with the number of lines.")
    last: Names = Field(default=(), description="Names of an argument with a range's last line.")
    pair: Names = Field(default=(), description="Names of an argument with first and last line in a list.")
    narrows: Names = Field(default=(), description="Arguments that narrow a reading to a part of a file.")


PACKAGED = "packaged"
"""The context in which the packaged table is validated: its patterns are compiled by a test, not at each start."""


def _compiles(pattern: str, info: ValidationInfo) -> str:
    if info.context == PACKAGED:
        return pattern
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Patterns = Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], SplitText]


class WrittenForms(Section):
    """Forms in which clients write tool calls and their results as text."""

    calls: Patterns = Field(default=(), description="Regular expressions of a call; groups: name, arguments (JSON).")
    results: Patterns = Field(default=(), description="Regular expressions of the beginning of a result; group: name.")
    added: Names = Field(default=(), description="Beginnings of texts that the client adds by itself.")


class TodoNames(Section):
    """Names by which to-do lists are known; of tools in any case, without the prefix of a server."""

    lists: Names = Field(default=(), description="Tools whose call states the whole list.")
    adds: Names = Field(default=(), description="Tools whose call adds an item.")
    changes: Names = Field(default=(), description="Tools whose call changes an item.")
    arguments: Names = Field(default=(), description="Arguments of any tool that hold a checklist.")
    items: Names = Field(default=(), description="Arguments with the items.")
    text: Names = Field(default=(), description="Members of an item with its text.")
    status: Names = Field(default=(), description="Members of an item with its status.")
    id: Names = Field(default=(), description="Members of an item with its id.")
    merge: Names = Field(default=(), description="Arguments by which items that a call does not name stay.")
    done: Names = Field(default=(), description="Statuses of items that are done.")
    dropped: Names = Field(default=(), description="Statuses of items that were dropped.")
    pending: Names = Field(default=(), description="Statuses of open items; any other one is shown.")


class WorkNames(Section):
    """Names and patterns by which calls show the state of the work, which a block describes."""

    todos: TodoNames = TodoNames.defaults()
    checks: Patterns = Field(default=(), description="Regular expressions of commands that test, build or check.")
    changes: Patterns = Field(default=(), description="Regular expressions of commands that change something.")
    intents: Patterns = Field(
        default=(), description="Regular expressions of the beginning of a sentence on what comes next."
    )
    progress: Patterns = Field(default=(), description="The same of a sentence on the progress.")


class ToolTable(Section):
    """The content of a file of tools."""

    keys: ToolKeys = ToolKeys.defaults()
    written: WrittenForms = WrittenForms.defaults()
    work: WorkNames = WorkNames.defaults()
    protected: Names = Field(default=(), description="Tools whose results are never left out; names or globs.")
    map: dict[str, ToolRule] = Field(default={}, description="Rules by tool name or glob.")


class Tools(ToolTable):
    """Rules for the clients' tools, beside the packaged table."""

    file: FilePath | None = Field(default=None, description="File of this shape; overrides the packaged one.")


FILE = "tools.yaml"


def tool_map(tools: ToolTable) -> ToolMap:
    """Return *tools* merged over the packaged table. Patterns are compiled at their first use."""
    table = merged(_packaged_table(), tools)
    keys = Keys(**{name: getattr(table.keys, name) for name in ToolKeys.model_fields})
    text_format = TextToolFormat(
        _compiled(table.written.calls, re.MULTILINE | re.DOTALL),
        _compiled(table.written.results),
        table.written.added,
        any_pattern([*map(re.escape, table.written.added), *table.written.results]),
    )
    tools_by_name = {name: _tool(rule) for name, rule in table.map.items()}
    return ToolMap(tools_by_name, table.protected, keys, text_format, _work(table.work))


@cache
def _packaged_table() -> ToolTable:
    """Return the packaged table. It is read once: at a start two parts need it, and again at each reload."""
    table = parse_inline(packaged(FILE).read_text(encoding="utf-8"))
    return ToolTable.model_validate(table, context=PACKAGED)


def _work(work: WorkNames) -> WorkRules:
    todos: dict[str, Any] = {name: getattr(work.todos, name) for name in TodoNames.model_fields}
    for name in ("lists", "adds", "changes", "done", "dropped", "pending"):
        todos[name] = frozenset(word.lower() for word in todos[name])
    talk = TalkRules(_compiled(work.intents, re.IGNORECASE), _compiled(work.progress, re.IGNORECASE))
    return WorkRules(TodoRules(**todos), _compiled(work.checks), _compiled(work.changes), talk)


def _compiled(patterns: Iterable[str], flags: re.RegexFlag = re.NOFLAG) -> tuple[re.Pattern[str], ...]:
    return tuple(lazy_pattern(pattern, flags) for pattern in patterns)


def with_file(tools: Tools, folder: Path) -> Tools:
    """Return *tools* merged over its own file, whose relative path starts at *folder*. Raises ``SettingsError``."""
    if tools.file is None:
        return tools
    table = merged(read_table(folder / tools.file, ToolTable, FILE), tools)
    parts = {name: getattr(table, name) for name in ToolTable.model_fields}
    return Tools(file=tools.file, **parts)


def merged(below: ToolTable, above: ToolTable) -> ToolTable:
    """Return *above* merged over *below*: rules and key lists replace, protected names add up."""
    # A name for which *above* has a rule, or which it protects, loses its rule or its protection in *below*.
    protected = tuple(name for name in below.protected if name not in above.map)
    rules = {name: rule for name, rule in below.map.items() if name not in above.protected}
    todos = _filled(above.work.todos, below.work.todos)
    return ToolTable(
        keys=_filled(above.keys, below.keys),
        written=_filled(above.written, below.written),
        work=_filled(above.work, below.work).model_copy(update={"todos": todos}),
        protected=(*protected, *above.protected),
        map={**rules, **above.map},
    )


def _filled(above: SomeSection, below: SomeSection) -> SomeSection:
    """Return *above* with the values of *below* in place of those that are empty."""
    values = {name: getattr(above, name) or getattr(below, name) for name in type(above).model_fields}
    return above.model_copy(update=values)  # all are valid already


def _tool(rule: ToolRule) -> Tool:
    cases = {value: _tool(case) for value, case in rule.cases.items()}
    return Tool(rule.kind, rule.path, rule.patch, rule.base, rule.limit, rule.unit, rule.by, cases)

"""The table of tools: the packaged file, with what the configuration says laid over it."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from proxy.core.tool_calls import Forms
from proxy.core.tool_table import Keys, Tool, ToolMap
from proxy.settings.data import packaged
from proxy.settings.problems import Problem, SettingsError, key_name
from proxy.settings.source import parse_inline, read_yaml
from proxy.settings.tooltable import ToolKeys, ToolRule, Tools, ToolTable, WrittenForms

FILE = "tools.yaml"


def tool_map(tools: ToolTable) -> ToolMap:
    """The compiled table: *tools* over the packaged one."""
    below = ToolTable.model_validate(parse_inline(packaged(FILE).read_text(encoding="utf-8")))
    table = merged(below, tools)
    keys = Keys(**{name: getattr(table.keys, name) for name in ToolKeys.model_fields})
    forms = Forms(
        tuple(re.compile(pattern, re.MULTILINE | re.DOTALL) for pattern in table.written.calls),
        tuple(re.compile(pattern) for pattern in table.written.results),
        table.written.added,
    )
    return ToolMap({name: _tool(rule) for name, rule in table.map.items()}, table.protected, keys, forms)


def with_file(tools: Tools, folder: Path) -> Tools:
    """*tools* over what its file says; a relative path starts at *folder*. Raises ``SettingsError``."""
    if tools.file is None:
        return tools
    table = merged(_read(folder / tools.file), tools)
    return Tools(file=tools.file, keys=table.keys, written=table.written, protected=table.protected, map=table.map)


def merged(below: ToolTable, above: ToolTable) -> ToolTable:
    """*above* over *below*: rules and lists of keys replace those of their name, protected names are added."""
    keys = {name: getattr(above.keys, name) or getattr(below.keys, name) for name in ToolKeys.model_fields}
    # A name that has a rule of its own now, or is protected now, is no longer what it was.
    protected = tuple(name for name in below.protected if name not in above.map)
    rules = {name: rule for name, rule in below.map.items() if name not in above.protected}
    forms = {name: getattr(above.written, name) or getattr(below.written, name) for name in WrittenForms.model_fields}
    return ToolTable(
        keys=ToolKeys(**keys),
        written=WrittenForms(**forms),
        protected=(*protected, *above.protected),
        map={**rules, **above.map},
    )


def _read(file: Path) -> ToolTable:
    source = read_yaml(file, {})
    problems = list(source.problems)
    try:
        table = ToolTable.model_validate(source.values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            origin = source.origin(detail["loc"])
            remedy = "Write it in the shape of the packaged tools.yaml."
            problems.append(Problem(origin.file, origin.line, key_name(detail["loc"]), detail["msg"], remedy))
    if problems:
        raise SettingsError(problems)
    return table


def _tool(rule: ToolRule) -> Tool:
    cases = {value: _tool(case) for value, case in rule.cases.items()}
    return Tool(rule.kind, rule.path, rule.patch, rule.base, rule.limit, rule.unit, rule.by, cases)

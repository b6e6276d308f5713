"""Reads an agent's to-do list from the calls that write it: the whole list at once, or one item at a time.

Clients name the tools and their arguments as they like, so all names are data (``config/tools.yaml``). No arguments
raise an error: a call of an odd shape changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LONGEST_ARGUMENTS = 65_536
"""Most characters of a call's arguments that are read; a longer one is no to-do list."""

MOST_ITEMS = 200
"""Items of one list that are read."""

_CHECKBOX = re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])?[ \t]*\[([^\]\n]{0,2})\][ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
"""A line of a checklist in Markdown: its mark, and its text."""

_NUMBER = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True)
class TodoRules:
    """The names by which to-do lists are known; names of tools in lower case, without a server's prefix.

    A call of one of ``lists`` states the whole list, one of ``adds`` a new item, one of ``changes`` a change of one.
    ``arguments`` are those of any call that hold a checklist. ``items`` are the keys of a list, ``text``, ``status``
    and ``id`` those of an item, ``merge`` those which say that a list only changes items. ``done`` and ``dropped`` are
    values of a status, or marks in a checklist's brackets; every other one is open. ``pending`` are those open ones
    that say nothing more.
    """

    lists: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    merge: tuple[str, ...] = ()
    done: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()

    def concern(self, name: str, arguments: str) -> bool:
        """True if a call of the tool *name* may change a to-do list."""
        if len(arguments) > LONGEST_ARGUMENTS:
            return False
        tool = bare_name(name)
        if tool in self.lists or tool in self.adds or tool in self.changes:
            return True
        return any(f'"{key}"' in arguments for key in self.arguments)

    def replace_all(self, name: str, arguments: str) -> bool:
        """True if a call that concerns a to-do list states all of it, so that no earlier call counts."""
        if bare_name(name) not in self.lists:
            return any(f'"{key}"' in arguments for key in self.arguments)
        if any(f'"{key}"' in arguments for key in self.merge):
            return False
        return any(f'"{key}"' in arguments for key in (*self.items, *self.arguments))


NO_TODO_LISTS = TodoRules()
"""Rules by which no call writes a to-do list."""


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


@dataclass(slots=True)
class TodoList:
    """A to-do list as the calls read so far left it: its items by their ids, or by their numbers."""

    rules: TodoRules
    items: dict[str, TodoItem] = field(default_factory=dict)

    def read(self, name: str, arguments: str, result: str) -> None:
        """Change the list as a call of the tool *name* did; *result* may name the id of a new item."""
        tool = bare_name(name)
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return
        if isinstance(values, list) and tool in self.rules.lists:
            self._replace(values, merge=False)
        elif isinstance(values, dict):
            self._read_members(values, tool, result)

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


def bare_name(name: str) -> str:
    """The tool *name* in lower case, without the prefix of its server."""
    return name.rpartition("__")[2].rpartition(".")[2].lower()


def _first(values: dict[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first of *keys* that is there; None if there is none."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _text(value: Any) -> str:
    """*value* on one line; empty if it is no text."""
    if not isinstance(value, str):
        return ""
    return " ".join(value.split())


def folded_names(names: Sequence[str]) -> frozenset[str]:
    """*names* in lower case, as they are compared."""
    return frozenset(name.lower() for name in names)

"""The table of tools: the kind of each call's tool, and the files, folders or command that the call names.

Each client has its own names for tools and arguments, so all names are data (``config/tools.yaml``). Models write
arguments, so any text is accepted: if it is cut off, no JSON or of an odd shape, only the kind of the call is known.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from proxy.core.apis.json_steps import ONE_CALL, dismantle, is_large, parse_each, runs
from proxy.core.conversation import Call
from proxy.core.written_calls import NO_TEXT_FORMAT, TextToolFormat

Kind = Literal[
    "file_read",
    "file_edit",
    "file_write",
    "grep",
    "glob",
    "list",
    "shell",
    "shell_read",
    "web_fetch",
    "web_search",
    "search_semantic",
    "media_read",
    "agent",
    "protected",
    "unknown",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

REPEATABLE = frozenset({"file_read", "grep", "glob"})
"""Kinds whose calls only read: an equal call with an equal result adds nothing."""

TARGETED = REPEATABLE | {"file_edit", "file_write", "list", "media_read", "search_semantic"}
"""Kinds whose arguments name files or folders."""

MOST_PATHS = 32
"""Paths of one call that are used; a patch may name thousands."""

_HEADER = re.compile(r"^(?:\*\*\* (?:Update|Add|Delete) File: |\*\*\* Move to: |\+\+\+ b/)(.+?)\s*$", re.MULTILINE)
_DOTS = re.compile(r"(?:^|(?<=/))\./+")
_SLASHES = re.compile(r"[/\\]+")
_SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_LINES = re.compile(r"\s*\d{1,9}(?:[\s,:;-]+\d{1,9})*\s*")
"""A number, or a range of lines, written as a text."""

UNKNOWN_RANGE = (0, 0)
"""The first and last line of a call whose range is not known."""

LONGEST_FIGURE, LONGEST_RANGE = 9, 64
"""Digits of the longest line number, and characters of the longest range of lines, that are read."""


class Tool(msgspec.Struct, frozen=True):
    """One tool: its kind, or its kinds in ``cases`` by the value of its argument ``by`` (``*``: any other value).

    ``path`` are the argument keys that name its target, if not the usual ones; ``patch`` those whose text is a patch
    with file headers. ``base`` is the number of a file's first line, ``limit`` the default number of lines it reads,
    ``unit`` the unit of its range.
    """

    kind: Kind = "unknown"
    path: tuple[str, ...] = ()
    patch: tuple[str, ...] = ()
    base: int = 1
    limit: int = 0
    unit: Literal["lines", "bytes"] = "lines"
    by: str = ""
    cases: Mapping[str, Tool] = msgspec.field(default_factory=dict)


class Keys(msgspec.Struct, frozen=True):
    """The usual argument keys: of a path, of lists of paths or of objects with a path, and of a range of lines.

    ``about`` are keys of the subject of a call without a path, such as its query. ``narrows`` are keys that select a
    part of a file other than by lines, such as a symbol or an outline.
    """

    path: tuple[str, ...] = ()
    many: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    narrows: tuple[str, ...] = ()


class TodoRules(msgspec.Struct, frozen=True):
    """The names by which to-do lists are recognised; names of tools in lower case, without a server's prefix.

    A call of one of ``lists`` states the whole list, one of ``adds`` a new item, one of ``changes`` a change of an
    item. ``arguments`` are arguments of any tool that hold a checklist. ``items`` are the keys of a list; ``text``,
    ``status`` and ``id`` those of an item; ``merge`` those that make a list an update of some items. ``done`` and
    ``dropped`` are values of a status, or marks in a checklist's brackets; every other value is open. ``pending`` are
    the open values that need no mention.
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


class TalkRules(msgspec.Struct, frozen=True):
    """The beginnings of sentences that later ones replace: ``intents`` announce a step, ``progress`` reports on one."""

    intents: tuple[re.Pattern[str], ...] = ()
    progress: tuple[re.Pattern[str], ...] = ()


NO_TALK = TalkRules()
"""No patterns: no sentence is replaced by a later one."""


class WorkRules(msgspec.Struct, frozen=True):
    """The signs of the state of the work: to-do lists, commands that check it, commands that change something.

    The patterns of ``checks`` and ``changes`` match the beginning of one command of a line. ``talk`` has the sentences
    that are outdated by later ones.
    """

    todos: TodoRules = TodoRules()
    checks: tuple[re.Pattern[str], ...] = ()
    changes: tuple[re.Pattern[str], ...] = ()
    talk: TalkRules = NO_TALK


NO_KEYS = Keys()
NO_WORK = WorkRules()
UNKNOWN = Tool()
PROTECTED = Tool("protected")


class ToolMap:
    """The table of tools by names and globs, compiled; ``protected`` are names and globs of further tools.

    ``text_format`` describes calls and results that are written as text, ``work`` the signs of the state of the work.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        protected: Sequence[str] = (),
        keys: Keys = NO_KEYS,
        text_format: TextToolFormat = NO_TEXT_FORMAT,
        work: WorkRules = NO_WORK,
    ) -> None:
        self.text_format = text_format
        self.work = work
        named = {**tools, **dict.fromkeys(protected, PROTECTED)}
        self._exact = {name: tool for name, tool in named.items() if not is_glob(name)}
        # Reversed, so that of two names that differ in case only the first one decides.
        self._folded = {name.lower(): tool for name, tool in reversed(self._exact.items())}
        globs = [(re.compile(fnmatch.translate(name), re.IGNORECASE), t) for name, t in named.items() if is_glob(name)]
        # Globs of protected tools first: a general one must not take a protected tool.
        self._globs = sorted(globs, key=lambda entry: entry[1].kind != "protected")
        self._keys = keys
        self._range_keys = frozenset((*keys.first, *keys.count, *keys.last))
        self._target_keys = frozenset((*keys.path, *keys.pair))
        self._narrowing_keys = frozenset(keys.narrows)
        self._plain_keys = self._target_keys - self._range_keys - self._narrowing_keys
        self._many_keys = frozenset(keys.many)

    def find(self, name: str) -> Tool:
        """Return the tool *name*: exactly, without its server's prefix, in any case, by a glob; else an unknown one."""
        bare = name.rpartition("__")[2].rpartition(".")[2]
        for candidate in (name, bare):
            if tool := self._exact.get(candidate):
                return tool
        for candidate in (name.lower(), bare.lower()):
            if tool := self._folded.get(candidate):
                return tool
        return next((tool for pattern, tool in self._globs if pattern.match(name) or pattern.match(bare)), UNKNOWN)

    def call(self, name: str, arguments: str) -> Call:
        """Return the facts of one call."""
        [call] = self.calls([(name, arguments)])
        return call

    def calls(self, named: Sequence[tuple[str, str]]) -> list[Call]:
        """Return the facts of calls, each a name and arguments; ``ONE_CALL`` characters are parsed at a time."""
        calls: list[Call] = []
        for run in runs([len(arguments) for _, arguments in named]):
            parsed = self._tools_and_values(named[run])
            calls += [self._call(*texts, *values) for texts, values in zip(named[run], parsed, strict=True)]
        return calls

    def _call(self, name: str, arguments: str, tool: Tool, values: Any) -> Call:
        """Return the facts of one call of *tool*; *values* are its decoded arguments."""
        if tool.kind not in TARGETED:
            return Call(tool.kind)
        paths = list(dict.fromkeys(map(_normalised, self._paths(tool, values, arguments))))[:MOST_PATHS]
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        first, last = self._range(tool, values)
        repeat_key = 0
        if tool.kind in REPEATABLE and isinstance(values, dict):
            repeat_key = _repeat_key(name, values, arguments)
        if len(arguments) > ONE_CALL and is_large(arguments.encode("utf-8", "replace")):
            dismantle(values)
        digests, name_digests = tuple(map(hash, paths)), tuple(map(hash, names))
        return Call(tool.kind, repeat_key, digests, name_digests, first, last, tool.limit)

    def targets(self, name: str, arguments: str) -> list[str]:
        """Return the paths that a call names, as the client wrote them."""
        [(tool, values)] = self._tools_and_values([(name, arguments)])
        if tool.kind not in TARGETED:
            return []
        return list(dict.fromkeys(self._paths(tool, values, arguments)))

    def subject(self, arguments: str) -> str:
        """Return the subject of a call without a path, such as its query; empty if it has none."""
        [values] = parse_each([arguments])
        if not isinstance(values, dict):
            return ""
        for key in self._keys.about:
            text = values.get(key)
            if isinstance(text, str) and text.strip():
                return text
        return ""

    def _tools_and_values(self, named: Sequence[tuple[str, str]]) -> list[tuple[Tool, Any]]:
        """Return the tool of each call and the values of its arguments, which are only read if the kind needs them."""
        tools = [self.find(name) for name, _ in named]
        needed = [at for at, tool in enumerate(tools) if tool.by or tool.kind in TARGETED]
        found: list[tuple[Tool, Any]] = [(tool, None) for tool in tools]
        for at, values in zip(needed, parse_each([named[at][1] for at in needed]), strict=True):
            tool = tools[at]
            if tool.by:
                tool = _case(tool, values)
            found[at] = tool, values
        return found

    def _paths(self, tool: Tool, values: Any, arguments: str) -> list[str]:
        """Return the paths in a call's arguments, as the client wrote them; *values* are the decoded arguments."""
        paths: list[str] = []
        patches: list[Any] = []
        if isinstance(values, dict):
            patches = [values.get(key) for key in tool.patch]
        elif tool.patch:
            patches = [arguments]
        for patch in patches:
            if isinstance(patch, str):
                paths += _HEADER.findall(patch)
        if isinstance(values, dict):
            keys = tool.path or self._keys.path
            paths += _texts(values, keys)
            if not self._many_keys.isdisjoint(values):
                paths += _listed_paths(values, self._keys.many, keys)
        return paths

    def _range(self, tool: Tool, values: Any) -> tuple[int, int]:
        """Return the first and last line, counted from one; last 0 for the end, first 0 if the range is not known."""
        keys = self._keys
        if not isinstance(values, dict):
            return UNKNOWN_RANGE
        if not self._plain_keys.issuperset(values) and self._has_unknown_limit(tool, values):
            return UNKNOWN_RANGE
        for key in keys.pair:
            if values.get(key):
                return _pair_range(values[key])
        if self._range_keys.isdisjoint(values):
            return 1, 0
        first, count, last = (_figure(values, group) for group in (keys.first, keys.count, keys.last))
        if tool.unit != "lines" and (first, count, last) != (None, None, None):
            return UNKNOWN_RANGE
        return _line_range(first, count or 0, last or 0, tool.base)

    def _has_unknown_limit(self, tool: Tool, values: Mapping[str, Any]) -> bool:
        """Return True if a figure or the name of a part may limit the call in an unknown way.

        Under an unusual key a figure may be a range of anything: bytes, pages, the last lines.
        """
        narrows = self._narrowing_keys
        if tool.kind == "file_read" and not narrows.isdisjoint(values) and any(values.get(key) for key in narrows):
            return True
        for key, value in values.items():
            if key in self._range_keys:
                if _is_no_figure(value):
                    return True
            elif key not in self._target_keys and key not in tool.path and _holds_figure(value):
                return True
        return False


NO_TOOLS = ToolMap({})
"""A table without tools: every call is of an unknown kind."""


def _case(tool: Tool, values: Any) -> Tool:
    """Return the case of *tool* that the arguments *values* select."""
    if not isinstance(values, dict):
        return UNKNOWN
    action = values.get(tool.by)
    if not isinstance(action, str):
        return UNKNOWN
    return tool.cases.get(action) or tool.cases.get("*", UNKNOWN)


def _repeat_key(name: str, values: Any, arguments: str) -> int:
    """Return a number, never zero, that is equal for equal calls; the text of large *arguments* must be equal, too."""
    text = arguments
    if len(arguments) <= ONE_CALL:
        try:
            text = msgspec.json.encode(values, order="deterministic").decode()
        except (UnicodeError, TypeError):  # lone surrogates, and numbers that Python does not hold
            text = _SORTED.encode(values)
    return hash(f"{name}\0{text}") or 1


def is_glob(name: str) -> bool:
    """True if *name* is a pattern: https://docs.python.org/3/library/fnmatch.html"""
    return any(char in name for char in "*?[")


def _normalised(path: str) -> str:
    path = path.strip()
    if "\\" not in path and "//" not in path and "./" not in path:
        return path
    return _SLASHES.sub("/", _DOTS.sub("", _SLASHES.sub("/", path)))


def _listed_paths(values: Mapping[str, Any], lists: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the paths under the keys *lists*: each has a list of paths or of objects with a path, or a single one."""
    paths: list[str] = []
    for key in lists:
        elements = values.get(key)
        if elements is None:
            continue
        if not isinstance(elements, list):
            elements = [elements]
        for element in elements:
            if isinstance(element, str) and element:
                paths.append(element)
            elif isinstance(element, dict):
                paths += _texts(element, keys)
    return paths


def _texts(values: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the texts under *keys* that are not empty."""
    present = map(values.get, keys)
    return [value for value in present if value and isinstance(value, str)]


def _line_range(first: int | None, count: int, last: int, base: int) -> tuple[int, int]:
    """Return the range of *count* lines from *first* on, or to *last*; *base* is the number of a file's first line."""
    if min(first or 0, count, last) < 0:
        return UNKNOWN_RANGE  # counted from the end
    start = 1
    if first is not None:
        start = max(1, first + 1 - base)
    if count and not last:
        last = start + count - 1
    return start, last


def _pair_range(pair: Any) -> tuple[int, int]:
    """Return the range in a list of the first and the last line; a last one below zero leaves it open."""
    if not isinstance(pair, list) or len(pair) != 2:
        return UNKNOWN_RANGE
    first, last = pair
    if type(first) is not int or type(last) is not int or first <= 0:
        return UNKNOWN_RANGE
    return first, max(0, last)


def _figure(values: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Return the first figure under one of *keys*; models also write figures as texts. None if there is none."""
    for key in keys:
        value: Any = values.get(key)
        if value is not None and (type(value) is int or _is_digits(value)):
            return int(value)
    return None


def _is_digits(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= LONGEST_FIGURE


def _is_no_figure(value: Any) -> bool:
    """Return True if *value* is set and is no figure."""
    return not (value is None or isinstance(value, int) or _is_digits(value))


def _holds_figure(value: Any) -> bool:
    """Return True if a figure, or a range of lines as a text, is anywhere in *value*."""
    stack = [value]
    while stack:
        node = stack.pop()
        # Exact types are fast, and parsed JSON has no other lists and objects.
        if type(node) is dict:
            stack += node.values()
        elif type(node) is list:
            stack += node
        elif _is_figure(node):
            return True
    return False


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_RANGE and _LINES.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)

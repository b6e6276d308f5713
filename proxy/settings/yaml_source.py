"""Reads YAML with line numbers, and records for every value the file, variable or flag that it came from.

PyYAML, not ruamel.yaml, which edits the clients' files: with libyaml it reads the packaged files in 17 ms, pure Python
in 200 ms, and that is a fifth of a start. Values are typed by YAML 1.2's core schema
(https://yaml.org/spec/1.2.2/#103-core-schema). ``${NAME}`` and ``${NAME:-default}`` are filled in as by Docker Compose
(https://docs.docker.com/reference/compose-file/interpolation).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

import msgspec
import yaml
from pydantic import BaseModel, ValidationError

from proxy.settings.problems import Path, Problem, SettingsError, key_name

M = TypeVar("M", bound=BaseModel)

MOST_VALUES: Final = 20_000
"""Values of one file at most: aliases can make a few lines expand into billions. Real files have some hundred."""

DEEPEST: Final = 32
"""Levels of nesting at most."""

LISTS: Final[frozenset[Path]] = frozenset({("upstreams",), ("models",)})
"""Lists whose entries have names."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^{}\\\n]|\\.)*))?\}")
_REFERENCE = re.compile(r"\$\$\{|" + _VARIABLE.pattern + r"|\$\{")
# A brace ends a plain scalar inside {...}, so `{key: ${NAME}}` would be invalid YAML: the braces of references are
# replaced by private-use characters while the text is parsed. These are one character too, so columns stay right.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_UNSHIELD = str.maketrans({_OPEN: "{", _CLOSE: "}"})


class _Loader(yaml.CSafeLoader):
    """YAML 1.2's core scalars: `on` and `off` are words and 010 is ten, unlike in PyYAML's YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way to replace them


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), None)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$"), None
)

_TAG = "tag:yaml.org,2002:"


class Origin(msgspec.Struct, frozen=True):
    """The origin of a value: a file and its line, an environment variable, or a flag."""

    file: str
    line: int | None = None


class Source(msgspec.Struct):
    """Plain values, their origins by path, and the problems met so far."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)
    origins: dict[Path, Origin] = msgspec.field(default_factory=dict)
    problems: list[Problem] = msgspec.field(default_factory=list)
    file: str = "the configuration"

    def origin(self, path: Path) -> Origin:
        """Return the origin of the value at *path*, or of its nearest parent that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return Origin(self.file)

    def add_problem(self, path: Path, message: str, remedy: str) -> None:
        """Add a problem with the value at *path*."""
        at = self.origin(path)
        self.problems.append(Problem(at.file, at.line, key_name(path), message, remedy))


def read_yaml(file: FilePath, environ: Mapping[str, str]) -> Source:
    """Return the values of *file* with ``${NAME}`` filled in from *environ*. Problems are collected, not raised.

    Raises ``SettingsError`` if the file cannot be read or is no YAML.
    """
    source = Source(file=str(file))
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = read_failure(error)
        remedy = "Give the path of a readable YAML file."
        if isinstance(error, UnicodeDecodeError):
            remedy = "Save it as UTF-8; PowerShell's `>` may write UTF-16."
        problem = Problem(str(file), None, "", f"cannot be read: {reason}", remedy)
        raise SettingsError([problem]) from error
    node = _compose(text, str(file))
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"):
        return source
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        problem = Problem(str(file), line, "", "the file is not a mapping", "Write sections such as `server:`.")
        raise SettingsError([problem])
    builder = _ValueBuilder(source, environ)
    values = builder.build(node, ())
    # Of a file that is too large a part was read: what is missing in it would be thousands of problems.
    if not builder.is_too_large:
        source.values = values
    return source


def read_table(file: FilePath, model: type[M], packaged: str) -> M:
    """Return the data in *file*, which has the shape of the file *packaged*. Raises ``SettingsError``."""
    source = read_yaml(file, {})
    problems = list(source.problems)
    try:
        table = model.model_validate(source.values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            origin = source.origin(detail["loc"])
            remedy = f"Write it in the shape of the packaged {packaged}."
            problems.append(Problem(origin.file, origin.line, key_name(detail["loc"]), detail["msg"], remedy))
        raise SettingsError(problems) from None
    if problems:
        raise SettingsError(problems)
    return table


def read_failure(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file could not be read as text."""
    if isinstance(error, OSError):
        return str(error.strerror)
    return "it is not UTF-8 text"


def parse_inline(text: str) -> Any:
    """Return the value of YAML such as ``[a, b]``, as an environment variable may hold it.

    Raises ``ValueError`` if *text* is no YAML.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or "it is not YAML") from error
    if node is None:
        return None
    source = Source()
    value = _ValueBuilder(source, None).build(node, ())
    if source.problems:
        raise ValueError(source.problems[0].message)
    return value


def _compose(text: str, file: str) -> yaml.Node | None:
    """Return the root node of *text*, None if it is empty. Raises ``SettingsError`` with the line and a remedy."""
    shielded = _VARIABLE.sub(lambda match: match[0].replace("{", _OPEN).replace("}", _CLOSE), text)
    try:
        return yaml.compose(shielded, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        message = getattr(error, "problem", None) or str(error).splitlines()[0]
        remedy = "Check the indentation, the quotes and the brackets around this line."
        if "alphabetic or numeric" in message:  # the parser's words for a * or & with no name behind it
            remedy = 'Put a glob that begins with * or & in quotes: "*".'
        elif "tab" in message or "start any token" in message:
            remedy = "Indent with spaces, not tabs, and quote values that begin with @, ` or %."
        elif "escape character" in message or "hexdecimal" in message:  # both as PyYAML spells them
            remedy = r"Put a path with backslashes in single quotes, or in none: 'C:\Users\me'."
        line = None
        if mark is not None:
            line = mark.line + 1
        raise SettingsError([Problem(file, line, "", f"not valid YAML: {message}", remedy)]) from error


class _ValueBuilder:
    """Turns nodes into plain values and records their lines. If *environ* is None, ``${NAME}`` stays as it is."""

    def __init__(self, source: Source, environ: Mapping[str, str] | None) -> None:
        self._source = source
        self._environ = environ
        self._values_left = MOST_VALUES
        self.is_too_large = False

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._values_left -= 1
        if self._values_left < 0 or len(path) > DEEPEST:
            self._add_size_problem(path)
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                self._record_line((*path, index), child)
                items.append(self.build(child, (*path, index)))
            return items
        return self._scalar(node, path)

    def _add_size_problem(self, path: Path) -> None:
        """Add one problem for all values that are too many or too deep, and read no further values."""
        if not self.is_too_large:
            self._source.add_problem(path, "too many or too deeply nested values", "Write it without aliases (*name).")
        self.is_too_large, self._values_left = True, 0

    def _record_line(self, path: Path, node: yaml.Node) -> None:
        self._source.origins[path] = Origin(self._source.file, node.start_mark.line + 1)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._record_line((*path, "?"), key_node)
                self._source.add_problem((*path, "?"), "a key must be a word", "Write `name: value`.")
                continue
            key = key_node.value.translate(_UNSHIELD)
            here = (*path, key)
            first = self._source.origins.get(here)
            self._record_line(here, key_node)
            if key in values and first is not None:
                self._source.add_problem(here, f"set twice, first in line {first.line}", "Keep one of the two.")
                continue
            values[key] = self.build(child, here)
        return values

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = str(node.value).translate(_UNSHIELD)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                return float(text)
        except ValueError:
            self._source.add_problem(path, f"is no {kind}", "Write a plain number, or leave the tag out.")
            return None
        if kind != "str":
            self._source.add_problem(path, f"has the tag {node.tag!r}, which is not supported", "Leave the tag out.")
            return None
        if self._environ is None:
            return text
        return self._expand(text, path, self._environ)

    def _expand(self, text: str, path: Path, environ: Mapping[str, str]) -> str:
        """Return *text* with its variables filled in; empty if one of them is a problem."""

        def fill(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            if match[0] == "${":
                remedy = "Write ${NAME} or ${NAME:-default}; for a literal ${ write $${."
                self._source.add_problem(path, "${ begins no variable that is named and closed", remedy)
                return ""
            if name is None:
                return "${"
            value = environ.get(name) or default
            if value is None:
                self._add_unset_problem(name, path, environ)
            return value or ""

        problems_before = len(self._source.problems)
        filled = _REFERENCE.sub(fill, text)
        if len(self._source.problems) > problems_before:
            return ""  # validating the rest of the text would report a second problem of the same value
        return filled

    def _add_unset_problem(self, name: str, path: Path, environ: Mapping[str, str]) -> None:
        """Add a problem: the variable *name* has neither value nor default."""
        message = f"the environment variable {name} is not set"
        if name in environ:
            message = f"the environment variable {name} is empty"
        close = difflib.get_close_matches(name, environ, n=1, cutoff=0.75)
        if close:
            message += f" (did you mean {close[0]}?)"
        self._source.add_problem(path, message, f"Set it, or give a default: ${{{name}:-}} for none.")


def set_value(source: Source, path: tuple[str, ...], value: Any, origin: Origin) -> None:
    """Set *value* at *path* in *source*.

    An entry of a list is addressed by its number or its ``name``, in which case does not matter and ``-`` equals ``_``.
    An unknown name adds an entry.
    """
    parent: Any = source.values
    reached: Path = ()
    *sections, last = path
    for step in sections:
        at = _key_of_step(parent, step, reached)
        reached = (*reached, at)
        source.origins.setdefault(reached, origin)
        if isinstance(parent, dict) and not isinstance(parent.get(at), dict | list):
            parent[at] = _empty_container(reached)
        parent = parent[at]
    at = _key_of_step(parent, last, reached)
    reached = (*reached, at)
    source.origins[reached] = origin
    parent[at] = value
    _drop_origins_below(source, reached)


def _empty_container(path: Path) -> list[Any] | dict[str, Any]:
    if path in LISTS:
        return []
    return {}


def _key_of_step(parent: Any, step: str, path: Path) -> str | int:
    """Return the key or index of *step* in *parent*, the value at *path*. Raises ``ValueError`` for a plain value."""
    if isinstance(parent, dict):
        return step
    if isinstance(parent, list):
        return _index_or_new_entry(parent, step)
    raise ValueError(f"{key_name(path)} is no list or section")


def _index_or_new_entry(entries: list[Any], step: str) -> int:
    """Return the index of the entry of that name or number; add one if there is none."""
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and _normalised(entry.get("name")) == _normalised(step):
            return index
    if step.isdecimal() and int(step) <= len(entries):
        if int(step) == len(entries):
            entries.append({})
        return int(step)
    entries.append({"name": step})
    return len(entries) - 1


def _normalised(name: object) -> str:
    return str(name).casefold().replace("-", "_")


def _drop_origins_below(source: Source, path: Path) -> None:
    for other in list(source.origins):
        if len(other) > len(path) and other[: len(path)] == path:
            del source.origins[other]


def sections_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every mapping in *value* with its path, outermost first."""
    if isinstance(value, dict):
        yield path, value
        for key, child in list(value.items()):
            yield from sections_in(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from sections_in(child, (*path, index))

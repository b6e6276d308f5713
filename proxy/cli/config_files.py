"""Clients' configuration files as documents: parsed, changed value by value, and written with their comments.

A path leads to a value. Each of its steps is a key of a mapping, or members that identify an element of a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from io import StringIO
from itertools import pairwise
from typing import Any, Final, Literal

Format = Literal["json", "toml", "yaml", "env"]
Step = str | Mapping[str, str]
"""One step of a path: a key, or members that identify an element of a list."""

MISSING: Final = object()
"""The value at a path that leads nowhere; None is a value of JSON and YAML."""

_INDENT = re.compile(r"\n([ \t]+)\S")
_UNQUOTED = re.compile(r"[\w.:/@-]+")
"""Values of an env file that need no quotes."""


class DocumentError(Exception):
    """A document that cannot be read or changed; the text completes a sentence that begins with the file's name."""


def parse(text: str, file_format: Format) -> Any:
    """Return the document in *text*; None if it is empty. Raises ``DocumentError``."""
    try:
        document = _parse(text, file_format)
    except Exception as error:  # each library has its own errors; all of them mean that the text is malformed
        raise DocumentError(f"cannot be read as {file_format}: {_first_line(error)}") from error
    if document is not None and not isinstance(document, MutableMapping | MutableSequence):
        raise DocumentError("holds neither a table nor a list")
    return document


def _parse(text: str, file_format: Format) -> Any:
    match file_format:
        case "json":
            if not text.strip():
                return None
            return json.loads(text)
        case "toml":
            import tomlkit

            return tomlkit.parse(text)
        case "yaml":
            return _yaml().load(text)
        case "env":
            return _EnvFile(text)


def dump(document: Any, file_format: Format, original: str = "") -> str:
    """Return *document* as text. JSON gets the indentation of the *original* text, or two spaces."""
    match file_format:
        case "json":
            indent: str | int = 2
            if (indented := _INDENT.search(original)) is not None:
                indent = indented[1]
            return _json(document, indent) + "\n"
        case "toml":
            import tomlkit

            return tomlkit.dumps(document)
        case "yaml":
            stream = StringIO()
            _yaml().dump(document, stream)
            return stream.getvalue()
        case "env":
            return str(document)


def _json(document: Any, indent: str | int) -> str:
    """Return *document* as JSON, with letters as they are, unless half of a surrogate pair is among them."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return json.dumps(document, indent=indent)  # UTF-8 has no such letter: it stays escaped
    return text


def _yaml() -> Any:
    # The settings are read with PyYAML, which is faster and loses comments; these files must keep theirs.
    # https://yaml.dev/doc/ruamel.yaml/
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


class _EnvFile(dict[str, str]):
    """An env file: the variables that it sets. As a string it is the file's text, unchanged lines included."""

    def __init__(self, text: str) -> None:
        from dotenv.parser import parse_stream

        self._bindings = list(parse_stream(StringIO(text)))
        super().__init__({binding.key: binding.value or "" for binding in self._bindings if binding.key})

    def __str__(self) -> str:
        """Return the text: changed variables on their old lines, new ones at the end, everything else as it was."""
        lines, new = [], dict(self)
        for binding in self._bindings:
            if binding.key is None:
                lines.append(binding.original.string)
                continue
            if binding.key not in new:  # it was removed
                continue
            value = new.pop(binding.key)
            line = binding.original.string
            if value != (binding.value or ""):
                line = _assignment(binding.key, value)
            lines.append(line)
        text = "".join(lines)
        if text and not text.endswith("\n"):
            text += "\n"
        return text + "".join(_assignment(name, value) for name, value in new.items())


def _assignment(name: str, value: str) -> str:
    if not _UNQUOTED.fullmatch(value):
        escaped = value.replace("'", "\\'")
        value = f"'{escaped}'"
    return f"{name}={value}\n"


def get(document: Any, path: Sequence[Step]) -> Any:
    """Return the value at *path*; ``MISSING`` if there is none."""
    node = document
    for step in path:
        node = _child(node, step)
        if node is MISSING:
            break
    return node


def put(document: Any, path: Sequence[Step], value: Any) -> None:
    """Set the value at *path* and create the containers that lead to it. Raises ``DocumentError``."""
    node = document
    for step, following in pairwise(path):
        child = _child(node, step)
        if child is MISSING or child is None:
            empty: Any = []
            if isinstance(following, str):
                empty = {}
            _set(node, step, empty, path)
            child = _child(node, step)
        node = child
    _set(node, path[-1], value, path)


def remove(document: Any, path: Sequence[Step]) -> None:
    """Delete the value at *path*, and each container above it that is empty afterwards."""
    container, step = get(document, path[:-1]), path[-1]
    if isinstance(step, str):
        del container[step]
    else:
        del container[_index(container, step)]
    if len(path) > 1 and not container:
        remove(document, path[:-1])


def _child(node: Any, step: Step) -> Any:
    if isinstance(step, str) and isinstance(node, Mapping):
        return node.get(step, MISSING)
    if not isinstance(step, str) and (index := _index(node, step)) is not None:
        return node[index]
    return MISSING


def _index(node: Any, members: Mapping[str, str]) -> int | None:
    """Return the position of the list element that has all *members*; None if there is none."""
    if not isinstance(node, Sequence):
        return None
    for index, element in enumerate(node):
        if isinstance(element, Mapping) and members.items() <= element.items():
            return index
    return None


def _set(node: Any, step: Step, value: Any, path: Sequence[Step]) -> None:
    if isinstance(step, str) and isinstance(node, MutableMapping):
        node[step] = value
    elif not isinstance(step, str) and isinstance(node, MutableSequence):
        index = _index(node, step)
        if index is None:
            node.append(value)
        else:
            node[index] = value
    else:
        raise DocumentError(f"has another kind of value where {path_name(path)} should be")


def plain(value: Any) -> Any:
    """Return *value* as a value of JSON, without the types of its format's library; None for ``MISSING``."""
    if value is MISSING:
        return None
    if hasattr(value, "unwrap"):  # tomlkit's items
        value = value.unwrap()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def path_name(path: Sequence[Step]) -> str:
    """Return *path* for messages, such as ``provider.ullage.models``."""
    return ".".join(map(_step_name, path))


def _step_name(step: Step) -> str:
    if isinstance(step, str):
        return step
    return "/".join(step.values())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

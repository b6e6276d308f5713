"""Points a client at the proxy, and takes that back: its own file, its own format, nothing else in it touched.

What a file was before is kept in a journal in the proxy's data directory (mode 0600: such files may hold keys), so
that it can be put back.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from proxy.cli.clients import Change, Client, ClientFacts, File, Format, Step, changes, fill_in

JOURNAL = "connected.json"
BY_HAND = "Add what `ullage connect` prints without --write by hand (comments in JSON cannot be kept)."
_LACKING = object()
_INDENT = re.compile(r"\n([ \t]+)\S")


class ConnectError(Exception):
    """A file that cannot be changed safely; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class ClientFile:
    """A client's file on this machine, and what it is to say."""

    path: Path
    format: Format
    changes: tuple[Change, ...]


def connect(
    name: str, client: Client, facts: ClientFacts, environ: Mapping[str, str], journal: Path | None
) -> list[str]:
    """Lines for the user: the configuration itself, or with a *journal* the files that now hold it.

    Raises ``ConnectError`` and ``OSError``.
    """
    said = []
    for place in client_files(client, facts, environ):
        if journal is None:
            said.append(f"# {place.path}\n{rendered(place)}")
        else:
            write(name, place, journal)
            said.append(f"written: {place.path}")
    if journal is not None and not said:
        said.append(f"# {client.title} has no file to write. By hand:")
    said += [f"export {variable}={fill_in(value, facts)}" for variable, value in client.environment.items()]
    said += [line for line in (fill_in(each, facts) for each in client.commands) if line is not None]
    said += [f"# The key is read from {facts.key}."] if facts.key else []
    return [*said, *([f"# {client.note}"] if client.note else [])]


def client_files(client: Client, facts: ClientFacts, environ: Mapping[str, str]) -> list[ClientFile]:
    """The files of *client* with what each is to say."""
    return [ClientFile(_path(file, environ), file.format, tuple(changes(file, facts))) for file in client.files]


def rendered(place: ClientFile) -> str:
    """What *place* is to say, as a file of its own."""
    document = _load("", place)
    for change in place.changes:
        _put(document, change.at, change.to)
    return _dump(document, place.format)


def write(name: str, place: ClientFile, journal: Path) -> None:
    """Set the values of *place* in its file, made if it is not there. Raises ``ConnectError`` and ``OSError``."""
    text = place.path.read_text("utf-8") if place.path.exists() else ""
    document = _load(text, place)
    before = []
    for change in place.changes:
        found = _get(document, change.at)
        if change.missing and found is not _LACKING:
            continue
        was = {} if found is _LACKING else {"was": _plain(found)}
        before.append({"at": list(change.at), "wrote": change.to, **was})
        _put(document, change.at, change.to)
    changed = _dump(document, place.format, text)
    kept = _journal(journal)
    # Written twice, what was there before us is still what the first time found.
    entry = {"format": place.format, "before": text, "values": before}
    entry = kept.setdefault(name, {}).setdefault(str(place.path), entry)
    entry["after"] = changed
    _replace(journal, json.dumps(kept, indent=1), 0o600)
    _replace(place.path, changed, None)


def undo(name: str, client: Client, journal: Path) -> list[str]:
    """Put back what was there before; lines for the user: the files changed, and what somebody else changed since.

    Raises ``ConnectError`` and ``OSError``.
    """
    kept = _journal(journal)
    files = kept.pop(name, {})
    said = []
    for path, entry in files.items():
        file = Path(path)
        if not file.exists():
            continue
        restored, others = _restored(file, entry)
        said += [f"changed since, left alone: {path}: {other}" for other in others]
        if restored:
            _replace(file, restored, None)
        else:
            file.unlink()
        said.append(f"changed back: {path}")
    if files:
        _replace(journal, json.dumps(kept, indent=1), 0o600)
    return said or [f"Nothing of {client.title} was written by `ullage connect --write`."]


def _restored(file: Path, entry: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the text that *file* had before, and the values in it that were changed since and stay."""
    text = file.read_text("utf-8")
    if text == entry["after"]:
        return entry["before"], []
    return _taken_back(text, ClientFile(file, entry["format"], ()), entry["values"])


def _taken_back(text: str, place: ClientFile, values: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """*text* without what was written into it, and the values that are not what was written any more."""
    document, others = _load(text, place), []
    for value in reversed(values):
        if _plain(_get(document, value["at"])) != value["wrote"]:
            others.append(_spelled(value["at"]))
        elif "was" in value:
            _put(document, value["at"], value["was"])
        else:
            _remove(document, value["at"])
    return _dump(document, place.format, text) if document else "", others


def _path(file: File, environ: Mapping[str, str]) -> Path:
    moved = environ.get(file.home, "") if file.home else ""
    path = Path(moved) / Path(file.path).name if moved else Path(file.path)
    return path.expanduser().resolve()


def _journal(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConnectError(f"{path} is not what was written there: {error}. Move it away to go on.") from error
    if not isinstance(kept, dict):
        raise ConnectError(f"{path} is not what was written there. Move it away to go on.")
    return kept


def _replace(path: Path, text: str, mode: int | None) -> None:
    """Write *path* as a whole or not at all, keeping its permissions where it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(mode or (path.stat().st_mode & 0o777 if path.exists() else 0o600))
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _load(text: str, place: ClientFile) -> Any:
    try:
        document = _read(text, place.format)
    except Exception as error:  # each format's library has errors of its own, and all mean the same here
        why = f"{place.path} cannot be read as {place.format}: {_first_line(error)}."
        raise ConnectError(f"{why} {BY_HAND}") from error
    if document is None:
        listed = place.changes and not isinstance(place.changes[0].at[0], str)
        return [] if listed else {}
    if not isinstance(document, MutableMapping | MutableSequence):
        raise ConnectError(f"{place.path} holds neither a table nor a list. {BY_HAND}")
    return document


def _read(text: str, form: Format) -> Any:
    if form == "json":
        return json.loads(text) if text.strip() else None
    if form == "toml":
        import tomlkit

        return tomlkit.parse(text)
    return _yaml().load(text) if form == "yaml" else _Lines(text)


def _dump(document: Any, form: Format, like: str = "") -> str:
    """The document as text; JSON with the indentation of the text it was."""
    if form == "json":
        indent = _INDENT.search(like)
        return json.dumps(document, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    if form == "toml":
        import tomlkit

        return tomlkit.dumps(document)
    if form == "yaml":
        stream = StringIO()
        _yaml().dump(document, stream)
        return stream.getvalue()
    return str(document)


def _yaml() -> Any:
    from ruamel.yaml import YAML

    kind = YAML()
    kind.preserve_quotes = True
    kind.width = 4096
    return kind


class _Lines(dict[str, str]):
    """An env file: its lines as they are, and the variables they set."""

    def __init__(self, text: str) -> None:
        from dotenv.parser import parse_stream

        self._bindings = list(parse_stream(StringIO(text)))
        super().__init__({each.key: each.value or "" for each in self._bindings if each.key})

    def __str__(self) -> str:
        """The file's text: lines of variables that were set or removed are new or gone, all others as they were."""
        kept, open_names = [], dict(self)
        for binding in self._bindings:
            if binding.key is None:
                kept.append(binding.original.string)
            elif binding.key in open_names:
                value = open_names.pop(binding.key)
                same = value == (binding.value or "")
                kept.append(binding.original.string if same else f"{binding.key}={_quoted(value)}\n")
        text = "".join(kept)
        if text and not text.endswith("\n"):
            text += "\n"
        return text + "".join(f"{name}={_quoted(value)}\n" for name, value in open_names.items())


def _quoted(value: str) -> str:
    return (
        value if value and all(c.isalnum() or c in "-_.:/@" for c in value) else "'" + value.replace("'", "\\'") + "'"
    )


def _get(document: Any, at: Sequence[Step]) -> Any:
    for step in at:
        document = _child(document, step)
        if document is _LACKING:
            return _LACKING
    return document


def _child(node: Any, step: Step) -> Any:
    if isinstance(step, str):
        return node[step] if isinstance(node, Mapping) and step in node else _LACKING
    if not isinstance(node, Sequence):
        return _LACKING
    return next((each for each in node if isinstance(each, Mapping) and step.items() <= each.items()), _LACKING)


def _put(document: Any, at: Sequence[Step], value: Any) -> None:
    node = document
    for step, following in zip(at, [*at[1:], None], strict=True):
        if following is None:
            _set(node, step, value, at)
            return
        inner = _child(node, step)
        if inner is _LACKING or inner is None:
            _set(node, step, {} if isinstance(following, str) else [], at)
            inner = _child(node, step)
        node = inner


def _set(node: Any, step: Step, value: Any, at: Sequence[Step]) -> None:
    if isinstance(step, str) and isinstance(node, MutableMapping):
        node[step] = value
    elif not isinstance(step, str) and isinstance(node, MutableSequence):
        found = _child(node, step)
        if found is _LACKING:
            node.append(value)
        else:
            node[[each is found for each in node].index(True)] = value
    else:
        raise ConnectError(f"Something else stands where {_spelled(at)} should be. {BY_HAND}")


def _remove(document: Any, at: Sequence[Step]) -> None:
    """Take the value away, and what it leaves empty above it."""
    for depth in range(len(at), 0, -1):
        node, step = _get(document, at[: depth - 1]), at[depth - 1]
        found = _child(node, step)
        if depth < len(at) and found:
            return
        if isinstance(step, str):
            del node[step]
        else:
            node.remove(found)


def _plain(value: Any) -> Any:
    """*value* without what its format's library adds to it."""
    if value is _LACKING:
        return None
    if hasattr(value, "unwrap"):
        value = value.unwrap()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _spelled(at: Sequence[Step]) -> str:
    return ".".join(step if isinstance(step, str) else "/".join(step.values()) for step in at)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

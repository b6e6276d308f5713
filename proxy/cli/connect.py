"""``ullage connect``: points a client at the proxy and undoes it, changing nothing else in the client's own files.

A journal in the proxy's data directory has the text of each file before the change. Its mode is 0600, because such
files may have keys.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from proxy.cli import config_files
from proxy.cli.clients import Client, ClientFacts, File, FileSetting, fill_in, filled_settings
from proxy.cli.config_files import MISSING, DocumentError, Format

CONFIG_HOME: Final = Path("~/.config")
"""The default of ``XDG_CONFIG_HOME``: https://specifications.freedesktop.org/basedir-spec/latest/"""

JOURNAL: Final = "connected.json"
BY_HAND: Final = "Add what `ullage connect` prints without --write by hand (comments in JSON cannot be kept)."


class ConnectError(Exception):
    """A file that cannot be changed safely; the text has its name, the reason and a remedy."""


def reason(error: ConnectError | OSError) -> str:
    """Return the sentence for the user on a file that was not changed."""
    if isinstance(error, OSError):
        return f"{error.filename}: cannot be changed: {error.strerror}."
    return str(error)


@dataclass(frozen=True, slots=True)
class ClientFile:
    """A client's file on this machine, and the settings to make in it."""

    path: Path
    format: Format
    settings: tuple[FileSetting, ...]


def client_list(by_name: Mapping[str, Client]) -> str:
    """Return one line for each client: the name that ``connect`` takes, its title and its API."""
    return "\n".join(f"{name:16}{client.title} ({client.api})" for name, client in by_name.items())


def connect(
    name: str, client: Client, facts: ClientFacts, environ: Mapping[str, str], journal: Path | None
) -> list[str]:
    """Return lines for the user: the configuration itself, or the files written if there is a *journal*.

    Raises ``ConnectError`` and ``OSError``.
    """
    lines = []
    for file in client_files(client, facts, environ):
        if journal is None:
            lines.append(f"# {file.path}\n{render(file)}")
        else:
            write(name, file, journal)
            lines.append(f"written: {file.path}")
    if journal is not None and not lines:
        lines.append(f"# {client.title} has no file to write. By hand:")
    return lines + _instructions(client, facts)


def _instructions(client: Client, facts: ClientFacts) -> list[str]:
    """Return the user's steps apart from files: variables to export, commands to run, and notes as comments."""
    lines = [f"export {variable}={fill_in(value, facts)}" for variable, value in client.environment.items()]
    commands = [fill_in(command, facts) for command in client.commands]
    lines.extend(command for command in commands if command is not None)
    if facts.key:
        lines.append(f"# The key is read from {facts.key}.")
    if client.note:
        lines.append(f"# {client.note}")
    if client.takes_window and facts.window is None:
        lines.append(f"# {_window_advice(facts)}")
    return lines


def _window_advice(facts: ClientFacts) -> str:
    if facts.model is None:
        return "Without --model NAME neither a model nor its window is configured."
    return f"The window of {facts.model} is not known: give --window N to configure it."


def client_files(client: Client, facts: ClientFacts, environ: Mapping[str, str]) -> list[ClientFile]:
    """Return the files of *client*, with the settings that *facts* require."""
    return [ClientFile(_path(file, environ), file.format, tuple(filled_settings(file, facts))) for file in client.files]


def _path(file: File, environ: Mapping[str, str]) -> Path:
    """Return the path of *file*; environment variables may move its folder, or all of ~/.config."""
    path = Path(file.path)
    if folder := environ.get(file.home):
        path = Path(folder) / path.name
    elif (folder := environ.get("XDG_CONFIG_HOME")) and path.is_relative_to(CONFIG_HOME):
        path = folder / path.relative_to(CONFIG_HOME)
    return path.expanduser().resolve()


def render(file: ClientFile) -> str:
    """Return the text that *file* would have with our values alone."""
    document = _parse("", file)
    for setting in file.settings:
        config_files.put(document, setting.at, setting.value)
    return config_files.dump(document, file.format)


def write(name: str, file: ClientFile, journal: Path) -> None:
    """Set our values in *file*, which is created if it does not exist. Raises ``ConnectError`` and ``OSError``."""
    text = ""
    if file.path.exists():
        text = _read_text(file.path)
    document = _parse(text, file)
    values = _apply(file, document)
    changed = config_files.dump(document, file.format, text)
    # The journal first: if the second write fails, an undo finds the file as it was before and changes nothing.
    _record(journal, name, file.path, {"format": file.format, "before": text, "values": values, "after": changed})
    _write_atomically(file.path, changed, None)


def _apply(file: ClientFile, document: Any) -> list[dict[str, Any]]:
    """Set our values in *document*; return each with its path, and the value that it replaced if there was one."""
    values = []
    for setting in file.settings:
        present = config_files.get(document, setting.at)
        if setting.if_missing and present is not MISSING:
            continue
        value: dict[str, Any] = {"at": list(setting.at), "wrote": setting.value}
        if present is not MISSING:
            value["was"] = config_files.plain(present)
        values.append(value)
        try:
            config_files.put(document, setting.at, setting.value)
        except DocumentError as error:
            raise ConnectError(f"{file.path} {error}. {BY_HAND}") from error
    return values


def _record(journal: Path, name: str, path: Path, entry: Mapping[str, Any]) -> None:
    """Write the entry of one file to the journal, combined with that of an earlier write."""
    entries = _read_journal(journal)
    files = entries.setdefault(name, {})
    if earlier := files.get(str(path)):
        entry = _combined(earlier, entry)
    files[str(path)] = entry
    _write_atomically(journal, json.dumps(entries, indent=1), 0o600)


def _combined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a file that was written twice: the state before the first time, and all values.

    If the file was edited between the two, its old text must not replace it: ``before`` is None then.
    """
    values = {json.dumps(value["at"]): value for value in earlier["values"]}
    for value in later["values"]:
        path = json.dumps(value["at"])
        first = values.get(path)
        if first is not None and value.get("was") == first["wrote"]:
            value = {**first, "wrote": value["wrote"]}
        # Otherwise the user has edited the value meanwhile, and an undo restores that edit.
        values[path] = value
    before = earlier["before"]
    if earlier["after"] != later["before"]:
        before = None
    return {**later, "before": before, "values": list(values.values())}


def undo(name: str, client: Client, journal: Path) -> list[str]:
    """Restore the client's files; return lines for the user: files restored, and values that were changed since.

    Raises ``ConnectError`` and ``OSError``.
    """
    entries = _read_journal(journal)
    files = entries.pop(name, {})
    lines: list[str] = []
    for path, entry in files.items():
        if Path(path).exists():
            lines.extend(_undo_file(Path(path), entry))
    if files:
        _write_atomically(journal, json.dumps(entries, indent=1), 0o600)
    return lines or [f"Nothing of {client.title} was written by `ullage connect --write`."]


def _undo_file(path: Path, entry: Mapping[str, Any]) -> list[str]:
    """Restore the file at *path*, or delete it if nothing but our values was in it; return lines for the user."""
    text = _read_text(path)
    foreign: list[str] = []
    if entry["before"] is not None and text == entry["after"]:
        restored = entry["before"]
    else:
        restored, foreign = _without_our_values(text, path, entry)
    if restored:
        _write_atomically(path, restored, None)
    else:
        path.unlink()
    return [*(f"changed since, left alone: {path}: {name}" for name in foreign), f"changed back: {path}"]


def _without_our_values(text: str, path: Path, entry: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return *text* with the old values in place of ours, and the names of values that no longer are ours."""
    document, foreign = _parse(text, ClientFile(path, entry["format"], ())), []
    for value in reversed(entry["values"]):
        if config_files.plain(config_files.get(document, value["at"])) != value["wrote"]:
            foreign.append(config_files.path_name(value["at"]))
        elif "was" in value:
            config_files.put(document, value["at"], value["was"])
        else:
            config_files.remove(document, value["at"])
    if not document:
        return "", foreign
    return config_files.dump(document, entry["format"], text), foreign


def _read_text(path: Path) -> str:
    """Return the text of *path*, with its line ends as they are. Raises ``ConnectError`` and ``OSError``."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConnectError(f"{path} cannot be read: it is not UTF-8 text. {BY_HAND}") from error


def _parse(text: str, file: ClientFile) -> Any:
    """Return the document in *text*; an empty table or list, whichever *file* needs, if there is none."""
    try:
        document = config_files.parse(text, file.format)
    except DocumentError as error:
        raise ConnectError(f"{file.path} {error}. {BY_HAND}") from error
    if document is not None:
        return document
    if file.settings and not isinstance(file.settings[0].at[0], str):
        return []
    return {}


def _read_journal(path: Path) -> dict[str, Any]:
    """Return the journal: by client and path the file's text before and after, and each value set in it."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConnectError(f"{path} is not a journal of `ullage connect`: {error}. Move it away to go on.") from error
    if not isinstance(entries, dict):
        raise ConnectError(f"{path} is not a journal of `ullage connect`. Move it away to go on.")
    return entries


def _write_atomically(path: Path, text: str, mode: int | None) -> None:
    """Write *path* atomically, with *mode*; without one it has the permissions of the file there, or 0600."""
    if mode is None:
        mode = 0o600
        if path.exists():
            mode = path.stat().st_mode & 0o777
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file in the same directory, renamed: a client that reads meanwhile sees the old or the new text.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

"""Reads the settings from file, environment and flags: the only place that reads any of them."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from proxy.settings.problems import Path, Problem, SettingsError, key_name
from proxy.settings.settings import Settings, bad_references
from proxy.settings.tools import with_file
from proxy.settings.yaml_source import LISTS, Origin, Source, parse_inline, read_yaml, sections_in, set_value

PREFIX = "ULLAGE_"
SECRETS = ("api_key", "key", "other_keys", "admin_key", "access_keys", "allow")

Overrides = Mapping[tuple[str, ...], object]
"""Values of the command line by path; an entry of a list is named or numbered: ``("models", "*", ...)``."""


def load(path: str | FilePath | None, overrides: Overrides, environ: Mapping[str, str]) -> Settings:
    """Return the settings in force. Flags replace environment variables, these the file, and the file the defaults.

    *overrides* are the flags; variables in *environ* are called ``ULLAGE_SECTION__KEY``. Raises ``SettingsError`` with
    every problem.
    """
    source = Source() if path is None else read_yaml(FilePath(path), environ)
    _overlay_environment(source, environ)
    for key, value in overrides.items():
        set_value(source, key, value, Origin("the command line"))
    folder = FilePath.cwd() if path is None else FilePath(path).parent
    _read_secret_files(source, folder)
    settings = _validated(source)
    if source.problems or settings is None:
        raise SettingsError(sorted(source.problems, key=lambda problem: (problem.file, problem.line or 0)))
    return settings.model_copy(update={"tools": with_file(settings.tools, folder)})


def _validated(source: Source) -> Settings | None:
    """Return the settings; if they are invalid, add every problem to *source* and return None."""
    try:
        return Settings.model_validate(source.values)
    except ValidationError as error:
        details = [typing.cast("dict[str, Any]", each) for each in error.errors(include_url=False, include_input=False)]
    for detail in details:
        _add_validation_problem(source, detail)
    if all(detail["loc"] for detail in details):
        # pydantic checks the rules between sections only if every value is valid. Here they are checked as written.
        for path, message, remedy in bad_references(*_upstream_references(source.values)):
            source.add_problem(path, message, remedy)
    return None


def _upstream_references(values: Mapping[str, Any]) -> tuple[list[str], str, dict[int, str]]:
    """Return the upstreams' names, the default one's, and each model's upstream by index, as far as they are texts."""
    names = [entry["name"] for _, entry in _list_entries(values, "upstreams") if isinstance(entry.get("name"), str)]
    server = values.get("server")
    default = server.get("default_upstream") if isinstance(server, dict) else ""
    models = [(at, entry.get("upstream")) for at, entry in _list_entries(values, "models")]
    used = {at: upstream for at, upstream in models if isinstance(upstream, str)}
    return names, default if isinstance(default, str) else "", used


def _list_entries(values: Mapping[str, Any], key: str) -> list[tuple[int, dict[str, Any]]]:
    entries = values.get(key)
    if not isinstance(entries, list):
        return []
    return [(at, entry) for at, entry in enumerate(entries) if isinstance(entry, dict)]


def _overlay_environment(source: Source, environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        # Kubernetes sets ULLAGE_PORT and others for a service of that name; a variable without a section is not ours.
        # https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
        if not name.startswith(PREFIX) or (len(path) == 1 and path not in LISTS):
            continue
        if len(path) > 1 and path[-2] == "headers":
            path = (*path[:-1], path[-1].replace("_", "-"))  # no variable's name can hold a dash
        origin = Origin(f"environment variable {name}")
        try:
            value: object = parse_inline(environ[name]) if _is_container(path, environ[name]) else environ[name]
            set_value(source, path, value, origin)
        except ValueError as error:
            remedy = "Write it as in the file, on one line."
            source.problems.append(Problem(origin.file, None, key_name(path), str(error), remedy))


def _is_container(path: tuple[str, ...], text: str) -> bool:
    """True if the setting at *path* is a list or section, and *text* is written as one."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    kinds = {str, SecretStr, FilePath}
    return not any(inner in kinds for inner in _plain_types(_declared_type(path))) or _is_list(_declared_type(path))


def _is_list(annotation: object) -> bool:
    return any(typing.get_origin(inner) in (tuple, list, dict) for inner in _plain_types(annotation))


def _plain_types(annotation: object) -> list[Any]:
    """Return the plain types in *annotation*, those inside Annotated and unions included."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(annotation) for inner in _plain_types(part)]
    return [annotation]


def _declared_type(path: Path) -> object:
    """Return the declared type of the setting at *path*; None if there is none."""
    annotation: object = Settings
    for step in path:
        annotation = _member_type(annotation, step)
    return annotation


def _member_type(annotation: object, step: str | int) -> object:
    for inner in _plain_types(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found = inner.model_fields.get(str(step))
            return found.annotation if found else None
        if typing.get_origin(inner) is tuple:
            return typing.get_args(inner)[0]
        if typing.get_origin(inner) is dict:
            return typing.get_args(inner)[1]
    return None


def _read_secret_files(source: Source, folder: FilePath) -> None:
    for path, mapping in sections_in(source.values):
        for name in SECRETS:
            if mapping.get(f"{name}_file"):
                _read_secret_file(source, mapping, path, name, folder)


def _read_secret_file(source: Source, mapping: dict[str, Any], path: Path, name: str, folder: FilePath) -> None:
    """Set the secret *name* of the section at *path* from the file that the section names."""
    here = (*path, f"{name}_file")
    file = mapping[f"{name}_file"]
    if not isinstance(file, str) or not _declared_type(here):
        return
    if mapping.get(name):
        source.add_problem(here, f"{name} is set as well", f"Keep {name} or {name}_file.")
        return
    text = _read_secret(source, here, file, folder)
    if text:
        mapping[name] = text
        source.origins[(*path, name)] = source.origin(here)


def _read_secret(source: Source, path: Path, file: str, folder: FilePath) -> str:
    """Return the secret in *file*; if it cannot be read, add a problem for *path* and return an empty text."""
    try:
        text = (folder / FilePath(file).expanduser()).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        source.add_problem(path, f"{file} cannot be read: {reason}", "Give the path of a file that this user may read.")
        return ""
    if not text:
        source.add_problem(path, f"{file} is empty", "Write the secret into it.")
    return text


def _add_validation_problem(source: Source, detail: dict[str, Any]) -> None:
    where: Path = _setting_path(detail["loc"])
    context = detail.get("ctx", {})
    if detail["type"] == "field_problems":
        for below, message, remedy in context["problems"]:
            source.add_problem((*where, *below), message, remedy)
    elif detail["type"] == "extra_forbidden":
        source.add_problem(where, "there is no such key", _unknown_key_remedy(where))
    elif detail["type"] == "missing":
        source.add_problem(where, "is required", f"Add `{where[-1]}: ...`.")
    elif detail["type"] == "tuple_type":
        source.add_problem(where, "is no list", _remedy(where, detail["type"], context))
    else:
        source.add_problem(where, _lower_first(str(detail["msg"])), _remedy(where, detail["type"], context))


def _setting_path(loc: tuple[str | int, ...]) -> Path:
    """Return *loc* without the parts that pydantic adds for the branches of a union."""
    path: Path = ()
    for step in loc:
        known = _declared_type(path)
        inner = [typing.get_origin(kind) for kind in _plain_types(known)]
        is_section = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in _plain_types(known))
        if not is_section and not any(kind in (tuple, dict) for kind in inner):
            break
        path = (*path, step)
    return path


def _unknown_key_remedy(path: Path) -> str:
    *parent, key = path
    known = _field_names(_declared_type(tuple(parent)))
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    elsewhere = [key_name(found) for found in _all_setting_paths(Settings, ()) if found[-1] == key]
    if elsewhere:
        return f"Did you mean {elsewhere[0]!r}?"
    return f"Known here: {', '.join(known)}."


def _field_names(annotation: object) -> list[str]:
    for inner in _plain_types(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return list(inner.model_fields)
    return []


def _all_setting_paths(annotation: object, path: Path) -> Iterator[Path]:
    for key in _field_names(annotation):
        yield (*path, key)
        yield from _all_setting_paths(_member_type(annotation, key), (*path, key))


def _remedy(path: Path, kind: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return f"Write {context['expected']}."
    if kind in ("string_type", "string_sub_type") and path:
        return "Put the value in quotes."
    if kind == "tuple_type":
        return "Write a list: one entry per line, each beginning with `- `."
    if kind.endswith("_type") and _field_names(_declared_type(path)):
        return f"Write it as a section with: {', '.join(_field_names(_declared_type(path)))}."
    for inner in _plain_types(_declared_type(path[:-1])):
        if isinstance(inner, type) and issubclass(inner, BaseModel) and str(path[-1]) in inner.model_fields:
            return _described(inner.model_fields[str(path[-1])])
    return "Give a value of the right kind."


def _described(field: FieldInfo) -> str:
    """Return the description of a setting, with its default if that fits on a line."""
    description = field.description or "Give a value of the right kind."
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or isinstance(default, BaseModel | tuple):
        return description
    return f"{description} The default is {default}."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]

"""Reads the settings from file, environment and flags: the only place that reads any of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Final, cast

from pydantic import ValidationError

from proxy.settings.injected import with_file as with_marks_file
from proxy.settings.problems import Path, Problem, SettingsError, key_name
from proxy.settings.setting_keys import SettingKeys
from proxy.settings.settings import Settings, bad_references
from proxy.settings.tools import with_file
from proxy.settings.yaml_source import (
    LISTS,
    Origin,
    Source,
    parse_inline,
    read_failure,
    read_yaml,
    sections_in,
    set_value,
)

PREFIX: Final = "ULLAGE_"

SECRETS: Final = ("api_key", "key", "other_keys", "admin_key", "access_keys", "allow")
"""Names of settings that can be read from a file: the setting of the same name with ``_file`` is its path."""

Overrides = Mapping[tuple[str, ...], object]
"""Values of the command line by path; an entry of a list is named or numbered: ``("models", "*", ...)``."""


def load(
    path: str | FilePath | None,
    overrides: Overrides,
    environ: Mapping[str, str],
    model: type[Settings] = Settings,
) -> Settings:
    """Return the settings in force. Flags replace environment variables, these the file, and the file the defaults.

    *overrides* are the flags; variables in *environ* are called ``ULLAGE_SECTION__KEY``. *model* has all keys that may
    be set. Raises ``SettingsError`` with every problem.
    """
    keys = SettingKeys(model)
    folder, source = FilePath.cwd(), Source()
    if path is not None:
        folder, source = FilePath(path).parent, read_yaml(FilePath(path), environ)
    _overlay_environment(source, environ, keys)
    for key, value in overrides.items():
        set_value(source, key, value, Origin("the command line"))
    _read_secret_files(source, keys, folder)
    settings = _validated(source, keys, model)
    if source.problems or settings is None:
        raise SettingsError(sorted(source.problems, key=lambda problem: (problem.file, problem.line or 0)))
    own = {"tools": with_file(settings.tools, folder), "injected": with_marks_file(settings.injected, folder)}
    return settings.model_copy(update=own)


def _validated(source: Source, keys: SettingKeys, model: type[Settings]) -> Settings | None:
    """Return the settings; if they are invalid, add every problem to *source* and return None."""
    try:
        return model.model_validate(source.values)
    except ValidationError as error:
        details = [cast("dict[str, Any]", detail) for detail in error.errors(include_url=False, include_input=False)]
    for detail in details:
        if not _follows(detail, details):
            _add_validation_problem(source, keys, detail)
    if all(detail["loc"] for detail in details):
        # pydantic checks the rules between sections only if every value is valid. Here they are checked as written.
        for path, message, remedy in bad_references(*_upstream_references(source.values)):
            source.add_problem(path, message, remedy)
    return None


def _follows(detail: dict[str, Any], details: list[dict[str, Any]]) -> bool:
    """True if *detail* says that a list is too short, and only because entries of it are invalid."""
    path = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(path) and other["loc"][: len(path)] == path for other in details
    )


def _upstream_references(values: Mapping[str, Any]) -> tuple[list[str], str, dict[int, str]]:
    """Return the upstreams' names, the default one's, and each model's upstream by index, as far as they are texts."""
    names = [entry["name"] for _, entry in _list_entries(values, "upstreams") if isinstance(entry.get("name"), str)]
    server, default = values.get("server"), ""
    if isinstance(server, dict) and isinstance(server.get("default_upstream"), str):
        default = server["default_upstream"]
    models = [(index, entry.get("upstream")) for index, entry in _list_entries(values, "models")]
    used = {index: upstream for index, upstream in models if isinstance(upstream, str)}
    return names, default, used


def _list_entries(values: Mapping[str, Any], key: str) -> list[tuple[int, dict[str, Any]]]:
    entries = values.get(key)
    if not isinstance(entries, list):
        return []
    return [(index, entry) for index, entry in enumerate(entries) if isinstance(entry, dict)]


def _overlay_environment(source: Source, environ: Mapping[str, str], keys: SettingKeys) -> None:
    """Set the values of the variables in *environ* that name a setting, in place of those of the file."""
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
            value: object = environ[name]
            if keys.is_container(path, environ[name]):
                value = parse_inline(environ[name])
            set_value(source, path, value, origin)
        except ValueError as error:
            remedy = "Write it as in the file, on one line."
            source.problems.append(Problem(origin.file, None, key_name(path), str(error), remedy))


def _read_secret_files(source: Source, keys: SettingKeys, folder: FilePath) -> None:
    for path, mapping in sections_in(source.values):
        for name in SECRETS:
            if mapping.get(f"{name}_file") and keys.has((*path, f"{name}_file")):
                _read_secret_file(source, mapping, (*path, name), folder)


def _read_secret_file(source: Source, section: dict[str, Any], path: Path, folder: FilePath) -> None:
    """Set the secret at *path*, which belongs to *section*, from the file that the section names."""
    name = str(path[-1])
    path_of_file = (*path[:-1], f"{name}_file")
    file = section[f"{name}_file"]
    if not isinstance(file, str):
        return
    if section.get(name):
        source.add_problem(path_of_file, f"{name} is set as well", f"Keep {name} or {name}_file.")
        return
    text = _read_secret(source, path_of_file, file, folder)
    if text:
        section[name] = text
        source.origins[path] = source.origin(path_of_file)


def _read_secret(source: Source, path: Path, file: str, folder: FilePath) -> str:
    """Return the secret in *file*; if it cannot be read, add a problem for *path* and return an empty text."""
    try:
        text = (folder / FilePath(file).expanduser()).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{file} cannot be read: {read_failure(error)}"
        source.add_problem(path, message, "Give the path of a file that this user may read.")
        return ""
    if not text:
        source.add_problem(path, f"{file} is empty", "Write the secret into it.")
    return text


def _add_validation_problem(source: Source, keys: SettingKeys, detail: dict[str, Any]) -> None:
    """Add the problem that pydantic describes in *detail*, with our words and a remedy."""
    path = keys.setting_path(detail["loc"])
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "field_problems":
        for below, message, remedy in context["problems"]:
            source.add_problem((*path, *below), message, remedy)
    elif kind == "extra_forbidden":
        source.add_problem(path, "there is no such key", keys.unknown_key_remedy(path))
    elif kind == "missing":
        source.add_problem(path, "is required", f"Add `{path[-1]}: ...`.")
    elif kind == "tuple_type":
        source.add_problem(path, "is no list", keys.remedy(path, kind, context))
    elif kind == "model_type":
        source.add_problem(path, "is empty, or no section", keys.remedy(path, kind, context))
    else:
        message = str(detail["msg"])
        source.add_problem(path, message[:1].lower() + message[1:], keys.remedy(path, kind, context))

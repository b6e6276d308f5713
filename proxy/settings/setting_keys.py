"""The keys of a settings model: the type of each, and a remedy for a wrong one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from proxy.settings.problems import Path, key_name

ANY_VALUE = "Give a value of the right kind."


class SettingKeys:
    """The keys of *model*, which is the model of the whole configuration."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def has(self, path: Path) -> bool:
        """True if there is a setting at *path*."""
        return self._type(path) is not None

    def is_container(self, path: Path, text: str) -> bool:
        """True if the setting at *path* is a list or section, and *text* is written as one."""
        if not text.lstrip().startswith(("[", "{")):
            return False
        annotation = self._type(path)
        if _is_list(annotation):
            return True
        return {str, SecretStr, FilePath}.isdisjoint(_plain_types(annotation))

    def setting_path(self, location: Path) -> Path:
        """Return *location* without the parts that pydantic adds for the branches of a union."""
        path: Path = ()
        for step in location:
            annotation = self._type(path)
            if not _is_list(annotation) and not any(_is_section(inner) for inner in _plain_types(annotation)):
                break
            path = (*path, step)
        return path

    def unknown_key_remedy(self, path: Path) -> str:
        """Return the key that the unknown one at *path* resembles, else the keys that are possible there."""
        *parent, key = path
        possible = _field_names(self._type(tuple(parent)))
        close = difflib.get_close_matches(str(key), possible, n=1, cutoff=0.6)
        if close:
            return f"Did you mean {close[0]!r}?"
        for elsewhere in _paths_below(self._model, ()):
            if elsewhere[-1] == key:
                return f"Did you mean {key_name(elsewhere)!r}?"
        return f"Known here: {', '.join(possible)}."

    def remedy(self, path: Path, problem: str, context: Mapping[str, Any]) -> str:
        """Return the remedy for a problem at *path*, given pydantic's type of the problem and its context."""
        if problem == "literal_error":
            return f"Write {context['expected']}."
        if problem in ("string_type", "string_sub_type") and path:
            return "Put the value in quotes."
        if problem == "tuple_type":
            return "Write a list: one entry per line, each beginning with `- `."
        members = _field_names(self._type(path))
        if problem.endswith("_type") and members:
            return f"Write keys below it, indented, or take the line out: {', '.join(members)}."
        for inner in _plain_types(self._type(path[:-1])):
            if _is_section(inner) and str(path[-1]) in inner.model_fields:
                return _description(inner.model_fields[str(path[-1])])
        return ANY_VALUE

    def _type(self, path: Path) -> object:
        """Return the declared type of the setting at *path*; None if there is none."""
        annotation: object = self._model
        for step in path:
            annotation = _member_type(annotation, step)
        return annotation


def _plain_types(annotation: object) -> list[Any]:
    """Return the plain types in *annotation*, those inside Annotated and unions included."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(annotation) for inner in _plain_types(part)]
    return [annotation]


def _is_list(annotation: object) -> bool:
    return any(typing.get_origin(inner) in (tuple, list, dict) for inner in _plain_types(annotation))


def _is_section(kind: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _member_type(annotation: object, step: str | int) -> object:
    for inner in _plain_types(annotation):
        if _is_section(inner):
            field = inner.model_fields.get(str(step))
            if field is None:
                return None
            return field.annotation
        if typing.get_origin(inner) is tuple:
            return typing.get_args(inner)[0]
        if typing.get_origin(inner) is dict:
            return typing.get_args(inner)[1]
    return None


def _field_names(annotation: object) -> list[str]:
    for inner in _plain_types(annotation):
        if _is_section(inner):
            return list(inner.model_fields)
    return []


def _paths_below(annotation: object, path: Path) -> Iterator[Path]:
    for key in _field_names(annotation):
        yield (*path, key)
        yield from _paths_below(_member_type(annotation, key), (*path, key))


def _description(field: FieldInfo) -> str:
    """Return the description of a setting, with its default if that fits on a line."""
    description = field.description or ANY_VALUE
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or isinstance(default, BaseModel | tuple):
        return description
    return f"{description} The default is {default}."

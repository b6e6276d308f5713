"""Reads the configuration of LiteLLM's proxy, with the files that it includes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

INCLUDE: Final = "include"
"""The member that names further files: their lists are appended, their other values replace those read before.

https://docs.litellm.ai/docs/proxy/config_management
"""


class NotLiteLLM(Exception):
    """The file cannot be converted; the text completes a sentence that begins with its name."""

    def __init__(self, reason: str, file: Path) -> None:
        super().__init__(f"{file}: {reason}")


def read_file(path: Path) -> dict[str, Any]:
    """Return LiteLLM's configuration in the file *path* with those that it includes.

    Raises ``NotLiteLLM`` and ``OSError``.
    """
    config = _read(path)
    waiting, visited = _includes(config, path), {path.resolve()}
    while waiting:
        file = waiting.pop(0)
        if file.resolve() in visited:
            continue
        visited.add(file.resolve())
        included = _read(file)
        waiting += _includes(included, file)
        for key, value in included.items():
            if isinstance(value, list) and isinstance(config.get(key), list):
                value = config[key] + value
            config[key] = value
    config.pop(INCLUDE, None)
    if not isinstance(config.get("model_list"), list):
        raise NotLiteLLM("has no model_list: it is no configuration of LiteLLM's proxy.", path)
    return config


def _read(path: Path) -> dict[str, Any]:
    """Return the object in the YAML file *path*."""
    try:
        value = yaml.safe_load(path.read_text("utf-8-sig"))
    except UnicodeError as error:
        raise NotLiteLLM("cannot be read: it is not UTF-8 text. Save it as UTF-8.", path) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date is a ValueError
        reason = str(error).replace("\n", " ")
        raise NotLiteLLM(f"is no YAML: {reason}", path) from error
    if not isinstance(value, dict):
        raise NotLiteLLM("has no model_list: it is no configuration of LiteLLM's proxy.", path)
    return value


def _includes(config: Mapping[str, Any], path: Path) -> list[Path]:
    """Return the files that *config* includes; their names are relative to the directory of its own file *path*."""
    names = config.get(INCLUDE, [])
    if not isinstance(names, list):
        raise NotLiteLLM("include is no list of files.", path)
    return [path.parent / str(name) for name in names]

"""Clients as data: which settings of which file point each of them at the proxy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from proxy.core.tokens.budget import DEFAULT_RESERVE
from proxy.settings import packaged

Format = Literal["json", "toml", "yaml", "env"]
Step = str | Mapping[str, str]
"""One step into a document: a key, or the element of a list that has these members."""

LEAST_THINKING = 1024
"""Tokens: https://docs.claude.com/en/docs/build-with-claude/extended-thinking"""

_ALONE = re.compile(r"\{(\w+)\}")


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileSetting(_Data):
    """One value of a file: where it stands, and what it becomes.

    ``missing``: only if there is none. ``least``: only if the window has at least so many tokens.
    """

    at: tuple[str | dict[str, str], ...]
    to: Any
    missing: bool = False
    least: int = 0


class File(_Data):
    """A file of a client below the user's home; ``home`` is the environment variable that moves its folder."""

    path: str
    format: Format
    set: tuple[FileSetting, ...]
    home: str = ""


class Client(_Data):
    """A client: the ``api`` it speaks, and by which files, variables or commands it is told where the model is."""

    title: str
    api: str
    key: str = ""
    needs_model: bool = False
    note: str = ""
    files: tuple[File, ...] = ()
    environment: dict[str, str] = {}
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What a client is told. ``root`` is the proxy's address without a path, figures are in tokens.

    ``window`` is what the client may believe, ``real`` the model's own window if that is another one.
    """

    root: str
    key: str
    model: str | None = None
    window: int | None = None
    output: int | None = None
    real: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One value to be set, with everything filled in; ``missing``: only where there is none."""

    at: tuple[Step, ...]
    to: Any
    missing: bool = False


def clients() -> dict[str, Client]:
    """The known clients by the name they are asked for."""
    text = packaged("clients.yaml").read_text("utf-8")
    return TypeAdapter(dict[str, Client]).validate_python(yaml.safe_load(text))


def changes(file: File, facts: ClientFacts) -> list[Change]:
    """What *file* is to say; values about a model or window that *facts* does not know are left out."""
    found = []
    for setting in file.set:
        if (facts.window or 0) < setting.least:
            continue
        steps, value = fill_in(list(setting.at), facts), fill_in(setting.to, facts)
        if value is not None and steps is not None and len(steps) == len(setting.at):
            found.append(Change(tuple(steps), value, setting.missing))
    return found


def fill_in(value: Any, facts: ClientFacts) -> Any:
    """Return *value* with the names in braces replaced; None if one of them is not known.

    A figure that stands alone becomes a number; members and elements that are not known are left out, and so is an
    object of which none is.
    """
    if isinstance(value, dict):
        return _filled_object(value, facts)
    if isinstance(value, list):
        parts = [fill_in(part, facts) for part in value]
        return [part for part in parts if part is not None]
    return _filled_text(value, facts) if isinstance(value, str) else value


def _filled_object(value: Mapping[str, Any], facts: ClientFacts) -> dict[str, Any] | None:
    pairs = {fill_in(key, facts): fill_in(part, facts) for key, part in value.items()}
    known = {key: part for key, part in pairs.items() if key is not None and part is not None}
    return known if known or not value else None


def _filled_text(value: str, facts: ClientFacts) -> str | int | None:
    known = _known(facts)
    if alone := _ALONE.fullmatch(value):
        return known[alone[1]]
    names = [name for _, name, _, _ in Formatter().parse(value) if name]
    return None if any(known[name] is None for name in names) else value.format_map(known)


def _known(facts: ClientFacts) -> dict[str, str | int | None]:
    return {
        "root": facts.root,
        "url": f"{facts.root}/v1",
        "key": facts.key,
        "model": facts.model,
        "window": facts.window,
        "text_window": None if facts.window is None else str(facts.window),
        "output": _output(facts),
        **_thinking(facts),
    }


def _output(facts: ClientFacts) -> int | None:
    """The longest answer that goes with the window: clients that are told one figure want the other as well."""
    window = facts.real or facts.window
    if window is None:
        return None
    return facts.output or min(window // 8, DEFAULT_RESERVE)


def _thinking(facts: ClientFacts) -> dict[str, str | None]:
    """The figures, as texts, of a client that thinks within its answer: at most a quarter of the window for both.

    Thinking takes half of that, or nothing if that is less than the API takes.
    """
    window, output = facts.real or facts.window, _output(facts)
    if window is None or output is None:
        return {"text_output": None, "text_thinking": None}
    output = min(output, window // 4)
    thinking = output // 2 if output // 2 >= LEAST_THINKING else 0
    return {"text_output": str(output), "text_thinking": str(thinking)}

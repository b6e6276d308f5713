"""The known clients: which settings of which files point each of them at the proxy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from proxy.addresses import without_version
from proxy.cli.config_files import Format, Step
from proxy.core.tokens.budget import DEFAULT_RESERVE
from proxy.settings import packaged

LEAST_THINKING: Final = 1024
"""Fewest thinking tokens that the API accepts: https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileSetting(_Data):
    """A value to set in a file: ``at`` is its path, ``value`` may have placeholders.

    ``if_missing``: set it only if the file has none. ``min_window``: only if the window has at least so many tokens.
    """

    at: tuple[Step, ...]
    value: Any
    if_missing: bool = False
    min_window: int = 0


class File(_Data):
    """A file of a client below the user's home; ``home`` is the environment variable that moves its folder."""

    path: str
    format: Format
    set: tuple[FileSetting, ...]
    home: str = ""


class Run(_Data):
    """The start of a client with its configuration: nothing is written.

    ``command`` is its program. ``environment`` are variables beside those of its files; ``document`` is a variable that
    takes the text of its first file. Each of ``arguments`` is left out if a placeholder in it has no value.
    """

    command: str
    environment: dict[str, str] = {}
    document: str = ""
    arguments: tuple[tuple[str, ...], ...] = ()


class Client(_Data):
    """A client: the ``api`` it speaks, and the files, environment variables or commands that configure it.

    ``run`` is how it is started without any of these files, None if it reads its configuration from them alone.
    ``key`` is the environment variable that it reads its key from. ``needs_model``: its configuration names models.
    """

    title: str
    api: str
    key: str = ""
    needs_model: bool = False
    note: str = ""
    files: tuple[File, ...] = ()
    environment: dict[str, str] = {}
    commands: tuple[str, ...] = ()
    run: Run | None = None

    @property
    def takes_window(self) -> bool:
        """True if its configuration can state the model's window."""
        values = [*(setting.value for file in self.files for setting in file.set), *self.commands]
        return any("window}" in str(value) for value in values)


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """The configuration of a client. ``root`` is the proxy's address without a path; figures are in tokens.

    ``window`` is the window that the client assumes, ``real_window`` the model's own if that is another one.
    """

    root: str
    key: str
    model: str | None = None
    window: int | None = None
    output: int | None = None
    real_window: int | None = None

    def at(self, address: str, *, roomy: bool = False) -> ClientFacts:
        """Return these facts with the proxy's *address*; if *roomy*, with a window ten times as large."""
        window = self.window
        if roomy and window is not None:
            window *= 10
        return replace(self, root=without_version(address), window=window)


def clients() -> dict[str, Client]:
    """Return the known clients by name."""
    text = packaged("clients.yaml").read_text("utf-8")
    return TypeAdapter(dict[str, Client]).validate_python(yaml.safe_load(text))


def filled_settings(file: File, facts: ClientFacts) -> list[FileSetting]:
    """Return the settings of *file*, filled in, without those that need a model or window that *facts* lacks."""
    result = []
    for setting in file.set:
        if (facts.window or 0) < setting.min_window:
            continue
        path, value = fill_in(list(setting.at), facts), fill_in(setting.value, facts)
        if value is None or path is None or len(path) != len(setting.at):
            continue
        result.append(setting.model_copy(update={"at": tuple(path), "value": value}))
    return result


def fill_in(value: Any, facts: ClientFacts) -> Any:
    """Return *value* with its placeholders replaced; None if one of them has no value.

    A text that is nothing but a placeholder of a number becomes that number. Members and elements without a value are
    left out, and so is an object without any member.
    """
    if isinstance(value, str):
        return _fill_text(value, facts)
    if isinstance(value, dict):
        return _fill_object(value, facts)
    if isinstance(value, list):
        parts = [fill_in(part, facts) for part in value]
        return [part for part in parts if part is not None]
    return value


def _fill_object(value: Mapping[str, Any], facts: ClientFacts) -> dict[str, Any] | None:
    if not value:
        return {}
    pairs = {fill_in(key, facts): fill_in(part, facts) for key, part in value.items()}
    complete = {key: part for key, part in pairs.items() if key is not None and part is not None}
    return complete or None


def _fill_text(value: str, facts: ClientFacts) -> str | int | None:
    values = _placeholder_values(facts)
    if placeholder := _PLACEHOLDER.fullmatch(value):
        return values[placeholder[1]]
    names = [name for _, name, _, _ in Formatter().parse(value) if name]
    if any(values[name] is None for name in names):
        return None
    return value.format_map(values)


def _placeholder_values(facts: ClientFacts) -> dict[str, str | int | None]:
    text_window = None
    if facts.window is not None:
        text_window = str(facts.window)
    return {
        "root": facts.root,
        "url": f"{facts.root}/v1",
        "key": facts.key,
        "model": facts.model,
        "window": facts.window,
        "text_window": text_window,
        "output": _max_output(facts),
        **_answer_and_thinking(facts),
    }


def _max_output(facts: ClientFacts) -> int | None:
    """Return the longest answer for the window: clients whose configuration has a window require this figure, too."""
    window = facts.real_window or facts.window
    if window is None:
        return None
    return facts.output or min(window // 8, DEFAULT_RESERVE)


def _answer_and_thinking(facts: ClientFacts) -> dict[str, str | None]:
    """Return figures, as texts, for a client whose answers include thinking: a quarter of the window at most.

    Half of it is for thinking, or none if half is less than ``LEAST_THINKING``.
    """
    window, output = facts.real_window or facts.window, _max_output(facts)
    if window is None or output is None:
        return {"text_output": None, "text_thinking": None}
    output = min(output, window // 4)
    thinking = output // 2
    if thinking < LEAST_THINKING:
        thinking = 0
    return {"text_output": str(output), "text_thinking": str(thinking)}

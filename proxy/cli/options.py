"""Settings given as options of commands, and the end of a command that cannot continue.

Imports nothing heavy: ``ullage --help`` and the container's health check do without the settings.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn
from urllib.parse import urlsplit

import typer

from proxy.terminal import fold_lines

if TYPE_CHECKING:
    from proxy.settings import Settings, SettingsError

Overrides = dict[tuple[str, ...], object]
"""Settings given as options, by their path. They replace settings of the file and the environment."""

REFUSED: Final = 1
MISUSED: Final = 2
"""Exit codes of a command that was used rightly and whose answer is no, and of one that was used wrongly."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""The names of variables that a shell sets: https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap08.html"""


def model_name(value: str | None) -> str | None:
    """Return *value*, the name of a model; end the process if it is none."""
    if value is not None and not (value.strip() and value.isprintable()):
        fail(MISUSED, "--model needs the name of a model.")
    return value


def variable_name(value: str | None) -> str | None:
    """Return *value*, the name of an environment variable; end the process, without a word of it, if it is none."""
    if value is not None and not _VARIABLE.match(value):
        fail(MISUSED, "A key is not given itself: give the name of the environment variable that holds it.")
    return value


def http_address(value: str | None) -> str | None:
    """Return *value*, the address of a proxy; end the process if it is none."""
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_address = False
    if not is_address or not value.isprintable() or " " in value:
        fail(MISUSED, f"--url {value}: give scheme and host, such as http://127.0.0.1:8484.")
    return value


def writable_file(value: Path | None) -> Path | None:
    """Return *value*, a file to write at the end; end the process now if it cannot be written."""
    if value is None or (value.exists() and not value.is_file() and not value.is_dir()):
        return value  # what reads a pipe would take this for the end
    is_new = not value.exists()
    try:
        with value.open("ab"):
            pass
        if is_new:
            value.unlink()
    except OSError as error:
        fail(MISUSED, f"{value}: cannot be written: {error.strerror}.")
    return value


def picture_file(value: Path | None) -> Path | None:
    """Return *value*, a picture to draw at the end; end the process now if it cannot be drawn or written."""
    if value is not None and importlib.util.find_spec("matplotlib") is None:
        fail(REFUSED, f"{value}: drawing needs matplotlib: pip install 'ullage[plot]'")
    return writable_file(value)


ConfigOption = Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")]
UpstreamOption = Annotated[str | None, typer.Option(help="The only upstream: http(s)://host/v1.", metavar="URL")]
AddressOption = Annotated[
    str | None,
    typer.Option(help="The proxy's address [default: http://127.0.0.1:8484].", metavar="URL", callback=http_address),
]
ModelOption = Annotated[str | None, typer.Option(help="The model that it requests.", callback=model_name)]
KeyOption = Annotated[
    str | None, typer.Option(help="Environment variable that holds the key.", metavar="NAME", callback=variable_name)
]
HtmlOption = Annotated[
    Path | None, typer.Option(help="Write a report to open in a browser.", metavar="FILE", callback=writable_file)
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw pressure over time into this PNG.", metavar="FILE", callback=picture_file)
]
"""Options of several commands, and files that they write at their end."""


def overrides_of(upstream: str | None = None, window: int | None = None, model: str = "*") -> Overrides:
    """Return the overrides of the options --upstream and --window; *model* is the one that the window is for."""
    overrides: Overrides = {}
    if upstream is not None:
        # The whole list of the file is replaced: a key that is configured for one server must never go to another.
        overrides["upstreams",] = [{"name": "upstream", "base_url": upstream}]
    if window is not None:
        overrides["models", model, "context_window"] = window
    return overrides


def settings_of(config: Path | None, overrides: Overrides) -> Settings:
    """Return the settings; print their problems and end the process if they have any."""
    from proxy.features.settings import AllSettings
    from proxy.settings import SettingsError, load

    try:
        return load(config, overrides, os.environ, AllSettings)
    except SettingsError as error:
        fail(REFUSED, _problems(error))


def key_in(variable: str | None) -> str:
    """Return the key in the environment *variable*; empty if none is named, or if it is not set."""
    return os.environ.get(variable or "", "")


def _problems(error: SettingsError) -> str:
    """Return the problems with the settings, and their number, as lines."""
    total = f"{len(error.problems)} problems."
    if len(error.problems) == 1:
        total = "1 problem."
    return fold_lines("\n".join([*map(str, error.problems), total]), sys.stderr)


def fail(code: int, message: str) -> NoReturn:
    """Print *message* to standard error and end the process with *code*."""
    typer.echo(message, err=True)
    raise typer.Exit(code)

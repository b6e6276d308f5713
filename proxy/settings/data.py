"""Data files that come with the package, and the model table that comes with an installed one."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from proxy.core.overflow.rules import Rules, read_rules
from proxy.settings.model import Settings

OVERFLOW = "overflow.yaml"
TABLE = "model_prices_and_context_window_backup.json"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the table says of one model, in tokens; ``None`` where it says nothing."""

    max_input_tokens: int | None
    max_output_tokens: int | None
    mode: str
    provider: str


class _Row(msgspec.Struct):
    # The first entry of the table explains the columns in prose, so a figure may be a text.
    max_input_tokens: int | float | str | None = None
    max_output_tokens: int | float | str | None = None
    max_tokens: int | float | str | None = None
    mode: str = ""
    litellm_provider: str = ""


def packaged(name: str) -> Traversable:
    """The data file *name* of the configuration folder, from the installed package or the source checkout.

    Raises ``FileNotFoundError`` when neither has it.
    """
    installed = importlib.resources.files("proxy").joinpath("_config", name)
    if installed.is_file():
        return installed
    checkout = Path(__file__).resolve().parents[2] / "config" / name
    if checkout.is_file():
        return checkout
    raise FileNotFoundError(f"the package holds no data file {name!r}")


def rulebook() -> dict[str, Any]:
    """What providers say when a request is too long, as packaged. Reads a file: call it once, or in a thread."""
    data: dict[str, Any] = yaml.load(packaged(OVERFLOW).read_bytes(), Loader=yaml.CSafeLoader)
    return data


def overflow_rules(settings: Settings) -> Rules:
    """The packaged rules behind the configured ones. Reads a file: call it once, or in a thread."""
    own = [rule.model_dump(exclude_none=True) for rule in settings.overflow_rules]
    return read_rules(rulebook(), own)


def version() -> str:
    """The installed version, or ``0+source`` in a checkout that is not installed."""
    try:
        return importlib.metadata.version("ullage")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def model_table() -> dict[str, ModelFacts]:
    """Facts by model name from litellm's table, read as data; empty when litellm is not installed.

    Reads and decodes 3 MB: call it in a thread. Raises ``OSError`` or ``msgspec.MsgspecError`` on a broken file.
    """
    # find_spec locates a top-level package without running it: importing it takes seconds and 150 MB.
    spec = importlib.util.find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    file = Path(spec.submodule_search_locations[0]) / TABLE
    if not file.is_file():
        return {}
    rows = msgspec.json.decode(file.read_bytes(), type=dict[str, _Row])
    return {name: _facts(row) for name, row in rows.items() if name != "sample_spec"}


def _facts(row: _Row) -> ModelFacts:
    longest, output = _tokens(row.max_input_tokens), _tokens(row.max_output_tokens)
    if row.max_output_tokens is None:
        # Without an output figure of its own a row's max_tokens means the window; where the two differ (some round
        # 262,144 to 262,000, one says 1,049,000 beside 262,144) only the smaller one is safe.
        longest = min(filter(None, (longest, _tokens(row.max_tokens))), default=None)
    return ModelFacts(longest, output, row.mode, row.litellm_provider)


def _tokens(value: float | str | None) -> int | None:
    return int(value) if isinstance(value, int | float) and value > 0 else None

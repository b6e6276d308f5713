"""Data files of this package, and the model table in litellm's."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec.structs import replace

from proxy.core.models import LazyTable, ModelLimits
from proxy.core.overflow.rules import OverflowRules, read_rules
from proxy.settings.upstreams import OverflowRule

OVERFLOW: Final = "overflow.yaml"

TABLE: Final = "model_prices_and_context_window_backup.json"
"""LiteLLM's table of models in its package.

https://github.com/BerriAI/litellm/blob/main/model_prices_and_context_window.json
"""

PROVIDERS: Final = ("types/utils.py", "llms/openai_like/providers.json")
"""Files of LiteLLM's package that name its providers: an enumeration, and those that speak OpenAI's API."""

_MEMBER = re.compile(r"^    [A-Z0-9_]+ = \"([^\"]+)\"", re.MULTILINE)


class Prices(msgspec.Struct, frozen=True):
    """US dollars for one token; for inputs above ``tier`` tokens the prices of ``above``."""

    input: float
    cached: float
    output: float
    tier: int | None = None
    above: Prices | None = None

    def cost(self, tokens: int, cached: int, output: int = 0) -> float:
        """Return the US dollars for *tokens* of input, of which *cached* were in the provider's cache, and *output*."""
        if self.above is not None and self.tier is not None and tokens > self.tier:
            return self.above.cost(tokens, cached, output)
        return (tokens - cached) * self.input + cached * self.cached + output * self.output


class _Row(msgspec.Struct):
    # The first entry of the table explains the columns in prose, so a figure may be a text.
    max_input_tokens: int | float | str | None = None
    max_output_tokens: int | float | str | None = None
    max_tokens: int | float | str | None = None
    litellm_provider: str = ""
    input_cost_per_token_above_100k_tokens: float | None = None
    input_cost_per_token_above_128k_tokens: float | None = None
    input_cost_per_token_above_200k_tokens: float | None = None
    input_cost_per_token_above_256k_tokens: float | None = None
    input_cost_per_token_above_272k_tokens: float | None = None
    input_cost_per_token_above_512k_tokens: float | None = None


_TIER = re.compile(r"input_cost_per_token_above_(\d+)k_tokens")
_TIER_FIELDS = [match for match in map(_TIER.fullmatch, _Row.__struct_fields__) if match]
_TIERS = sorted((int(match[1]), match[0]) for match in _TIER_FIELDS)


def packaged(name: str) -> Traversable:
    """Return the data file *name* of the installed package, or of the checkout's ``config/``.

    Raises ``FileNotFoundError`` if neither has it.
    """
    installed = importlib.resources.files("proxy").joinpath("_config", name)
    if installed.is_file():
        return installed
    checkout = Path(__file__).resolve().parents[2] / "config" / name
    if checkout.is_file():
        return checkout
    raise FileNotFoundError(f"the package holds no data file {name!r}")


def packaged_overflow_rules() -> dict[str, Any]:
    """Return the packaged rules for providers' overflow errors. Reads a file: call it once, or in a thread."""
    data: dict[str, Any] = yaml.load(packaged(OVERFLOW).read_bytes(), Loader=yaml.CSafeLoader)
    return data


def overflow_rules(configured: Iterable[OverflowRule]) -> OverflowRules:
    """Return the *configured* overflow rules, followed by the packaged ones. Reads a file: call it in a thread."""
    own = [rule.model_dump(exclude_none=True) for rule in configured]
    if not own:
        return _unconfigured_rules()
    return read_rules(packaged_overflow_rules(), own)


@cache
def _unconfigured_rules() -> OverflowRules:
    """Return the packaged rules alone. They are read once and not again at each reload."""
    return read_rules(packaged_overflow_rules())


def model_table() -> Mapping[str, ModelLimits]:
    """Return limits by model name from litellm's table, read as data; empty if litellm is not installed.

    No row states a window: ``read_published_table`` derives it from the input and the output.

    Reads and decodes 3 MB: call it in a thread. Raises ``OSError`` or ``msgspec.MsgspecError`` on a broken file.
    """
    file = _litellm_file(TABLE)
    if file is None:
        return {}
    rows = msgspec.json.decode(file.read_bytes(), type=dict[str, _Row])
    rows.pop("sample_spec", None)
    return LazyTable(rows, lambda _, row: _limits(row))


def litellm_providers() -> frozenset[str]:
    """Return LiteLLM's names of providers, read from its files as data; empty if they are not where they were."""
    table, in_code, in_data = map(_litellm_file, (TABLE, *PROVIDERS))
    if table is None or in_code is None or in_data is None:
        return frozenset()
    _, _, listed = in_code.read_text("utf-8").partition("class LlmProviders(")
    names = set(_MEMBER.findall(listed.partition("\nclass ")[0]))
    names.update(msgspec.json.decode(in_data.read_bytes(), type=dict[str, msgspec.Raw]))
    rows = msgspec.json.decode(table.read_bytes(), type=dict[str, _Row])
    return frozenset(names.union(row.litellm_provider for row in rows.values()))


def prices(models: Iterable[str]) -> dict[str, Prices]:
    """Return the prices of those *models* that litellm's table has, also without their provider's prefix.

    Reads 3 MB. Raises ``OSError`` or ``msgspec.MsgspecError`` on a broken file.
    """
    file = _litellm_file(TABLE)
    if file is None:
        return {}
    rows = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    by_model: dict[str, Prices] = {}
    for model in models:
        raw = rows.get(model) or rows.get(model.rpartition("/")[2])
        if raw is None:
            continue
        price = _prices(msgspec.json.decode(raw, type=dict[str, Any]))
        if price is not None:
            by_model[model] = price
    return by_model


def _prices(row: Mapping[str, Any]) -> Prices | None:
    """Return the prices of a row; None if it has none."""
    prices = _tier_prices(row, "")
    tier = _first_tier(row)
    if prices is None or tier is None:
        return prices
    return replace(prices, tier=tier * 1000, above=_tier_prices(row, f"_above_{tier}k_tokens"))


def _tier_prices(row: Mapping[str, Any], suffix: str) -> Prices | None:
    """Return the prices of the tier whose columns end in *suffix*. Cached tokens cost as much as others by default."""
    own = _cost(row, "input_cost_per_token" + suffix)
    if own is None:
        return None
    cached = _cost(row, "cache_read_input_token_cost" + suffix)
    if cached is None:
        cached = own
    return Prices(own, cached, _cost(row, "output_cost_per_token" + suffix) or 0.0)


def _cost(row: Mapping[str, Any], name: str) -> float | None:
    cost = row.get(name)
    if isinstance(cost, int | float):
        return float(cost)
    return None


def _first_tier(row: Mapping[str, Any]) -> int | None:
    """Return the thousands of tokens above which a prompt costs more; None if it never does."""
    matches = map(_TIER.fullmatch, row)
    return min((int(match[1]) for match in matches if match), default=None)


def _litellm_file(name: str) -> Path | None:
    # find_spec locates a top-level package without running it: importing it takes seconds and 150 MB.
    spec = importlib.util.find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / name
    if not file.is_file():
        return None
    return file


def _limits(row: _Row) -> ModelLimits:
    longest, output = _tokens(row.max_input_tokens), _tokens(row.max_output_tokens)
    if row.max_output_tokens is None:
        # In a row without max_output_tokens, max_tokens is the window, too. If the two differ (some rows round 262,144
        # to 262,000, one has 1,049,000 beside 262,144), only the smaller one is safe.
        longest = min(filter(None, (longest, _tokens(row.max_tokens))), default=None)
    tier = next((thousands * 1000 for thousands, name in _TIERS if getattr(row, name) is not None), None)
    return ModelLimits(None, longest, output, tier)


def _tokens(value: float | str | None) -> int | None:
    if isinstance(value, int | float) and value > 0:
        return int(value)
    return None

"""Configuration: read from YAML, environment and flags, here and nowhere else; errors name file, line, key, remedy."""

from proxy import version
from proxy.settings.compression import Compression, Stages
from proxy.settings.injected import injected_rules
from proxy.settings.load import Overrides, load
from proxy.settings.packaged_data import (
    Prices,
    model_table,
    overflow_rules,
    packaged,
    packaged_overflow_rules,
    prices,
)
from proxy.settings.problems import Problem, SettingsError
from proxy.settings.settings import Settings, open_proxy_problem, serving_problem
from proxy.settings.tools import tool_map
from proxy.settings.upstreams import Model, Upstream

__all__ = [
    "Compression",
    "Model",
    "Overrides",
    "Prices",
    "Problem",
    "Settings",
    "SettingsError",
    "Stages",
    "Upstream",
    "injected_rules",
    "load",
    "model_table",
    "open_proxy_problem",
    "overflow_rules",
    "packaged",
    "packaged_overflow_rules",
    "prices",
    "serving_problem",
    "tool_map",
    "version",
]

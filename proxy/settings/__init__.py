"""Configuration: read from YAML, environment and flags, here and nowhere else; errors name file, line, key, remedy."""

from proxy.settings.compressing import Compression, Stages
from proxy.settings.data import ModelFacts, Prices, model_table, overflow_rules, packaged, prices, rulebook, version
from proxy.settings.load import Overrides, load
from proxy.settings.model import Settings, Telemetry, is_loopback, refuse_open
from proxy.settings.problems import Problem, SettingsError
from proxy.settings.servers import Model, OverflowRule, Timeouts, Upstream
from proxy.settings.serving import Limits, Server, Store
from proxy.settings.summary import summary
from proxy.settings.tools import tool_map

__all__ = [
    "Compression",
    "Limits",
    "Model",
    "ModelFacts",
    "OverflowRule",
    "Overrides",
    "Prices",
    "Problem",
    "Server",
    "Settings",
    "SettingsError",
    "Stages",
    "Store",
    "Telemetry",
    "Timeouts",
    "Upstream",
    "is_loopback",
    "load",
    "model_table",
    "overflow_rules",
    "packaged",
    "prices",
    "refuse_open",
    "rulebook",
    "summary",
    "tool_map",
    "version",
]

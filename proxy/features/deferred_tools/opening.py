"""Opens the feature that defers tools, and the tool that finds them."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.deferred_tools.feature import DeferTools
from proxy.features.deferred_tools.search import ToolSearch
from proxy.features.deferred_tools.settings import deferred_tools_settings
from proxy.features.opening import FeatureParts
from proxy.server_tools.tool import ServerTool


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature if it is switched on."""
    settings = deferred_tools_settings(parts.settings)
    if not settings.enabled:
        return []
    return [DeferTools(parts.reader, settings.share, settings.max_tokens)]


def open_tools(parts: FeatureParts) -> list[ServerTool]:
    """Return the tool if the feature is switched on."""
    settings = deferred_tools_settings(parts.settings)
    if not settings.enabled:
        return []
    return [ToolSearch(settings.max_tokens)]

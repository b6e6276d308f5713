"""Opens the recall tool."""

from __future__ import annotations

from proxy.features.opening import FeatureParts
from proxy.features.recall.recall import Limits, Recall
from proxy.features.recall.settings import recall_settings
from proxy.server_tools.tool import ServerTool


def open_tools(parts: FeatureParts) -> list[ServerTool]:
    """Return it if it is switched on."""
    recall = recall_settings(parts.settings)
    if not recall.enabled:
        return []
    limits = Limits(recall.results, recall.max_tokens)
    return [Recall(parts.reader, limits, without_tools=recall.without_tools)]

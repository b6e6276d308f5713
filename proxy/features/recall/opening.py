"""Opens the recall tool."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.opening import FeatureParts, open_earlier
from proxy.features.recall.recall import DeclareRecall, Limits, Recall
from proxy.features.recall.settings import recall_settings
from proxy.server_tools.tool import ServerTool


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return what declares the tool in every request, if it searches earlier conversations."""
    recall = recall_settings(parts.settings)
    if not (recall.enabled and recall.sessions):
        return []
    return [DeclareRecall(parts.reader)]


def open_tools(parts: FeatureParts) -> list[ServerTool]:
    """Return it if it is switched on."""
    recall = recall_settings(parts.settings)
    if not recall.enabled:
        return []
    limits = Limits(recall.results, recall.max_tokens)
    read_earlier = open_earlier(parts.store) if recall.sessions else None
    return [Recall(parts.reader, limits, without_tools=recall.without_tools, read_earlier=read_earlier)]

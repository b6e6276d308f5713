"""Opens the feature that offers the recall tool."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.opening import FeatureParts
from proxy.features.recall.answer import Recall
from proxy.features.recall.session import Limits
from proxy.features.recall.settings import recall_settings


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return it if it is switched on."""
    recall = recall_settings(parts.settings)
    if not recall.enabled:
        return []
    return [
        Recall(
            parts.reader, Limits(recall.results, recall.max_tokens), parts.faults, without_tools=recall.without_tools
        )
    ]

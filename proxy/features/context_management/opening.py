"""Opens the feature that applies context edits."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.context_management.feature import ContextManagement
from proxy.features.context_management.settings import edited_upstreams
from proxy.features.opening import FeatureParts


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return it if an upstream is configured for which edits are applied here."""
    names = edited_upstreams(parts.settings)
    return [ContextManagement(parts.reader, parts.resolve, names)] if names else []

"""Opens the feature that answers with views."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.compress.feature import Compress
from proxy.features.opening import FeatureParts


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature: it has no setting, and costs nothing but on its own route."""
    return [Compress(parts.reader, parts.resolve)]

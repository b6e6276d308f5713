"""Opens the feature that caps tool results."""

from __future__ import annotations

from proxy.engine.features import Feature
from proxy.features.cap_results.feature import CapResults
from proxy.features.cap_results.settings import limits_of_results
from proxy.features.opening import FeatureParts


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return it if results are always capped, and not only in a compaction."""
    limits = limits_of_results(parts.settings)
    return [CapResults(parts.reader, limits)] if limits else []

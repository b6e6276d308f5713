"""Opens the feature that caps tool results."""

from __future__ import annotations

from proxy.core.compaction.truncate import TruncateLimits
from proxy.engine.features import Feature
from proxy.features.cap_results.feature import CapResults
from proxy.features.opening import FeatureParts


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return it if results are always capped, and not only in a compaction."""
    truncate = parts.settings.compression.stages.truncate
    if not truncate.enabled or not truncate.always:
        return []
    return [CapResults(parts.reader, TruncateLimits(truncate.max_lines, truncate.max_bytes))]

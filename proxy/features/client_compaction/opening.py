"""Opens the features that answer compactions which clients make themselves."""

from __future__ import annotations

import time

from proxy.engine.features import Feature
from proxy.features.client_compaction.feature import ClientCompaction, UpstreamCompaction
from proxy.features.client_compaction.settings import UpstreamWithCompaction, answers_from_summaries
from proxy.features.client_compaction.summary_answer import SummaryAnswers
from proxy.features.opening import FeatureParts


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return what opens our items and answers requests for a compaction; what answers from summaries if configured."""
    upstreams = {
        each.name: UpstreamCompaction(each.compaction, each.compacts)
        for each in parts.settings.upstreams
        if isinstance(each, UpstreamWithCompaction)
    }
    features: list[Feature] = [
        ClientCompaction(
            parts.reader, parts.store.records, parts.records, parts.resolve, parts.shares, time.time, upstreams
        )
    ]
    if answers_from_summaries(parts.settings):
        features.append(SummaryAnswers(parts.records, parts.reader, parts.shares, time.time))
    return features

"""What is written down of conversations and told of them, built from the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cachetools import TTLCache

from proxy.features.history.archive import Archive, ArchiveLimits, Outcome
from proxy.features.history.history import History
from proxy.features.history.recorder import LEAST_SECONDS, HistoryRecorder
from proxy.settings import Settings
from proxy.store import Store
from proxy.tasks import Tasks

NOTED: Final = 10_000
"""Conversations that were noted a moment ago, of which a process remembers that."""

ARCHIVED: Final = 100_000
"""Originals that a process remembers to have written: about 200 bytes each."""

DAY: Final = 86_400.0


def open_archive(
    settings: Settings, store: Store, tasks: Tasks, observe: Callable[[Outcome, int], None]
) -> Archive | None:
    """What keeps originals as *settings* have it; ``None`` where none are kept."""
    wanted = settings.archive
    if not wanted.enabled:
        return None
    terms = ArchiveLimits(wanted.days * DAY, wanted.max_item, wanted.queue)
    # Known for an hour: what the store lost meanwhile is written again, and what it has lives on.
    return Archive(store.archive, terms, TTLCache(ARCHIVED, 3600.0), tasks.spawn, observe, time.monotonic)


def open_chronicle(store: Store, archive: Archive | None) -> HistoryRecorder:
    """What notes what becomes of conversations."""
    recent: TTLCache[tuple[str, bytes], bool] = TTLCache(NOTED, LEAST_SECONDS)
    return HistoryRecorder(store.conversations, recent, time.time, archive)


def open_conversations(settings: Settings, store: Store) -> History:
    """What tells callers of their conversations."""
    compacts, summaries = settings.compression.mode == "on", settings.summaries.mode
    return History(store.conversations, store.archive, time.time, compacts=compacts, summaries=summaries)

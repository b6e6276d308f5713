"""Opens the history of conversations: what notes them, what archives what left their views, and their routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from cachetools import TTLCache

from proxy.features.history.archive import Archive, ArchiveLimits
from proxy.features.history.history import History
from proxy.features.history.recorder import LEAST_SECONDS, HistoryRecorder
from proxy.features.history.routes import HistoryRoutes
from proxy.features.history.settings import archive_settings
from proxy.features.opening import OpenHistory
from proxy.server.access import Access
from proxy.server.admin import Route
from proxy.server.config import Limits
from proxy.settings import Settings
from proxy.store import Store
from proxy.tasks import Tasks

RECENT_NOTES: Final = 10_000
"""Conversations noted within the last ``LEAST_SECONDS``: none of them is noted again."""

ARCHIVED_ITEMS: Final = 100_000
"""Originals known to be archived: about 200 bytes each."""

ARCHIVED_SECONDS: Final = 3600.0
"""Time after which an archived original is written again: so one that the store lost comes back, and others live on."""

DAY_SECONDS: Final = 86_400.0


def open_history(settings: Settings, store: Store, tasks: Tasks, observe: Callable[[str, int], None]) -> OpenHistory:
    """Return the history of conversations. *observe* counts what became of how many archived items."""
    archive = open_archive(settings, store, tasks, observe)
    recorder = open_recorder(store, archive)

    def open_routes(access: Access, limits: Limits) -> Mapping[str, Route]:
        return HistoryRoutes(access, open_reader(settings, store), limits).by_name()

    if archive is None:
        return OpenHistory((recorder,), recorder.note_summary, open_routes)
    return OpenHistory((recorder,), recorder.note_summary, open_routes, archive.finish)


def open_archive(settings: Settings, store: Store, tasks: Tasks, observe: Callable[[str, int], None]) -> Archive | None:
    """Return what archives what left the views; None if nothing is archived."""
    wanted = archive_settings(settings)
    if not wanted.enabled:
        return None
    limits = ArchiveLimits(wanted.days * DAY_SECONDS, wanted.max_item, wanted.queue)
    known: TTLCache[tuple[bytes, bytes], bool] = TTLCache(ARCHIVED_ITEMS, ARCHIVED_SECONDS)
    return Archive(store.archive, limits, known, tasks.spawn, observe, time.monotonic)


def open_recorder(store: Store, archive: Archive | None) -> HistoryRecorder:
    """Return what notes what becomes of conversations."""
    recent: TTLCache[tuple[str, bytes], bool] = TTLCache(RECENT_NOTES, LEAST_SECONDS)
    return HistoryRecorder(store.conversations, recent, time.time, archive)


def open_reader(settings: Settings, store: Store) -> History:
    """Return what callers read of their conversations."""
    compacts, summaries = settings.compression.mode == "on", settings.summaries.mode
    return History(store.conversations, store.archive, time.time, compacts=compacts, summaries=summaries)

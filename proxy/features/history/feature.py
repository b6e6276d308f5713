"""Builds the history of conversations: its recorder, its archive and its routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from cachetools import LRUCache, TTLCache

from proxy.engine.features import Feature
from proxy.features.history.archive import Archive, ArchiveLimits
from proxy.features.history.budgets import ConversationBudgets, Key, Spending
from proxy.features.history.history import History
from proxy.features.history.notes import NOTE_SECONDS, HistoryRecorder
from proxy.features.history.routes import HistoryRoutes
from proxy.features.history.sessions import EarlierSessions
from proxy.features.history.settings import archive_settings, budget_settings
from proxy.features.opening import OpenHistory, ReadEarlier
from proxy.server.access import Access
from proxy.server.admin import Route
from proxy.server.config import Limits
from proxy.settings import Settings
from proxy.store import Store
from proxy.tasks import Tasks, Warn

RECENT_NOTES: Final = 10_000
"""Conversations and skipped summaries that are remembered for ``NOTE_SECONDS``: none is saved or noted twice in it."""

ARCHIVED_ITEMS: Final = 100_000
"""Originals remembered as archived: about 200 bytes each."""

ARCHIVED_SECONDS: Final = 3600.0
"""Seconds after which an archived original is written again: its lifetime begins again, and a lost one is replaced."""

CONVERSATIONS: Final = 10_000
"""Conversations whose used tokens are remembered: about 300 bytes each."""

DAY_SECONDS: Final = 86_400.0


def open_history(
    settings: Settings, store: Store, tasks: Tasks, observe: Callable[[str, int], None], warn: Warn
) -> OpenHistory:
    """Return the history of conversations. *observe* counts the outcomes of archived items, *warn* logs a budget."""
    archive = open_archive(settings, store, tasks, observe)
    recorder = open_recorder(store, archive)
    budgets = open_budgets(settings, store, tasks, warn)
    features: list[Feature] = [recorder]
    if budgets is not None:
        features.append(budgets)

    def open_routes(access: Access, limits: Limits) -> Mapping[str, Route]:
        return HistoryRoutes(access, open_reader(settings, store), limits).by_name()

    async def finish(seconds: float) -> None:
        for part in (archive, budgets):
            if part is not None:
                await part.finish(seconds)

    return OpenHistory(tuple(features), recorder.note_summary, open_routes, finish)


def open_budgets(settings: Settings, store: Store, tasks: Tasks, warn: Warn) -> ConversationBudgets | None:
    """Return the counter of the tokens that conversations use; None if it is switched off."""
    section = budget_settings(settings)
    if not section.enabled:
        return None
    spendings: LRUCache[Key, Spending] = LRUCache(CONVERSATIONS)
    return ConversationBudgets(store.conversations, section.total or 0, spendings, tasks.spawn, warn)


def open_archive(settings: Settings, store: Store, tasks: Tasks, observe: Callable[[str, int], None]) -> Archive | None:
    """Return the archive of items that left views; None if it is switched off."""
    section = archive_settings(settings)
    if not section.enabled:
        return None
    limits = ArchiveLimits(section.days * DAY_SECONDS, section.max_item, section.queue)
    written: TTLCache[tuple[bytes, bytes], bool] = TTLCache(ARCHIVED_ITEMS, ARCHIVED_SECONDS)
    return Archive(store.archive, limits, written, tasks.spawn, observe, time.monotonic)


def open_recorder(store: Store, archive: Archive | None) -> HistoryRecorder:
    """Return the recorder of requests, compactions and summaries of conversations."""
    recent: TTLCache[tuple[object, ...], int] = TTLCache(RECENT_NOTES, NOTE_SECONDS)
    return HistoryRecorder(store.conversations, recent, time.time, archive)


def open_reader(settings: Settings, store: Store) -> History:
    """Return the reader by which callers read their own conversations."""
    return History(
        store.conversations,
        store.archive,
        time.time,
        compacts=settings.compression.mode == "on",
        summaries=settings.summaries.mode,
        budgets=budget_settings(settings).enabled,
    )


def open_earlier(store: Store) -> ReadEarlier:
    """Return the reader of a tenant's earlier conversations."""
    return EarlierSessions(store.conversations, store.archive, store.summaries).items

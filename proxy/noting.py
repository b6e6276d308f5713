"""What is written down of conversations and told of them, built from the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cachetools import TTLCache

from proxy.notes.archive import Archive, Outcome, Terms
from proxy.notes.chronicle import LEAST, Chronicle
from proxy.notes.conversations import Conversations
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
    terms = Terms(wanted.days * DAY, wanted.max_item, wanted.queue)
    # Known for an hour: what the store lost meanwhile is written again, and what it has lives on.
    return Archive(store.archive, terms, TTLCache(ARCHIVED, 3600.0), tasks.spawn, observe, time.monotonic)


def open_chronicle(store: Store, archive: Archive | None) -> Chronicle:
    """What notes what becomes of conversations."""
    recent: TTLCache[tuple[str, bytes], bool] = TTLCache(NOTED, LEAST)
    return Chronicle(store.conversations, recent, time.time, archive)


def open_conversations(settings: Settings, store: Store) -> Conversations:
    """What tells callers of their conversations."""
    compacts, summaries = settings.compression.mode == "on", settings.summaries.mode
    return Conversations(store.conversations, store.archive, time.time, compacts=compacts, summaries=summaries)

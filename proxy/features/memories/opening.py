"""Opens what stores memories, gives them to conversations, and lets callers read and write them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from cachetools import LRUCache

from proxy.engine.features import Feature
from proxy.features.memories.block import StoredBlock
from proxy.features.memories.book import MemoryBook
from proxy.features.memories.extraction import ExtractMemories
from proxy.features.memories.feature import GiveMemories
from proxy.features.memories.routes import MemoryRoutes
from proxy.features.memories.settings import memories_settings
from proxy.features.memories.tools import DeclareMemoryTools, MemorySave, MemorySearch
from proxy.features.opening import FeatureParts, open_earlier
from proxy.server.access import Access
from proxy.server.admin import OpenRoutes, Route, no_routes
from proxy.server.config import Limits
from proxy.server_tools.tool import ServerTool
from proxy.settings import Settings
from proxy.store import Store

BLOCKS: Final = 2_000
"""Conversations whose block is remembered, for the time in which the store is away: about 2 KB each."""


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return what gives memories, and what declares their tools, if they are switched on."""
    settings = memories_settings(parts.settings)
    if not settings.enabled:
        return []
    book = MemoryBook(parts.store.memories, time.time)
    cached: LRUCache[bytes, StoredBlock] = LRUCache(BLOCKS)
    features: list[Feature] = [GiveMemories(parts.reader, parts.store.records, book, cached, time.time)]
    if settings.tools:
        features.append(DeclareMemoryTools(parts.reader, settings.tools))
    if settings.extract:
        features.append(ExtractMemories(book, settings.extract, parts.spawn))
    return features


def open_tools(parts: FeatureParts) -> list[ServerTool]:
    """Return the tools if they are switched on for any project."""
    settings = memories_settings(parts.settings)
    if not settings.enabled or not settings.tools:
        return []
    book = MemoryBook(parts.store.memories, time.time)
    return [MemorySave(book), MemorySearch(book, open_earlier(parts.store))]


def open_routes(settings: Settings, store: Store) -> OpenRoutes:
    """Return what opens the routes, if memories are switched on."""
    if not memories_settings(settings).enabled:
        return no_routes
    book = MemoryBook(store.memories, time.time)

    def open_with(access: Access, limits: Limits) -> Mapping[str, Route]:
        return MemoryRoutes(access, book, limits).by_name()

    return open_with

"""Gives a new conversation the memories of its project, once, at the beginning of its first user message.

What a conversation was given is stored as a record, so that every later request of it, on any replica and after any
restart, sends the same bytes, and the provider's cache stays useful. The record is found by the first user message and,
from the second request on, by the model's first answer, too: many conversations begin with the same words.

    a request                                  its block
    without an answer of the model's           chosen now, and stored; the same again if it is repeated soon
    with one, and a record of this answer      the record's
    with one, and a record of its beginning    the record's, which is stored for this answer
    with one, and no record                    none: it began without
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cachetools import LRUCache
from msgspec import structs

from proxy.core.decisions import API_FORMATS
from proxy.core.errors import InvalidRequest, StoreUnavailable
from proxy.core.request import Request
from proxy.engine.features import Feature, Planning
from proxy.engine.ports import Records
from proxy.engine.reading import LocatedBody, Reader
from proxy.features.memories import block
from proxy.features.memories.block import Entry, StoredBlock
from proxy.features.memories.book import MemoryBook
from proxy.features.memories.extraction import ExtractMemories
from proxy.features.memories.routes import MemoryRoutes
from proxy.features.memories.selection import choose, query_of
from proxy.features.memories.settings import memories_settings
from proxy.features.memories.tools import DeclareMemoryTools, MemorySave, MemorySearch
from proxy.features.opening import FeatureParts, open_earlier
from proxy.offload import offload
from proxy.server.access import Access
from proxy.server.admin import OpenRoutes, Route, no_routes
from proxy.server.config import Limits
from proxy.server_tools.declare import ENDLESS
from proxy.server_tools.tool import ServerTool
from proxy.settings import Settings
from proxy.store import Store

STAGE: Final = "memories"

ROUTE: Final = "\0memories"
"""The route under which blocks are stored; no upstream and model have this name."""

REPEATED_SECONDS: Final = 600.0
"""Seconds for which the first request of a conversation gets the same block if it is repeated."""

WINDOW_PART: Final = 16
"""A block takes at most one token in so many of the window."""

UNKNOWN_WINDOW: Final = 8_192
"""The window that a block is sized by if the model's is unknown."""

BLOCKS: Final = 2_000
"""Conversations whose block is remembered, for the time in which the store is away: about 2 KB each."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a conversation begins: the index of its first user item, and the names of its records.

    ``answered`` is the name by its first answer too, empty if it has none yet. ``texts`` are the user's messages.
    """

    index: int
    name: bytes
    answered: bytes
    texts: tuple[str, ...]


class GiveMemories(Feature):
    """Gives memories of *book*. *cached* are the blocks of conversations in use; *now* returns Unix time."""

    markers = MappingProxyType({"chat": (b'"messages"',), "messages": (b'"messages"',), "responses": (b'"input"',)})

    def __init__(
        self,
        reader: Reader,
        records: Records,
        book: MemoryBook,
        cached: MutableMapping[bytes, StoredBlock],
        now: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._records = records
        self._book = book
        self._cached = cached
        self._now = now

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with the block of its conversation; *request* itself if that was given none."""
        purpose = engine.run.request.purpose
        if purpose not in ("answer", "count") or engine.mode_of(request) != "on":
            return request
        api_format = API_FORMATS[request.api]
        try:
            located = await self._reader.located(api_format, request.tenant, request.body)
            beginning = await offload(len(request.body), self._beginning, request, located)
        except InvalidRequest:
            return request  # what cannot be read may still be relayed
        if beginning is None or located.envelope.stored:
            return request
        given = await self._stored(request, beginning)
        if not beginning.answered and not self._is_repeated(given):
            given = await self._new(request, engine, beginning, is_dry=purpose == "count", replaces=given is not None)
        if given is not None and given.entries:
            given = await self._without_forgotten(request, beginning, given, is_dry=purpose == "count")
        if given is None or not given.entries:
            return request
        text = block.text_of(given.entries)
        start, end = located.scan.spans[beginning.index]
        item = api_format.with_text(located.body[start:end], text, before=True)
        body = located.body[:start] + item + located.body[end:]
        return structs.replace(request, body=body, prepared=(*request.prepared, STAGE))

    def _beginning(self, request: Request, located: LocatedBody) -> Beginning | None:
        """Return how the conversation begins; None if it has no user item before the model's first answer."""
        api_format, key = API_FORMATS[request.api], self._records.prefix_key(request.tenant)
        index, digest, answer = -1, b"", b""
        texts: list[str] = []
        for at, (start, end) in enumerate(located.scan.spans):
            raw = located.body[start:end]
            item = api_format.read_item(raw, len)
            if item.role in ("assistant", "tool"):
                answer = item.digest
                break
            if item.role != "user":
                continue
            texts.append(api_format.read_item_text(raw).text)
            if index < 0:
                index, digest = at, item.digest
        if index < 0:
            return None
        options = request.options
        label = f"{options.project}\0{options.conversation}".encode("utf-8", "surrogatepass")
        name = hmac.digest(key, b"memories\0" + label + b"\0" + digest, "sha256")[:16]
        answered = b""
        if answer:
            answered = hmac.digest(key, name + answer, "sha256")[:16]
        return Beginning(index, name, answered, tuple(texts))

    async def _stored(self, request: Request, beginning: Beginning) -> StoredBlock | None:
        """Return the block that the conversation was given, as the store has it or this process remembers it."""
        names = [name for name in (beginning.answered, beginning.name) if name]
        given, is_stored = await self._look_up(request, beginning, names)
        if given is None:
            return None
        if not is_stored:
            given = await self._save(request, beginning, names[0], given)
        self._cached[names[0]] = given
        return given

    async def _look_up(
        self, request: Request, beginning: Beginning, names: Sequence[bytes]
    ) -> tuple[StoredBlock | None, bool]:
        """Return the block under the first of *names* that has one, and True if the store has it under the first."""
        stored = await self._records.newest(request.tenant, beginning.name, ROUTE, names)
        if stored is not None:
            index, value = stored
            return block.decode(value), index == 0
        return next((self._cached[name] for name in names if name in self._cached), None), False

    def _is_repeated(self, given: StoredBlock | None) -> bool:
        return given is not None and abs(self._now() - given.given_at) < REPEATED_SECONDS

    async def _new(
        self, request: Request, engine: Planning, beginning: Beginning, *, is_dry: bool, replaces: bool
    ) -> StoredBlock | None:
        """Return a block chosen now; None if there is nothing to give. It is stored unless *is_dry*.

        *replaces*: an earlier conversation began with the same words, and this one must not be taken for it.
        """
        try:
            memories = await self._book.valid(request.tenant, request.options.project)
        except StoreUnavailable:
            return None  # what could not be stored could not be given again
        entries: tuple[Entry, ...] = ()
        if memories:
            now = self._now()
            measured = await engine.measure(request, ENDLESS)
            route, window = measured.known.route, measured.known.window or UNKNOWN_WINDOW
            count = self._reader.count(route.encoding, route.model)
            entries = block.entries_of(choose(memories, query_of(beginning.texts), now), window // WINDOW_PART, count)
        if not entries and not replaces:
            return None
        given = StoredBlock(block.VERSION, int(self._now()), entries)
        if is_dry:
            return given
        given = await self._save(request, beginning, beginning.name, given, replaces=replaces)
        self._cached[beginning.name] = given
        return given

    async def _save(
        self, request: Request, beginning: Beginning, name: bytes, given: StoredBlock, *, replaces: bool = False
    ) -> StoredBlock:
        """Store the block *given*; return the one that is valid from now on, which another replica may have stored."""
        value = block.encode(given)
        stored = await self._records.save(request.tenant, beginning.name, ROUTE, name, value, replace=replaces)
        return block.decode(stored) or given

    async def _without_forgotten(
        self, request: Request, beginning: Beginning, given: StoredBlock, *, is_dry: bool
    ) -> StoredBlock:
        """Return the block *given* without memories that were forgotten since, and have the store forget them, too.

        While the store is away none is known to be forgotten.
        """
        try:
            forgotten = set((await self._book.all(request.tenant, request.options.project)).forgotten)
        except StoreUnavailable:
            return given
        remaining = tuple(entry for entry in given.entries if entry.id not in forgotten)
        if len(remaining) == len(given.entries):
            return given
        smaller = StoredBlock(given.version, given.given_at, remaining)
        if is_dry:
            return smaller
        name = beginning.answered or beginning.name
        self._cached[name] = smaller
        return await self._save(request, beginning, name, smaller, replaces=True)


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

"""Gives a new conversation the memories of its project, once, at the beginning of its first user message.

Theory of operation
===================

The block of a conversation is stored as a record, so that every later request of it, on any replica and after any
restart, sends the same bytes, and the provider's prompt cache applies. A record has a name that is derived from the
first user message and, from the second request on, from the model's first answer, too: many conversations begin with
the same words.

    request                                             block
    --------------------------------------------------  --------------------------------------------------------------
    without an answer of the model, first time          chosen now, and stored under the first user message
    the same again within ``REPEATED_SECONDS``          that block: a client repeats a request that failed
    the same again later                                chosen anew: this is another conversation
    with an answer, and a record of this answer         that of the record
    with an answer, and a record of its first message   that of the record, which is then stored for this answer, too
    with an answer, and no record                       none: the conversation began without a block

If the memories cannot be read, a new conversation begins without a block. While the store does not answer, blocks come
from the memory of the process. Memories that were forgotten since are removed from a block, which changes the prompt
once.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import msgspec
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
from proxy.features.memories.settings import is_named, memories_settings
from proxy.features.memories.tools import DECLARATIONS, MemorySave, MemorySearch
from proxy.features.opening import FeatureParts, open_earlier
from proxy.server.access import Access
from proxy.server.admin import OpenRoutes, Route, no_routes
from proxy.server.config import Limits
from proxy.server_tools.declare import ENDLESS, DeclareTools
from proxy.server_tools.tool import ServerTool
from proxy.settings import Settings
from proxy.store import Store
from proxy.tasks import offload

STAGE: Final = "memories"

ROUTE: Final = "\0memories"
"""The route under which blocks are stored; no upstream and model have this name."""

REPEATED_SECONDS: Final = 600.0
"""Seconds for which the first request of a conversation gets the same block if it is repeated."""

WINDOW_PART: Final = 16
"""A block takes at most one token in so many of the window."""

UNKNOWN_WINDOW: Final = 8_192
"""The window, in tokens, by which the size of a block is chosen if the model's is unknown."""

BLOCKS: Final = 2_000
"""Conversations whose block is remembered, in case the store does not answer: about 2 KB each."""


class Beginning(msgspec.Struct, frozen=True):
    """How a conversation begins: the index of its first user item, and the names of its records.

    ``answered`` is the name by its first answer too, empty if it has none yet. ``texts`` are the user's messages.
    """

    index: int
    name: bytes
    answered: bytes
    texts: tuple[str, ...]


class GiveMemories(Feature):
    """Adds memories of *book* to conversations. *cached* are the blocks of recent ones; *now* returns Unix time."""

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
        """Return *request* with the block of its conversation; *request* itself if that has none."""
        purpose = engine.run.request.purpose
        if purpose not in ("answer", "count") or engine.mode_of(request) != "on":
            return request
        api_format = API_FORMATS[request.api]
        try:
            located = await self._reader.located(api_format, request.tenant, request.body)
            beginning = await offload(len(request.body), self._beginning, request, located)
        except InvalidRequest:
            return request  # a body that cannot be read may still be relayed
        if beginning is None or located.envelope.stored:
            return request
        current, is_dry = await self._stored(request, beginning), purpose == "count"
        if not beginning.answered and not self._is_repeated(current):
            current = await self._new(request, engine, beginning, is_dry=is_dry, replaces=current is not None)
        if current is not None and current.entries:
            current = await self._without_forgotten(request, beginning, current, is_dry=is_dry)
        if current is None or not current.entries:
            return request
        text = block.text_of(current.entries)
        start, end = located.scan.spans[beginning.index]
        item = api_format.with_text(located.body[start:end], text, before=True)
        body = located.body[:start] + item + located.body[end:]
        return structs.replace(request, body=body, prepared=(*request.prepared, STAGE))

    def _beginning(self, request: Request, located: LocatedBody) -> Beginning | None:
        """Return the beginning of the conversation; None if it has no user item before the model's first answer."""
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
        """Return the block of the conversation from the store, or from the memory of this process."""
        names = [name for name in (beginning.answered, beginning.name) if name]
        current, is_stored = await self._look_up(request, beginning, names)
        if current is None:
            return None
        if not is_stored:
            current = await self._save(request, beginning, names[0], current)
        self._cached[names[0]] = current
        return current

    async def _look_up(
        self, request: Request, beginning: Beginning, names: Sequence[bytes]
    ) -> tuple[StoredBlock | None, bool]:
        """Return the block under the first of *names* that has one, and True if the store has it under the first."""
        stored = await self._records.newest(request.tenant, beginning.name, ROUTE, names)
        if stored is not None:
            index, value = stored
            return block.decode(value), index == 0
        return next((self._cached[name] for name in names if name in self._cached), None), False

    def _is_repeated(self, current: StoredBlock | None) -> bool:
        """True if the conversation's *current* block was chosen so recently that its request is a repetition."""
        return current is not None and abs(self._now() - current.chosen_at) < REPEATED_SECONDS

    async def _new(
        self, request: Request, engine: Planning, beginning: Beginning, *, is_dry: bool, replaces: bool
    ) -> StoredBlock | None:
        """Return a block chosen now; None if there are no memories. It is stored unless *is_dry*.

        *replaces*: an earlier conversation began with the same words, and its record must not apply to this one.
        """
        try:
            memories = await self._book.valid(request.tenant, request.options.project)
        except StoreUnavailable:
            return None  # a block that cannot be stored could not be repeated
        entries: tuple[Entry, ...] = ()
        if memories:
            now = self._now()
            # Measured for its route only: the size of a block depends on the model's window and vocabulary.
            measured = await engine.measure(request, ENDLESS)
            route, window = measured.known.route, measured.known.window or UNKNOWN_WINDOW
            count = self._reader.count(route.encoding, route.model)
            entries = block.entries_of(choose(memories, query_of(beginning.texts), now), window // WINDOW_PART, count)
        if not entries and not replaces:
            return None
        chosen = StoredBlock(block.VERSION, int(self._now()), entries)
        if is_dry:
            return chosen
        saved = await self._save(request, beginning, beginning.name, chosen, replaces=replaces)
        self._cached[beginning.name] = saved
        return saved

    async def _save(
        self, request: Request, beginning: Beginning, name: bytes, new: StoredBlock, *, replaces: bool = False
    ) -> StoredBlock:
        """Store the block *new*; return the one that is valid from now on, which another replica may have stored."""
        value = block.encode(new)
        stored = await self._records.save(request.tenant, beginning.name, ROUTE, name, value, replace=replaces)
        return block.decode(stored) or new

    async def _without_forgotten(
        self, request: Request, beginning: Beginning, current: StoredBlock, *, is_dry: bool
    ) -> StoredBlock:
        """Return the *current* block without memories that were forgotten since, and store it unless *is_dry*.

        If the store does not answer the block stays as it is.
        """
        try:
            forgotten = set((await self._book.all(request.tenant, request.options.project)).forgotten)
        except StoreUnavailable:
            return current
        remaining = tuple(entry for entry in current.entries if entry.id not in forgotten)
        if len(remaining) == len(current.entries):
            return current
        smaller = StoredBlock(current.version, current.chosen_at, remaining)
        if is_dry:
            return smaller
        name = beginning.answered or beginning.name
        self._cached[name] = smaller
        return await self._save(request, beginning, name, smaller, replaces=True)


def open_features(parts: FeatureParts) -> list[Feature | ServerTool]:
    """Return the features that add memories, offer tools for them, and extract them, as far as they are switched on."""
    settings = memories_settings(parts.settings)
    if not settings.enabled:
        return []
    book = MemoryBook(parts.store.memories, time.time)
    cached: LRUCache[bytes, StoredBlock] = LRUCache(BLOCKS)
    features: list[Feature | ServerTool] = [GiveMemories(parts.reader, parts.store.records, book, cached, time.time)]
    if settings.tools:
        is_for = partial(is_named, patterns=settings.tools)
        features.append(DeclareTools(parts.reader, DECLARATIONS, STAGE, is_for))
        features += [MemorySave(book), MemorySearch(book, open_earlier(parts.store))]
    if settings.extract:
        features.append(ExtractMemories(book, settings.extract, parts.spawn))
    return features


def open_routes(settings: Settings, store: Store) -> OpenRoutes:
    """Return the function that opens the routes, if memories are switched on."""
    if not memories_settings(settings).enabled:
        return no_routes
    book = MemoryBook(store.memories, time.time)

    def open_with(access: Access, limits: Limits) -> Mapping[str, Route]:
        return MemoryRoutes(access, book, limits).by_name()

    return open_with

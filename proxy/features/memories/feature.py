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
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

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
from proxy.features.memories.selection import choose, query_of
from proxy.offload import offload
from proxy.server_tools.declare import ENDLESS

STAGE: Final = "memories"

ROUTE: Final = "\0memories"
"""The route under which blocks are stored; no upstream and model have this name."""

REPEATED_SECONDS: Final = 600.0
"""Seconds for which the first request of a conversation gets the same block if it is repeated."""

WINDOW_PART: Final = 16
"""A block takes at most one token in so many of the window."""

UNKNOWN_WINDOW: Final = 8_192
"""The window that a block is sized by if the model's is unknown."""


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
        purpose = engine.received.purpose
        if purpose not in ("answer", "count") or engine.mode_of(request) != "on":
            return request
        api_format = API_FORMATS[request.api]
        try:
            located = await self._reader.located(api_format, request.tenant, request.body)
            begins = await offload(len(request.body), self._beginning, request, located)
        except InvalidRequest:
            return request  # what cannot be read may still be relayed
        if begins is None or located.envelope.stored:
            return request
        given = await self._stored(request, begins)
        if not begins.answered and not self._is_repeated(given):
            given = await self._new(request, engine, begins, is_dry=purpose == "count", replaces=given is not None)
        if given is not None and given.entries:
            given = await self._without_forgotten(request, begins, given, is_dry=purpose == "count")
        if given is None or not given.entries:
            return request
        text = block.text_of(given.entries)
        start, end = located.scan.spans[begins.index]
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

    async def _stored(self, request: Request, begins: Beginning) -> StoredBlock | None:
        """Return the block that the conversation was given, as the store has it or this process remembers it."""
        names = [name for name in (begins.answered, begins.name) if name]
        given, is_stored = await self._look_up(request, begins, names)
        if given is None:
            return None
        if not is_stored:
            given = await self._save(request, begins, names[0], given)
        self._cached[names[0]] = given
        return given

    async def _look_up(
        self, request: Request, begins: Beginning, names: Sequence[bytes]
    ) -> tuple[StoredBlock | None, bool]:
        """Return the block under the first of *names* that has one, and True if the store has it under the first."""
        stored = await self._records.newest(request.tenant, begins.name, ROUTE, names)
        if stored is not None:
            index, value = stored
            return block.decode(value), index == 0
        return next((self._cached[name] for name in names if name in self._cached), None), False

    def _is_repeated(self, given: StoredBlock | None) -> bool:
        return given is not None and abs(self._now() - given.given_at) < REPEATED_SECONDS

    async def _new(
        self, request: Request, engine: Planning, begins: Beginning, *, is_dry: bool, replaces: bool
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
            entries = block.entries_of(choose(memories, query_of(begins.texts), now), window // WINDOW_PART, count)
        if not entries and not replaces:
            return None
        given = StoredBlock(block.VERSION, int(self._now()), entries)
        if is_dry:
            return given
        given = await self._save(request, begins, begins.name, given, replaces=replaces)
        self._cached[begins.name] = given
        return given

    async def _save(
        self, request: Request, begins: Beginning, name: bytes, given: StoredBlock, *, replaces: bool = False
    ) -> StoredBlock:
        """Store the block *given*; return the one that is valid from now on, which another replica may have stored."""
        value = block.encode(given)
        stored = await self._records.save(request.tenant, begins.name, ROUTE, name, value, replace=replaces)
        return block.decode(stored) or given

    async def _without_forgotten(
        self, request: Request, begins: Beginning, given: StoredBlock, *, is_dry: bool
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
        name = begins.answered or begins.name
        self._cached[name] = smaller
        return await self._save(request, begins, name, smaller, replaces=True)

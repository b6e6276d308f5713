"""Reads and counts requests in O(new): a cached prefix is recognised by its hash, and only new items are parsed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import msgspec
from cachebox import LRUCache
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from proxy.core.apis.base import PER_REPLY, ApiFormat
from proxy.core.apis.envelope import SYSTEM, TOOLS, Envelope, read_envelope
from proxy.core.apis.json_scan import MOST_ITEMS, Scan, Span, extend, scan, utf8_text
from proxy.core.apis.tool_declarations import reads_declarations, tools_tokens
from proxy.core.conversation import (
    EMPTY_LAYOUT,
    UNREAD,
    Count,
    Injected,
    Item,
    ItemFacts,
    ItemText,
    Layout,
    WrittenCalls,
    lay_out,
    linked_size,
    prefix_hashes,
)
from proxy.core.decisions import ParsedBody, TokenCounts
from proxy.core.errors import InvalidRequest
from proxy.core.models import Route
from proxy.core.tokens.budget import NOTHING, Members, RoleTotals, add_up
from proxy.core.tokens.counting import NO_RULES, InjectedRules, Meter, injected_in
from proxy.core.tokens.media import prices
from proxy.core.tool_calls import facts_of
from proxy.core.tool_table import NO_TOOLS, ToolMap
from proxy.core.written_calls import find_written_calls, join_written_results, texts_of, with_written_result
from proxy.engine.ports import Cache, Counter
from proxy.tasks import LARGE, load_of, offload

P = TypeVar("P", bound="Prefix")

RECOUNTED = 1_024
"""Characters from which the count of a text in a view is cached: the block, for one, is in every view."""

MANY, LEAST_ITEM = 1_000, 16
"""A body with more than ``MANY`` items of fewer than ``LEAST_ITEM`` bytes on average is refused: no API has such short
messages, and each costs as much as one of hundreds of bytes."""

SEED = int.from_bytes(os.urandom(8), "big")
"""Seeds the keys of the caches. They never leave the process, so a fast hash is enough; stored or sent names are keyed
and cryptographic. https://github.com/Cyan4973/xxHash#performance-on-small-data"""

MOST_MEASURES, MOST_SCOPES = 1_024, 4_096
"""Cached names of ways of counting, and cached scopes. Bounded: clients choose models and credentials."""

MOST_METERS, KEPT_SHORT = 64, 2_000
"""Meters that are used again, each for one tenant, and the most short texts that such a one has counted: names of tools
come with every request. Together they take 15 MB at most.
"""

PREFIX_FROM = 8_192
"""Bytes from which a body is cached as a prefix; reading a smaller one again costs as little."""


class Prefix(msgspec.Struct):
    """The first ``border`` bytes of a body that was read; ``digest`` is theirs."""

    border: int
    digest: bytes


class CountedBody(ParsedBody, frozen=True):
    """A body whose items were counted; ``body`` is the client's, or the same with its items as a list.

    ``scope`` is that of the names of its items, ``count`` counts the texts of its views.
    """

    counts: TokenCounts
    cached_prefix: CachedPrefix | None
    scope: int
    count: Meter

    def layout(self) -> Layout:
        """Return the structure of the items, continued from that of a prefix of this body."""
        if self.cached_prefix is None:
            return lay_out(self.items, EMPTY_LAYOUT)
        layout = self.cached_prefix.layout = lay_out(self.items, self.cached_prefix.layout)
        return layout

    def prefix_hashes(self, key: bytes, label: str) -> tuple[bytes, ...]:
        """Return the keyed hash after each item, continued from those computed for a prefix of this body."""
        if self.cached_prefix is None:
            return prefix_hashes(key, label, self.items, ())
        scope, earlier = self.cached_prefix.prefix_hashes
        if scope != (key, label):
            earlier = ()
        hashes = prefix_hashes(key, label, self.items, earlier)
        self.cached_prefix.prefix_hashes = (key, label), hashes
        return hashes

    def items_with_facts(self, facts: Mapping[int, ItemFacts | None]) -> tuple[Item, ...]:
        """Return the items with *facts*, by index. The conversation's next body begins with these items."""
        items = list(self.items)
        for index, of_item in facts.items():
            items[index] = replace(items[index], facts=of_item)
        if self.cached_prefix is not None:
            self.cached_prefix.items = tuple(items)
        return tuple(items)


class CountedMembers(msgspec.Struct, frozen=True):
    """The tokens of the members around the items, and the way in which they were counted."""

    counted_by: str
    tokens: dict[str, int]
    members: Members


class CachedEnvelope(msgspec.Struct):
    """An envelope that was read, and the newest count of its members. Threads share it without a lock."""

    envelope: Envelope
    counted: CountedMembers | None = None


class CachedPrefix(Prefix):
    """A prefix of a body with everything that was read of it: equal bytes have an equal scan and equal items.

    ``layout`` and ``prefix_hashes`` (with their key and label) are set when first needed, and may be those of a shorter
    prefix. ``counted_by`` names the way in which the items were counted. ``linked`` bounds the bytes of its calls and
    results (``linked_size``). Threads share it without a lock: members are only replaced as a whole.
    """

    scan: Scan
    counted_by: str = ""
    items: tuple[Item, ...] = ()
    linked: int = 0
    prefix_hashes: tuple[tuple[bytes, str], tuple[bytes, ...]] = ((b"", ""), ())
    layout: Layout = EMPTY_LAYOUT
    roles: RoleTotals = NOTHING


class LocatedBody(msgspec.Struct, frozen=True):
    """A body of one API and tenant whose items are located but not yet counted."""

    api_format: ApiFormat
    tenant: bytes
    body: bytes
    scan: Scan
    envelope: Envelope
    cached_envelope: CachedEnvelope
    cached_prefix: CachedPrefix | None
    hasher: PrefixHasher | None


class Reader:
    """Reads bodies with bounded caches: of items, envelopes, sizes (tokens of long texts), and prefixes of bodies.

    Keys are digests over tenant and content: no caller can time what another one sent, and no cache holds a body. Large
    bodies are read on threads, so the caches must be safe to share. A body of more than *most* items is refused.
    """

    def __init__(
        self,
        counter: Counter,
        items: Cache[bytes, Item],
        envelopes: Cache[bytes, CachedEnvelope],
        sizes: Cache[bytes, int],
        prefixes: Cache[bytes, CachedPrefix],
        tools: ToolMap = NO_TOOLS,
        most: int = MOST_ITEMS,
        injected: InjectedRules = NO_RULES,
    ) -> None:
        self.tools = tools
        self.most = most
        self._injected = injected
        self._counter = counter
        self._items = items
        self._envelopes = envelopes
        self._sizes = sizes
        self._prefixes = prefixes
        self._meters: LRUCache[tuple[str, str, bytes], Meter] = LRUCache(MOST_METERS)

    async def located(self, api_format: ApiFormat, tenant: bytes, body: bytes) -> LocatedBody:
        """As ``locate``, on a thread if much of the body is new."""
        hasher, prefix = self._longest_prefix(api_format, tenant, body)
        longer, size = None, len(body)
        if prefix is not None and len(body) - prefix.border < LARGE:
            longer = extend(body, api_format.LIST, prefix.scan, self.most)
            if longer is not None:  # a body that does not continue the list is scanned as a whole
                size -= prefix.border
        return await offload(size, self._locate, api_format, tenant, body, hasher, prefix, longer)

    def locate(self, api_format: ApiFormat, tenant: bytes, body: bytes) -> LocatedBody:
        """Locate the items of *body* and read what is around them.

        Raises ``InvalidRequest`` if it is no valid body of *api_format*, ``TooManyItems`` if it has too many.
        """
        return self._locate(api_format, tenant, body, *self._longest_prefix(api_format, tenant, body))

    def _longest_prefix(
        self, api_format: ApiFormat, tenant: bytes, body: bytes
    ) -> tuple[PrefixHasher | None, CachedPrefix | None]:
        """Return the longest cached prefix of *body*, and the hash that found it; takes 0.1 ms for each MB."""
        if len(body) < PREFIX_FROM:
            return None, None
        hasher = PrefixHasher(scope_of(tenant, api_format.API), body)
        return hasher, hasher.find(self._prefixes)

    def _locate(
        self,
        api_format: ApiFormat,
        tenant: bytes,
        body: bytes,
        hasher: PrefixHasher | None,
        prefix: CachedPrefix | None,
        longer: Scan | None = None,
    ) -> LocatedBody:
        """Return the located *body*; *longer* is its scan if that was extended from the prefix before."""
        try:
            if longer is None and prefix is not None:
                longer = extend(body, api_format.LIST, prefix.scan, self.most)
            scanned = longer or scan(body, api_format.LIST, self.most)
        except InvalidRequest:
            listed = api_format.with_item_list(body)
            if listed is None:
                raise
            return self.locate(api_format, tenant, listed)
        if (number := len(scanned.spans)) > MANY and scanned.end - scanned.start < LEAST_ITEM * number:
            raise InvalidRequest(f"{number} messages or items that hold hardly anything are no conversation.")
        raw = scanned.without_items(body)
        name = name_in(raw, scope_of(tenant, api_format.API))
        around = self._envelopes.get(name)
        if around is None:
            around = CachedEnvelope(read_envelope(utf8_text(raw), api_format.OUTPUT_FIGURES))
            self._envelopes[name] = around
        return LocatedBody(api_format, tenant, body, scanned, around.envelope, around, prefix, hasher)

    async def read(self, located: LocatedBody, encoding: str, model: str = "") -> CountedBody:
        """As ``count_body``, on a thread if much of the body is new."""
        return await offload(self.new_size(located, encoding, model), self.count_body, located, encoding, model)

    def new_size(self, located: LocatedBody, encoding: str, model: str) -> int:
        """Return the size of the uncounted part for ``offload``; ``LARGE`` if a vocabulary has to be loaded first."""
        if encoding not in self._counter.loaded:
            return LARGE
        prefix = located.cached_prefix
        if prefix is None or prefix.counted_by != _measure(encoding, model):
            return load_of(len(located.body), len(located.scan.spans))
        return load_of(len(located.body) - prefix.border, len(located.scan.spans) - len(prefix.items))

    def count_body(self, located: LocatedBody, encoding: str, model: str = "") -> CountedBody:
        """Count a located body in *encoding*, with media and tools priced as *model* prices them.

        Raises ``InvalidRequest`` if an item is not valid.
        """
        api_format, tenant, measure = located.api_format, located.tenant, _measure(encoding, model)
        prefix, spans = located.cached_prefix, located.scan.spans
        if prefix is not None and prefix.counted_by != measure:
            prefix = None  # it was counted in another way
        earlier: tuple[Item, ...] = ()
        roles = NOTHING
        if prefix is not None and spans[: len(prefix.items)] == prefix.scan.spans:
            earlier, roles = prefix.items, prefix.roles
        way, scope = (encoding, model, tenant), scope_of(tenant, api_format.API, measure)
        # The meter that counted so before remembers short texts, such as names of tools.
        count = self._meters[way] = self._meters.get(way) or self.count(*way)
        new = self._read_items(api_format, count, scope, located.body, spans[len(earlier) :])
        short: dict[str, int] = {}
        if len(count.short) > KEPT_SHORT:
            self._meters.pop(way, None)
            short = count.short  # too many to keep: only the views of this body use them
        items = earlier + new
        if any(item.written_result for item in new):
            items = join_written_results(items, len(earlier), partial(self._calls_written_in, located))
        roles = add_up(items, roles)
        around = located.cached_envelope.counted
        if around is None or around.counted_by != measure:
            around = self._count_members(located.envelope, measure, scope, encoding, model)
            located.cached_envelope.counted = around
        cached = self._cache_prefix(located, measure, items, roles)
        tools = 0
        if not around.tokens.keys().isdisjoint(TOOLS):
            tools = api_format.PER_TOOLS
        fixed = PER_REPLY + tools + roles.system + sum(around.tokens.values())
        counts = TokenCounts(fixed, roles.history, around.tokens, roles, around.members)
        count = replace(count, again_from=RECOUNTED, short=short)
        return CountedBody(located.body, located.scan, items, located.envelope, counts, cached, scope, count)

    def _calls_written_in(self, located: LocatedBody, index: int) -> WrittenCalls:
        """Return the calls that the item at *index* has in its text."""
        text = located.api_format.read_item_text(located.body[slice(*located.scan.spans[index])]).text
        return find_written_calls(text, self.tools.text_format, self.tools.call)

    def _count_members(self, envelope: Envelope, measure: str, scope: int, encoding: str, model: str) -> CountedMembers:
        """Count the members around the items; a text that was counted before is not counted again."""
        tokens: dict[str, int] = {}
        injected: list[Injected] = []
        for key, text in envelope.counted().items():
            # In the cache it is an item: it has tokens and injected parts as one has.
            name = name_in(f"{key}\0{text}".encode("utf-8", "surrogatepass"), scope)
            member = self._items.get(name)
            if member is None:
                count = self.count_tools(encoding, model) if key in TOOLS else self.count(encoding, model)
                [parts] = injected_in((envelope.texts.get(key, ""),), count)
                member = self._items[name] = Item("system", count(text), 0, b"", injected=parts)
            tokens[key] = member.tokens
            injected += member.injected
        tools, system = (sum(tokens.get(key, 0) for key in keys) for keys in (TOOLS, SYSTEM))
        return CountedMembers(measure, tokens, Members(tools, system, tuple(injected)))

    def _cache_prefix(
        self, located: LocatedBody, measure: str, items: tuple[Item, ...], roles: RoleTotals
    ) -> CachedPrefix | None:
        """Cache the body up to its last item, with the members of its own prefix; return None for a small body."""
        if located.hasher is None or not located.scan.spans:
            return None
        prefix, border = located.cached_prefix, located.scan.spans[-1][1]
        digest = located.hasher.digest(border)
        cached = CachedPrefix(border, digest, located.scan, measure, items, roles=roles)
        included = 0  # items whose bytes are in the prefix's ``linked``
        if prefix is not None:
            cached.prefix_hashes = prefix.prefix_hashes
            if prefix.counted_by == measure:
                cached.layout = prefix.layout
                cached.linked, included = prefix.linked, len(prefix.items)
        cached.linked += linked_size(items[included:])
        located.hasher.file(self._prefixes, cached)
        return cached

    def count(self, encoding: str, model: str = "", tenant: bytes | None = None) -> Meter:
        """Return a counter of text in *encoding*, with the prices of *model* for media.

        With a *tenant*, the count of a text of ``LARGE`` characters or more is cached.
        """
        count = self._counter.counter(encoding)
        if tenant is None:
            return Meter(count, prices(model), self._injected)
        return Meter(count, prices(model), self._injected, partial(self._count_once, encoding, tenant), LARGE)

    def _count_once(self, encoding: str, tenant: bytes, text: str) -> int:
        """Return the tokens of a long *text*, from the cache or counted and cached."""
        name = name_in(text.encode("utf-8", "surrogatepass"), scope_of(tenant, encoding, "again"))
        size = self._sizes.get(name)
        if size is None:
            size = self._sizes[name] = self._counter.counter(encoding)(text)
        return size

    def view_item(self, api_format: ApiFormat, route: Route, tenant: bytes, count: Count, raw: bytes) -> Item:
        """Return the item *raw* of a view, without digest and facts; it is cached, because later views have it again.

        *count* is that of the view's request, which has counted most short texts of the item already.
        """
        name = name_in(raw, scope_of(tenant, api_format.API, _measure(route.encoding, route.model), "view"))
        item = self._items.get(name)
        if item is None:
            [item] = api_format.read_items((raw,), count, with_digest=False)
            self._items[name] = item
        return item

    def count_tools(self, encoding: str, model: str) -> Callable[[str], int]:
        """Return a counter for the JSON of a tools array as *model* reads it."""
        count = self.count(encoding, model)
        if not reads_declarations(model):
            return count
        return lambda text: tools_tokens(text, count)

    def tokens_of_tools(self, text: str, encoding: str, model: str) -> int:
        """Return the tokens of a tools array of our own as *model* reads it; cached, since it is the same for all."""
        name = name_in(text.encode(), scope_of(b"", _measure(encoding, model)))
        size = self._sizes.get(name)
        if size is None:
            size = self._sizes[name] = self.count_tools(encoding, model)(text)
        return size

    def _read_items(
        self, api_format: ApiFormat, count: Meter, scope: int, body: bytes, spans: Sequence[Span]
    ) -> tuple[Item, ...]:
        names = [name_in(body[start:end], scope) for start, end in spans]
        known = {name: self._items.get(name) for name in names}
        # By name, because a body may repeat an item thousands of times.
        new = {name: span for name, span in zip(names, spans, strict=True) if known[name] is None}
        slices = [slice(*span) for span in new.values()]
        items: Iterable[Item] = api_format.read_items((body[at] for at in slices), count)
        items = without_facts(items, (body[at] for at in slices), count, self.tools)
        read = dict(zip(new, items, strict=True))
        self._items.update(read)
        return tuple([known[name] or read[name] for name in names])

    def read_facts(self, api_format: ApiFormat, body: CountedBody, texts: dict[int, ItemText]) -> tuple[Item, ...]:
        """Return the items of *body* with the facts of all calls and results, which only a compaction needs.

        Texts that are read for them are added to *texts*, by index.
        """
        spans = body.scan.spans
        unread = [index for index, item in enumerate(body.items) if item.facts is UNREAD]
        # By name, because a body may repeat an item thousands of times.
        names = {index: name_in(body.body[slice(*spans[index])], body.scope) for index in unread}
        cached = {name: item for name in set(names.values()) if (item := self._items.get(name))}
        facts = {name: item.facts for name, item in cached.items()}
        new = {name: index for index, name in names.items() if facts.get(name, UNREAD) is UNREAD}
        # All texts before all facts: each pass stays in the same few functions.
        texts |= texts_of(api_format, {index: body.body[slice(*spans[index])] for index in new.values()}, body.items)
        read = facts_of([texts[index] for index in new.values()], self.tools.calls, body.count.text)
        facts |= dict(zip(new, read, strict=True))
        self._items.update({name: replace(cached[name], facts=facts[name]) for name in cached.keys() & new.keys()})
        return body.items_with_facts({index: facts[name] for index, name in names.items()})


class PrefixHasher:
    """Hashes a body once, to find its longest cached prefix and to cache a longer one.

    The key of a prefix is the digest of its first 2^k bytes, at least half of it. So a longer body of the conversation
    looks up two keys only, and conversations with equal beginnings differ within so many bytes.
    """

    def __init__(self, scope: int, body: bytes) -> None:
        self._body = memoryview(body)
        self._marks = [(0, xxh3_128(seed=scope))]

    def find(self, prefixes: Cache[bytes, P]) -> P | None:
        """Return the longest cached prefix with which the body begins."""
        power = len(self._body).bit_length() - 1
        longest: P | None = None
        for exponent in (power - 1, power):
            candidate = prefixes.get(self.digest(1 << exponent))
            fits = candidate is not None and candidate.border <= len(self._body)
            if candidate and fits and self.digest(candidate.border) == candidate.digest:
                longest = candidate
        return longest

    def file(self, prefixes: Cache[bytes, P], prefix: P) -> None:
        """Cache *prefix*, a prefix of the body."""
        prefixes[self.digest(1 << (prefix.border.bit_length() - 1))] = prefix

    def digest(self, end: int) -> bytes:
        """Return the digest of the first *end* bytes, continued from the longest shorter one."""
        at = len(self._marks) - 1
        while self._marks[at][0] > end:
            at -= 1
        start, mark = self._marks[at]
        if start < end:
            mark = mark.copy()
            mark.update(self._body[start:end])
            self._marks.append((end, mark))
        digest: bytes = mark.digest()
        return digest


def without_facts(items: Iterable[Item], raws: Iterable[bytes], count: Count, tools: ToolMap) -> list[Item]:
    """Return *items*, whose bytes are *raws*, with the facts of calls and results left to be read when they are needed.

    A user's message has the form of the result that it may begin with.
    """
    unread: list[Item] = []
    for item, raw in zip(items, raws, strict=True):
        if item.role == "user":
            item = with_written_result(item, raw, tools.text_format, count)
        elif item.role == "assistant" or (item.role == "tool" and item.answers):
            item = replace(item, facts=UNREAD)
        unread.append(item)
    return unread


@lru_cache(MOST_MEASURES)
def _measure(encoding: str, model: str) -> str:
    """Return the name of a way of counting: equal for models that count alike."""
    form = "declared" if reads_declarations(model) else "json"
    return f"{encoding},{prices(model).name},{form}"


@lru_cache(MOST_SCOPES)
def scope_of(tenant: bytes, *parts: str) -> int:
    """Return the seed of the keys of this tenant's texts; *parts* name the cache."""
    return xxh3_64_intdigest(b"\0".join([tenant, *map(str.encode, parts), b""]), SEED)


name_in = xxh3_128_digest
"""Returns the cache key of some bytes in a scope."""

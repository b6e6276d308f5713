"""Compaction records of conversations: looks up the newest one, writes a new one, prepares its summary ahead.

A record is stored under the prefix hash at its boundary, and a conversation's newest record is the one with the longest
prefix. Other replicas may have written it, so a look-up asks this process's cache and then the store, but reads the
store only where that can tell something new:

    the cache has a record, and the store was read up to it       read the boundaries behind it
    the store was read before, and nobody else wrote since        read nothing
    no record was cached, and the last look found none            read the boundaries since that look
    the record that the last look found was evicted               read all boundaries, at most ``MOST_BOUNDARIES``
    the store does not answer                                     use the cached record; nothing is noted as read
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from cachebox import LRUCache
from msgspec import structs

from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord, dump, load
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.truncate import BYTES_PER_TOKEN
from proxy.core.compaction.view import NO_TEXTS, OriginalItems, same_block, write_texts
from proxy.core.conversation import ItemText, Layout
from proxy.core.decisions import CountedView, LookedUp, MeasuredRequest, NeedBlock, Policy, UncountedView, View, Written
from proxy.core.planner import history_in_view, is_left_to_provider, provider_compacts
from proxy.core.tokens.budget import Marks, TokenBudget
from proxy.engine.ports import Cache, Records, Summaries, Summary, SummaryRequest, Version
from proxy.engine.reading import Reader
from proxy.engine.summary_requests import summary_request_of
from proxy.tasks import LARGE, Spawn, offload

MOST_BOUNDARIES = 512
"""Boundaries that one look-up reads. A conversation is compacted again long before it grows by so many requests."""

NEXT_LOOK_SHARE = 64
"""Divisor of the baseline budget: the least growth of a conversation between two looks ahead.

A conversation that needs no summary yet is looked at again halfway to its high mark, where it would be compacted. Near
the mark that would be every request, and a look takes a millisecond for 400 KB.
"""

LARGE_LOOK = 4 * LARGE
"""Size (``load_of``) from which the look ahead runs on a thread: reading the facts of its calls takes up to 15 ms."""

LONG_PARAGRAPH = 8_192
"""Characters from which a paragraph of a block is not counted again in the block's carrier: most digests have more."""

NEED_NO_SUMMARY = 4_096
"""Conversations that are remembered as needing no summary yet."""

RecordKey = tuple[str, bytes]
"""A route's name and the prefix hash at a record's boundary."""


class StoreLook(msgspec.Struct, frozen=True):
    """A look into the store for the newest record up to one boundary.

    ``has_record`` is False if there was none. ``version`` is the store's version before the look, None if unknown.
    ``cached`` is the number of records that this process had cached until then, in all conversations: an equal number
    later means that it cached none since. ``systems`` are the indexes of system items, which change no prefix hash.
    """

    has_record: bool
    version: Version | None
    cached: int
    systems: tuple[int, ...]


class CompactionRecords:
    """Looks compaction records up and writes them.

    *cached* is a cache in front of the store. *looked_up* has the last look into the store, by the key of the boundary
    up to which it read. *summaries* is None if no model writes any. Only the event loop's thread uses it.
    """

    def __init__(
        self,
        reader: Reader,
        records: Records,
        policy: Policy,
        cached: Cache[RecordKey, CompactionRecord],
        looked_up: Cache[RecordKey, StoreLook],
        summaries: Summaries | None,
        spawn: Spawn,
    ) -> None:
        self._reader = reader
        self._records = records
        self._policy = policy
        self._cached = cached
        self._count_cached = 0
        self._looked_up = looked_up
        self._summaries = summaries
        self._spawn = spawn
        self.counts_answers = summaries is not None
        """True if ``answered`` needs every answer: the budget for summaries is a share of what answers cost."""

        self._need_no_summary: LRUCache[RecordKey, int] = LRUCache(NEED_NO_SUMMARY)

    async def look_up(self, measured: MeasuredRequest) -> LookedUp:
        """Return the layout, the newest record of the conversation, and an operator's request for a compaction.

        Such a request is consumed. A dry run leaves it in the store, and so does a request that the provider compacts.
        """
        layout = await offload(measured.light_size, measured.lay_out)
        record = await self.newest(measured, layout)
        first: Compaction | None = None
        if record is not None:
            first = record.compaction
        if measured.target.dry_run or is_left_to_provider(measured, record):
            return LookedUp(layout, record, first=first)
        requested = await self._records.pop_request(measured.request.tenant, measured.root_hash)
        share: float | None = None
        if requested[:1].isdigit():
            share = float(requested)
        return LookedUp(layout, record, bool(requested), first, share=share)

    async def newest(self, measured: MeasuredRequest, layout: Layout) -> CompactionRecord | None:
        """Return the conversation's newest record: the cached one, unless the store has a newer one.

        The store is read for the boundaries from the last one that was read before: other replicas can have written
        there only.
        """
        count = len(measured.prefix_hashes)
        if not count:
            return None
        cached_before = self._count_cached  # read before the first await: other requests cache records meanwhile
        recent = layout.boundaries[-MOST_BOUNDARIES:]
        boundaries = [count, *recent[: bisect_left(recent, count)][::-1]]
        unread, cached, last_look = self._newest_cached(measured, layout, boundaries)
        if not unread:
            return cached
        if cached is None and last_look is not None and last_look.has_record:
            # The cache has evicted the record that the last look found: read all boundaries again.
            name, last_look = measured.known.route.name, None
            unread = [(name, measured.prefix_hashes[boundary - 1]) for boundary in boundaries]
        version = self._records.version()
        # If no other process has written since the last look, the store has only records that were cached here.
        if last_look is None or version is None or last_look.version != version:
            stored = await self._stored(measured, unread, boundaries)
            if stored is not None:
                return stored
            if not self._records.reachable():
                return cached
        self._looked_up[unread[0]] = StoreLook(cached is not None, version, cached_before, layout.systems)
        return cached

    async def _stored(
        self, measured: MeasuredRequest, unread: Sequence[RecordKey], boundaries: Sequence[int]
    ) -> CompactionRecord | None:
        """Read and cache the newest record under *unread*, the keys of the first of *boundaries*; None if none is."""
        hashes, tenant = measured.prefix_hashes, measured.request.tenant
        newest_first = [prefix_hash for _, prefix_hash in unread]
        stored = await self._records.newest(tenant, measured.root_hash, measured.known.route.name, newest_first)
        if stored is None:
            return None
        index, value = stored
        record = load(value, len(hashes))
        if record is None or record.compaction.boundary != boundaries[index]:
            return None
        self._cache(unread[index], record)
        return record

    def _cache(self, key: RecordKey, record: CompactionRecord) -> None:
        """Cache *record* and count that."""
        self._cached[key] = record
        self._count_cached += 1

    def _newest_cached(
        self, measured: MeasuredRequest, layout: Layout, boundaries: Sequence[int]
    ) -> tuple[list[RecordKey], CompactionRecord | None, StoreLook | None]:
        """Return the keys of *boundaries* to read from the store, the newest cached record, and the last look.

        The last of the keys is the newest one that the store was read for before.
        """
        route, hashes = measured.known.route.name, measured.prefix_hashes
        unread: list[RecordKey] = []
        look: StoreLook | None = None
        # A look that equals this found no record, and none was cached since: no older boundary can have one.
        none_since = (False, self._count_cached, layout.systems)
        for boundary in boundaries:
            key = (route, hashes[boundary - 1])
            cached = self._cached.get(key)
            # System items change no hash, so the same hash may belong to another boundary in a request without them.
            if cached is not None and cached.compaction.boundary == boundary:
                return unread, cached, look or self._looked_up.get(key)
            if look is not None:
                continue
            unread.append(key)
            look = self._looked_up.get(key)
            if look is not None and (look.has_record, look.cached, look.systems) == none_since:
                break
        return unread, None, look

    async def write(
        self, measured: MeasuredRequest, need: NeedBlock, texts: Mapping[int, ItemText] = NO_TEXTS
    ) -> Written:
        """Write the texts of the compaction in *need* and store its record; a dry run stores nothing.

        *texts* are those of items that were read for this request already, by index.

        If another replica has stored a record at this boundary first and it fits, that one is returned: all replicas
        must send the same view.
        """
        lookup, target, compaction = need.lookup, need.target, need.compaction
        layout, before, budget = lookup.layout, lookup.record, measured.budget_for(target)
        original = measured.original(layout, texts)
        if before is not None and same_block(compaction, before.compaction):
            # The block stays as it is, and with it the summary that is part of it.
            summary = Summary("", before.summary_length, before.summary_spent, before.summary_by)
        else:
            summary = await self._summary(measured, need) or Summary("", 0, 0)
        count = structs.replace(measured.count, again_from=LONG_PARAGRAPH)
        block, edits = await offload(
            measured.size, write_texts, original, compaction, count, self._policy.tools, before, summary.text
        )
        record = CompactionRecord(
            VERSION,
            compaction,
            block,
            edits,
            budget.window,
            budget.reserve,
            budget.fixed,
            summary.tokens_spent,
            summary_by=summary.model,
            summary_length=summary.length,
            lowered_output=need.lowered_output or 0,
        )
        if not target.dry_run:
            record = await self._saved(measured, need, record)
        return Written(lookup, target, record, record.lowered_output or need.lowered_output)

    async def _saved(self, measured: MeasuredRequest, need: NeedBlock, record: CompactionRecord) -> CompactionRecord:
        """Store *record* and return it, or another replica's at this boundary if that is stored and fits."""
        layout, target, boundary = need.lookup.layout, need.target, record.compaction.boundary
        hashes, tenant, route = measured.prefix_hashes, measured.request.tenant, measured.known.route.name
        name = hashes[boundary - 1]
        ours = dump(record)
        stored = await self._records.save(tenant, measured.root_hash, route, name, ours, replace=target.replaces)
        stored_record = None
        if stored != ours:  # another replica was first
            stored_record = load(stored, len(hashes))
        if stored_record is not None and stored_record.compaction.boundary == boundary:
            budget = measured.budget_for(target)
            room = budget.input_budget(stored_record.lowered_output or budget.reserve)
            if measured.schedule(self._policy, layout, budget).fits(stored_record.compaction, room):
                record = stored_record
        self._cache((route, name), record)
        # No version, so that the next look reads the store: other replicas may have written meanwhile.
        self._looked_up[route, name] = StoreLook(True, None, self._count_cached, layout.systems)
        return record

    async def _summary(self, measured: MeasuredRequest, need: NeedBlock) -> Summary | None:
        """Return a model's summary of the folded items or of a part of them; None if none is ready and fits the block.

        None is used while the store does not answer: replicas would have different ones, and must send equal views.
        """
        compaction, target, before = need.compaction, need.target, need.lookup.record
        if self._summaries is None or not compaction.text_tokens or not self._records.reachable():
            return None
        last: Compaction | None = None
        if before is not None:
            last = before.compaction
        request = self._summary_request(measured, need.lookup.layout, compaction.cut, last)
        if request is None:
            return None
        if self._waits_for_summary(measured, target):
            summary = await self._summaries.write(replace(request, requested=target.wait_for_summary))
        else:
            summary = await self._summaries.ready(request)
        # The writer kept to the cap by the vocabulary of its own model, by which this count may be higher.
        most = min(compaction.text_tokens // 2, request.cap + request.cap // 4)
        if summary is None or measured.count(summary.text) > most:
            return None
        return summary

    def _waits_for_summary(self, measured: MeasuredRequest, target: CompactionTarget) -> bool:
        """True if the compaction waits for its summary instead of using what is ready."""
        if target.dry_run or measured.client_compaction or measured.request.options.mode != "on":
            return False
        return target.wait_for_summary or (self._summaries is not None and self._summaries.inline)

    async def summed_up(self, measured: MeasuredRequest) -> tuple[Summary, OriginalItems] | None:
        """Return the ready summary of the conversation's longest prefix, and its original items; None without one."""
        if self._summaries is None or not self._records.reachable():
            return None
        layout = await offload(measured.size, measured.lay_out)
        summary_request = self._summary_request(measured, layout, layout.count, None)
        if summary_request is None:
            return None
        summary = await self._summaries.ready(summary_request)
        if summary is None:
            return None
        return summary, measured.original(layout)

    def answered(self, view: View, status: int) -> None:
        """Note that *view* was answered with *status*; above the soft mark prepare the next summary."""
        summaries = self._summaries
        if summaries is None:
            return
        if status == 429:
            summaries.limited(view.request.tenant)
        if status != 200:
            return
        summaries.sent(view.request.tenant, _likely_tokens(view))
        if isinstance(view, UncountedView) or view.observation or view.layout is None:
            return
        measured = view.measured
        if measured.client_compaction:
            return  # the client replaces its history with the answer, which is another conversation
        if not view.layout.count or not measured.prefix_hashes or measured.parsed.envelope.has_unseen_input:
            return
        if not provider_compacts(measured):
            self._look_ahead(summaries, view, view.layout)

    def _look_ahead(self, summaries: Summaries, view: CountedView, layout: Layout) -> None:
        """Prepare the summary of the next compaction, if the view is above the soft level."""
        measured, request = view.measured, view.request
        budget, marks = measured.budget, self._policy.rules.marks
        last: Compaction | None = None
        if view.edits.record is not None:
            last = view.edits.record.compaction
        weight = budget.quantised_fixed + history_in_view(layout, last)
        if weight <= _soft_level(budget, marks, last):
            return
        since = _hash_at(measured, last)
        name = measured.known.route.name, since
        if weight < self._need_no_summary.get(name, 0) or not summaries.is_due(request, measured.known.route, since):
            return
        if measured.size < LARGE_LOOK:
            upcoming = self._next_compaction(measured, layout, last)
            self._prepare(summaries, measured, layout, last, weight, upcoming)
        else:
            self._spawn(self._prepare_large(summaries, measured, layout, last, weight), "look ahead")

    async def _prepare_large(
        self, summaries: Summaries, measured: MeasuredRequest, layout: Layout, last: Compaction | None, weight: int
    ) -> None:
        upcoming = await offload(measured.size, self._next_compaction, measured, layout, last)
        self._prepare(summaries, measured, layout, last, weight, upcoming)

    def _next_compaction(self, measured: MeasuredRequest, layout: Layout, last: Compaction | None) -> Compaction | None:
        """Return the compaction that would follow *last* if one were due now."""
        schedule = measured.with_facts().schedule(self._policy, layout, measured.budget)
        return schedule.newest_compaction(last, CompactionTarget(force=True))

    def _prepare(
        self,
        summaries: Summaries,
        measured: MeasuredRequest,
        layout: Layout,
        last: Compaction | None,
        weight: int,
        upcoming: Compaction | None,
    ) -> None:
        """Prepare the summary of what *upcoming*, the next compaction, would fold, if it would fold anything."""
        budget, folded = measured.budget, 0
        if last is not None:
            folded = last.cut
        if upcoming is None or not upcoming.text_tokens or upcoming.cut <= folded:
            # A compaction without a fold needs no summary, nor does one a few messages later.
            halfway = (budget.high(self._policy.rules.marks, budget.baseline) - weight) // 2
            growth = max(halfway, budget.baseline // NEXT_LOOK_SHARE)
            self._need_no_summary[measured.known.route.name, _hash_at(measured, last)] = weight + growth
            return
        summary_request = self._summary_request(measured, layout, upcoming.cut, last)
        if summary_request is not None:
            summaries.prepare(summary_request)

    def _summary_request(
        self, measured: MeasuredRequest, layout: Layout, cut: int, last: Compaction | None
    ) -> SummaryRequest | None:
        record: CompactionRecord | None = None
        if last is not None:
            record = self._cached.get((measured.known.route.name, measured.prefix_hashes[last.boundary - 1]))
        return summary_request_of(measured, layout, cut, record, self._policy.rules.shares.summary)


def _hash_at(measured: MeasuredRequest, last: Compaction | None) -> bytes:
    """Return the prefix hash at the *last* compaction, or the root hash if there was none."""
    if last is None:
        return measured.root_hash
    return measured.prefix_hashes[last.boundary - 1]


def _soft_level(budget: TokenBudget, marks: Marks, last: Compaction | None) -> int:
    """Return the level in tokens above which the next summary is prepared: the soft mark.

    If the *last* compaction left more than that, it is the middle between what was left and the high mark.
    """
    soft = budget.soft(marks, budget.baseline)
    if last is None or (left := budget.quantised_fixed + last.view_tokens) < soft:
        return soft
    return (left + budget.high(marks, budget.baseline)) // 2


def _likely_tokens(view: View) -> int:
    """Return an estimate of the provider's tokens of what was sent, 0 if there is none."""
    if isinstance(view, UncountedView):
        return view.bound // BYTES_PER_TOKEN
    return view.expected_tokens

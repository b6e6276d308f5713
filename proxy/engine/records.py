"""Compaction records of conversations: the newest one is looked up, a new one written, its summary begun ahead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cachebox import LRUCache

from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord, dump, load
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.view import OriginalItems, same_block, write_texts
from proxy.core.conversation import Layout
from proxy.core.decisions import CountedView, LookedUp, MeasuredRequest, NeedBlock, Policy, UncountedView, View, Written
from proxy.core.planner import history_in_view, is_left_to_provider, provider_compacts
from proxy.core.request import Request
from proxy.core.tokens.budget import Marks, TokenBudget
from proxy.engine.ports import Cache, Records, Summaries, Summary, SummaryRequest, Version
from proxy.engine.reading import Reader
from proxy.engine.summary_requests import summary_request_of
from proxy.offload import LARGE, offload
from proxy.tasks import Spawn

MOST_BOUNDARIES = 512
"""Boundaries that one look-up reads; a record is never further back than the room between the marks."""

NEXT_LOOK_SHARE = 64
"""A conversation that needs no summary yet is looked at again halfway to its high mark, where it would be compacted.

It grows by at least one part in so many of its baseline between two looks: one takes a millisecond for 400 KB.
"""

LARGE_LOOK = 4 * LARGE
"""Weight of a request from which the look ahead goes to a thread: reading the facts of its calls takes up to 15 ms."""

NEED_NO_SUMMARY = 4_096
"""Conversations that are cached as needing no summary yet."""

BYTES_BOUND_SHARE = 4
"""A bound by bytes is about so many times the tokens it bounds."""

RecordKey = tuple[str, bytes]
"""A route's name and the prefix hash at a record's boundary."""


@dataclass(frozen=True, slots=True)
class StoreLook:
    """A look into the store for the newest record up to one boundary; ``has_record`` is False if there was none.

    ``version`` is the store's, as it was before; None if it was unknown. ``cached`` are the records that this process
    had cached in all, then; ``systems`` are where the conversation had system items, which change no hash.
    """

    has_record: bool
    version: Version | None
    cached: int
    systems: tuple[int, ...]


class CompactionRecords:
    """Looks compaction records up and writes them.

    *cached* is in front of the store. *looked_up* are the keys up to which the store was read before, and whether
    there was a record then. *summaries* is None if no model writes any.
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
        self._number_cached = 0
        self._looked_up = looked_up
        self._summaries = summaries
        self._spawn = spawn
        self.counts_answers = summaries is not None
        """True if every answer counts: what summaries may cost is a share of what answers did."""

        self._need_no_summary: LRUCache[RecordKey, int] = LRUCache(NEED_NO_SUMMARY)

    async def look_up(self, measured: MeasuredRequest) -> LookedUp:
        """The layout, the newest record of the conversation, and an operator's request for a compaction.

        Such a request is handed out once: a dry run leaves it, and so does a request that the provider compacts.
        """
        layout = await offload(measured.light_size, measured.lay_out)
        record = await self.newest(measured, layout)
        first: Compaction | None = None
        if record is not None:
            first = record.compaction
        if measured.target.dry_run or is_left_to_provider(measured, record):
            return LookedUp(layout, record, first=first)
        requested = await self._records.pop_request(measured.request.tenant, measured.root_hash(layout))
        share: float | None = None
        if requested[:1].isdigit():
            share = float(requested)
        return LookedUp(layout, record, bool(requested), first, share=share)

    async def newest(self, measured: MeasuredRequest, layout: Layout) -> CompactionRecord | None:
        """The newest record on the conversation's prefix hashes: the cached one, unless the store has a newer one.

        The store is read for the boundaries since the newest one that was read before, that one included: whatever
        other replicas wrote since then, they wrote there.
        """
        count = len(measured.prefix_hashes)
        if not count:
            return None
        number = self._number_cached  # as of now: others may cache records while the store is read
        recent = layout.boundaries[-MOST_BOUNDARIES:]
        boundaries = [count, *recent[: bisect_left(recent, count)][::-1]]
        unread, cached, last_look = self._newest_cached(measured, layout, boundaries)
        if not unread:
            return cached
        if cached is None and last_look is not None and last_look.has_record:
            # The record that was known then is cached no more: the store is read for all the boundaries there are.
            name, last_look = measured.known.route.name, None
            unread = [(name, measured.prefix_hashes[boundary - 1]) for boundary in boundaries]
        version = self._records.version()
        if last_look is not None and version is not None and last_look.version == version:
            # No other process has written since: the store has no record but those that this one wrote, or read then.
            self._looked_up[unread[0]] = StoreLook(cached is not None, version, number, layout.systems)
            return cached
        stored = await self._stored(measured, layout, unread, boundaries)
        if stored is not None:
            return stored
        if self._records.reachable():
            self._looked_up[unread[0]] = StoreLook(cached is not None, version, number, layout.systems)
        return cached

    async def _stored(
        self, measured: MeasuredRequest, layout: Layout, unread: Sequence[RecordKey], boundaries: Sequence[int]
    ) -> CompactionRecord | None:
        """The newest record that the store has under *unread*, the keys of the first of *boundaries*; now cached."""
        hashes, tenant = measured.prefix_hashes, measured.request.tenant
        wanted = [prefix_hash for _, prefix_hash in unread]
        stored = await self._records.newest(tenant, measured.root_hash(layout), measured.known.route.name, wanted)
        if stored is None:
            return None
        index, value = stored
        record = load(value, len(hashes))
        if record is None or record.compaction.boundary != boundaries[index]:
            return None
        self._cache(unread[index], record)
        return record

    def _cache(self, key: RecordKey, record: CompactionRecord) -> None:
        """Cache *record*."""
        self._cached[key] = record
        self._number_cached += 1

    def _newest_cached(
        self, measured: MeasuredRequest, layout: Layout, boundaries: Sequence[int]
    ) -> tuple[list[RecordKey], CompactionRecord | None, StoreLook | None]:
        """The keys of *boundaries* that the store was not read for, the newest cached record, and the last look at it.

        The last of the keys is the newest that the store was read for.
        """
        route, hashes = measured.known.route.name, measured.prefix_hashes
        unread: list[RecordKey] = []
        look: StoreLook | None = None
        # A look after which there can be no cached record either:
        none_since = (False, self._number_cached, layout.systems)
        for boundary in boundaries:
            key = (route, hashes[boundary - 1])
            # Read once: the cache is bounded, and may lose it while the store is read.
            cached = self._cached.get(key)
            # System items change no hash: without them the same hash may stand at another boundary.
            if cached is not None and cached.compaction.boundary == boundary:
                return unread, cached, look or self._looked_up.get(key)
            if look is not None:
                continue
            unread.append(key)
            look = self._looked_up.get(key)
            if look is not None and (look.has_record, look.cached, look.systems) == none_since:
                break
        return unread, None, look

    async def write(self, measured: MeasuredRequest, need: NeedBlock) -> Written:
        """The record of the compaction in *need*: written here, or another replica's if that was first and fits too.

        A dry run stores nothing.
        """
        lookup, target, compaction = need.lookup, need.target, need.compaction
        layout, before, budget = lookup.layout, lookup.record, measured.budget_for(target)
        original = measured.original(layout)
        if before is not None and same_block(compaction, before.compaction):
            # Its block stays, and with it the summary that is in it.
            summary = Summary("", before.summary_length, before.summary_spent, before.summary_by)
        else:
            summary = await self._summary(measured, need) or Summary("", 0, 0)
        route = measured.known.route
        count = self._reader.count(route.encoding, route.model, measured.request.tenant)
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
        """*record* once it is stored, or another replica's at this boundary, if that fits too."""
        layout, target, boundary = need.lookup.layout, need.target, record.compaction.boundary
        hashes, tenant, route = measured.prefix_hashes, measured.request.tenant, measured.known.route.name
        name, root = hashes[boundary - 1], measured.root_hash(layout)
        ours = dump(record)
        stored = await self._records.save(tenant, root, route, name, ours, replace=target.replaces)
        stored_record = None
        if stored != ours:  # another replica was first
            stored_record = load(stored, len(hashes))
        if stored_record is not None and stored_record.compaction.boundary == boundary:
            budget = measured.budget_for(target)
            room = budget.input_budget(stored_record.lowered_output or budget.reserve)
            if measured.schedule(self._policy, layout, budget).fits(stored_record.compaction, room):
                record = stored_record
        self._cache((route, name), record)
        # Without a version: others may have written meanwhile.
        self._looked_up[route, name] = StoreLook(True, None, self._number_cached, layout.systems)
        return record

    async def _summary(self, measured: MeasuredRequest, need: NeedBlock) -> Summary | None:
        """A model's summary of what is folded, or of a part of it; None if there is none, or none fits the block.

        Without the store replicas have different summaries, and none is used: their views must be equal.
        """
        compaction, target, before = need.compaction, need.target, need.lookup.record
        if self._summaries is None or not compaction.text_tokens or not self._records.reachable():
            return None
        last: Compaction | None = None
        if before is not None:
            last = before.compaction
        passage = self._passage(measured, need.lookup.layout, compaction.cut, last)
        if passage is None:
            return None
        if self._waits_for_summary(measured, target):
            summary = await self._summaries.write(replace(passage, requested=target.wait_for_summary))
        else:
            summary = await self._summaries.ready(passage)
        most = min(compaction.text_tokens // 2, passage.cap + passage.cap // 4)
        if summary is None or measured.count(summary.text) > most:
            return None
        return summary

    def _waits_for_summary(self, measured: MeasuredRequest, target: CompactionTarget) -> bool:
        """True if the compaction waits for its summary instead of using what is ready."""
        if target.dry_run or measured.client_compaction or measured.request.options.mode != "on":
            return False
        return target.wait_for_summary or (self._summaries is not None and self._summaries.inline)

    async def summed_up(self, measured: MeasuredRequest) -> tuple[Summary, OriginalItems] | None:
        """The ready summary of the longest prefix of a conversation, and its original items; None if there is none."""
        if self._summaries is None or not self._records.reachable():
            return None
        layout = await offload(measured.size, measured.lay_out)
        passage = self._passage(measured, layout, layout.count, None)
        if passage is None:
            return None
        summary = await self._summaries.ready(passage)
        if summary is None:
            return None
        return summary, measured.original(layout)

    def answered(self, view: View, status: int) -> None:
        """Note that *view* was answered with *status*; past the soft mark the next summary is begun."""
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
            return  # the client goes on from its answer with another conversation
        if not view.layout.count or not measured.prefix_hashes or measured.parsed.envelope.has_unseen_input:
            return
        if not provider_compacts(measured):
            self._look_ahead(view.request, view, view.layout)

    def _look_ahead(self, request: Request, view: CountedView, layout: Layout) -> None:
        """Begin the summary of the next compaction, if the view is past the soft mark."""
        measured, summaries = view.measured, self._summaries
        assert summaries is not None
        budget, marks = measured.budget, self._policy.rules.marks
        last: Compaction | None = None
        if view.edits.record is not None:
            last = view.edits.record.compaction
        weight = budget.quantised_fixed + history_in_view(layout, last)
        if weight <= _soft_level(budget, marks, last):
            return
        if last is None:
            since = measured.root_hash(layout)
        else:
            since = measured.prefix_hashes[last.boundary - 1]
        name = measured.known.route.name, since
        if weight < self._need_no_summary.get(name, 0) or not summaries.is_due(request, measured.known.route, since):
            return
        if measured.size < LARGE_LOOK:
            self._prepare(measured, layout, last, weight, self._next_compaction(measured, layout, last))
        else:
            self._spawn(self._prepare_large(measured, layout, last, weight), "look ahead")

    async def _prepare_large(
        self, measured: MeasuredRequest, layout: Layout, last: Compaction | None, weight: int
    ) -> None:
        wanted = await offload(measured.size, self._next_compaction, measured, layout, last)
        self._prepare(measured, layout, last, weight, wanted)

    def _next_compaction(self, measured: MeasuredRequest, layout: Layout, last: Compaction | None) -> Compaction | None:
        """The compaction behind *last* if one were due now."""
        schedule = measured.with_facts().schedule(self._policy, layout, measured.budget)
        return schedule.newest_compaction(last, CompactionTarget(force=True))

    def _prepare(
        self,
        measured: MeasuredRequest,
        layout: Layout,
        last: Compaction | None,
        weight: int,
        wanted: Compaction | None,
    ) -> None:
        """Begin the summary of what *wanted*, the next compaction, would fold, if it would fold anything."""
        budget, summaries = measured.budget, self._summaries
        assert summaries is not None
        folded = 0
        if last is not None:
            folded = last.cut
        if wanted is None or not wanted.text_tokens or wanted.cut <= folded:
            # A compaction without a fold needs no summary, nor will one a few messages later.
            if last is None:
                since = measured.root_hash(layout)
            else:
                since = measured.prefix_hashes[last.boundary - 1]
            halfway = (budget.high(self._policy.rules.marks, budget.baseline) - weight) // 2
            growth = max(halfway, budget.baseline // NEXT_LOOK_SHARE)
            self._need_no_summary[measured.known.route.name, since] = weight + growth
            return
        passage = self._passage(measured, layout, wanted.cut, last)
        if passage is not None:
            summaries.prepare(passage)

    def _passage(
        self, measured: MeasuredRequest, layout: Layout, cut: int, last: Compaction | None
    ) -> SummaryRequest | None:
        record: CompactionRecord | None = None
        if last is not None:
            record = self._cached.get((measured.known.route.name, measured.prefix_hashes[last.boundary - 1]))
        return summary_request_of(measured, layout, cut, record, self._policy.rules.shares.summary)


def _soft_level(budget: TokenBudget, marks: Marks, last: Compaction | None) -> int:
    """The level above which the next summary is begun.

    If the *last* compaction left more than the soft mark, that is half of the way to the next one.
    """
    soft = budget.soft(marks, budget.baseline)
    if last is None or (left := budget.quantised_fixed + last.view_tokens) < soft:
        return soft
    return (left + budget.high(marks, budget.baseline)) // 2


def _likely_tokens(view: View) -> int:
    """The provider's tokens of what was sent, 0 if they are unknown."""
    if isinstance(view, UncountedView):
        return view.bound // BYTES_BOUND_SHARE
    return view.expected_tokens

"""The events of conversations: the newest one looked up, a new one written and fixed, its summary begun ahead."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from cachetools import LRUCache

from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord, dump, load
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.view import OriginalItems, RenderOptions, same_block, write_texts
from proxy.core.conversation import Layout
from proxy.core.decisions import CountedView, LookedUp, MeasuredRequest, NeedBlock, Policy, UncountedView, View, Written
from proxy.core.planner import provider_compacts
from proxy.core.request import Request
from proxy.engine.ports import Records, Summaries, Summary, SummaryRequest
from proxy.engine.reading import Reader
from proxy.engine.summary_requests import summary_request_of
from proxy.offload import load_of, offload

MAX_PLACES = 512
"""Places asked of the store at once; an event is never further back than the room between the marks."""

ASKED_AGAIN = 64
"""Of the room a conversation has, the part it grows by before it is asked anew whether it needs a summary."""

SPARED = 4_096
"""Conversations of which it is remembered that they need none yet."""


BYTES_BOUND_SHARE = 4
"""A bound by bytes is about so many times the tokens it bounds."""


class CompactionRecords:
    """Looks events up and makes them facts.

    ``records`` is the in-process front of the store, ``asked`` the places it was last asked for: bounded mappings.
    """

    def __init__(
        self,
        reader: Reader,
        recorder: Records,
        policy: Policy,
        records: MutableMapping[tuple[str, bytes], CompactionRecord],
        asked: MutableMapping[tuple[str, bytes], bool],
        summaries: Summaries | None,
    ) -> None:
        self._reader = reader
        self._recorder = recorder
        self._policy = policy
        self._records = records
        self._asked = asked
        self._summaries = summaries
        self._spared: LRUCache[tuple[str, bytes], int] = LRUCache(SPARED)

    async def look_up(self, measured: MeasuredRequest) -> LookedUp:
        """The layout, the newest record of the conversation, and whether an operator asked for a compaction.

        That is told once, so it is not asked for a dry run, nor if the provider is to compact.
        """
        layout = await offload(_load(measured), measured.lay_out)
        record = await self.newest(measured, layout)
        first = record.compaction if record else None
        if measured.target.dry_run or (record is None and self._is_left_to_provider(measured)):
            return LookedUp(layout, record, first=first)
        requested = await self._recorder.pop_request(measured.request.tenant, measured.root_hash(layout))
        share = float(requested) if requested[:1].isdigit() else None
        return LookedUp(layout, record, bool(requested), first, share=share)

    @staticmethod
    def _is_left_to_provider(measured: MeasuredRequest) -> bool:
        return measured.target.is_plain and not measured.tools_json and provider_compacts(measured)

    async def newest(self, measured: MeasuredRequest, layout: Layout) -> CompactionRecord | None:
        """The newest event record on this chain: from memory, unless the store has a newer one.

        The store is asked for the places since the newest one it was asked for before, that one included: what other
        replicas did since then, they did there.
        """
        links = measured.prefix_hashes
        route, count = measured.route.name, len(links)
        places = [place for place in layout.boundaries[-MAX_PLACES:] if 0 < place < count]
        newer: list[tuple[str, bytes]] = []
        known: CompactionRecord | None = None
        asked = False
        at = [*places, count][::-1] if count else []
        for place in at:
            name = (route, links[place - 1])
            # Taken out at once: the memory is bounded, and may lose it while the store is asked.
            known = self._records.get(name)
            if known is not None:
                break
            if not asked:
                newer.append(name)
                asked = name in self._asked
        if newer:
            root = measured.root_hash(layout)
            found = await self._recorder.newest(measured.request.tenant, root, route, [link for _, link in newer])
            record = load(found[1], count) if found else None
            if found and record and record.compaction.boundary == at[found[0]]:
                self._records[newer[found[0]]] = record
                return record
            if self._recorder.reachable():
                self._asked[newer[0]] = True
        return known

    async def write(self, measured: MeasuredRequest, need: NeedBlock) -> Written:
        """The record that *need* asks for: written here, unless another replica was first; then theirs, if it fits too.

        A dry run stores nothing.
        """
        found, target, compaction = need.found, need.target, need.compaction
        layout, before, budget = found.layout, found.record, measured.budget_for(target)
        original = measured.original(layout)
        if before is not None and same_block(compaction, before.compaction):
            # Its block stays, and with it the summary that is in it.
            summary = Summary("", before.summary_length, before.summary_spent, before.summary_by)
        else:
            summary = await self._summary(measured, need) or Summary("", 0, 0)
        count = self._reader.count(measured.route.encoding, measured.route.model)
        pen = RenderOptions(count, self._policy.tools)
        block, edits = await offload(_load(measured), write_texts, original, compaction, pen, before, summary.text)
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
        return Written(found, target, record, record.lowered_output or need.lowered_output)

    async def _saved(self, measured: MeasuredRequest, need: NeedBlock, record: CompactionRecord) -> CompactionRecord:
        """*record* once it is stored, or another replica's at this boundary, if that fits too."""
        layout, target, boundary = need.found.layout, need.target, record.compaction.boundary
        hashes, tenant, route = measured.prefix_hashes, measured.request.tenant, measured.route.name
        name, root = hashes[boundary - 1], measured.root_hash(layout)
        stored = await self._recorder.save(tenant, root, route, name, dump(record), replace=target.replaces)
        theirs = load(stored, len(hashes))
        if theirs is not None and theirs.compaction.boundary == boundary:
            budget = measured.budget_for(target)
            if measured.schedule(self._policy, layout, budget).fits(
                theirs.compaction, budget.input_budget(theirs.lowered_output or budget.reserve)
            ):
                record = theirs
        self._records[route, name] = record
        return record

    async def _summary(self, measured: MeasuredRequest, need: NeedBlock) -> Summary | None:
        """What a model wrote of what is folded, or of a part of it, if that is there and has its room in the block.

        Without the store replicas know different summaries, and none is used: their views must be equal.
        """
        compaction, target, before = need.compaction, need.target, need.found.record
        if self._summaries is None or not compaction.text_tokens or not self._recorder.reachable():
            return None
        passage = self._passage(measured, need.found.layout, compaction.cut, before.compaction if before else None)
        if passage is None:
            return None
        waits = (
            not target.dry_run
            and (target.wait_for_summary or self._summaries.inline)
            and not measured.client_compaction
            and measured.request.options.mode == "on"
        )
        asked = replace(passage, requested=target.wait_for_summary)
        found = await (self._summaries.write(asked) if waits else self._summaries.ready(passage))
        most = min(compaction.text_tokens // 2, passage.cap + passage.cap // 4)
        return found if found is not None and measured.count(found.text) <= most else None

    async def summed_up(self, measured: MeasuredRequest) -> tuple[Summary, OriginalItems] | None:
        """What a model wrote of the longest prefix of a measured conversation, if it is there, and its items."""
        if self._summaries is None or not self._recorder.reachable():
            return None
        layout = await offload(_load(measured), measured.lay_out)
        passage = self._passage(measured, layout, layout.count, None)
        found = await self._summaries.ready(passage) if passage else None
        return (found, measured.original(layout)) if found else None

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
            return  # from the answer to a client's own compaction another conversation goes on
        if not view.layout.count or not measured.prefix_hashes or measured.parsed.envelope.has_unseen_input:
            return
        if not provider_compacts(measured):
            self._look_ahead(view.request, view, view.layout)

    def _look_ahead(self, request: Request, view: CountedView, layout: Layout) -> None:
        """Begin the summary of the next compaction, if the view is past the soft mark."""
        measured, summaries = view.measured, self._summaries
        assert summaries is not None
        budget, marks, hashes = measured.budget, self._policy.rules.marks, measured.prefix_hashes
        last = view.edits.record.compaction if view.edits.record else None
        schedule = measured.schedule(self._policy, layout, budget)
        weight = budget.quantised_fixed + schedule.view_tokens(layout.count, last)
        if weight <= budget.soft(marks, budget.baseline):
            return
        since = hashes[last.boundary - 1] if last else measured.root_hash(layout)
        name = measured.route.name, since
        if weight < self._spared.get(name, 0) or not summaries.is_due(request, measured.route, since):
            return
        wanted = schedule.newest_compaction(last, CompactionTarget(force=True))
        if wanted is None or not wanted.text_tokens or wanted.cut <= (last.cut if last else 0):
            # What does without a fold needs no summary; nor will it with the next few messages.
            self._spared[name] = weight + budget.baseline // ASKED_AGAIN
            return
        passage = self._passage(measured, layout, wanted.cut, last)
        if passage is not None:
            summaries.prepare(passage)

    def _passage(
        self, measured: MeasuredRequest, layout: Layout, cut: int, last: Compaction | None
    ) -> SummaryRequest | None:
        name = (measured.route.name, measured.prefix_hashes[last.boundary - 1]) if last else None
        record = self._records.get(name) if name else None
        return summary_request_of(measured, layout, cut, record, self._policy.rules.shares.summary)


def _likely_tokens(view: View) -> int:
    """The provider's tokens of what was sent, 0 if they are unknown."""
    if isinstance(view, UncountedView):
        return view.bound // BYTES_BOUND_SHARE
    return view.expected_tokens


def _load(measured: MeasuredRequest) -> int:
    return load_of(len(measured.parsed.body), len(measured.parsed.items))

"""The events of conversations: the newest one looked up, a new one written and fixed, its summary begun ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import replace

from cachetools import LRUCache

from proxy.core.compression.event import Demand, Event
from proxy.core.compression.record import VERSION, Record, dump, load
from proxy.core.compression.view import Pen, Raw, same_block, write
from proxy.ports import Passage, Recorder, Request, Summaries, Summary
from proxy.walk import passages
from proxy.walk.plans import Plan, Policy, Subject
from proxy.walk.reading import Reader

RENDER_INLINE = 65_536
"""Bytes of folded items that are digested on the event loop; more goes to a thread."""

MAX_PLACES = 512
"""Places asked of the store at once; an event is never further back than the room between the marks."""

ASKED_AGAIN = 64
"""Of the room a conversation has, the part it grows by before it is asked anew whether it needs a summary."""

SPARED = 4_096
"""Conversations of which it is remembered that they need none yet."""


class Events:
    """Looks events up and makes them facts.

    ``records`` is the in-process front of the store, ``asked`` the places it was last asked for: bounded mappings.
    """

    def __init__(
        self,
        reader: Reader,
        recorder: Recorder,
        policy: Policy,
        records: MutableMapping[tuple[str, bytes], Record],
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

    def links(self, subject: Subject) -> tuple[bytes, ...]:
        """A name of the conversation after each of its items, which only this tenant's key makes."""
        request = subject.request
        return subject.reading.links(self._recorder.chain_key(request.tenant), request.options.conversation)

    async def is_wished(self, subject: Subject, links: tuple[bytes, ...]) -> bool:
        """Whether somebody wished that this conversation be compacted now, as ``newest`` saw; told once."""
        return await self._recorder.take(subject.request.tenant, subject.root(links))

    async def newest(self, subject: Subject, links: tuple[bytes, ...]) -> Record | None:
        """The newest event record on this chain: from memory, unless the store has a newer one.

        The store is asked for the places since the newest one it was asked for before, that one included: what other
        replicas did since then, they did there.
        """
        route, count = subject.route.name, len(links)
        places = [place for place in subject.layout.places[-MAX_PLACES:] if 0 < place < count]
        newer: list[tuple[str, bytes]] = []
        known: Record | None = None
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
            root = subject.root(links)
            found = await self._recorder.newest(subject.request.tenant, root, route, [link for _, link in newer])
            record = load(found[1], count) if found else None
            if found and record and record.event.place == at[found[0]]:
                self._records[newer[found[0]]] = record
                return record
            if self._recorder.reachable():
                self._asked[newer[0]] = True
        return known

    async def settle(
        self,
        subject: Subject,
        links: tuple[bytes, ...],
        event: Event,
        before: Record | None,
        demand: Demand,
        *,
        supersede: bool,
        output: int | None = None,
    ) -> Record:
        """The record of *event*: written here, unless another replica was first; then theirs, if it fits too.

        *output* is the output figure if that is lowered with it.
        Where *demand* only peeks it is only told what the record would be.
        """
        figures, raw = subject.figures, subject.raw
        count = self._reader.count(subject.route.encoding, subject.route.model)
        if before is not None and same_block(event, before.event):
            # Its block stays, and with it the summary that is in it.
            summary = Summary("", before.upto, before.spent, before.by)
        else:
            summary = await self._summary(subject, links, event, count, before, demand) or Summary("", 0, 0)
        pen = Pen(count, self._reader.tools)
        touched = max([event.cut, *(swap.index + 1 for swap in event.swaps), *(index + 1 for index, _ in event.trims)])
        if touched == 0 or raw.spans[touched - 1][1] <= RENDER_INLINE:
            block, edits = write(raw, event, pen, before, summary.text)
        else:
            block, edits = await asyncio.to_thread(write, raw, event, pen, before, summary.text)
        record = Record(
            VERSION,
            event,
            block,
            edits,
            figures.window,
            figures.reserve,
            figures.fixed,
            summary.spent,
            by=summary.by,
            upto=summary.cut,
            output=output or 0,
        )
        if demand.peek:
            return record
        route, link, root = subject.route.name, links[event.place - 1], subject.root(links)
        tenant = subject.request.tenant
        held = await self._recorder.fix(tenant, root, route, link, dump(record), supersede=supersede)
        theirs = load(held, len(links))
        if (
            theirs
            and theirs.event.place == event.place
            and self._policy.schedule(subject).fits(theirs.event, figures.inside(theirs.output or figures.reserve))
        ):
            record = theirs
        self._records[route, link] = record
        return record

    async def _summary(
        self,
        subject: Subject,
        links: tuple[bytes, ...],
        event: Event,
        count: Callable[[str], int],
        before: Record | None,
        demand: Demand,
    ) -> Summary | None:
        """What a model wrote of what *event* folds, or of a part of it, if that is there and has its place in it.

        Without the store replicas know different summaries, and none is used: their views must be equal.
        """
        if self._summaries is None or not event.text or not self._recorder.reachable():
            return None
        passage = self._passage(subject, links, event.cut, before.event if before else None)
        if passage is None:
            return None
        waits = (
            not demand.peek
            and (demand.wait or self._summaries.inline)
            and not subject.report.client_compaction
            and subject.request.options.mode == "on"
        )
        asked = replace(passage, asked=demand.wait)
        found = await (self._summaries.write(asked) if waits else self._summaries.ready(passage))
        most = min(event.text // 2, passage.cap + passage.cap // 4)
        return found if found is not None and count(found.text) <= most else None

    async def summed_up(self, subject: Subject, links: tuple[bytes, ...]) -> tuple[Summary, Raw] | None:
        """What a model wrote of the longest prefix of a measured conversation, if it is there, and its items."""
        if self._summaries is None or not self._recorder.reachable():
            return None
        subject = replace(subject, layout=subject.reading.layout())
        passage = self._passage(subject, links, subject.layout.count, None)
        found = await self._summaries.ready(passage) if passage else None
        return (found, subject.raw) if found else None

    def answered(self, request: Request, plan: Plan, status: int) -> None:
        """Note that *plan* was answered with *status*; past the soft mark a summary is begun for the next event."""
        subject, summaries, report = plan.subject, self._summaries, plan.report
        if summaries is None:
            return
        if status == 429:
            summaries.limited(request.tenant)
        if status != 200:
            return
        # A byte bound is about four times what it bounds.
        summaries.sent(request.tenant, (report.tokens_after or 0) // (4 if report.bounded else 1))
        if subject is None or report.observed or subject.reading.outline.unseen or subject.is_managed:
            return
        marks, figures, count = self._policy.rules.marks, subject.figures, subject.layout.count
        event = plan.record.event if plan.record else None
        # From the answer to a client's own compaction another chain goes on.
        if not plan.links or not count or report.client_compaction:
            return
        schedule = self._policy.schedule(subject)
        weight = figures.stepped + schedule.weight(count, event)
        if weight <= figures.soft(marks, figures.lasting):
            return
        since = plan.links[event.place - 1] if event else subject.root(plan.links)
        name = subject.route.name, since
        if weight < self._spared.get(name, 0) or not summaries.is_due(request, subject.route, since):
            return
        wanted = schedule.run(event, Demand(force=True))
        if wanted is None or not wanted.text or wanted.cut <= (event.cut if event else 0):
            # What does without a fold needs no summary; nor will it with the next few messages.
            self._spared[name] = weight + figures.lasting // ASKED_AGAIN
            return
        passage = self._passage(subject, plan.links, wanted.cut, event)
        if passage is not None:
            summaries.prepare(passage)

    def _passage(self, subject: Subject, links: tuple[bytes, ...], cut: int, event: Event | None) -> Passage | None:
        request, route, reading = subject.request, subject.route, subject.reading
        about = passages.Subject(
            request,
            route,
            reading,
            subject.raw,
            subject.figures,
            subject.factor,
            links,
            subject.root(links),
            bool(subject.recall),
        )
        record = self._records.get((route.name, links[event.place - 1])) if event else None
        share = self._policy.rules.shares.summary
        return passages.passage_of(about, cut, record, share, self._reader.count(route.encoding, route.model))

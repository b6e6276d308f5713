"""From a request to what goes upstream: read, measure, look up the newest event, fold on, write, splice, verify."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from proxy import passages
from proxy.core.budget.catalogue import Route
from proxy.core.budget.figures import (
    NO_BUFFERS,
    Buffers,
    Figures,
    economy_cap,
    input_room,
    reserve,
    scaled,
    summary_room,
)
from proxy.core.budget.regions import regions, scaled_up
from proxy.core.budget.shares import borrowed
from proxy.core.compression.fresh import capped
from proxy.core.compression.prune import oldest
from proxy.core.compression.record import VERSION, Record, dump, load
from proxy.core.compression.schedule import Demand, Event, Rules, Schedule
from proxy.core.compression.tools import shrink
from proxy.core.compression.truncate import Truncate
from proxy.core.compression.view import Pen, Raw, View, assemble, same_block, write
from proxy.core.conversation import chat, messages, responses
from proxy.core.conversation.compaction import client_of
from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.facts import pairs_of
from proxy.core.conversation.items import EMPTY, Layout
from proxy.core.conversation.outline import TOOLS, splice
from proxy.core.conversation.portable import MARKS, PORTABLE, WITHOUT
from proxy.core.conversation.scan import scan
from proxy.core.errors import ContextTooLong, InvalidRequest, UllageError
from proxy.core.overflow.policy import Extent, Lower
from proxy.core.report import Report
from proxy.lessons import Lessons, Sent
from proxy.ports import Passage, Recorder, Request, Summaries, Summary
from proxy.reading import Located, Reader, Reading

DIALECTS: Mapping[str, Dialect] = MappingProxyType({"chat": chat, "messages": messages, "responses": responses})

RENDER_INLINE = 65_536
"""Bytes of folded items that are digested on the event loop; more goes to a thread."""

LARGE = 0.30
"""A fresh tool result that takes more of the room left than this is worth a warning."""

MAX_PLACES = 512
"""Places asked of the store at once; an event is never further back than the room between the marks."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How views are kept small: the schedule's rules, and when an output figure may be lowered.

    ``stored``: whether a provider may cut a history that only it has, or its error is the answer. ``economy`` compacts
    where it gets dear and not only where it gets full. ``always`` caps every tool result before it is first sent.
    """

    rules: Rules
    lower_output: Lower = "last"
    stored: Literal["truncate", "error"] = "truncate"
    economy: bool = False
    buffers: Buffers = NO_BUFFERS
    always: Truncate | None = None

    def figures(self, route: Route, window: int, requested: int | None, fixed: int, factor: float) -> Figures:
        """What a request may use; *window* and *requested* are in the provider's tokens, the rest in ours."""
        usual = reserve(None, route.max_output, window)
        limit = None if route.max_input is None else scaled(route.max_input, factor)
        cap = scaled(economy_cap(window, route.tier), factor) if self.economy else None
        held = reserve(requested, route.max_output, window)
        return Figures(
            scaled(window, factor), scaled(held, factor), fixed, scaled(usual, factor), limit, cap, self.buffers
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """One request under consideration, measured. ``factor``: provider tokens per token of our count.

    ``lower`` says when its output figure may give way, where not the policy does.
    """

    request: Request
    route: Route
    reading: Reading
    layout: Layout
    figures: Figures
    factor: float
    requested: int | None
    report: Report
    lower: Lower | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes upstream, or why nothing does. ``tokens`` is the view's weight in our own count, if counted.

    ``record`` is the event that the view comes from, ``subject`` what was measured; ``links`` name the conversation
    after each item. ``request`` is what it is a view of, where that is not the client's own request. ``withheld``: it
    would have gone further than was allowed; nothing was decided, and this is no view to send.
    """

    body: bytes
    report: Report
    route: Route | None = None
    tokens: int | None = None
    subject: Subject | None = None
    output: int | None = None
    sent: Sent | None = None
    error: UllageError | None = None
    record: Record | None = None
    request: Request | None = None
    withheld: bool = False
    links: tuple[bytes, ...] = field(default=(), repr=False)


class Fitter:
    """Fits requests into their windows.

    ``records`` is the in-process front of the store, ``asked`` the places it was last asked for, ``tools`` remembers
    shrunk tool arrays: bounded mappings all.
    """

    def __init__(
        self,
        reader: Reader,
        recorder: Recorder,
        policy: Policy,
        records: MutableMapping[tuple[str, bytes], Record],
        asked: MutableMapping[tuple[str, bytes], bool],
        tools: MutableMapping[tuple[bytes, str, str, int], tuple[str, int]],
        lessons: Lessons,
        summaries: Summaries | None = None,
    ) -> None:
        self._reader = reader
        self._recorder = recorder
        self._policy = policy
        self._records = records
        self._asked = asked
        self._tools = tools
        self._lessons = lessons
        self._summaries = summaries

    def capped(self, request: Request) -> Request:
        """*request* with its tool results capped, where that is wanted; *request* itself where nothing is too big."""
        limits = self._policy.always
        if limits is None:
            return request
        dialect = DIALECTS[request.api]
        try:
            where = scan(request.body, dialect.LIST)
            body = capped(request.body, where, dialect, self._reader.tools, limits)
        except InvalidRequest:
            return request  # what cannot be read may still be relayed
        return request if body is request.body else replace(request, body=body)

    def low(self, route: Route, window: int, budget: int) -> int:
        """The lowest low mark that a request inside *budget* can have: what weighs less needs no closer look."""
        figures = self._policy.figures(route, window, None, 0, 1.0)
        return figures.low(self._policy.rules.marks, min(budget, figures.lasting))

    def locate(self, request: Request) -> Located:
        """Where things stand in the body. Raises ``InvalidRequest`` where it cannot be read."""
        return self._reader.locate(DIALECTS[request.api], request.tenant, request.body)

    async def measure(
        self, request: Request, located: Located, route: Route, report: Report, window: int, factor: float
    ) -> Subject:
        """The request, read and weighed against *window* (in the provider's tokens)."""
        dialect = DIALECTS[request.api]
        reading = await self._reader.read(dialect, route.encoding, request.tenant, located, route.model)
        requested = reading.outline.requested
        figures = self._policy.figures(route, window, requested, reading.fixed, factor)
        report = report.but(window=window, client_compaction=request.compacting or _compacting(reading))
        return Subject(request, route, reading, EMPTY, figures, factor, requested, report)

    async def weigh(self, request: Request, located: Located, route: Route) -> int:
        """Tokens of the request as the client sent it, by our own count."""
        reading = await self._reader.read(DIALECTS[request.api], route.encoding, request.tenant, located, route.model)
        return reading.fixed + reading.history

    def rerouted(self, request: Request, model: str) -> bytes:
        """The body of *request* for another *model*: its name, and no reasoning that only its author can read."""
        located = self.locate(request)
        body, outline, where = located.body, located.outline, located.scan
        items, edits = body[where.start : where.end], {"model": json.dumps(model)}
        if MARKS.search(items):
            portable = PORTABLE[request.api]
            raws = [body[start:end] for start, end in where.spans]
            kept = [portable(raw) if MARKS.search(raw) else raw for raw in raws]
            if kept != raws:
                items, edits = b",".join(filter(None, kept)), {**edits, **WITHOUT.get(request.api, {})}
        at = len(body[: where.start].decode())
        found = splice(outline, at, items, {key: value for key, value in edits.items() if key in outline.fields})
        if "model" in outline.fields:
            return found
        return found.replace(b"{", b'{"model":' + edits["model"].encode() + b",", 1)

    def renamed(self, request: Request, model: str) -> bytes:
        """The body of *request* with another name of its model, and every other byte as it is."""
        located, body, name = self.locate(request), request.body, json.dumps(model).encode()
        text, where = located.outline.text, located.outline.fields.get("model")
        if where is None:
            return body
        # The items stand either behind the name or before it; from the other end the outline is the body.
        if where.start < len(located.body[: located.scan.start].decode()):
            start = len(text[: where.start].encode())
            end = start + len(text[where.start : where.end].encode())
        else:
            end = len(body) - len(text[where.end :].encode())
            start = end - len(text[where.start : where.end].encode())
        return body[:start] + name + body[end:]

    def with_output(self, request: Request, plan: Plan, most: int) -> Plan | None:
        """*plan* with every output figure above *most* lowered to it; ``None`` where there is none."""
        located = self.locate(replace(request, body=plan.body))
        outline, (start, end) = located.outline, (located.scan.start, located.scan.end)
        given = {key: outline.value(key) for key in DIALECTS[request.api].OUTPUT_FIGURES if key in outline.fields}
        edits = {key: str(most) for key, value in given.items() if value.isdecimal() and int(value) > most}
        if not edits:
            return None
        body = splice(outline, len(plan.body[:start].decode()), plan.body[start:end], edits)
        stages = tuple(dict.fromkeys((*plan.report.stages, "output")))
        return replace(plan, body=body, output=most, report=plan.report.but(outcome="compacted", stages=stages))

    @property
    def lower(self) -> Lower:
        """When a request's own output figure may be lowered."""
        return self._policy.lower_output

    def truncating(self, located: Located, plan: Plan) -> Plan | None:
        """*plan* with leave for the provider to cut the history that only it has; ``None`` where that is not wanted."""
        outline = located.outline
        if self._policy.stored == "error" or "truncation" in outline.fields or "truncation" in plan.report.stages:
            return None
        at = plan.body.index(b"{") + 1
        body = plan.body[:at] + b'"truncation":"auto",' + plan.body[at:]
        report = plan.report.but(outcome="compacted", stages=(*plan.report.stages, "truncation"))
        return replace(plan, body=body, report=report)

    async def decide(
        self, subject: Subject, demand: Demand, *, supersede: bool = False, tries: int = 2, extent: Extent = "any"
    ) -> Plan:
        """The plan for *subject*: its own bytes while they fit, else the view of its newest event, verified.

        A plan that would go further than *extent* is withheld.
        """
        whole = subject
        if whole.report.client_compaction and (plan := await self._for_client(whole, demand)):
            return plan
        subject, tools = self._shrink_tools(whole)
        quiet = tools is None and not demand.force and demand.limit is None
        links = self._links(subject)
        if quiet and self._under_low(subject):
            return self._anchored(subject, self._verbatim(subject, b""), links, -1)
        subject = replace(subject, layout=subject.reading.layout())
        record = await self._newest(subject, links)
        if quiet and record is None and self._is_managed(subject):
            return self._anchored(subject, self._verbatim(subject, self._root(subject, links)), links, -1)
        since = record.event if record else None
        if demand.force and demand.limit is None and since is not None and since.place == subject.layout.count:
            # It was compacted at this very place: asked again, nothing more happens.
            demand = replace(demand, force=False)
        event, output = self._events(subject, since, demand)
        if extent != "any" and self._exceeds(extent, event, since, tools is not None or output is not None):
            return replace(self._verbatim(subject, self._root(subject, links)), withheld=True)
        if event is None:
            record = None
        elif record is None or event != since:
            supersede = supersede or demand.force or (since is not None and since.place == event.place)
            keep = not demand.peek
            record = await self._settle(subject, links, event, record, supersede=supersede, keep=keep)
        root = self._root(subject, links)
        if record is None and tools is None and output is None:
            plan = self._verbatim(subject, root)
        else:
            plan = self._compacted(subject, root, record, tools, output, record is not None and event != since)
        plan = self._anchored(subject, plan, links, record.event.place if record else -1)
        return await self._verified(whole, subject, plan, record, demand, tries=tries, extent=extent)

    async def _verified(
        self,
        whole: Subject,
        subject: Subject,
        plan: Plan,
        record: Record | None,
        demand: Demand,
        *,
        tries: int,
        extent: Extent,
    ) -> Plan:
        """*plan* if it fits, else one that goes further, or the refusal; *whole* has its tools entire."""
        held = plan.output or subject.figures.reserve
        weight = scaled(plan.report.tokens_after or 0, subject.factor)
        inside = subject.figures.inside(held)
        excess = weight - inside
        # Without an event the schedule has tried, unless it is what the provider counted so far that is too much.
        if excess > 0 and tries and (record is not None or (plan.tokens or 0) <= inside):
            limit = min(subject.figures.budget, demand.limit or subject.figures.window) - excess
            tighter = Demand(True, max(0, limit), demand.peek)
            again = await self.decide(whole, tighter, supersede=True, tries=tries - 1, extent=extent)
            return _with_event(again, plan.report.event)
        if excess > 0 and subject.requested is None and subject.figures.reserve > subject.figures.window // 32:
            # The client asked for no room at all: better a short answer than none.
            tight = replace(whole.figures, reserve=whole.figures.window // 32)
            again = await self.decide(replace(whole, figures=tight), demand, supersede=True, extent=extent)
            return _with_event(again, plan.report.event)
        if excess > _guess(subject, record) and self._is_certain(subject, plan, held):
            return replace(plan, error=self._refusal(subject, plan.tokens or 0))
        return plan

    @staticmethod
    def _exceeds(extent: Extent, event: Event | None, since: Event | None, edited: bool) -> bool:
        """Whether *event* goes further than *extent*; *edited*: something beside the items is changed too."""
        return _lossy(event, since) or (extent == "keep" and (edited or event != since))

    async def _for_client(self, subject: Subject, demand: Demand) -> Plan | None:
        """The plan for a client that compacts its conversation itself; ``None`` where that is too big.

        What it reads now is all that will be left, so nothing changes, whatever happened to the conversation before.
        Above the budget its answer gets the room a summary needs instead of what it asked for; after that its oldest
        tool results give way, as many as have to. No event is made of it.
        """
        if demand.force or demand.limit is not None or subject.reading.outline.stored:
            return None
        subject, links = replace(subject, layout=subject.reading.layout()), self._links(subject)
        plan = self._anchored(subject, self._verbatim(subject, self._root(subject, links)), links, -1)
        held = subject.figures.reserve
        if self._excess(subject, plan, held) <= 0:
            return plan
        if self._policy.lower_output != "never":
            held = min(held, summary_room(subject.figures.window, scaled(subject.reading.outline.least, subject.factor)))
        if self._excess(subject, plan, held) <= 0:
            return self._with_held(subject, links, plan, None, held)
        return await self._pruned(subject, links, plan, held)

    async def _pruned(self, subject: Subject, links: tuple[bytes, ...], plan: Plan, held: int) -> Plan | None:
        """*plan* without as many of its oldest tool results as it takes beside an answer of *held* tokens, verified."""
        items, count = subject.reading.items, subject.layout.count
        pairs = list(pairs_of(items, 0, count)) if self._policy.rules.mild.prune else []
        over = self._excess(subject, plan, held)
        for _ in range(3):
            swaps = oldest(pairs, items, over)
            if swaps is None:
                return None
            event = Event(count, 0, 0, swaps=swaps, stages=("prune",))
            record = await self._settle(subject, links, event, None, supersede=False, keep=False)
            made = self._with_held(subject, links, plan, record, held)
            excess = self._excess(subject, made, held)
            if excess <= 0:
                return made
            over += excess
        return None

    def _with_held(
        self, subject: Subject, links: tuple[bytes, ...], plan: Plan, record: Record | None, held: int
    ) -> Plan:
        """The view of *record* with an output figure of at least *held* tokens, where that is less than was asked."""
        figures, output = subject.figures, None
        root = self._root(subject, links)
        if subject.requested is not None and held < figures.reserve:
            made = self._compacted(subject, root, record, None, held, False) if record else plan
            used = scaled(made.report.tokens_after or 0, subject.factor)
            output = min(figures.reserve, max(held, figures.window - used - figures.window // 64))
        if record is None and output is None:
            return plan
        made = self._compacted(subject, root, record, None, output, False)
        return self._anchored(subject, made, links, subject.layout.count if record else -1)

    @staticmethod
    def _excess(subject: Subject, plan: Plan, held: int) -> int:
        """Tokens by which *plan* is too big beside an answer of *held*."""
        return scaled(plan.report.tokens_after or 0, subject.factor) - subject.figures.inside(held)

    def _is_certain(self, subject: Subject, plan: Plan, held: int) -> bool:
        """Whether the plan is too big by our own count too: what was only learned refuses nothing."""
        figures, factor = subject.figures, max(1.0, subject.factor)
        room = input_room(int(figures.window * factor), int(held * factor), subject.route.max_input)
        return (plan.tokens or 0) > room

    def _anchored(self, subject: Subject, plan: Plan, links: tuple[bytes, ...], event: int) -> Plan:
        """*plan* with what the provider will count for it, by what it counted for the conversation so far."""
        tokens, route = plan.tokens or 0, subject.route
        expected = self._lessons.expected(route, links, event, tokens, subject.factor)
        link = links[-1] if links else b""
        before = expected if event < 0 else plan.report.tokens_before
        report = plan.report.but(tokens_before=before, tokens_after=expected)
        if subject.reading.outline.unseen:
            return replace(plan, report=report)  # what the provider reports says nothing of what we counted
        held = int((plan.output or subject.figures.reserve) * subject.factor)
        sent = Sent(route, subject.request.tenant, tokens, link, event, not subject.reading.media, held)
        return replace(plan, report=report, sent=sent, links=links)

    @staticmethod
    def _is_managed(subject: Subject) -> bool:
        """Whether the client asked the provider to shorten the conversation itself, before it is too long."""
        managed = subject.reading.outline.managed
        return managed is not None and managed <= subject.figures.window * subject.factor

    def _under_low(self, subject: Subject) -> bool:
        """Whether the raw conversation is under the low mark: there nothing can have happened to it."""
        figures = subject.figures
        budget = min(figures.lasting, figures.budget)
        low = min(figures.low(self._policy.rules.marks, budget), budget)
        return figures.fixed + subject.reading.history <= low and figures.reserve <= figures.window // 2

    def _schedule(self, subject: Subject, figures: Figures | None = None) -> Schedule:
        rules = self._policy.rules
        if subject.reading.outline.stored:
            # Calls whose results are here, and results whose calls are, may be what the provider keeps.
            rules = replace(rules, rungs=replace(rules.rungs, fold=False, drop=False))
        return Schedule(subject.reading.items, subject.layout, figures or subject.figures, rules)

    def _events(self, subject: Subject, since: Event | None, demand: Demand) -> tuple[Event | None, int | None]:
        """The newest event, and the output figure when it is lowered so that nothing has to be dropped or clipped."""
        figures, mode = subject.figures, subject.lower or self._policy.lower_output
        schedule = self._schedule(subject)
        event = schedule.run(since, demand)
        if subject.requested is None or mode == "never":
            return event, None
        half, fits = figures.window // 2, schedule.fits(event, figures.budget)
        modest = mode == "last" and figures.reserve <= half
        if fits and not _lossy(event, since) and (event == since or modest):
            return event, None
        least = scaled(subject.reading.outline.least, subject.factor)
        for held in (max(least, half), max(least, min(1024, figures.window // 4))):
            if held >= figures.reserve:
                continue
            relaxed = self._schedule(subject, replace(figures, reserve=held))
            kinder = relaxed.run(since, demand)
            if relaxed.fits(kinder, figures.inside(held)) and not (fits and _lossy(kinder, since)):
                used = figures.stepped + relaxed.weight(subject.layout.count, kinder)
                left = max(1, least, figures.window - used - figures.window // 64)
                return kinder, left if left < figures.reserve else None
        return event, None

    def _shrink_tools(self, subject: Subject) -> tuple[Subject, str | None]:
        """*subject* with a smaller tools array where the tools leave hardly any room; the same on every call."""
        figures, sizes = subject.figures, subject.reading.sizes
        name = next((key for key in TOOLS if key in sizes), None)
        if not self._policy.rules.rungs.tools or name is None:
            return subject, None
        others = figures.fixed - sizes[name]
        target = self._tools_target(subject, others)
        if target is None or target >= sizes[name]:
            return subject, None
        text = subject.reading.outline.value(name)
        count = self._reader.count_tools(subject.route.encoding, subject.route.model)
        name_of = (subject.request.tenant, subject.route.name, text, target)  # nothing of one tenant times another
        if name_of not in self._tools:
            smaller = shrink(text.encode(), target, count).decode()
            self._tools[name_of] = (smaller, count(smaller))
        smaller, tokens = self._tools[name_of]
        if tokens >= sizes[name]:
            return subject, None
        return replace(subject, figures=replace(figures, fixed=others + tokens)), smaller

    def _tools_target(self, subject: Subject, others: int) -> int | None:
        """What the tools should come down to beside *others* that are fixed, if they should."""
        figures, rules = subject.figures, self._policy.rules
        targets = []
        if (figures.lasting - figures.fixed) * 4 < figures.lasting:
            targets.append(max(0, figures.lasting * 3 // 4 - others))
        over = figures.stepped + subject.reading.history > figures.mark(rules.marks.high, figures.lasting)
        if rules.allocation is not None and over:
            # In steps, as the fixed part is: a clock in the system text must not word the tools anew.
            step = max(1, figures.window // 64)
            targets.append(rules.allocation.for_tools(figures.window, -(-others // step) * step))
        return min(targets, default=None)

    def _links(self, subject: Subject) -> tuple[bytes, ...]:
        request = subject.request
        return subject.reading.links(self._recorder.chain_key(request.tenant), request.options.conversation)

    @staticmethod
    def _root(subject: Subject, links: tuple[bytes, ...]) -> bytes:
        task = subject.layout.task
        return links[task if task is not None else 0] if links else b""

    async def _newest(self, subject: Subject, links: tuple[bytes, ...]) -> Record | None:
        """The newest event record on this chain: from memory, unless the store has a newer one.

        The store is asked for the places since the newest one it was asked for before, that one included: what other
        replicas did since then, they did there.
        """
        route, count = subject.route.name, len(links)
        places = [place for place in subject.layout.places[-MAX_PLACES:] if 0 < place < count]
        newer: list[tuple[str, bytes]] = []
        known, asked = None, False
        at = [*places, count][::-1] if count else []
        for place in at:
            name = (route, links[place - 1])
            if name in self._records:
                known = name
                break
            if not asked:
                newer.append(name)
                asked = name in self._asked
        if newer:
            root = self._root(subject, links)
            found = await self._recorder.newest(subject.request.tenant, root, route, [link for _, link in newer])
            record = load(found[1], count) if found else None
            if found and record and record.event.place == at[found[0]]:
                self._records[newer[found[0]]] = record
                return record
            if self._recorder.reachable():
                self._asked[newer[0]] = True
        return self._records[known] if known else None

    async def _settle(
        self,
        subject: Subject,
        links: tuple[bytes, ...],
        event: Event,
        before: Record | None,
        *,
        supersede: bool,
        keep: bool,
    ) -> Record:
        """The record of *event*: written here, unless another replica was first; then theirs, if it fits too.

        Without *keep* it is only told what the record would be.
        """
        figures, raw = subject.figures, self._raw(subject)
        count = self._reader.count(subject.route.encoding, subject.route.model)
        if before is not None and same_block(event, before.event):
            text, spent = "", before.spent  # its block stays, and with it the summary that is in it
        else:
            summary = await self._summary(subject, links, event, count, wait=keep)
            text, spent = (summary.text, summary.spent) if summary else ("", 0)
        pen = Pen(count, self._reader.tools, self._policy.rules.truncate or Truncate())
        touched = max([event.cut, *(swap.index + 1 for swap in event.swaps), *(index + 1 for index, _ in event.trims)])
        if touched == 0 or raw.spans[touched - 1][1] <= RENDER_INLINE:
            block, edits = write(raw, event, pen, before, text)
        else:
            block, edits = await asyncio.to_thread(write, raw, event, pen, before, text)
        record = Record(VERSION, event, block, edits, figures.window, figures.reserve, figures.fixed, spent)
        if not keep:
            return record
        route, link, root = subject.route.name, links[event.place - 1], self._root(subject, links)
        tenant = subject.request.tenant
        held = await self._recorder.fix(tenant, root, route, link, dump(record), supersede=supersede)
        theirs = load(held, len(links))
        if theirs and theirs.event.place == event.place and self._schedule(subject).fits(theirs.event, figures.budget):
            record = theirs
        self._records[route, link] = record
        return record

    async def _summary(
        self, subject: Subject, links: tuple[bytes, ...], event: Event, count: Callable[[str], int], *, wait: bool
    ) -> Summary | None:
        """What a model wrote of what *event* folds, or of a part of it, if that is there and has its place in it.

        Without the store replicas know different summaries, and none is used: their views must be equal.
        """
        if self._summaries is None or not event.block or not self._recorder.reachable():
            return None
        passage = self._passage(subject, links, event.cut, None)
        if passage is None:
            return None
        waits = (
            wait
            and self._summaries.inline
            and not subject.report.client_compaction
            and subject.request.options.mode == "on"
        )
        found = await (self._summaries.write(passage) if waits else self._summaries.ready(passage))
        most = min(event.text // 2, passage.cap + passage.cap // 4)
        return found if found is not None and count(found.text) <= most else None

    async def summed_up(self, subject: Subject, links: tuple[bytes, ...]) -> tuple[Summary, Raw] | None:
        """What a model wrote of the longest prefix of a measured conversation, if it is there, and its items."""
        if self._summaries is None or not self._recorder.reachable():
            return None
        subject = replace(subject, layout=subject.reading.layout())
        passage = self._passage(subject, links, subject.layout.count, None)
        found = await self._summaries.ready(passage) if passage else None
        return (found, self._raw(subject)) if found else None

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
        if subject is None or report.observed or subject.reading.outline.unseen or self._is_managed(subject):
            return
        marks, figures, count = self._policy.rules.marks, subject.figures, subject.layout.count
        event = plan.record.event if plan.record else None
        # From the answer to a client's own compaction another chain goes on.
        if not plan.links or not count or report.client_compaction:
            return
        schedule = self._schedule(subject)
        if figures.stepped + schedule.weight(count, event) <= figures.soft(marks, figures.lasting):
            return
        since = plan.links[event.place - 1] if event else self._root(subject, plan.links)
        if not summaries.is_due(request, subject.route, since):
            return
        wanted = schedule.run(event, Demand(force=True))
        if wanted is None or not wanted.block or wanted.cut <= (event.cut if event else 0):
            return  # what does without a fold needs no summary
        passage = self._passage(subject, plan.links, wanted.cut, event)
        if passage is not None:
            summaries.prepare(passage)

    def _passage(self, subject: Subject, links: tuple[bytes, ...], cut: int, event: Event | None) -> Passage | None:
        request, route, reading = subject.request, subject.route, subject.reading
        about = passages.Subject(
            request,
            route,
            reading,
            self._raw(subject),
            subject.figures,
            subject.factor,
            links,
            self._root(subject, links),
        )
        record = self._records.get((route.name, links[event.place - 1])) if event else None
        share = self._policy.rules.shares.summary
        return passages.passage_of(about, cut, record, share, self._reader.count(route.encoding, route.model))

    def _compacted(
        self, subject: Subject, root: bytes, record: Record | None, tools: str | None, output: int | None, fresh: bool
    ) -> Plan:
        reading, count = subject.reading, self._reader.count(subject.route.encoding, subject.route.model)
        raw = self._raw(subject)
        if record is None:
            whole = reading.body[reading.scan.start : reading.scan.end]
            view = View(whole, reading.totals.system + reading.totals.history, reading.totals)
        else:
            view = assemble(raw, record.event, record.block, record.edits, count)
        outline, edits = reading.outline, {}
        if tools is not None:
            edits[next(key for key in TOOLS if key in reading.sizes)] = tools
        if output is not None:
            figure = max(int(output * subject.factor), outline.least)
            names = raw.dialect.OUTPUT_FIGURES
            edits.update({key: str(figure) for key in names if key in outline.fields})
        at = len(reading.body[: reading.scan.start].decode())
        body = splice(outline, at, view.content, edits)
        system = sum(reading.items[i].tokens for i in subject.layout.systems)
        tokens = subject.figures.fixed - system + view.tokens
        stages = (
            (record.event.stages if record else ()) + (("tools",) if tools else ()) + (("output",) if output else ())
        )
        report = self._report(subject, tokens, root, view, output)
        spent = record.spent if record else 0
        report = report.but(outcome="compacted", stages=stages, event=fresh, summary_tokens=spent)
        return Plan(body, report, subject.route, tokens, subject, output, record=record)

    def _verbatim(self, subject: Subject, root: bytes) -> Plan:
        tokens = self.total(subject)
        report = self._report(subject, tokens, root, View(b"", tokens, subject.reading.totals))
        return Plan(subject.request.body, report, subject.route, tokens, subject)

    def _report(self, subject: Subject, tokens: int, root: bytes, view: View, output: int | None = None) -> Report:
        figures, factor, allocation = subject.figures, subject.factor, self._policy.rules.allocation
        sizes, fixed = subject.reading.sizes, subject.reading.fixed
        by_region = regions(
            view.kept,
            # As small as they were made: the rest of the fixed part stays as the client sent it.
            tools=sum(sizes.get(key, 0) for key in TOOLS) - (fixed - figures.fixed),
            fixed=figures.fixed - subject.reading.totals.system + view.kept.system,
            summary=view.summary,
            reserve=output or figures.reserve,
        )
        return subject.report.but(
            regions=scaled_up(by_region, factor),
            borrowed=scaled_up(borrowed(by_region, allocation, figures.window), factor) if allocation else {},
            budget=int(figures.budget * factor),
            tokens_before=int(self.total(subject) * factor),
            tokens_after=int(tokens * factor),
            conversation=base64.urlsafe_b64encode(root[:12]).decode(),
            large_result=_large_result(subject),
        )

    @staticmethod
    def total(subject: Subject) -> int:
        """Tokens of the request as the client sent it."""
        return subject.reading.fixed + subject.reading.history

    @staticmethod
    def _raw(subject: Subject) -> Raw:
        reading, dialect = subject.reading, DIALECTS[subject.request.api]
        return Raw(reading.body, reading.scan.spans, reading.items, subject.layout, dialect)

    @staticmethod
    def _refusal(subject: Subject, tokens: int) -> ContextTooLong:
        figures, factor = subject.figures, subject.factor
        tools = sum(subject.reading.sizes.get(key, 0) for key in TOOLS)
        regions = {"tools": tools - (subject.reading.fixed - figures.fixed)}  # as small as they could be made
        regions["system messages"] = sum(subject.reading.items[i].tokens for i in subject.layout.systems)
        regions["newest messages"] = tokens - figures.fixed
        largest = max(regions, key=lambda name: regions[name])
        return ContextTooLong(
            tokens=int(tokens * factor),
            limit=subject.report.window or int(figures.window * factor),
            reserve=int((figures.window - figures.inside(figures.reserve)) * factor),
            largest=largest,
            largest_tokens=int(regions[largest] * factor),
        )


def _compacting(reading: Reading) -> str:
    """Whose own compaction of its conversation a request is, by its words; empty where it is none."""
    spans, body = reading.scan.spans, reading.body
    if not spans:
        return ""
    return client_of(reading.outline, body[slice(*spans[0])], body[slice(*spans[-1])])


def _with_event(plan: Plan, event: bool) -> Plan:
    """*plan*, also counted as an event where an attempt before it was one: it goes on from that one's record."""
    return replace(plan, report=plan.report.but(event=plan.report.event or event))


def _guess(subject: Subject, record: Record | None) -> int:
    """Tokens of the view that are no more than a guess."""
    items = subject.reading.items
    kept = {*record.event.anchors, *range(record.event.cut, len(items))} if record else range(len(items))
    return sum(items[index].guess for index in kept)


def _large_result(subject: Subject) -> float:
    """The share of the room left that the largest of the newest tool results takes; zero where that needs no warning.

    What no request has seen before can still be asked for in a narrower way.
    """
    newest, largest = 0, 0
    for item in reversed(subject.reading.items):
        if not item.answers:
            break
        newest, largest = newest + item.tokens, max(largest, item.tokens)
    left = subject.figures.budget - subject.reading.fixed - subject.reading.history + newest
    share = largest / left if left > 0 else 0.0
    return round(share, 2) if share > LARGE else 0.0


def _lossy(event: Event | None, since: Event | None) -> bool:
    """Whether a new event drops or clips."""
    return event is not None and event != since and not {"drop", "clip"}.isdisjoint(event.stages)

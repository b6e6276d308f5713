"""From a request to what goes upstream: read, measure, look up the newest event, fold on, write, splice, verify."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from proxy.core.budget.catalogue import Route
from proxy.core.budget.figures import input_room, scaled, summary_room
from proxy.core.compression.event import Demand, Event
from proxy.core.compression.fresh import capped
from proxy.core.compression.prune import oldest
from proxy.core.compression.record import Record
from proxy.core.compression.view import View, assemble
from proxy.core.conversation.compaction import client_of
from proxy.core.conversation.facts import pairs_of
from proxy.core.conversation.items import EMPTY
from proxy.core.conversation.outline import TOOLS, splice
from proxy.core.conversation.scan import scan
from proxy.core.errors import InvalidRequest
from proxy.core.overflow.policy import Extent, Lower
from proxy.core.report import Report
from proxy.ports import Recorder, Request, Summaries
from proxy.walk import offering
from proxy.walk.events import Events
from proxy.walk.lessons import Lessons, Sent
from proxy.walk.plans import DIALECTS, Plan, Policy, Subject
from proxy.walk.reading import Located, Reader, Reading
from proxy.walk.telling import refusal_of, report_of
from proxy.walk.toolroom import ToolRoom


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
        self._policy = policy
        self._lessons = lessons
        self._room = ToolRoom(reader, policy, tools)
        self.events = Events(reader, recorder, policy, records, asked, summaries)

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
        """The lowest low mark that a request inside *budget* can have: what has fewer bytes needs no closer look.

        A token of JSON is more than two bytes, so that its tokens are under half of the mark.
        """
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
        report = report.but(window=window, client_compaction=request.compacting or _compacting(reading))
        recall = 0
        if self._policy.recall and not report.client_compaction:
            recall = offering.tokens(self._reader, request.api, reading.outline, route, window)
        figures = self._policy.figures(route, window, requested, reading.fixed + recall, factor)
        return Subject(request, route, reading, EMPTY, figures, factor, requested, report, recall=recall)

    async def weigh(self, request: Request, located: Located, route: Route) -> int:
        """Tokens of the request as the client sent it, by our own count."""
        reading = await self._reader.read(DIALECTS[request.api], route.encoding, request.tenant, located, route.model)
        return reading.fixed + reading.history

    @property
    def may_truncate(self) -> bool:
        """Whether a provider may cut the history that only it has."""
        return self._policy.stored == "truncate"

    @property
    def lower(self) -> Lower:
        """When a request's own output figure may be lowered."""
        return self._policy.lower_output

    async def decide(
        self, subject: Subject, demand: Demand, *, supersede: bool = False, tries: int = 2, extent: Extent = "any"
    ) -> Plan:
        """The plan for *subject*: its own bytes while they fit, else the view of its newest event, verified.

        A plan that would go further than *extent* is withheld.
        """
        whole = subject
        if whole.report.client_compaction and (plan := await self._for_client(whole, demand)):
            return plan
        subject, tools = self._room.shrunk(whole)
        calm = tools is None and demand.limit is None and (demand.wait or not demand.force)
        quiet = calm and not demand.force
        links = self.events.links(subject)
        if calm and self._is_quiet(subject):
            return self._anchored(subject, self._as_asked(self._verbatim(subject, b""), demand), links, -1)
        subject = replace(subject, layout=subject.reading.layout())
        record = await self.events.newest(subject, links)
        if quiet and record is None and subject.is_managed:
            return self._anchored(subject, self._verbatim(subject, subject.root(links)), links, -1)
        since = record.event if record else None
        if not demand.peek and await self.events.is_wished(subject, links):
            demand, extent = replace(demand, force=True, wait=True), "any"
        if demand.force and demand.limit is None and since is not None and since.place == subject.layout.count:
            # It was compacted at this very place: asked again, nothing more happens.
            demand = replace(demand, force=False, wait=False)
        event, output = self._decided(subject, record, demand) or self._events(subject, since, demand)
        if extent != "any" and self._exceeds(extent, event, since, tools is not None or output is not None):
            return replace(self._verbatim(subject, subject.root(links)), withheld=True)
        if event is None:
            record = None
        elif record is None or event != since:
            supersede = supersede or demand.force or (since is not None and since.place == event.place)
            record = await self.events.settle(subject, links, event, record, demand, supersede=supersede, output=output)
            output = record.output or output
        root = subject.root(links)
        if record is None and tools is None and output is None:
            plan = self._as_asked(self._verbatim(subject, root), demand)
        else:
            plan = self._compacted(subject, root, record, tools, output, record is not None and event != since)
        plan = self._anchored(subject, plan, links, record.event.place if record else -1)
        plan = replace(plan, before=since)
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
            return _following(again, plan)
        if excess > 0 and subject.requested is None and subject.figures.reserve > subject.figures.window // 32:
            # The client asked for no room at all: better a short answer than none.
            tight = replace(whole.figures, reserve=whole.figures.window // 32)
            again = await self.decide(replace(whole, figures=tight), demand, supersede=True, extent=extent)
            return _following(again, plan)
        if excess > 0 and whole.recall:  # no request is refused for want of the tool's room
            again = await self.decide(whole.without_recall(), demand, supersede=True, extent=extent)
            return _following(again, plan)
        if excess > _guess(subject, record) and self._is_certain(subject, plan, held):
            return replace(plan, error=refusal_of(subject, plan.tokens or 0, held))
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
        subject, links = replace(subject, layout=subject.reading.layout()), self.events.links(subject)
        plan = self._anchored(subject, self._verbatim(subject, subject.root(links)), links, -1)
        held = subject.figures.reserve
        if self._excess(subject, plan, held) <= 0:
            return plan
        if self._policy.lower_output != "never":
            held = min(
                held, summary_room(subject.figures.window, scaled(subject.reading.outline.least, subject.factor))
            )
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
            record = await self.events.settle(subject, links, event, None, Demand(peek=True), supersede=False)
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
        root = subject.root(links)
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
        """Whether the plan is too big by our own count too, for a window that somebody stated."""
        figures, route, factor = subject.figures, subject.route, max(1.0, subject.factor)
        window: int | None = int(figures.window * factor)
        if subject.report.source == "learned":
            window = self._lessons.stated(route, subject.request.tenant)
        if window is None:
            return False
        return (plan.tokens or 0) > input_room(window, int(held * factor), route.max_input)

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
    def _as_asked(plan: Plan, demand: Demand) -> Plan:
        """*plan*, which changes nothing; if the caller asked for a compaction it says that there was nothing to do."""
        return replace(plan, report=plan.report.but(reason="nothing_to_fold")) if demand.wait else plan

    def _is_quiet(self, subject: Subject) -> bool:
        """Whether the raw conversation is under half of the low mark: there nothing can have happened to it."""
        figures = subject.figures
        budget = min(figures.lasting, figures.budget)
        low = min(figures.quiet(self._policy.rules.marks, budget), budget)
        return figures.fixed + subject.reading.history <= low and figures.reserve <= figures.window // 2

    def _decided(self, subject: Subject, record: Record | None, demand: Demand) -> tuple[Event, int] | None:
        """What was decided for this very request when it came before, its lowered output figure among it."""
        figures = subject.figures
        if record is None or not record.output or record.event.place != subject.layout.count:
            return None
        if demand.force or demand.limit is not None or record.output >= figures.reserve:
            return None
        fits = self._policy.schedule(subject).fits(record.event, figures.inside(record.output))
        return (record.event, record.output) if fits else None

    def _events(self, subject: Subject, since: Event | None, demand: Demand) -> tuple[Event | None, int | None]:
        """The newest event, and the output figure when it is lowered so that nothing has to be dropped or clipped."""
        figures, mode = subject.figures, subject.lower or self._policy.lower_output
        schedule = self._policy.schedule(subject)
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
            relaxed = self._policy.schedule(subject, replace(figures, reserve=held))
            kinder = relaxed.run(since, demand)
            if relaxed.fits(kinder, figures.budget) and not _lossy(kinder, since):
                return kinder, None  # nothing has to be lowered for it
            if relaxed.fits(kinder, figures.inside(held)) and not (fits and _lossy(kinder, since)):
                used = figures.stepped + relaxed.weight(subject.layout.count, kinder)
                left = max(1, least, figures.window - used - figures.window // 64)
                return kinder, left if left < figures.reserve else None
        return event, None

    def _compacted(
        self, subject: Subject, root: bytes, record: Record | None, tools: str | None, output: int | None, fresh: bool
    ) -> Plan:
        reading, route = subject.reading, subject.route
        count = self._reader.recount(route.encoding, subject.request.tenant, route.model)
        raw, recall = subject.raw, bool(subject.recall) and record is not None
        if record is None:
            subject = subject.without_recall()
            whole = reading.body[reading.scan.start : reading.scan.end]
            view = View(whole, reading.totals.system + reading.totals.history, reading.totals)
        else:
            view = assemble(raw, record.event, offering.told(record.block, recall=recall), record.edits, count)
        outline, edits, thinking = reading.outline, {}, {}
        if tools is not None:
            edits[next(key for key in TOOLS if key in reading.sizes)] = tools
        if recall:
            edits |= offering.tools(subject.request.api, outline, tools)
        if output is not None:
            figure = max(int(output * subject.factor), outline.least)
            names = raw.dialect.OUTPUT_FIGURES
            thinking = outline.thinking(figure)
            edits |= {key: str(figure) for key in names if key in outline.fields} | thinking
        at = len(reading.body[: reading.scan.start].decode())
        body = splice(outline, at, view.content, edits)
        system = sum(reading.items[i].tokens for i in subject.layout.systems)
        tokens = subject.figures.fixed - system + view.tokens
        used = {"tools": tools, "output": output, "thinking": thinking, "recall": recall}
        stages = (record.event.stages if record else ()) + tuple(name for name, value in used.items() if value)
        report = report_of(self._policy, subject, tokens, root, view, output)
        spent = record.spent if record else 0
        report = report.but(outcome="compacted", stages=stages, event=fresh, summary_tokens=spent)
        return Plan(body, report, subject.route, tokens, subject, output, record=record, recall=recall)

    def _verbatim(self, subject: Subject, root: bytes) -> Plan:
        tokens = subject.total
        report = report_of(
            self._policy, subject.without_recall(), tokens, root, View(b"", tokens, subject.reading.totals)
        )
        return Plan(subject.request.body, report, subject.route, tokens, subject)


def _compacting(reading: Reading) -> str:
    """Whose own compaction of its conversation a request is, by its words; empty where it is none."""
    spans, body = reading.scan.spans, reading.body
    if not spans:
        return ""
    return client_of(reading.outline, body[slice(*spans[0])], body[slice(*spans[-1])])


def _following(plan: Plan, tried: Plan) -> Plan:
    """*plan*, also counted as an event where *tried* before it was one: it goes on from that one's record."""
    return replace(plan, report=plan.report.but(event=plan.report.event or tried.report.event), before=tried.before)


def _guess(subject: Subject, record: Record | None) -> int:
    """Tokens of the view that are no more than a guess."""
    items = subject.reading.items
    kept = {*record.event.anchors, *range(record.event.cut, len(items))} if record else range(len(items))
    return sum(items[index].guess for index in kept)


def _lossy(event: Event | None, since: Event | None) -> bool:
    """Whether a new event drops or clips."""
    return event is not None and event != since and not {"drop", "clip"}.isdisjoint(event.stages)

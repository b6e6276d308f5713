"""From a request to what goes upstream: read it, measure it, and plan until the decision is final."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import assert_never

from cachetools import LRUCache

from proxy.core.budget.catalogue import Route
from proxy.core.compaction.record import CompactionRecord
from proxy.core.compaction.schedule import CompactionTarget, LowerOutput
from proxy.core.compaction.truncate import TruncateLimits
from proxy.core.conversation.compaction import client_of
from proxy.core.conversation.scan import scan
from proxy.core.decisions import (
    DIALECTS,
    START,
    CountedView,
    FinalDecision,
    Forward,
    KnownRoute,
    MeasuredRequest,
    NeedBlock,
    NeedRecord,
    ParsedBody,
    Policy,
    Progress,
    Reject,
    TokenCounts,
    TooLossy,
)
from proxy.core.errors import InvalidRequest
from proxy.core.planner import decide
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.engine.learned_routes import LearnedRoutes, Sent
from proxy.engine.plans import Plan
from proxy.engine.ports import Records, Summaries
from proxy.engine.reading import Located, Reader, Reading
from proxy.engine.records import CompactionRecords
from proxy.engine.tool_room import ToolRoom
from proxy.engine.view_report import report_of
from proxy.features.cap_results.feature import cap_results
from proxy.features.recall import tool
from proxy.offload import load_of, offload

LOWS = 1_024
"""Low marks that are remembered: one for each window and output figure in use."""


class Fitter:
    """Fits requests into their windows.

    ``records`` is the in-process front of the store, ``asked`` the places it was last asked for, ``tools`` remembers
    shrunk tool arrays: bounded mappings all.
    """

    def __init__(
        self,
        reader: Reader,
        recorder: Records,
        policy: Policy,
        records: MutableMapping[tuple[str, bytes], CompactionRecord],
        asked: MutableMapping[tuple[str, bytes], bool],
        tools: MutableMapping[tuple[bytes, str, str, int], tuple[str, int]],
        lessons: LearnedRoutes,
        summaries: Summaries | None = None,
    ) -> None:
        self._reader = reader
        self._policy = policy
        self._recorder = recorder
        self._lessons = lessons
        self._lows: LRUCache[tuple[int | None, ...], int] = LRUCache(LOWS)
        self._room = ToolRoom(reader, policy, tools)
        self.events = CompactionRecords(reader, recorder, policy, records, asked, summaries)

    def markers(self) -> dict[str, tuple[bytes, ...]]:
        """What a body holds if its results may have to be capped, by API."""
        return {} if self._policy.always is None else dict.fromkeys(DIALECTS, (b"tool", b"function"))

    async def capped(self, request: Request) -> Request:
        """*request* with its tool results capped, where that is wanted; *request* itself where nothing is too big."""
        limits = self._policy.always
        if limits is None:
            return request
        return await offload(len(request.body), self._capped, request, limits)

    def _capped(self, request: Request, limits: TruncateLimits) -> Request:
        dialect = DIALECTS[request.api]
        try:
            where = scan(request.body, dialect.LIST, self._reader.most)
            body = cap_results(request.body, where, dialect, self._reader.tools, limits)
        except InvalidRequest:
            return request  # what cannot be read may still be relayed
        return request if body is request.body else replace(request, body=body)

    def low(self, route: Route, window: int, budget: int) -> int:
        """The lowest low mark that a request inside *budget* can have: what has fewer bytes needs no closer look.

        A token of JSON is more than two bytes, so that its tokens are under half of the mark.
        """
        name = (window, budget, route.max_output, route.max_input, route.tier)
        low = self._lows.get(name)
        if low is None:
            figures = self._policy.budget(route, window, None, 0, 1.0)
            low = self._lows[name] = figures.low(self._policy.rules.marks, min(budget, figures.baseline))
        return low

    def locate(self, request: Request) -> Located:
        """Where things stand in the body. Raises ``InvalidRequest`` where it cannot be read."""
        return self._reader.locate(DIALECTS[request.api], request.tenant, request.body)

    async def located(self, request: Request) -> Located:
        """As ``locate``, of a large body on a thread."""
        return await self._reader.located(DIALECTS[request.api], request.tenant, request.body)

    async def measure(
        self,
        request: Request,
        located: Located,
        route: Route,
        window: int,
        token_ratio: float,
        source: str,
        target: CompactionTarget | None = None,
    ) -> MeasuredRequest:
        """The request, read and counted against *window* (in the provider's tokens)."""
        dialect = DIALECTS[request.api]
        reading = await self._reader.read(dialect, route.encoding, request.tenant, located, route.model)
        known = KnownRoute(route, window, source, None, token_ratio)
        return await offload(reading.load, self._measured, request, reading, known, target)

    def _measured(
        self, request: Request, reading: Reading, known: KnownRoute, target: CompactionTarget | None
    ) -> MeasuredRequest:
        policy, route, window, token_ratio = self._policy, known.route, known.window, known.token_ratio
        envelope, requested = reading.outline, reading.outline.requested
        counts = TokenCounts(reading.fixed, reading.sizes, reading.totals, reading.members)
        client_compaction = request.compacting or _compacting(reading)
        added = 0
        if policy.recall and not client_compaction:
            added = tool.tool_tokens(self._reader, request.api, envelope, route, window)
        budget = policy.budget(route, window, requested, counts.fixed + added, token_ratio)
        tools_json, budget = self._room.shrunk(request.tenant, route, envelope, counts, budget)
        hashes = reading.links(self._recorder.prefix_key(request.tenant), request.options.conversation)
        stated: int | None = int(budget.window * max(1.0, token_ratio))
        if known.window_source == "learned":
            stated = self._lessons.stated(route, request.tenant)
        return MeasuredRequest(
            request=request,
            known=replace(known, stated_window=stated),
            parsed=ParsedBody(reading.body, reading.scan, reading.items, envelope),
            counts=counts,
            prefix_hashes=hashes,
            budget=budget,
            requested_output=requested,
            client_compaction=client_compaction,
            tools_json=tools_json,
            addition=tool.addition(request.api, envelope, tools_json, added),
            anchor=self._lessons.anchor(route, hashes),
            target=target or CompactionTarget(lower_output=policy.lower_output),
            count=self._reader.recount(route.encoding, request.tenant, route.model),
            lay_out=reading.layout,
        )

    async def weigh(self, request: Request, located: Located, route: Route) -> int:
        """Tokens of the request as the client sent it, by our own count."""
        reading = await self._reader.read(DIALECTS[request.api], route.encoding, request.tenant, located, route.model)
        return reading.fixed + reading.history

    @property
    def may_truncate(self) -> bool:
        """Whether a provider may cut the history that only it has."""
        return self._policy.stored == "truncate"

    @property
    def lower(self) -> LowerOutput:
        """When a request's own output figure may be lowered."""
        return self._policy.lower_output

    async def decide(self, measured: MeasuredRequest, report: Report) -> Plan:
        """What to send for *measured*, with *report* completed. Nothing is sent."""
        progress: Progress = START
        size = load_of(len(measured.parsed.body), len(measured.parsed.items))
        while True:
            decision = await offload(size, decide, measured, self._policy, progress)
            match decision:
                case NeedRecord():
                    progress = await self.events.look_up(measured)
                case NeedBlock():
                    progress = await self.events.write(measured, decision)
                case Forward() | TooLossy() | Reject():
                    return self._planned(measured, decision, report)
                case other:
                    assert_never(other)

    def _planned(self, measured: MeasuredRequest, decision: FinalDecision, report: Report) -> Plan:
        report = report.but(window=measured.known.window, client_compaction=measured.client_compaction)
        if isinstance(decision, TooLossy):
            return Plan(measured.request.body, report, measured.route, withheld=True)
        view, route = decision.view, measured.route
        report = report_of(self._policy, view, report)
        error = decision.error if isinstance(decision, Reject) else None
        return Plan(view.body, report, route, view, view.edits.lowered_output, _sent(view), error)


def _sent(view: CountedView) -> Sent | None:
    """What the answer to *view* can teach; None if what the provider counts says nothing of what we counted."""
    measured = view.measured
    if measured.parsed.envelope.unseen:
        return None
    record, ratio = view.edits.record, measured.token_ratio
    output = int((view.edits.lowered_output or view.budget.reserve) * ratio)
    return Sent(
        measured.route,
        measured.request.tenant,
        view.tokens,
        measured.prefix_hashes[-1] if measured.prefix_hashes else b"",
        record.compaction.place if record else -1,
        plain=not measured.counts.roles.media,
        output=output,
    )


def _compacting(reading: Reading) -> str:
    """Whose own compaction of its conversation a request is, by its words; empty where it is none."""
    spans, body = reading.scan.spans, reading.body
    if not spans:
        return ""
    history = reading.totals.assistant > 0
    return client_of(reading.outline, body[slice(*spans[0])], body[slice(*spans[-1])], history)

"""What to send for a request: under which route and window, by which step of its model's policy."""

from __future__ import annotations

from dataclasses import replace

from proxy.core.attempts import first_max_loss
from proxy.core.budget.catalogue import COMPRESS, Catalogue, Route
from proxy.core.budget.figures import input_room, reserve
from proxy.core.compaction.schedule import CompactionTarget, MaxLoss
from proxy.core.conversation.identity import name_of
from proxy.core.conversation.outline import Envelope
from proxy.core.report import Report
from proxy.core.request import Mode, Request
from proxy.engine.bodies import rerouted
from proxy.engine.fitting import Fitter
from proxy.engine.learned_routes import CachedRoute, LearnedRoutes, Sent
from proxy.engine.plans import Plan
from proxy.engine.quick_check import MEDIA, Head, bound, read_head
from proxy.engine.recovery import Recovery
from proxy.offload import offload

MOST_BYTES_A_TOKEN = 12
"""Of a request's JSON there is hardly ever more to a token, whitespace and escapes included: English has 4 to 5."""
OBSERVED = "\0observed"
"""Added to a conversation's label where it is only observed; no header can carry it."""


class Planner:
    """Decides what goes upstream."""

    def __init__(
        self, catalogue: Catalogue, fitter: Fitter, mode: Mode, lessons: LearnedRoutes, recovery: Recovery
    ) -> None:
        self._catalogue = catalogue
        self._fitter = fitter
        self._mode = mode
        self._lessons = lessons
        self._recovery = recovery

    async def fit(self, request: Request, *, counted: bool = False, dry_run: bool = False) -> Plan:
        """What to send for *request*: the client's own bytes, the smaller view of its conversation, or a fallback's.

        *counted* counts it even where its bytes show that it fits; *dry_run* only asks, and makes nothing a fact.

        The steps of the model's policy are tried in order; those that would have to drop or clip only if all would.
        """
        plan = await self.planned(request, "any" if dry_run else None, counted=counted, dry_run=dry_run)
        if plan.route is None or plan.route.steps == (COMPRESS,) or not (plan.withheld or plan.error):
            return plan
        steps = plan.route.steps if await self.may_leave(request) else ()
        for max_loss in ("no_drop", "any"):
            for at, step in enumerate(steps):
                if step != COMPRESS:
                    found = await self.by_fallback(request, step, max_loss, dry_run=dry_run)
                elif max_loss == "no_drop" and at == 0:
                    continue  # that far it was tried
                else:
                    found = await self.planned(request, max_loss, dry_run=dry_run)
                if found.error is None and not found.withheld:
                    return found
        return plan if plan.error else await self.planned(request, "any")

    async def may_leave(self, request: Request) -> bool:
        """Whether another model can answer: not where the path names this one, or its server has the history."""
        return not request.model and not (await self._fitter.located(request)).outline.stored

    async def by_fallback(self, request: Request, model: str, max_loss: MaxLoss, *, dry_run: bool = False) -> Plan:
        """What to send when *model* is asked in place of the one that was."""
        located = await self._fitter.located(request)
        asked = located.outline.model
        # The caller's key goes with no errand of ours to an upstream that the caller did not choose.
        origin = request.origin if self._upstream_of(model) == self._upstream_of(asked) else None
        body = await offload(len(request.body), rerouted, request, located, model)
        other = replace(request, body=body, origin=origin)
        plan = await self.planned(other, max_loss, dry_run=dry_run)
        return replace(plan, request=other, report=as_fallback(plan.report.but(model=asked), model))

    def quick_check(self, request: Request) -> Plan | None:
        """The client's own bytes if they alone show that nothing has to be done; None if that takes a closer look.

        Nothing is counted or hashed, and nothing is waited for: not even for what other replicas learned of the route,
        so that a process which never asked for that gives no quick answer.
        """
        head = read_head(request.api, request.body)
        if head is None or request.options.compact_now:
            return None
        route, mode = self._route(request, head.model), self._mode_of(request)
        known = self._lessons.cached(route, request.tenant)
        if known is None:
            return None
        return self._uncounted(request, head, route, known, mode)

    async def planned(
        self, request: Request, max_loss: MaxLoss | None = None, *, counted: bool = False, dry_run: bool = False
    ) -> Plan:
        """The plan for *request* and the model it names, as far as *max_loss* (its policy's, if none) allows."""
        head = read_head(request.api, request.body)
        about: Head | Envelope = head or (await self._fitter.located(request)).outline
        route, mode = self._route(request, about.model), self._mode_of(request)
        known = await self._lessons.of(route, request.tenant)
        if mode == "on" and (smaller := await self._fitter.capped(request)) is not request:
            return _as_capped(await self.planned(smaller, max_loss, counted=counted, dry_run=dry_run))
        plan = self._uncounted(request, about, route, known, mode, counted=counted)
        if plan is not None:
            return plan
        window = self._recovery.window(route, known, request)
        assert window is not None  # else it is sent uncounted
        if mode == "observe":
            # What was only considered must never be taken for what was sent: it is recorded under a name of its own.
            own = replace(request.options, conversation=request.options.conversation + OBSERVED)
            request = replace(request, options=own)
        report = self._report(request, about, route, known, window)
        target = self._target(request, route, mode, max_loss, dry_run)
        located, ratio = await self._fitter.located(request), known.lesson.calibration.factor
        measured = await self._fitter.measure(request, located, route, window, ratio, report.source, target)
        plan = await self._fitter.decide(measured, report)
        if report.conversation:
            plan = replace(plan, report=plan.report.but(conversation=report.conversation))
        return _observed(request, plan, route) if mode == "observe" else plan

    def _route(self, request: Request, named: str) -> Route:
        """Where *request* goes; *named* is the model that its body names."""
        route = self._catalogue.resolve(request.model or named, len(request.body))
        return replace(route, variant=request.variant) if request.variant else route

    def _mode_of(self, request: Request) -> Mode:
        return self._mode if request.options.mode == "on" else request.options.mode

    def _uncounted(
        self,
        request: Request,
        about: Head | Envelope,
        route: Route,
        known: CachedRoute,
        mode: Mode,
        *,
        counted: bool = False,
    ) -> Plan | None:
        """The client's own bytes if nothing is to be counted: mode off, no known window, or few bytes; else None."""
        window = self._recovery.window(route, known, request)
        if mode == "off" or window is None:
            sent = _sent_uncounted(request, route) if mode != "off" else None
            report = self._report(request, about, route, known, window)
            reason = "off" if mode == "off" else "unknown-window"
            return Plan(request.body, report.but(reason=reason, window=None), route, sent=sent)
        if isinstance(about, Envelope) or request.options.compact_now or counted:
            return None
        reserved = reserve(about.requested, route.max_output, window)
        budget = input_room(window, reserved, route.max_input)
        tokens = bound(request.body, about, self._fitter.low(route, window, budget))
        if not tokens:
            return None
        report = self._report(request, about, route, known, window)
        return Plan(
            request.body, report.but(budget=budget, tokens_before=tokens, tokens_after=tokens, bounded=True), route
        )

    def _report(
        self, request: Request, about: Head | Envelope, route: Route, known: CachedRoute, window: int | None
    ) -> Report:
        """What is known of a request before it is counted."""
        options = request.options
        session = options.conversation.removesuffix(OBSERVED) or request.session or about.session
        return Report(
            request.request_id,
            request.api,
            request.model or about.model,
            route.upstream,
            about.stream is True,
            window=window,
            source=self._recovery.source(route, known, window),
            project=options.project,
            task_size=options.task_size,
            conversation=name_of(request.tenant, session) if session else "",
            epoch=request.epoch,
            client_compaction=request.compacting,
        )

    def _target(
        self, request: Request, route: Route, mode: Mode, max_loss: MaxLoss | None, dry_run: bool
    ) -> CompactionTarget:
        """What the view of *request* must reach at first."""
        now = request.options.compact_now
        if max_loss is None:
            max_loss = "any" if mode == "observe" or now else first_max_loss(route.steps)
        return CompactionTarget(
            force=now,
            wait_for_summary=now,
            dry_run=dry_run,
            max_loss=max_loss,
            lower_output=self._fitter.lower,
            share=request.options.compact_to,
        )

    def _upstream_of(self, model: str) -> str:
        return self._catalogue.resolve(model).upstream


def _as_capped(plan: Plan) -> Plan:
    """*plan*, of a request whose results were capped, which is a stage of its own."""
    outcome = "compacted" if plan.report.outcome == "verbatim" else plan.report.outcome
    stages = ("truncate", *(stage for stage in plan.report.stages if stage != "truncate"))
    return replace(plan, report=plan.report.but(outcome=outcome, stages=stages))


def _sent_uncounted(request: Request, route: Route) -> Sent:
    """What an answer can teach of a view that nobody counted, since no window is known to hold it against."""
    plain = not MEDIA.search(request.body)
    return Sent(route, request.tenant, len(request.body) // MOST_BYTES_A_TOKEN, b"", -1, plain, counted=False)


def _observed(request: Request, plan: Plan, route: Route) -> Plan:
    """The client's own bytes, with the report of what *plan* would have done."""
    reason = "would_refuse" if plan.error else "would_compact" if plan.body != request.body else ""
    return Plan(request.body, plan.report.but(observed=True, outcome="verbatim", reason=reason), route)


def as_fallback(report: Report, model: str) -> Report:
    """*report* of a plan for the fallback *model*, which says so; as it is where there is none."""
    if not model:
        return report
    outcome = "degraded" if report.outcome == "verbatim" else report.outcome
    return report.but(fallback=model, reason="fallback", outcome=outcome)

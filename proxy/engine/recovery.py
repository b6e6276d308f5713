"""After a provider said "too long": something strictly smaller by what it stated, or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from proxy.core.attempts import lowering, retries_smaller
from proxy.core.budget.catalogue import COMPRESS, Route
from proxy.core.budget.figures import reserve
from proxy.core.budget.windows import Source
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.errors import InvalidRequest
from proxy.core.overflow.evidence import Prior, check_claim
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import Usage
from proxy.core.request import Request
from proxy.engine.bodies import truncating, with_output
from proxy.engine.fitting import Fitter
from proxy.engine.learned_routes import CachedRoute, LearnedRoutes, Sent
from proxy.engine.plans import Plan
from proxy.engine.quick_check import MEDIA
from proxy.engine.reading import Located

SHRINK = 0.75
"""Of the view that was refused, what is sent next where the error states nothing to go by."""

STATED = frozenset({"configured", "server", "request"})
"""Sources of a window that a person or the server stated: a table may be wrong about this server."""


class Course:
    """How far the attempts at one request have come.

    ``left`` are the fallbacks that nobody asked yet, ``later`` is what may be made smaller once all of them failed.
    ``unsure`` is a plan and a refusal of it that teaches only once something smaller was answered.
    """

    def __init__(self, plan: Plan) -> None:
        self.sent = 0
        self.overflows = 0
        self.retries = 0
        self.later: tuple[Plan, Overflow] | None = None
        self.unsure: tuple[Plan, Overflow] | None = None
        steps = plan.route.steps if plan.route else ()
        self._first = steps[0] if steps else COMPRESS
        self.left = [step for step in steps if step not in (COMPRESS, plan.report.fallback)]

    def goes_elsewhere_first(self, plan: Plan) -> bool:
        """Whether a fallback is to be asked before *plan* is made smaller."""
        return not plan.report.fallback and self._first != COMPRESS and bool(self.left)


class Recovery:
    """Finds what to send after an overflow. Uses the deterministic stages only: the client is waiting."""

    def __init__(self, fitter: Fitter, lessons: LearnedRoutes) -> None:
        self._fitter = fitter
        self._lessons = lessons

    def concerns(self, overflow: Overflow | None) -> bool:
        """Whether something smaller may be sent for *overflow*; every other error is the client's to see."""
        return overflow is not None and retries_smaller(overflow, self._fitter.lower)

    def window(self, route: Route, known: CachedRoute, request: Request) -> int | None:
        """The window that holds for *request*, in the provider's tokens; ``None`` where nobody knows."""
        window = self._lessons.window(route, known.lesson)
        if request.options.window is not None:
            window = min(window or request.options.window, request.options.window)
        return window

    def source(self, route: Route, known: CachedRoute, window: int | None) -> Source | Literal["request"]:
        """Who says that *window* holds; the request itself where it asked for a smaller one."""
        told = self._lessons.window(route, known.lesson)
        if window != told:
            return "request"
        return route.source if told == route.window else "learned"

    async def prior(self, request: Request, plan: Plan) -> Prior:
        """What is known of *request*, sent as *plan* has it, before a refusal of it is believed."""
        if plan.route is None:
            return Prior(body=plan.body)
        request = await self._fitter.capped(request)
        try:
            located = self._fitter.locate(request)
            counted = None if located.outline.unseen else await self._weight(request, located, plan)
        except InvalidRequest:
            return Prior(body=plan.body)  # what cannot be read may still be relayed, and refused for its length
        known = self._lessons.now(plan.route, request.tenant)
        window = self.window(plan.route, known, request)
        stated = self.source(plan.route, known, window) in STATED
        factor = known.lesson.calibration.factor
        tokens = None if counted is None else int(counted * factor)
        output = located.outline.requested if plan.output is None else plan.output
        return Prior(tokens, output, window, stated, not MEDIA.search(plan.body), plan.body)

    def after_content(self, sent: Sent, overflow: Overflow, usage: Usage) -> Overflow | None:
        """Return *overflow*, which came behind content, if it can be true of what was *sent* and may teach."""
        known = self._lessons.now(sent.route, sent.tenant)
        counted = usage.input_tokens
        if counted is None and sent.counted:
            counted = int(sent.tokens * known.lesson.calibration.factor)
        window = self._lessons.window(sent.route, known.lesson)
        if counted is None and window is not None and not overflow.decisive:
            return None  # it was not even counted, so small was it beside the window
        prior = Prior(counted, sent.output, window, sent.route.source in STATED, sent.plain)
        found = check_claim(overflow, prior)
        return found if found is not None and found.sure else None

    async def learn(self, request: Request, plan: Plan, overflow: Overflow) -> None:
        """Keep what *overflow* teaches, after *plan* of *request* was refused with it."""
        if plan.route is None or overflow.kind == "output_cap":
            return
        located = await self._fitter.located(request)
        if located.outline.stored:
            return
        sent = None if located.outline.unseen else await self._weight(request, located, plan)
        asked = plan.sent.output if plan.sent else reserve(located.outline.requested, plan.route.max_output, 0)
        self._lessons.overflowed(plan.route, request.tenant, overflow, sent, asked)

    async def _weight(self, request: Request, located: Located, plan: Plan) -> int:
        assert plan.route is not None
        return plan.tokens if plan.tokens is not None else await self._fitter.weigh(request, located, plan.route)

    async def smaller(self, request: Request, plan: Plan, overflow: Overflow) -> Plan | None:
        """Something strictly smaller than *plan* of *request*, by what *overflow* states; ``None`` if there is nothing.

        What *overflow* teaches should have been learned before.
        """
        assert plan.route is not None
        route = plan.route
        if overflow.kind == "output_cap":
            return await self._less_output(request, plan, overflow)
        located = await self._fitter.located(request)
        if located.outline.stored:
            return truncating(located, plan) if self._fitter.may_truncate else None
        sent = await self._weight(request, located, plan)
        known = self._lessons.now(route, request.tenant)
        window = self.window(route, known, request)
        if overflow.window is not None:  # a figure too odd to be kept is still what this request was measured by
            window = min(window or overflow.window, overflow.window)
        # When nothing is known but that this was too much, the demand below decides.
        assumed = window or 2 * len(request.body)
        factor = max(known.lesson.calibration.factor, (overflow.prompt or 0) / max(1, sent))
        # What was unknown ahead is known now.
        reason = "" if plan.report.reason == "unknown-window" else plan.report.reason
        source = "learned" if overflow.window is not None and window == overflow.window else None
        report = plan.report.but(reason=reason, source=source or self.source(route, known, window))
        plain = CompactionTarget(replaces=True, lower_output=lowering(overflow, self._fitter.lower))
        less = replace(plain, force=True, limit=int(SHRINK * sent))
        measured = await self._fitter.measure(request, located, route, assumed, factor, report.source, plain)
        for target in (less,) if overflow.kind == "payload" else (plain, less):
            found = await self._fitter.decide(replace(measured, target=target), report)
            if found.error is None and is_smaller(found, plan, sent):
                told = found.report if window else found.report.but(window=None, budget=None)
                told = told.but(conversation=plan.report.conversation or told.conversation)
                return replace(found, report=told)
        return None

    async def _less_output(self, request: Request, plan: Plan, overflow: Overflow) -> Plan | None:
        if overflow.limit is None or (plan.output is not None and plan.output <= overflow.limit):
            return None
        located = await self._fitter.located(replace(request, body=plan.body))
        return with_output(request.api, located, plan, overflow.limit)


def is_smaller(plan: Plan, than: Plan, sent: int) -> bool:
    """Whether *plan* asks for strictly less *than* one that weighed *sent* tokens: fewer of them, or less output."""
    lowered = plan.output is not None and (than.output is None or plan.output < than.output)
    weight = plan.tokens or 0
    return plan.body != than.body and (weight < sent or (weight <= sent and lowered))

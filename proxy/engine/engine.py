"""The only conductor: fit a request, send it, and once the provider still says "too long", something smaller."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from proxy.core.attempts import is_news
from proxy.core.budget.catalogue import Catalogue
from proxy.core.conversation.compaction import OTHER, TRIGGER
from proxy.core.conversation.identity import name_of
from proxy.core.errors import UpstreamTimeout, UpstreamUnreachable
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import SERVED, Report, Usage
from proxy.core.request import Mode, Request
from proxy.engine.bodies import renamed
from proxy.engine.fail_open import FailOpen, Sending
from proxy.engine.fitting import Fitter
from proxy.engine.learned_routes import LearnedRoutes, Sent
from proxy.engine.planning import Planner, as_fallback
from proxy.engine.plans import Plan
from proxy.engine.ports import Clock, Reply, Send
from proxy.engine.reading import Located
from proxy.engine.recovery import Course, Recovery
from proxy.engine.replies import Answer, DrainedReply, LocalReply, OverflowDetector, learn_nothing
from proxy.features.client_compaction.compact_endpoint import ASSUMED_WINDOW, CompactEndpoint, Kind, ends_with_trigger
from proxy.features.client_compaction.summary_answer import SummaryAnswer
from proxy.features.context_management.feature import ContextManagement
from proxy.features.recall.answer import continue_answer
from proxy.features.recall.session import Extend, Recalling, Resent
from proxy.offload import offload
from proxy.tasks import Faults

RETRIES = 2
"""How often an overflow is answered with something smaller; then the provider's first error goes to the client."""

TAIL = 262_144
"""Bytes at a body's end in which the item that asks for a compaction is looked for: tools may follow it."""

UNCOUNTED = frozenset({404, 405, 501})
"""How upstreams that cannot count tokens answer."""

LOSSY = frozenset({"drop", "clip"})
"""Stages that lose what the model is looking at."""

Counting = Literal["auto", "relay", "own"]
"""Who answers ``count_tokens``: the upstream if it can, the upstream, or our own count."""

COUNT_TOKENS = "count_tokens"
"""What a request for a count is reported as."""

SHOWN = 100
"""Models that are shown to people at once."""


class Engine:
    """Fits, sends, recovers, and learns from what comes back."""

    def __init__(
        self,
        catalogue: Catalogue,
        fitter: Fitter,
        mode: Mode,
        lessons: LearnedRoutes,
        clock: Clock,
        classifier: Classifier,
        counting: Mapping[str, Counting] = MappingProxyType({}),
        *,
        compacting: CompactEndpoint,
        managing: ContextManagement,
        own: SummaryAnswer | None = None,
        recalling: Recalling | None = None,
        answered: Callable[[Request, Plan], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._own = own
        self._recalling = recalling
        self._answered_by = answered
        self._managing = managing
        self._compacting = compacting
        self._classifier = classifier
        self._catalogue = catalogue
        self._counting = counting
        self._fitter = fitter
        self._mode = mode
        self._lessons = lessons
        self._clock = clock
        self._recovery = Recovery(fitter, lessons)
        self._looker = OverflowDetector(classifier, self._recovery)
        self.planner = Planner(catalogue, fitter, mode, lessons, self._recovery)
        self._markers = _markers(compacting.markers(), managing.markers(), fitter.markers())
        self._faults = faults or Faults()
        self._fail_open = FailOpen(catalogue, fitter, self._faults)

    def upstream_of(self, model: str) -> str:
        """The name of the upstream that serves *model*. Raises ``NotFound`` where none does."""
        return self._catalogue.resolve(model).upstream

    def windows(self) -> dict[str, list[dict[str, object]]]:
        """What holds for the models that were asked for, and what overflows taught: for people, tokens and seconds."""
        now = self._clock()
        routes = sorted(self._catalogue.known()[-SHOWN:], key=lambda route: route.name)
        return {
            "models": [
                {
                    "upstream": route.upstream,
                    "model": route.model,
                    "context_window": route.window,
                    "max_input_tokens": route.max_input,
                    "max_output_tokens": route.max_output,
                    "source": route.source,
                    "how": route.how,
                    "age_seconds": None if route.at is None else round(max(0.0, now - route.at), 1),
                }
                for route in routes
            ],
            "learned": self.learned()[:SHOWN],
        }

    def learned(self) -> list[dict[str, object]]:
        """The windows that traffic taught and that hold now: for people, tokens and seconds."""
        return self._lessons.learned()

    async def exchange(self, request: Request, send: Send) -> Answer:
        """The answer to *request*: one generation is paid for, more only where the model recalls what left its view.

        Raises ``InvalidRequest`` for a body that cannot be read, and what *send* raises.
        """
        return await self._fail_open.answer(request, send, self._answered)

    async def compact(self, request: Request, send: Send) -> Answer:
        """The answer to a request for a compaction: the upstream's where it has them, else our own.

        Raises as ``exchange`` does.
        """
        return await self._fail_open.answer(request, send, self._compacted)

    async def count(self, request: Request, send: Send) -> Answer:
        """The answer to a request that asks what a conversation weighs: that of the view that would be sent.

        The upstream's where it has one, else our own count. Nothing is recorded. Raises as ``exchange`` does.
        """
        return await self._fail_open.answer(request, send, self._counted, COUNT_TOKENS)

    async def untouched(self, request: Request, send: Send) -> Answer:
        """The upstream's answer to the client's own bytes, after a fault of ours. Raises what *send* raises."""
        return await self._fail_open.untouched(request, send)

    async def _answered(self, request: Request, send: Sending) -> Answer:
        if not self._is_marked(request):
            plan = self.planner.quick_check(request)
            if plan is not None:
                return await self._exchange(request, send, plan)
        request, ours = await self._opened(await self._managed(request))
        if request.api == "responses" and request.body.rfind(TRIGGER.encode(), -TAIL) >= 0:
            located = await self._fitter.located(request)
            if ends_with_trigger(located):
                return await self._compact(request, located, send, "trigger", ours)
        return await self._exchange(request, send)

    async def _compacted(self, request: Request, send: Sending) -> Answer:
        request, ours = await self._opened(request)
        request = replace(request, compacting=request.compacting or OTHER)
        return await self._compact(request, await self._fitter.located(request), send, "endpoint", ours)

    def _is_marked(self, request: Request) -> bool:
        """True if a feature may have something to do in *request*, however small it is."""
        markers = self._markers.get(request.api)
        return markers is not None and markers.search(request.body) is not None

    async def _opened(self, request: Request) -> tuple[Request, tuple[int, ...]]:
        """*request* without compaction items of ours, and the indexes where they stood."""
        size = len(request.body) if request.api == "responses" else 0
        return await offload(size, self._compacting.open_items, request)

    async def _managed(self, request: Request) -> Request:
        """*request* after the context edits it asks of a server that cannot do them.

        A size from which to compact is no window: nothing is refused, dropped or clipped for its sake.
        """
        if not self._managing.concerns(request) or request.options.mode == "off" or self._mode == "off":
            return request
        model = request.model or (await self._fitter.located(request)).outline.model
        served = await self._managing.served(request, self._catalogue.resolve(model))
        if served.options.window != request.options.window:
            plan = await self.planner.planned(served, "any", dry_run=True)
            if plan.error is not None or LOSSY.intersection(plan.report.stages):
                return replace(served, options=request.options)
        return served

    async def _compact(
        self, request: Request, located: Located, send: Sending, kind: Kind, ours: tuple[int, ...]
    ) -> Answer:
        outline = located.outline
        upstream = self.upstream_of(request.model or outline.model)
        serving = self._compacting.serving(upstream)
        relayed = outline.stored or request.options.mode == "off" or self._mode == "off"
        if relayed or serving.asks(kind):
            answer = await self._exchange(request, send)
            reply = answer.reply
            if (
                relayed
                or serving.who == "relay"
                or not (reply is None or self._compacting.is_unable(kind, reply, answer.head))
            ):
                return answer
            send.finish()
        return await self._own_compaction(request, located, kind, ours)

    async def _own_compaction(self, request: Request, located: Located, kind: Kind, ours: tuple[int, ...]) -> Answer:
        started, outline = self._clock(), located.outline
        model = request.model or outline.model
        route = self._catalogue.resolve(model, len(request.body))
        known = await self._lessons.of(route, request.tenant)
        window, factor = self._recovery.window(route, known, request), known.lesson.calibration.factor
        report = Report(request.request_id, request.api, model, route.upstream, outline.stream, "compacted", SERVED)
        wishes = request.options
        report = report.but(window=window, epoch=request.epoch, project=wishes.project, task_size=wishes.task_size)
        measured = await self._fitter.measure(request, located, route, window or ASSUMED_WINDOW, factor, "")
        made = await self._compacting.make(measured, kind, ours)
        body, content = self._compacting.body(made, kind, model, stream=outline.stream)
        report = report.but(
            window=window or ASSUMED_WINDOW,
            client_compaction=measured.client_compaction,
            tokens_before=made.taken,
            overhead_seconds=self._clock() - started,
        )
        session = request.options.conversation or request.session or outline.session
        if session:
            report = report.but(conversation=name_of(request.tenant, session))
        return Answer(report, LocalReply(body, content))

    async def _exchange(self, request: Request, send: Sending, plan: Plan | None = None) -> Answer:
        """The answer to a request that goes on with its conversation, as *plan* has it if it was planned already."""
        started = self._clock()
        if plan is None:
            plan = await self.planner.fit(request)
        if self._own and (served := await self._own.answer(request, plan)):
            report, body, content = served
            return Answer(report.but(overhead_seconds=self._clock() - started), LocalReply(body, content))
        spent = self._clock() - started
        first: Answer | None = None
        course = Course(plan)
        while True:
            report = plan.report.but(retries=course.sent, overflows=course.overflows, overhead_seconds=spent)
            if plan.error is not None or plan.route is None:
                return Answer(report.but(outcome="refused", reason="context_length_exceeded"), error=plan.error)
            reply, head, overflow = await self._send(request, plan, send, course)
            if reply is not None and overflow is None:
                if course.unsure and reply.status == 200 and not plan.report.fallback:
                    refused, claim = course.unsure
                    capped = await self._fitter.capped(refused.request or request)
                    await self._recovery.learn(capped, refused, claim)
                # Beside the answer, not before it: whatever goes wrong there is reported, and costs no request.
                asyncio.get_running_loop().call_soon(self._note, request, plan, reply.status)
                ending = LateOverflowDetector(self._classifier, reply.headers) if reply.status == 200 else None
                late = plan.sent or Sent(plan.route, request.tenant, 0, b"", -1, counted=False)
                learn = self._learner(reply, plan.sent, ending, late)
                answer = Answer(report, reply, head, learn=learn, ending=ending)
                if plan.view is None or not plan.view.edits.addition or self._recalling is None:
                    return answer
                again = partial(self._again, request, send)
                return await continue_answer(self._recalling.turn(request, plan, again), answer, send, self._faults)
            if reply is not None and first is None:
                first = Answer(report, DrainedReply(reply), head)
            assert first is not None
            started = self._clock()
            following = await self._following(request, plan, overflow, course)
            spent += self._clock() - started
            if following is None:
                facts = {"retries": course.sent - 1, "overflows": course.overflows, "overhead_seconds": spent}
                return replace(first, report=first.report.but(outcome="degraded", reason="overflow", **facts))
            plan = following

    def _note(self, request: Request, plan: Plan, status: int) -> None:
        """Note that *plan* was answered with *status*."""
        asked, events, answered = plan.request or request, self._fitter.events, self._answered_by
        self._faults.attempt("after", request.request_id, lambda: events.answered(asked, plan, status), None)
        if answered is not None:
            self._faults.attempt("after", request.request_id, lambda: answered(asked, plan), None)

    async def _again(self, request: Request, send: Sending, plan: Plan, grow: Extend) -> Resent:
        """*plan* sent once more as *grow* has it; after an overflow a smaller one, while that is smaller at all."""
        course = Course(plan)
        course.left = []  # the same model goes on: another one did not begin this answer
        first: Resent | None = None
        sent = await grow(plan)
        while True:
            reply, head, overflow = await self._send(request, sent, send, course)
            if reply is not None and overflow is None:
                return Resent(plan, reply, head, course.sent - 1, course.overflows)
            if reply is not None and first is None:
                first = Resent(plan, DrainedReply(reply), head)
            assert first is not None
            smaller = await self._following(request, sent, overflow, course)
            grown = await grow(smaller) if smaller else None
            if overflow is not None and grown is not None and (grown.tokens or 0) >= (sent.tokens or 0):
                # What is behind the view is as large as before: then the view itself has to be smaller.
                course.retries -= 1
                smaller = await self._smaller(request, plan, overflow, course)
                grown = await grow(smaller) if smaller else None
            if smaller is None or grown is None or (grown.tokens or 0) >= (sent.tokens or 0):
                return replace(first, retries=course.sent - 1, overflows=course.overflows)
            plan, sent = smaller, grown

    def _is_foreign(self, plan: Plan) -> bool:
        """Whether *plan* goes to a fallback's upstream that the caller did not choose, and so has no key for."""
        assert plan.route is not None
        return bool(plan.report.fallback) and plan.route.upstream != self.upstream_of(plan.report.model)

    async def _named(self, plan: Plan, request: Request) -> bytes:
        """The body to send: the plan's, under the name that the upstream has for the model."""
        assert plan.route is not None
        if request.model or plan.route.model == plan.route.asked:
            return plan.body
        named = replace(request, body=plan.body)
        return renamed(named, await self._fitter.located(named), plan.route.model)

    async def _send(
        self, request: Request, plan: Plan, send: Sending, course: Course
    ) -> tuple[Reply | None, bytes, Overflow | None]:
        """The reply to *plan*, the bytes taken from it, and the overflow if it is one.

        No reply where an overflow came before and this one is no news beside it.
        """
        assert plan.route is not None
        fallback, later = bool(plan.report.fallback), course.overflows > 0
        course.sent += 1
        try:
            body = await self._named(plan, plan.request or request)
            foreign = self._is_foreign(plan)
            reply = await send(plan.route.upstream, body, keyless=foreign, model=plan.route.asked)
            head, overflow = await self._looker.look(reply, plan.request or request, plan, send.taken, again=later)
        except (UpstreamUnreachable, UpstreamTimeout):
            send.drop()
            if fallback and later:
                return None, b"", None
            raise
        course.overflows += overflow is not None
        if overflow is not None:
            send.overflowed()
        elif later and not is_news(reply.status, rescue=fallback):
            course.overflows += not fallback
            send.drop()
            return None, b"", None
        return reply, head, overflow

    async def _following(self, request: Request, plan: Plan, overflow: Overflow | None, course: Course) -> Plan | None:
        """What to send after *plan* was refused; ``None`` where nothing is left to try."""
        if request.options.mode != "on" or self._mode != "on":
            return None
        if overflow is not None:
            if overflow.sure and course.unsure is None:
                await self._recovery.learn(await self._fitter.capped(plan.request or request), plan, overflow)
            else:
                course.unsure = (plan, overflow)
            if course.goes_elsewhere_first(plan):
                course.later = (plan, overflow)
            elif smaller := await self._smaller(request, plan, overflow, course):
                return smaller
            elif overflow.kind == "output_cap":
                return None  # another model has another cap, but nobody said that it was the conversation's length
        while course.left and await self.planner.may_leave(request):
            found = await self.planner.by_fallback(request, course.left.pop(0), "any")
            if found.error is None:
                return found
        if course.later is None:
            return None
        later, course.later = course.later, None
        return await self._smaller(request, *later, course)

    async def _smaller(self, request: Request, plan: Plan, overflow: Overflow, course: Course) -> Plan | None:
        if course.retries >= RETRIES:
            return None
        smaller = await self._recovery.smaller(await self._fitter.capped(plan.request or request), plan, overflow)
        if smaller is None:
            return None
        course.retries += 1
        report = as_fallback(smaller.report, plan.report.fallback)
        return replace(smaller.instead_of(plan), request=plan.request, report=report)

    async def _counted(self, request: Request, send: Sending) -> Answer:
        request = await self._managed(request)
        plan = await self.planner.fit(request, dry_run=True)
        assert plan.route is not None
        report = plan.report.but(api=COUNT_TOKENS, event=False)
        body = plan.body if plan.error is None else request.body
        how = self._counting.get(plan.route.upstream, "auto")
        if how != "own":
            named = await self._named(replace(plan, body=body), plan.request or request)
            reply = await send(plan.route.upstream, named, keyless=self._is_foreign(plan), model=plan.route.asked)
            if how == "relay" or reply.status not in UNCOUNTED:
                return Answer(report, reply)
        tokens = report.tokens_after
        if tokens is None or report.bounded or plan.error is not None:
            asked = replace(plan.request or request, body=body)
            counted = await self._fitter.weigh(asked, await self._fitter.located(asked), plan.route)
            factor = self._lessons.now(plan.route, request.tenant).lesson.calibration.factor
            tokens = int(counted * factor)
        send.drop()
        return Answer(report, LocalReply(b'{"input_tokens":%d}' % tokens))

    def _learner(
        self, reply: Reply, sent: Sent | None, ending: LateOverflowDetector | None, late: Sent
    ) -> Callable[[Usage], bool]:
        if reply.status != 200:
            return learn_nothing

        def learn(usage: Usage) -> bool:
            if ending is not None and ending.overflow is not None:
                found = self._recovery.after_content(late, ending.overflow, usage)
                if found is not None:
                    self._lessons.ended(late, found, usage)
                return False
            return (
                sent is not None and usage.input_tokens is not None and self._lessons.answered(sent, usage.input_tokens)
            )

        return learn


def _markers(*features: Mapping[str, tuple[bytes, ...]]) -> dict[str, re.Pattern[bytes]]:
    """For each API, what finds in a body whether one of *features* may have something to do in it."""
    found: dict[str, list[bytes]] = {}
    for feature in features:
        for api, words in feature.items():
            found.setdefault(api, []).extend(words)
    return {api: re.compile(b"|".join(map(re.escape, words))) for api, words in found.items()}

"""The engine: plans a request, sends it, and sends something smaller if the provider still finds it too long.

Two loops do all of that, and everything else uses them: token counts, dry runs, fallbacks, retries, continued answers.

Loop 1, ``_decide``, calls the planner until its decision is final, and sends nothing:

    NeedRecord                    look up the conversation's newest compaction record
    NeedFacts                     read what the calls and results are about
    NeedBlock                     write the texts of a compaction and store its record
    Forward | TooLossy | Reject   final

Loop 2, ``_deliver``, sends until a reply can be passed on:

    Accepted                      deliver it
    Overflow                      learn from it; send a smaller view, or plan for a fallback
    Failed | NotNews              plan for the next model; if none is left, deliver the provider's first refusal

Loop 2 ends because ``Attempts`` allows two smaller views at most and asks each fallback once.
A fault of our own costs compression, never the request (``proxy/engine/fail_open.py``). Work that grows with the body
goes to a thread (``proxy/tasks.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import assert_never

from msgspec import structs

from proxy.core.advice import NEARLY_FULL
from proxy.core.apis import gemini
from proxy.core.attempts import REQUESTED, Attempts, Failed, Fallback, NotNews, Shrink, plans_in_order
from proxy.core.compaction.schedule import MaxLoss
from proxy.core.conversation import ItemText
from proxy.core.decisions import (
    START,
    CountedView,
    FinalDecision,
    Forward,
    LookedUp,
    MeasuredRequest,
    NeedBlock,
    NeedFacts,
    NeedRecord,
    Policy,
    Progress,
    Reject,
    TooLossy,
    UncountedView,
    View,
)
from proxy.core.errors import UllageError
from proxy.core.models import Catalogue
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.planner import as_observed, decide
from proxy.core.report import Report, Usage
from proxy.core.request import Mode, Request
from proxy.engine.body_edits import rerouted
from proxy.engine.fail_open import COUNT_TOKENS, FailOpen
from proxy.engine.features import Continued, Extend, Features
from proxy.engine.learned_routes import LearnedRoutes, SentPrompt, sent_prompt
from proxy.engine.measuring import Measurer, with_calls_read
from proxy.engine.ports import Answer, Clock, Outcome, Refusal, learn_nothing
from proxy.engine.quick_check import QuickCheck
from proxy.engine.records import CompactionRecords
from proxy.engine.retries import Retries
from proxy.engine.run import GIVE_UP, GiveUp, Run, never_too_lossy, report_of
from proxy.engine.token_counts import CountTokens
from proxy.engine.upstream_calls import Accepted, UpstreamCalls
from proxy.tasks import Faults, offload


class Engine:
    """Answers requests. One instance serves all requests of a process at once; it keeps no state of any of them."""

    def __init__(
        self,
        catalogue: Catalogue,
        quick_check: QuickCheck,
        measurer: Measurer,
        records: CompactionRecords,
        learned: LearnedRoutes,
        calls: UpstreamCalls,
        retries: Retries,
        classifier: Classifier,
        features: Features,
        counts: CountTokens,
        policy: Policy,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self.measurer = measurer
        self._catalogue = catalogue
        self._quick_check = quick_check
        self._records = records
        self.learned = learned
        self._calls = calls
        self._retries = retries
        self._classifier = classifier
        self._features = features
        self._counts = counts
        self._policy = policy
        self._clock = clock
        self._faults = faults
        self._fail_open = FailOpen(catalogue, measurer, calls, faults)

    async def exchange(self, request: Request) -> Outcome:
        """Answer *request* with one generation, or with more if the model calls a tool that Ullage answers.

        Raises ``InvalidRequest`` for a body that cannot be read, and what the upstream raises.
        """
        run = Run(request, self._clock)
        try:
            # ``find`` for each marker takes a tenth of the time of one pattern that matches them all (6 ms per MB).
            markers = self._features.markers.get(request.api, ())
            if request.purpose == "answer" and not any(request.body.find(marker) >= 0 for marker in markers):
                return await self.proceed(run, request)
            return await self._with_features(run)
        except (UllageError, asyncio.CancelledError):
            run.drop()  # no answer takes the reply over, so nothing else would close its connection
            raise
        except Exception as fault:  # noqa: BLE001 - fail open: a fault of ours costs compression, never the request
            self._faults.report("request", request.request_id, fault)
            return await self._fail_open.pass_through(run)

    async def pass_through(self, request: Request) -> Outcome:
        """Send the client's own bytes, after a fault of ours. Raises what the upstream raises."""
        return await self._fail_open.pass_through(Run(request, self._clock))

    async def _with_features(self, run: Run) -> Outcome:
        """Answer a request that may concern a feature, or that asks for a token count."""
        request, engine = run.request, BoundEngine(self, run)
        for feature in self._features.concerned(request):
            request = await feature.prepare(request, engine)
            if request.purpose != "count" and (outcome := await feature.answer(request, engine)):
                return outcome
        if request.purpose == "count":
            return await self._count_tokens(run, request)
        return await self.proceed(run, request)

    async def _count_tokens(self, run: Run, request: Request) -> Outcome:
        """Answer with the number of tokens in the view that would be sent."""
        decision = await self.first_plan(request, dry_run=True)
        run.pause_planning()
        report = run.report(decision.view, self._policy).with_(api=COUNT_TOKENS, event=False)
        return await self._counts.answer(run, decision, report)

    async def proceed(self, run: Run, request: Request) -> Outcome:
        """Plan *request*, send it, and return the answer or the refusal. Raises ``StoredHistoryTooLong``."""
        decision = await self.first_plan(request)
        run.pause_planning()
        view = decision.view
        is_stored = isinstance(view, CountedView) and view.measured.parsed.envelope.stored
        if is_stored:
            decision = await self._retries.continued(decision)
        for feature in self._features.answering_planned:
            if isinstance(decision, Forward) and isinstance(view, CountedView):
                answer = await feature.answer_planned(request, view, run.report(view, self._policy))
                if answer is not None:
                    return answer
        delivery = await self._deliver(run, decision)
        if isinstance(delivery, Accepted):
            if is_stored:
                await self._retries.note_continued(delivery.view, delivery.head)
            return await self._answer_of(run, delivery)
        return self._refusal_of(run, delivery)

    # Loop 1: plan, and send nothing.

    async def first_plan(
        self, request: Request, *, dry_run: bool = False, count_always: bool = False
    ) -> Forward | Reject:
        """Plan for the requested model, then for its fallbacks, until a view loses no more than it may.

        If none does, the requested model's view may lose anything. *count_always* measures the request even if its
        bytes show that it fits; *dry_run* stores nothing. Raises as ``plan`` does.
        """
        max_loss: MaxLoss | None = "any" if dry_run else None
        measured: MeasuredRequest | UncountedView | None = None
        if not count_always:
            measured = await self._quick_check.view(request)
        if measured is None:
            measured = await self.measurer.measure(request, max_loss, dry_run=dry_run)
        if isinstance(measured, UncountedView):
            return Forward(measured)
        first = await self._plan_measured(measured)
        if isinstance(first, Forward):
            return first
        steps = measured.known.route.steps if await self._allows_fallback(request) else ()
        for model, step_max_loss in plans_in_order(steps):
            decision = await self._plan_for(request, model, step_max_loss, dry_run=dry_run)
            if isinstance(decision, Forward):
                return decision
        # Only a view that is too lossy is planned again: a refusal stays one, whatever may be lost.
        if isinstance(first, Reject):
            return first
        return never_too_lossy(await self.plan(request, "any"))

    async def plan(self, request: Request, max_loss: MaxLoss, *, dry_run: bool = False) -> FinalDecision:
        """Plan *request* for the model it names, without sending it. Raises ``InvalidRequest`` and ``NotFound``."""
        view = await self._quick_check.view(request)
        return await self._plan_measured(view or await self.measurer.measure(request, max_loss, dry_run=dry_run))

    async def preview(self, bound: BoundEngine, request: Request) -> tuple[Forward | Reject, Report]:
        """Plan *request* as it would be sent, whatever its view loses, and send nothing.

        Features note the view as one that was answered, since its compaction is stored, too.
        """
        for feature in self._features.concerned(request):
            request = await feature.prepare(request, bound)
        decision = never_too_lossy(await self._plan_measured(await self.measurer.measure(request, "any")))
        report = self.report(decision)
        if isinstance(decision, Forward) and isinstance(decision.view, CountedView):
            asyncio.get_running_loop().call_soon(self._after_answer, decision.view, report, 200)
        return decision, report

    async def _plan_measured(self, measured: MeasuredRequest | UncountedView) -> FinalDecision:
        if isinstance(measured, UncountedView):
            return Forward(measured)
        decision = await self._decide(measured)
        if self.measurer.mode_of(measured.request) == "observe":
            return as_observed(decision)
        return decision

    async def _decide(self, measured: MeasuredRequest) -> FinalDecision:
        """Ask the planner until its decision is final; look up or write what it lacks."""
        progress: Progress = START
        texts: dict[int, ItemText] = {}
        while True:
            # The size decides whether ``decide`` runs on a thread: without facts it reads numbers only.
            size = measured.light_size
            if measured.has_facts:
                size = measured.size
            if isinstance(progress, LookedUp) and (record := progress.record) is not None:
                # The planner counts the record's own texts unless this process has counted them before.
                size += len(record.block) + sum(map(len, record.edits.values()))
            decision = await offload(size, decide, measured, self._policy, progress)
            match decision:
                case NeedRecord():
                    progress = await self._records.look_up(measured)
                case NeedFacts():
                    measured = await offload(measured.size, measured.with_facts, texts)
                case NeedBlock():
                    progress = await self._records.write(measured, decision, texts)
                case Forward() | TooLossy() | Reject():
                    if self._policy.reads_calls:
                        return await with_calls_read(decision)
                    return decision
                case other:
                    assert_never(other)

    async def _plan_for(
        self, request: Request, model: str, max_loss: MaxLoss, *, dry_run: bool = False
    ) -> FinalDecision:
        """Plan *request* for the fallback called *model*, or for the requested model (``REQUESTED``)."""
        if model != REQUESTED:
            request = await self._for_fallback(request, model)
        return await self.plan(request, max_loss, dry_run=dry_run)

    async def _allows_fallback(self, request: Request) -> bool:
        """True if another model can answer: the path fixes no model, and no server stores the history."""
        if request.path_model and request.api != gemini.API:
            return False
        return not (await self.measurer.located(request)).envelope.stored

    async def _for_fallback(self, request: Request, model: str) -> Request:
        """Return *request* in a form that the fallback called *model* can read."""
        located = await self.measurer.located(request)
        requested_model = request.path_model or located.envelope.model
        same_upstream = self._catalogue.resolve(model).upstream == self._catalogue.resolve(requested_model).upstream
        body = await offload(len(request.body), rerouted, request, located, model)
        origin, path_model = None, ""
        if same_upstream:  # the caller's credentials go to no upstream that the caller did not choose
            origin = request.origin
        if request.path_model:
            path_model = model
        return structs.replace(
            request,
            body=body,
            origin=origin,
            requested_model=requested_model,
            fallback_model=model,
            path_model=path_model,
        )

    # Loop 2: send until a reply can be passed on.

    async def _deliver(
        self, run: Run, decision: Forward | Reject | GiveUp, extend: Extend | None = None
    ) -> Accepted | Reject | GiveUp:
        """Send until a reply can be passed on; *extend* appends to each view what continues an answer.

        Return the decision to send nothing more, if no reply can be.
        """
        refused_tokens: int | None = None
        while isinstance(decision, Forward):
            view = appended = decision.view
            if extend is not None and isinstance(view, CountedView):
                appended = await extend(view, refused_tokens)
            received = await self._calls.send(run, appended)
            if isinstance(received, Accepted):
                return structs.replace(received, view=view)
            if isinstance(received, Overflow):
                refused_tokens = appended.tokens
            decision = await self._after_refusal(run, appended, received)
        return decision

    async def _after_refusal(self, run: Run, view: View, refusal: Overflow | Failed | NotNews) -> Forward | GiveUp:
        """Decide what to send after *view* was refused."""
        # In the modes observe and off the client gets each refusal as it came.
        if self.measurer.mode_of(run.request) != "on":
            return GIVE_UP
        run.resume_planning()
        attempts = run.attempts = run.attempts or Attempts(view.known.route.steps, view)
        if isinstance(refusal, Overflow):
            await self._retries.learn_if_sure(run, view, refusal)
        decision: Forward | GiveUp = GIVE_UP
        for move in attempts.after(view, refusal):
            match move:
                case Shrink():
                    decision = await self._smaller(attempts, move)
                case Fallback():
                    decision = await self._by_fallback(run.request, move.model)
                case other:
                    assert_never(other)
            if isinstance(decision, Forward):
                break
        run.pause_planning()
        return decision

    async def _smaller(self, attempts: Attempts, move: Shrink) -> Forward | GiveUp:
        """Return a strictly smaller view for the same model, if there is one."""
        view = await self._retries.smaller(move.view, move.overflow, self._decide)
        if view is None:
            return GIVE_UP
        attempts.shrinks_left -= 1
        return Forward(view)

    async def _by_fallback(self, request: Request, model: str) -> Forward | GiveUp:
        """Return a view for the fallback called *model*, if it can have one."""
        if not await self._allows_fallback(request):
            return GIVE_UP
        decision = await self._plan_for(request, model, "any")
        if isinstance(decision, Forward):
            return decision
        return GIVE_UP

    async def _answer_of(self, run: Run, delivery: Accepted) -> Answer:
        """Return the answer with its report, and schedule the notes that features take of it."""
        view, reply = delivery.view, delivery.reply
        if run.unsure is not None and reply.status == 200 and not view.request.fallback_model:
            await self._retries.learn(*run.unsure)
        if isinstance(view, CountedView) and view.measured.has_facts:  # its report looks at every item's calls
            report = await offload(view.measured.light_size, run.report, view, self._policy)
        else:
            report = run.report(view, self._policy)
        for feature in self._features.amending:
            report = feature.amend(report, view)
        if self._records.counts_answers or isinstance(view, CountedView):
            # Not at once: the first bytes of the answer are written to the client before.
            asyncio.get_running_loop().call_soon(self._after_answer, view, report, reply.status)
        ending: LateOverflowDetector | None = None
        learn: Callable[[Usage], bool] = learn_nothing
        if reply.status == 200:
            ending = LateOverflowDetector(self._classifier, reply.header("content-encoding"))
            learn = self._learner(view, ending, report.conversation)
        answer = Answer(report, reply, delivery.head, learn, ending, delivery.hides_usage)
        if isinstance(view, CountedView) and (view.edits.addition or view.request.server_tools):
            return await self._continued(run, view, answer)
        return answer

    async def _continued(self, run: Run, view: CountedView, answer: Answer) -> Answer:
        """Return *answer* as features continue it: they answer the model's calls of Ullage's own tools."""
        for feature in self._features.continuing:
            answer = await feature.continue_answer(answer, view, BoundEngine(self, run))
        return answer

    def _refusal_of(self, run: Run, decision: Reject | GiveUp) -> Outcome:
        """Return our own refusal, or the provider's first one. Raises the error of a provider that gave no answer."""
        if isinstance(decision, Reject):
            report = self.report(decision, run)
            for feature in self._features.refusing:
                asyncio.get_running_loop().call_soon(feature.refused, decision.view, report)
            return Refusal(report, decision.error)
        first = run.stated_refusal()
        report = run.report(first.view, self._policy)
        if first.is_overflow:
            report = report.with_(outcome="degraded", reason="overflow")
        return Answer(report, first.reply, first.head)

    def report(self, decision: Forward | Reject, run: Run | None = None) -> Report:
        """Return the report of *decision*, which was not sent; *run* is None if it was planned only."""
        if run is None:
            report = report_of(decision.view, self._policy)
        else:
            report = run.report(decision.view, self._policy)
        if isinstance(decision, Reject):
            return report.with_(outcome="refused", reason="context_length_exceeded")
        return report

    def _after_answer(self, view: View, report: Report, status: int) -> None:
        """Let summaries and features note, behind the answer, that *view* was answered with *status*."""
        attempt, name = self._faults.attempt, view.request.request_id
        if self._records.counts_answers:
            attempt("after", name, partial(self._records.answered, view, status), None)
        if not isinstance(view, CountedView) or view.layout is None or report.client_compaction:
            return
        boundary: int | None = None
        if view.edits.record is not None:
            boundary = view.edits.record.compaction.boundary
        is_nearly_full = (report.pressure or 0.0) > NEARLY_FULL
        key = (view.known.route.name, view.measured.root_hash, (is_nearly_full, boundary))
        # Features note a compaction, a conversation that became nearly full, or one not noted for ``NOTE_SECONDS``.
        if report.event or key not in self._features.noted:
            self._features.noted[key] = True
            for feature in self._features.noting:
                attempt("after", name, partial(feature.answered, view, report, status), None)

    def _learner(self, view: View, ending: LateOverflowDetector | None, conversation: str) -> Callable[[Usage], bool]:
        """Return a callback for the usage of the answer to *view*; it keeps neither view nor body in memory."""
        learned, retries, sent = self.learned, self._retries, sent_prompt(view)
        late = sent or SentPrompt(view.known.route, view.request.tenant, 0, b"", -1, is_counted=False)
        counting, tenant = self._features.counting, view.request.tenant

        def learn(usage: Usage) -> bool:
            for feature in counting:
                feature.used(tenant, conversation, usage)
            if ending is not None and ending.overflow is not None:
                overflow = retries.after_content(late, ending.overflow, usage)
                if overflow is not None:
                    learned.learn_late_overflow(late, overflow, usage)
                return False
            if sent is None or usage.input_tokens is None:
                return False
            return learned.learn_usage(sent, usage.input_tokens)

        return learn

    async def resend(self, run: Run, view: CountedView, extend: Extend) -> Continued:
        """Send *view* with what *extend* appends, for the next generation of an answer by the same model.

        After an overflow a smaller view is sent; if none is left the reply is the provider's first refusal.
        """
        run.begin_generation()
        # No fallbacks: another model would answer with its own words what this one began.
        run.attempts = Attempts((), view)
        delivery = await self._deliver(run, Forward(view), extend)
        retries = max(0, run.sent - 1)
        if not isinstance(delivery, Accepted):
            first = run.stated_refusal()
            return Continued(view, first.reply, first.head, retries, run.overflows)
        if isinstance(delivery.view, CountedView):
            view = delivery.view
        return Continued(view, delivery.reply, delivery.head, retries, run.overflows)


class BoundEngine:
    """The engine as a feature sees it: for one request under way. See ``Planning``."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine = engine
        self.run = run

    async def plan(self, request: Request, max_loss: MaxLoss, *, dry_run: bool = False) -> FinalDecision:
        """Plan *request* without sending it. Raises ``InvalidRequest``."""
        return await self._engine.plan(request, max_loss, dry_run=dry_run)

    async def preview(self, request: Request) -> tuple[Forward | Reject, Report]:
        """Plan *request* as it would be sent, whatever its view loses, and send nothing. Raises ``InvalidRequest``."""
        return await self._engine.preview(self, request)

    async def measure(self, request: Request, assumed_window: int) -> MeasuredRequest:
        """Measure *request*, against *assumed_window* if its model's is unknown. Raises ``InvalidRequest``."""
        return await self._engine.measurer.measure_anyway(request, assumed_window)

    async def proceed(self, request: Request) -> Outcome:
        """Plan and send *request*. Raises what the upstream raises."""
        return await self._engine.proceed(self.run, request)

    async def resend(self, view: CountedView, extend: Extend) -> Continued:
        """Send *view* with what *extend* appends, for the next generation of the answer."""
        return await self._engine.resend(self.run, view, extend)

    def mode_of(self, request: Request) -> Mode:
        """Return the mode that holds for *request*."""
        return self._engine.measurer.mode_of(request)

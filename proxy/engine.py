"""The only conductor: fit a request, send it, and once the provider still says "too long", something smaller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from proxy.answering import Answering
from proxy.compacting import ASSUMED, Compacting, Kind, ends_with_trigger
from proxy.core.budget.catalogue import COMPRESS, Catalogue, Route
from proxy.core.budget.figures import input_room, reserve
from proxy.core.compression.schedule import Demand
from proxy.core.conversation.compaction import OTHER, TRIGGER
from proxy.core.conversation.identity import name_of
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.policy import Extent, first_extent, is_news
from proxy.core.overflow.stream import Ending, Opening
from proxy.core.report import SERVED, Report, Usage
from proxy.fitting import Fitter, Plan
from proxy.heads import MEDIA, bound, read_head
from proxy.lessons import Lessons, Sent
from proxy.managing import Managing
from proxy.ports import Clock, Mode, Reply, Request, Send
from proxy.reading import Located
from proxy.recovery import Course, Recovery

RETRIES = 2
"""How often an overflow is answered with something smaller; then the provider's first error goes to the client."""

HOLD_SECONDS = 5.0
"""How long the head of a stream is held after its first byte while it is unclear whether it is an overflow."""

TAIL = 262_144
"""Bytes at a body's end in which the item that asks for a compaction is looked for: tools may follow it."""

UNCOUNTED = frozenset({404, 405, 501})
"""How upstreams that cannot count tokens answer."""

LOSSY = frozenset({"drop", "clip"})
"""Stages that lose what the model is looking at."""

Counting = Literal["auto", "relay", "own"]
"""Who answers ``count_tokens``: the upstream if it can, the upstream, or our own count."""

ERROR_BYTES = 1_048_576
"""An error answer larger than this is passed on without being looked at."""

MOST_BYTES_A_TOKEN = 12
"""Of a request's JSON there is hardly ever more to a token, whitespace and escapes included: English has 4 to 5."""
OBSERVED = "\0observed"
"""Added to a conversation's label where it is only observed; no header can carry it."""

SHOWN = 100
"""Models that are shown to people at once."""


def _learn_nothing(usage: Usage) -> bool:
    del usage
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to the client: the upstream's ``reply`` (``head`` first: bytes already taken from it), or ``error``.

    ``learn`` takes the usage of an answer that came to its end, and says whether it shows that the provider silently
    cut the prompt instead of refusing it.
    """

    report: Report
    reply: Reply | None = None
    head: bytes = b""
    error: UllageError | None = None
    learn: Callable[[Usage], bool] = _learn_nothing
    ending: Ending | None = None


class Told:
    """What is left of a reply whose body was read to its end: its head, to be given back verbatim."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._reply.status

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The end-to-end headers as they came."""
        return self._reply.headers

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return self._reply.header(name)

    async def next_chunk(self) -> bytes:
        """Nothing: the body was taken."""
        return b""

    def close(self) -> None:
        """Nothing is under way any more."""


class Written:
    """An answer of our own, with status 200."""

    status = 200
    headers: Sequence[tuple[str, str]]

    def __init__(self, body: bytes, kind: str = "application/json") -> None:
        self._body = body
        self.headers = (("content-type", kind), ("content-length", str(len(body))))

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return dict(self.headers).get(name.lower(), "")

    async def next_chunk(self) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Nothing is under way."""


class Engine:
    """Fits, sends, recovers, and learns from what comes back."""

    def __init__(
        self,
        catalogue: Catalogue,
        fitter: Fitter,
        mode: Mode,
        lessons: Lessons,
        clock: Clock,
        classifier: Classifier,
        counting: Mapping[str, Counting] = MappingProxyType({}),
        *,
        compacting: Compacting,
        managing: Managing,
        answering: Answering | None = None,
    ) -> None:
        self._answering = answering
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
        """The answer to *request*: at most one generation is ever paid for.

        Raises ``InvalidRequest`` for a body that cannot be read, and what *send* raises.
        """
        request, ours = self._compacting.opened(await self._managed(request))
        if request.api == "responses" and request.body.rfind(TRIGGER.encode(), -TAIL) >= 0:
            located = self._fitter.locate(request)
            if ends_with_trigger(located):
                return await self._compact(request, located, send, "trigger", ours)
        return await self._exchange(request, send)

    async def compact(self, request: Request, send: Send) -> Answer:
        """The answer to a request for a compaction: the upstream's where it has them, else our own.

        Raises as ``exchange`` does.
        """
        request, ours = self._compacting.opened(request)
        request = replace(request, compacting=request.compacting or OTHER)
        return await self._compact(request, self._fitter.locate(request), send, "endpoint", ours)

    async def _managed(self, request: Request) -> Request:
        """*request* after the context edits it asks of a server that cannot do them.

        A size from which to compact is no window: nothing is refused, dropped or clipped for its sake.
        """
        if not self._managing.concerns(request) or request.options.mode == "off" or self._mode == "off":
            return request
        model = request.model or self._fitter.locate(request).outline.model
        served = await self._managing.served(request, self._catalogue.resolve(model))
        if served.options.window != request.options.window:
            plan = await self._fit(served, "any", peek=True)
            if plan.error is not None or LOSSY.intersection(plan.report.stages):
                return replace(served, options=request.options)
        return served

    async def _compact(
        self, request: Request, located: Located, send: Send, kind: Kind, ours: tuple[int, ...]
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
            if reply is not None:
                reply.close()
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
        subject = await self._fitter.measure(request, located, route, report, window or ASSUMED, factor)
        made = await self._compacting.make(subject, kind, ours)
        body, content = self._compacting.body(made, kind, model, stream=outline.stream)
        report = subject.report.but(tokens_before=made.taken, overhead_seconds=self._clock() - started)
        session = request.options.conversation or request.session or outline.session
        if session:
            report = report.but(conversation=name_of(request.tenant, session))
        return Answer(report, Written(body, content))

    async def _exchange(self, request: Request, send: Send) -> Answer:
        """The answer to a request that goes on with its conversation."""
        started = self._clock()
        plan = await self.fit(request)
        if self._answering and (served := await self._answering.answer(request, plan)):
            report, body, content = served
            return Answer(report.but(overhead_seconds=self._clock() - started), Written(body, content))
        spent = self._clock() - started
        first: Answer | None = None
        course = Course(plan)
        while True:
            report = plan.report.but(retries=course.sent, overflows=course.overflows, overhead_seconds=spent)
            if plan.error is not None or plan.route is None:
                return Answer(report.but(outcome="refused", reason="context_length_exceeded"), error=plan.error)
            reply, head, overflow = await self._send(request, plan, send, course)
            if reply is not None and overflow is None:
                # Beside the answer, not before it: whatever goes wrong there is reported, and costs no request.
                asyncio.get_running_loop().call_soon(self._fitter.answered, plan.request or request, plan, reply.status)
                ending = Ending(self._classifier, reply.headers) if reply.status == 200 else None
                late = plan.sent or Sent(plan.route, request.tenant, 0, b"", -1, counted=False)
                learn = self._learner(reply, plan.sent, ending, late)
                return Answer(report, reply, head, learn=learn, ending=ending)
            if reply is not None and first is None:
                first = Answer(report, Told(reply), head)
            assert first is not None
            started = self._clock()
            following = await self._following(request, plan, overflow, course)
            spent += self._clock() - started
            if following is None:
                facts = {"retries": course.sent - 1, "overflows": course.overflows, "overhead_seconds": spent}
                return replace(first, report=first.report.but(outcome="degraded", reason="overflow", **facts))
            plan = following

    def _is_foreign(self, plan: Plan) -> bool:
        """Whether *plan* goes to a fallback's upstream that the caller did not choose, and so has no key for."""
        assert plan.route is not None
        return bool(plan.report.fallback) and plan.route.upstream != self.upstream_of(plan.report.model)

    def _named(self, plan: Plan, request: Request) -> bytes:
        """The body to send: the plan's, under the name that the upstream has for the model."""
        assert plan.route is not None
        if request.model or plan.route.model == plan.route.asked:
            return plan.body
        return self._fitter.renamed(replace(request, body=plan.body), plan.route.model)

    async def _send(
        self, request: Request, plan: Plan, send: Send, course: Course
    ) -> tuple[Reply | None, bytes, Overflow | None]:
        """The reply to *plan*, the bytes taken from it, and the overflow if it is one.

        No reply where an overflow came before and this one is no news beside it.
        """
        assert plan.route is not None
        fallback, later = bool(plan.report.fallback), course.overflows > 0
        course.sent += 1
        try:
            body = self._named(plan, plan.request or request)
            foreign = self._is_foreign(plan)
            reply = await send(plan.route.upstream, body, keyless=foreign, model=plan.route.asked)
            head, overflow = await self._look(reply, plan, again=later)
        except (UpstreamUnreachable, UpstreamTimeout):
            if fallback and later:
                return None, b"", None
            raise
        course.overflows += overflow is not None
        if overflow is not None:
            reply.close()
        elif later and not is_news(reply.status, rescue=fallback):
            course.overflows += not fallback
            reply.close()
            return None, b"", None
        return reply, head, overflow

    async def _following(self, request: Request, plan: Plan, overflow: Overflow | None, course: Course) -> Plan | None:
        """What to send after *plan* was refused; ``None`` where nothing is left to try."""
        if request.options.mode != "on" or self._mode != "on":
            return None
        if overflow is not None:
            await self._recovery.learn(self._fitter.capped(plan.request or request), plan, overflow)
            if course.goes_elsewhere_first(plan):
                course.later = (plan, overflow)
            elif smaller := await self._smaller(request, plan, overflow, course):
                return smaller
            elif overflow.kind == "output_cap":
                return None  # another model has another cap, but nobody said that it was the conversation's length
        while course.left and self._may_leave(request):
            found = await self._by_fallback(request, course.left.pop(0), "any")
            if found.error is None:
                return found
        if course.later is None:
            return None
        later, course.later = course.later, None
        return await self._smaller(request, *later, course)

    async def _smaller(self, request: Request, plan: Plan, overflow: Overflow, course: Course) -> Plan | None:
        if course.retries >= RETRIES:
            return None
        smaller = await self._recovery.smaller(self._fitter.capped(plan.request or request), plan, overflow)
        if smaller is None:
            return None
        course.retries += 1
        return replace(smaller, request=plan.request, report=_as_fallback(smaller.report, plan.report.fallback))

    async def count(self, request: Request, send: Send) -> Answer:
        """The answer to a request that asks what a conversation weighs: that of the view that would be sent.

        The upstream's where it has one, else our own count. Nothing is recorded. Raises as ``exchange`` does.
        """
        request = await self._managed(request)
        plan = await self.fit(request, peek=True)
        assert plan.route is not None
        report = plan.report.but(api="count_tokens", event=False)
        body = plan.body if plan.error is None else request.body
        how = self._counting.get(plan.route.upstream, "auto")
        if how != "own":
            named = self._named(replace(plan, body=body), plan.request or request)
            reply = await send(plan.route.upstream, named, keyless=self._is_foreign(plan), model=plan.route.asked)
            if how == "relay" or reply.status not in UNCOUNTED:
                return Answer(report, reply)
            reply.close()
        tokens = report.tokens_after
        if tokens is None or report.bounded or plan.error is not None:
            asked = replace(plan.request or request, body=body)
            counted = await self._fitter.weigh(asked, self._fitter.locate(asked), plan.route)
            factor = self._lessons.now(plan.route, request.tenant).lesson.calibration.factor
            tokens = int(counted * factor)
        return Answer(report, Written(b'{"input_tokens":%d}' % tokens))

    async def fit(self, request: Request, *, counted: bool = False, peek: bool = False) -> Plan:
        """What to send for *request*: the client's own bytes, the smaller view of its conversation, or a fallback's.

        *counted* counts it even where its bytes show that it fits; *peek* only asks, and makes nothing a fact.

        The steps of the model's policy are tried in order; those that would have to drop or clip only if all would.
        """
        plan = await self._fit(request, "any" if peek else None, counted=counted, peek=peek)
        if plan.route is None or plan.route.steps == (COMPRESS,) or not (plan.withheld or plan.error):
            return plan
        steps = plan.route.steps if self._may_leave(request) else ()
        for extent in ("gentle", "any"):
            for at, step in enumerate(steps):
                if step != COMPRESS:
                    found = await self._by_fallback(request, step, extent, peek=peek)
                elif extent == "gentle" and at == 0:
                    continue  # that far it was tried
                else:
                    found = await self._fit(request, extent, peek=peek)
                if found.error is None and not found.withheld:
                    return found
        return plan if plan.error else await self._fit(request, "any")

    def _may_leave(self, request: Request) -> bool:
        """Whether another model can answer: not where the path names this one, or its server has the history."""
        return not request.model and not self._fitter.locate(request).outline.stored

    async def _by_fallback(self, request: Request, model: str, extent: Extent, *, peek: bool = False) -> Plan:
        """What to send when *model* is asked in place of the one that was."""
        asked = self._fitter.locate(request).outline.model
        # The caller's key goes with no errand of ours to an upstream that the caller did not choose.
        origin = request.origin if self.upstream_of(model) == self.upstream_of(asked) else None
        other = replace(request, body=self._fitter.rerouted(request, model), origin=origin)
        plan = await self._fit(other, extent, peek=peek)
        return replace(plan, request=other, report=_as_fallback(plan.report.but(model=asked), model))

    def _learner(self, reply: Reply, sent: Sent | None, ending: Ending | None, late: Sent) -> Callable[[Usage], bool]:
        if reply.status != 200:
            return _learn_nothing

        def learn(usage: Usage) -> bool:
            if ending is not None and ending.overflow is not None:
                self._lessons.ended(late, ending.overflow, usage)
                return False
            return (
                sent is not None and usage.input_tokens is not None and self._lessons.answered(sent, usage.input_tokens)
            )

        return learn

    async def _fit(
        self, request: Request, extent: Extent | None = None, *, counted: bool = False, peek: bool = False
    ) -> Plan:
        """The plan for *request* and the model it names, as far as *extent* (its policy's, if none) allows."""
        plan, session = await self._plan(request, extent, counted, peek)
        session = request.options.conversation or request.session or session
        report = plan.report.but(epoch=request.epoch)
        if session:
            report = report.but(conversation=name_of(request.tenant, session))
        return replace(plan, report=report)

    async def _plan(self, request: Request, extent: Extent | None, counted: bool, peek: bool) -> tuple[Plan, str]:
        """The plan, and what the body calls the conversation."""
        head = read_head(request.api, request.body)
        located = None if head else self._fitter.locate(request)
        about = located.outline if located else head
        model, stream = (about.model, about.stream is True) if about else ("", False)
        model, session = request.model or model, about.session if about else ""
        route = self._catalogue.resolve(model, len(request.body))
        if request.variant:
            route = replace(route, variant=request.variant)
        mode = self._mode if request.options.mode == "on" else request.options.mode
        known = await self._lessons.of(route, request.tenant)
        window = self._recovery.window(route, known, request)
        if mode == "on" and (smaller := self._fitter.capped(request)) is not request:
            plan, session = await self._plan(smaller, extent, counted, peek)
            outcome = "compacted" if plan.report.outcome == "verbatim" else plan.report.outcome
            stages = ("truncate", *(stage for stage in plan.report.stages if stage != "truncate"))
            return replace(plan, report=plan.report.but(outcome=outcome, stages=stages)), session
        report = Report(
            request.request_id,
            request.api,
            model,
            route.upstream,
            stream,
            source=self._recovery.source(route, known, window),
            project=request.options.project,
            task_size=request.options.task_size,
            client_compaction=request.compacting,
        )
        if mode == "off" or window is None:
            sent = _uncounted(request, route) if mode != "off" else None
            reason = "off" if mode == "off" else "unknown-window"
            return Plan(request.body, report.but(reason=reason), route, sent=sent), session
        if head is not None and not request.options.compact_now and not counted:
            held = reserve(head.requested, route.max_output, window)
            budget = input_room(window, held, route.max_input)
            if tokens := bound(request.body, head, self._fitter.low(route, window, budget)):
                bounds = {"tokens_before": tokens, "tokens_after": tokens, "bounded": True}
                return Plan(request.body, report.but(window=window, budget=budget, **bounds), route), session
        if mode == "observe":
            # What was only considered must never be taken for what was sent: it is recorded under a name of its own.
            own = replace(request.options, conversation=request.options.conversation + OBSERVED)
            request = replace(request, options=own)
        located = located or self._fitter.locate(request)
        factor = known.lesson.calibration.factor
        subject = await self._fitter.measure(request, located, route, report, window, factor)
        if extent is None:
            extent = "any" if mode == "observe" or request.options.compact_now else first_extent(route.steps)
        plan = await self._fitter.decide(subject, Demand(force=request.options.compact_now, peek=peek), extent=extent)
        return (_observed(request, plan, route) if mode == "observe" else plan), session

    async def _look(self, reply: Reply, plan: Plan, *, again: bool) -> tuple[bytes, Overflow | None]:
        """The bytes taken from *reply* to find out, and the overflow if it is one: then they are all there is.

        A claim is held against our own count, but a provider that was believed once is believed *again*.
        """
        try:
            return await self._judge(reply, plan, again)
        except BaseException:
            reply.close()  # whoever waited is gone or the connection broke: nobody else would end the call
            raise

    async def _judge(self, reply: Reply, plan: Plan, again: bool) -> tuple[bytes, Overflow | None]:
        counted = None if again else plan.tokens
        if reply.status >= 400:
            body, complete = await _read(reply, ERROR_BYTES)
            found = self._classifier.answer(reply.status, reply.headers, body, counted) if complete else None
            return body, found if self._recovery.concerns(found) else None
        if reply.status != 200 or not (again or _may_overflow(plan)):
            return b"", None
        return await _watch(reply, Opening(self._classifier, reply.headers, counted))


def _uncounted(request: Request, route: Route) -> Sent:
    """What an answer can teach of a view that nobody counted, since no window is known to hold it against."""
    plain = not MEDIA.search(request.body)
    return Sent(route, request.tenant, len(request.body) // MOST_BYTES_A_TOKEN, b"", -1, plain, counted=False)


def _observed(request: Request, plan: Plan, route: Route) -> Plan:
    """The client's own bytes, with the report of what *plan* would have done."""
    reason = "would_refuse" if plan.error else "would_compact" if plan.body != request.body else ""
    return Plan(request.body, plan.report.but(observed=True, outcome="verbatim", reason=reason), route)


def _as_fallback(report: Report, model: str) -> Report:
    """*report* of a plan for the fallback *model*, which says so; as it is where there is none."""
    if not model:
        return report
    outcome = "degraded" if report.outcome == "verbatim" else report.outcome
    return report.but(fallback=model, reason="fallback", outcome=outcome)


async def _watch(reply: Reply, opening: Opening) -> tuple[bytes, Overflow | None]:
    """Hold the opening of an answer until it is clear what it is; all of it, if it is an overflow."""
    taken = [await reply.next_chunk()]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HOLD_SECONDS
    while taken[-1] and opening.feed(taken[-1]) == "undecided":
        chunk = await _before(deadline, reply.next_chunk())
        if chunk is None:
            return b"".join(taken), None
        taken.append(chunk)
    if opening.finish() != "overflow":
        return b"".join(taken), None
    rest, complete = await _read(reply, ERROR_BYTES, deadline)
    return b"".join(taken) + rest, opening.overflow if complete else None


async def _read(reply: Reply, limit: int, deadline: float | None = None) -> tuple[bytes, bool]:
    """The rest of a reply up to *limit* bytes, and whether that was all of it."""
    taken: list[bytes] = []
    size = 0
    while size <= limit:
        chunk = await (reply.next_chunk() if deadline is None else _before(deadline, reply.next_chunk()))
        if not chunk:
            return b"".join(taken), chunk is not None
        taken.append(chunk)
        size += len(chunk)
    return b"".join(taken), False


async def _before(deadline: float, chunk: Awaitable[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout_at(deadline):
            return await chunk
    except TimeoutError:
        return None


def _may_overflow(plan: Plan) -> bool:
    budget, after = plan.report.budget, plan.report.tokens_after
    return budget is None or after is None or after * 2 >= budget

"""The only conductor: fit a request, send it, and once the provider still says "too long", something smaller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from proxy.core.budget.catalogue import Catalogue, Route
from proxy.core.budget.figures import Marks, input_room, reserve
from proxy.core.budget.windows import Source
from proxy.core.compression.schedule import Demand
from proxy.core.conversation.identity import name_of
from proxy.core.errors import UllageError
from proxy.core.overflow.classify import STATUSES, Overflow, classify
from proxy.core.overflow.stream import Opening
from proxy.core.report import Report, Usage
from proxy.fitting import Fitter, Plan
from proxy.heads import bound, read_head
from proxy.lessons import Held, Lessons, Sent
from proxy.ports import Clock, Mode, Reply, Request, Send

RETRIES = 2
"""How often an overflow is answered with something smaller; then the provider's first error goes to the client."""

HOLD_SECONDS = 5.0
"""How long the head of a stream is held after its first byte while it is unclear whether it is an overflow."""

UNCOUNTED = frozenset({404, 405, 501})
"""How upstreams that cannot count tokens answer."""

Counting = Literal["auto", "relay", "own"]
"""Who answers ``count_tokens``: the upstream if it can, the upstream, or our own count."""

ERROR_BYTES = 1_048_576
"""An error answer larger than this is passed on without being looked at."""

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
    """An answer of our own: JSON with status 200."""

    status = 200
    headers: Sequence[tuple[str, str]]

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.headers = (("content-type", "application/json"), ("content-length", str(len(body))))

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
        marks: Marks,
        mode: Mode,
        lessons: Lessons,
        clock: Clock,
        counting: Mapping[str, Counting] = MappingProxyType({}),
    ) -> None:
        self._catalogue = catalogue
        self._counting = counting
        self._fitter = fitter
        self._marks = marks
        self._mode = mode
        self._lessons = lessons
        self._clock = clock

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
            "learned": [
                {"route": name, "context_window": tokens, "age_seconds": age}
                for name, tokens, age in self._lessons.stated()[:SHOWN]
            ],
        }

    async def exchange(self, request: Request, send: Send) -> Answer:
        """The answer to *request*: at most one generation is ever paid for.

        Raises ``InvalidRequest`` for a body that cannot be read, and what *send* raises.
        """
        started = self._clock()
        plan = await self.fit(request)
        spent = self._clock() - started
        first: Answer | None = None
        for attempt in range(RETRIES + 1):
            report = plan.report.but(retries=attempt, overflows=attempt, overhead_seconds=spent)
            if plan.error is not None or plan.route is None:
                return Answer(report.but(outcome="refused", reason="context_length_exceeded"), error=plan.error)
            reply = await send(plan.route.upstream, plan.body)
            head, overflow = await self._look(reply, plan)
            if overflow is None:
                return Answer(report, reply, head, learn=self._learner(reply, plan.sent))
            first = first or Answer(report, Told(reply), head)
            reply.close()
            started = self._clock()
            smaller = await self.recover(request, plan, overflow) if attempt < RETRIES else None
            spent += self._clock() - started
            if smaller is None:
                report = report.but(
                    overflows=attempt + 1, outcome="degraded", reason="overflow", overhead_seconds=spent
                )
                return replace(first, report=report)
            plan = smaller
        raise AssertionError("the last attempt always returns")

    async def count(self, request: Request, send: Send) -> Answer:
        """The answer to a request that asks what a conversation weighs: that of the view that would be sent.

        The upstream's where it has one, else our own count. Nothing is recorded. Raises as ``exchange`` does.
        """
        plan = await self.fit(request, peek=True)
        assert plan.route is not None
        report = plan.report.but(api="count_tokens", event=False)
        body = plan.body if plan.error is None else request.body
        how = self._counting.get(plan.route.upstream, "auto")
        if how != "own":
            reply = await send(plan.route.upstream, body)
            if how == "relay" or reply.status not in UNCOUNTED:
                return Answer(report, reply)
            reply.close()
        tokens = report.tokens_after
        if tokens is None or report.bounded or plan.error is not None:
            counted = await self._fitter.weigh(request, self._fitter.locate(request), plan.route)
            factor = self._lessons.now(plan.route, request.tenant).lesson.calibration.factor
            tokens = int(counted * factor)
        return Answer(report, Written(b'{"input_tokens":%d}' % tokens))

    def _learner(self, reply: Reply, sent: Sent | None) -> Callable[[Usage], bool]:
        if sent is None or reply.status != 200:
            return _learn_nothing
        return lambda usage: usage.input_tokens is not None and self._lessons.answered(sent, usage.input_tokens)

    async def fit(self, request: Request, *, counted: bool = False, peek: bool = False) -> Plan:
        """What to send for *request*: the client's own bytes, or the smaller view of its conversation.

        *counted* counts it even where its bytes show that it fits; *peek* only asks, and makes nothing a fact.
        """
        plan, session = await self._fit(request, counted, peek)
        session = request.options.conversation or request.session or session
        report = plan.report.but(epoch=request.epoch)
        if session:
            report = report.but(conversation=name_of(request.tenant, session))
        return replace(plan, report=report)

    async def _fit(self, request: Request, counted: bool, peek: bool) -> tuple[Plan, str]:
        """The plan, and what the body calls the conversation."""
        head = read_head(request.api, request.body)
        located = None if head else self._fitter.locate(request)
        about = located.outline if located else head
        model, stream = (about.model, about.stream is True) if about else ("", False)
        model, session = request.model or model, about.session if about else ""
        route = self._catalogue.resolve(model, len(request.body))
        mode = self._mode if request.options.mode == "on" else request.options.mode
        known = await self._lessons.of(route, request.tenant)
        window = _window(route, known, request)
        if mode == "on" and (smaller := self._fitter.capped(request)) is not request:
            plan, session = await self._fit(smaller, counted, peek)
            outcome = "compacted" if plan.report.outcome == "verbatim" else plan.report.outcome
            stages = ("truncate", *(stage for stage in plan.report.stages if stage != "truncate"))
            return replace(plan, report=plan.report.but(outcome=outcome, stages=stages)), session
        report = Report(
            request.request_id,
            request.api,
            model,
            route.upstream,
            stream,
            source=_source(route, known, window),
            project=request.options.project,
            task_size=request.options.task_size,
        )
        if mode == "off" or window is None:
            reason = "off" if mode == "off" else "unknown-window"
            return Plan(request.body, report.but(reason=reason), route), session
        if head is not None and not request.options.compact_now and not counted:
            held = reserve(head.requested, route.max_output, window)
            budget = input_room(window, held, route.max_input)
            if tokens := bound(request.body, head, int(self._marks.low * budget)):
                bounds = {"tokens_before": tokens, "tokens_after": tokens, "bounded": True}
                return Plan(request.body, report.but(window=window, budget=budget, **bounds), route), session
        located = located or self._fitter.locate(request)
        factor = known.lesson.calibration.factor
        subject = await self._fitter.measure(request, located, route, report, window, factor)
        plan = await self._fitter.decide(subject, Demand(force=request.options.compact_now, peek=peek))
        if mode == "observe":
            return Plan(request.body, plan.report.but(observed=True, outcome="verbatim"), route), session
        return plan, session

    async def recover(self, request: Request, plan: Plan, overflow: Overflow) -> Plan | None:
        """Something strictly smaller than *plan*, by what *overflow* states; ``None`` where there is nothing."""
        assert plan.route is not None
        if request.options.mode != "on" or self._mode != "on":
            return None
        route, tenant, request = plan.route, request.tenant, self._fitter.capped(request)
        located = self._fitter.locate(request)
        sent = plan.tokens
        if sent is None:
            sent = await self._fitter.weigh(request, located, route)
        if located.outline.stored:
            return self._fitter.truncating(located, plan)
        known = self._lessons.overflowed(route, tenant, overflow, None if located.outline.unseen else sent)
        window = _window(route, known, request)
        # When nothing is known but that this was too much, the demand below decides.
        assumed = window or 2 * len(request.body)
        factor = max(known.lesson.calibration.factor, (overflow.prompt or 0) / max(1, sent))
        # What was unknown ahead is known now.
        report = plan.report.but(reason="", source=_source(route, known, window))
        subject = await self._fitter.measure(request, located, route, report, assumed, factor)
        for demand in (Demand(), Demand(force=True, limit=int(0.75 * sent))):
            smaller = await self._fitter.decide(subject, demand, supersede=True)
            if smaller.error is None and _is_smaller(smaller, plan, sent):
                told = smaller.report if window else smaller.report.but(window=None, budget=None)
                told = told.but(conversation=plan.report.conversation or told.conversation)
                return replace(smaller, report=told)
        return None

    async def _look(self, reply: Reply, plan: Plan) -> tuple[bytes, Overflow | None]:
        """The bytes taken from *reply* to find out, and the overflow if it is one: then they are all there is."""
        try:
            return await self._judge(reply, plan)
        except BaseException:
            reply.close()  # whoever waited is gone or the connection broke: nobody else would end the call
            raise

    async def _judge(self, reply: Reply, plan: Plan) -> tuple[bytes, Overflow | None]:
        if reply.status in STATUSES:
            body, complete = await _read(reply, ERROR_BYTES)
            counted = plan.tokens if plan.tokens is not None else None
            encoding = reply.header("content-encoding")
            return body, classify(reply.status, body, counted, encoding) if complete else None
        if reply.status != 200 or not plan.report.stream or not _may_overflow(plan):
            return b"", None
        if not reply.header("content-type").startswith("text/event-stream") or reply.header("content-encoding"):
            return b"", None
        return await _watch(reply)


def _window(route: Route, known: Held, request: Request) -> int | None:
    """The window that holds for this request, in the provider's tokens; ``None`` where nobody knows."""
    window = route.after(known.lesson.window, known.lesson.beside)
    if request.options.window is not None:
        window = min(window or request.options.window, request.options.window)
    return window


def _source(route: Route, known: Held, window: int | None) -> Source | Literal["request"]:
    """Who says that *window* holds; the request itself where it asked for a smaller one."""
    told = route.after(known.lesson.window, known.lesson.beside)
    if window != told:
        return "request"
    return route.source if told == route.window else "learned"


async def _watch(reply: Reply) -> tuple[bytes, Overflow | None]:
    """Hold the opening of a stream until it is clear what it is; all of it, if it is an overflow."""
    opening, taken = Opening(), [await reply.next_chunk()]
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


def _is_smaller(plan: Plan, than: Plan, sent: int) -> bool:
    lowered = plan.output is not None and (than.output is None or plan.output < than.output)
    return plan.body != than.body and ((plan.tokens or 0) < sent or ((plan.tokens or 0) <= sent and lowered))

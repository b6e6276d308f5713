"""``ullage replay``: plans the requests of past conversations without an upstream, and computes their prices."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from proxy import settings as configuration
from proxy.cli.findings import NO_FINDINGS, Findings, FreshResult, find_paragraphs, find_results, find_skills, largest
from proxy.cli.session_files import Message, Session, SessionFile, read_file, utf8_of
from proxy.core.advice import NEARLY_FULL, Advice, advise
from proxy.core.decisions import CountedView, Forward, MeasuredRequest, Reject, View
from proxy.core.errors import UllageError
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.core.tool_table import ToolMap
from proxy.engine.engine import Engine
from proxy.offline import offline_engine
from proxy.settings import Prices, Settings
from proxy.upstream_wiring import open_catalogue

SUFFIXES: Final = (".jsonl", ".json", ".md")
"""Suffixes of the files that are read in a folder."""

TENANT: Final = hashlib.sha256(b"replay").digest()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a conversation, in tokens: ``before`` as the client sent it, ``after`` as it goes upstream.

    ``repeated`` are those tokens of ``after`` that the previous request began with too: the provider may have them
    cached. ``repeated_before`` is the same of the client's own requests. ``after`` is None if the request was refused.
    """

    before: int
    after: int | None
    budget: int | None
    repeated: int
    repeated_before: int
    compacted: bool
    stages: tuple[str, ...]

    @property
    def pressure_before(self) -> float | None:
        """The client's tokens as a share of the budget; None without a budget."""
        if not self.budget:
            return None
        return self.before / self.budget

    @property
    def pressure(self) -> float | None:
        """Share of the budget that is used upstream; None if the request was refused or has no budget."""
        if self.after is None or not self.budget:
            return None
        return self.after / self.budget


@dataclass(frozen=True, slots=True)
class NearlyFull:
    """The fullest view of a conversation, that of its ``request``-th request, and the advice on it."""

    request: int
    pressure: float
    advice: Advice


@dataclass(frozen=True, slots=True)
class Replay:
    """One conversation, replayed. ``problem`` says why the last ``skipped`` of its requests were not planned.

    ``window`` is in tokens, None if it is not known. ``findings`` are what fills the window without need;
    ``nearly_full`` is the advice that the log and the page give, None if no view takes more than 80 % of its budget.
    """

    name: str
    model: str
    window: int | None
    requests: tuple[PlannedRequest, ...]
    prices: Prices | None = None
    problem: str = ""
    findings: Findings = NO_FINDINGS
    skipped: int = 0
    nearly_full: NearlyFull | None = None

    @property
    def cost(self) -> float | None:
        """US dollars of the input sent, the repeated part at the price of cached tokens; None without prices."""
        if self.prices is None:
            return None
        return sum(
            self.prices.cost(request.after, request.repeated) for request in self.requests if request.after is not None
        )

    @property
    def cost_before(self) -> float | None:
        """US dollars of the client's own requests, as if all had been accepted; None without prices."""
        if self.prices is None:
            return None
        return sum(self.prices.cost(request.before, request.repeated_before) for request in self.requests)


class Totals(NamedTuple):
    """The figures of some conversations together; costs are in US dollars, None if no price is known.

    ``requests`` were planned, ``skipped`` ones could not be. ``fitted_before`` are those that fitted as the client sent
    them, ``repeated`` is the share of the tokens sent that the previous request began with too.
    """

    conversations: int
    requests: int
    skipped: int
    answered: int
    fitted_before: int
    compactions: int
    tokens_before: int
    tokens_after: int
    repeated: float
    cost_before: float | None
    cost: float | None


def totals(replays: Sequence[Replay]) -> Totals:
    """Return the figures of *replays* together."""
    requests = [request for replay in replays for request in replay.requests]
    tokens_after = sum(request.after or 0 for request in requests)
    return Totals(
        conversations=len(replays),
        requests=len(requests),
        skipped=sum(replay.skipped for replay in replays),
        answered=sum(request.after is not None for request in requests),
        fitted_before=sum(request.budget is None or request.before <= request.budget for request in requests),
        compactions=sum(request.compacted for request in requests),
        tokens_before=sum(request.before for request in requests),
        tokens_after=tokens_after,
        repeated=sum(request.repeated for request in requests) / max(1, tokens_after),
        cost_before=_sum_known(replay.cost_before for replay in replays),
        cost=_sum_known(replay.cost for replay in replays),
    )


def _sum_known(amounts: Iterable[float | None]) -> float | None:
    """Return the sum of the amounts that are known; None if none is."""
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return None
    return sum(known)


def find_files(path: Path) -> Iterator[SessionFile]:
    """Yield the conversations of a file, or of all files below a folder, in the order of their paths.

    Raises ``OSError`` if a file cannot be read.
    """
    if not path.is_dir():
        yield _read(path, path.name)
        return
    for file in sorted(entry for entry in path.rglob("*") if entry.suffix in SUFFIXES and entry.is_file()):
        yield _read(file, str(file.relative_to(path)))


def _read(file: Path, name: str) -> SessionFile:
    return read_file(name, utf8_of(file.read_bytes()).decode("utf-8", "replace"))


async def replay_sessions(
    settings: Settings, sessions: Sequence[Session], model: str, advance: Callable[[int], None]
) -> list[Replay]:
    """Plan every request of *sessions*. *advance* is called with the number of requests that were planned or skipped.

    *model* is the model of sessions that name none. Needs no server and stores nothing.
    """
    catalogue = await asyncio.to_thread(open_catalogue, settings)
    prices = await asyncio.to_thread(configuration.prices, {session.model or model for session in sessions})
    tools = configuration.tool_map(settings.tools)
    replays = []
    async with offline_engine(settings, catalogue) as engine:
        for session in sessions:
            name = session.model or model
            replays.append(await _replay(engine, session, name, prices.get(name), advance, FindingsCollector(tools)))
    return replays


async def _replay(
    engine: Engine,
    session: Session,
    model: str,
    prices: Prices | None,
    advance: Callable[[int], None],
    collector: FindingsCollector,
) -> Replay:
    """Plan the requests of *session*, up to the first one that cannot be planned."""
    requests: list[PlannedRequest] = []
    window, problem, previous = None, "", _Sent()
    # The engine has a store in memory, so that a compaction of one request holds for the next, as in a running proxy.
    for body in request_bodies(session, model):
        try:
            decision, report = await _planned(engine, Request("chat", body, TENANT, session.name))
        except _CannotPlan as reason:
            problem = str(reason)
            break
        window = report.window
        collector.add(decision.view, report)
        sent = _sent(decision, report)
        requests.append(_beside(previous, sent, report))
        previous = sent
        advance(1)
    skipped = len(request_lengths(session.messages)) - len(requests)
    advance(skipped)
    return Replay(
        session.name,
        model,
        window,
        tuple(requests),
        prices,
        problem,
        collector.findings(),
        skipped,
        collector.nearly_full,
    )


class _CannotPlan(Exception):
    """A request cannot be planned; the text says why."""


async def _planned(engine: Engine, request: Request) -> tuple[Forward | Reject, Report]:
    """Return the decision on *request*, and its report. Raises ``_CannotPlan``."""
    try:
        decision = await engine.first_plan(request, count_always=True)
    except UllageError as error:
        raise _CannotPlan(error.message) from error
    report = engine.report(decision)
    if report.window is None:
        raise _CannotPlan("its window is not known: give --window")
    return decision, report


@dataclass(frozen=True, slots=True)
class _Sent:
    """The body that goes upstream for a request, empty if it was refused; its tokens, and those of the client's."""

    body: bytes = b""
    tokens: int | None = 0
    client_tokens: int = 0


def _sent(decision: Forward | Reject, report: Report) -> _Sent:
    client_tokens = report.tokens_before or 0
    if isinstance(decision, Reject):
        return _Sent(b"", None, client_tokens)
    return _Sent(decision.view.body, report.tokens_after or 0, client_tokens)


def _beside(previous: _Sent, sent: _Sent, report: Report) -> PlannedRequest:
    """Return the figures of a request, which the *previous* one came before."""
    return PlannedRequest(
        before=sent.client_tokens,
        after=sent.tokens,
        budget=report.budget,
        repeated=_repeated_tokens(previous, sent),
        repeated_before=previous.client_tokens,
        compacted=report.event,
        stages=report.stages,
    )


class FindingsCollector:
    """Collects what fills the window of a conversation without need, request by request."""

    def __init__(self, tools: ToolMap) -> None:
        self.nearly_full: NearlyFull | None = None
        self._tools = tools
        self._count = 0
        self._first: Report | None = None
        self._last: MeasuredRequest | None = None
        self._results: tuple[FreshResult, ...] = ()

    def add(self, view: View, report: Report) -> None:
        """Add the findings of the next request, if it was counted."""
        self._count += 1
        if not isinstance(view, CountedView):
            return
        self._first = self._first or report
        self._last = view.measured
        self._results = largest([*self._results, *find_results(view.measured, self._tools, self._count)])
        self._advise(view, report)

    def _advise(self, view: CountedView, report: Report) -> None:
        """Replace the advice by that on *view* if no earlier view was fuller."""
        pressure = report.pressure or 0.0
        fullest = NEARLY_FULL
        if self.nearly_full is not None:
            fullest = self.nearly_full.pressure
        if pressure <= fullest:
            return
        advice = advise(view, report, self._tools)
        if advice is not None:
            self.nearly_full = NearlyFull(self._count, round(pressure, 3), advice)

    def findings(self) -> Findings:
        """Return the findings of all requests so far."""
        if self._last is None or self._first is None:
            return NO_FINDINGS
        first = self._first
        tokens = {region: count for region, count in first.regions.items() if region != "reserve"}
        fill = (first.tokens_before or 0) / (first.window or 1)
        return Findings(find_paragraphs(self._last), self._results, tokens, round(fill, 3), find_skills(self._last))


def request_bodies(session: Session, model: str) -> Iterator[bytes]:
    """Yield every request of *session*, as a client would have sent it."""
    members: dict[str, object] = {"model": model}
    if session.tools:
        members["tools"] = session.tools
    head = _json(members).removesuffix(b"}") + b',"messages":['
    messages = [_json(message) for message in session.messages]
    for length in request_lengths(session.messages):
        yield head + b",".join(messages[:length]) + b"]}"


def request_lengths(messages: Sequence[Message]) -> list[int]:
    """Return the lengths at which *messages* were a request: before each turn of the model, and at the end."""
    roles = [str(message.get("role")) for message in messages]
    lengths = []
    for length, (role, following) in enumerate(zip(roles, [*roles[1:], "assistant"], strict=True), 1):
        if role not in ("assistant", "system", "developer") and following == "assistant":
            lengths.append(length)
    return lengths


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _repeated_tokens(previous: _Sent, sent: _Sent) -> int:
    """Return the tokens at the beginning of the body *sent* that the *previous* body began with too.

    They are estimated by the share of bytes. A body that only continues the previous one repeats all of its tokens.
    """
    tokens, common = sent.tokens or 0, _common_prefix(previous.body, sent.body)
    if common >= len(previous.body) - len(b"]}") > 0:
        return min(previous.tokens or 0, tokens)
    return int(tokens * common / max(1, len(sent.body)))


def _common_prefix(first: bytes, second: bytes) -> int:
    """Return the length of the longest common prefix, by bisection."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

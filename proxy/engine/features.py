"""The hooks of optional features. The engine calls those that a feature overrides, and knows no feature by name.

A request that does not concern a feature runs no code of it: ``prepare`` and ``answer`` are called only for bodies that
hold one of its markers, or for requests of its purposes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import msgspec
from cachebox import TTLCache

from proxy.core.apis.envelope import Envelope
from proxy.core.compaction.schedule import MaxLoss
from proxy.core.decisions import (
    NO_ADDITION,
    Addition,
    CountedView,
    FinalDecision,
    Forward,
    MeasuredRequest,
    Reject,
    View,
)
from proxy.core.models import Route
from proxy.core.report import Report, Usage
from proxy.core.request import Mode, Purpose, Request
from proxy.engine.ports import Answer, Outcome, Reply
from proxy.engine.run import Run

NOTE_SECONDS: Final = 60.0
"""Seconds between two calls of ``answered`` for one conversation, unless it was compacted or became nearly full."""

MOST_NOTED: Final = 10_000
"""Conversations remembered for ``NOTE_SECONDS``, so that features do not store something for every answer."""

NO_MARKERS: Final[Mapping[str, tuple[bytes, ...]]] = MappingProxyType({})


class Continued(msgspec.Struct, frozen=True):
    """One more generation of an answer: the view that was sent, without what was appended, and its reply.

    ``head`` are the bytes already read from the reply; ``retries`` and ``overflows`` are those of this generation.
    """

    view: CountedView
    reply: Reply
    head: bytes
    retries: int
    overflows: int


Extend = Callable[[CountedView, int | None], Awaitable[CountedView]]
"""Appends elements to a view; with them it has to have fewer tokens than the second argument, if that is not None."""


class Planning(Protocol):
    """The engine as a feature sees it while one request is under way."""

    @property
    def run(self) -> Run:
        """The state of the client's request: what has been sent and received for it."""

    async def plan(self, request: Request, max_loss: MaxLoss, *, dry_run: bool = False) -> FinalDecision:
        """Plan *request* without sending it. Raises ``InvalidRequest``."""

    async def preview(self, request: Request) -> tuple[Forward | Reject, Report]:
        """Plan *request* as it would be sent, whatever its view loses, and send nothing. Raises ``InvalidRequest``."""

    async def measure(self, request: Request, assumed_window: int) -> MeasuredRequest:
        """Measure *request*, against *assumed_window* if its model's is unknown. Raises ``InvalidRequest``."""

    async def proceed(self, request: Request) -> Outcome:
        """Plan and send *request*. Raises what the upstream raises."""

    async def resend(self, view: CountedView, extend: Extend) -> Continued:
        """Send *view* with what *extend* appends, for the next generation; after an overflow a smaller one.

        The caller adds every byte that it reads from ``run.reply`` to ``run.chunks``, so that a fault loses none.
        """

    def mode_of(self, request: Request) -> Mode:
        """Return the mode that holds for *request*."""


class Feature:
    """An optional behaviour. Every method does nothing unless overridden; the engine calls only overridden ones.

    ``markers`` are, by API, byte strings of which one is in every body that concerns the feature. ``purposes`` are the
    purposes of requests that concern it whatever their body holds.
    """

    markers: Mapping[str, tuple[bytes, ...]] = NO_MARKERS
    purposes: frozenset[Purpose] = frozenset()

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with another body or a smaller window, or as it is. Raises ``InvalidRequest``."""
        del engine
        return request

    async def answer(self, request: Request, engine: Planning) -> Outcome | None:
        """Answer *request* instead of the model; None to go on."""
        del request, engine
        return None

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """Return what to add to compacted views of *request*, in a *window* of so many tokens."""
        del request, envelope, route, window
        return NO_ADDITION

    async def answer_planned(self, request: Request, view: CountedView, report: Report) -> Answer | None:
        """Answer *request*, which was planned as *view* and not sent yet; None to send it."""
        del request, view, report
        return None

    async def continue_answer(self, answer: Answer, view: CountedView, engine: Planning) -> Answer:
        """Return *answer*, of any status, continued by further generations if its model calls this feature's tools.

        *view* has this feature's addition. The client sees one answer.
        """
        del view, engine
        return answer

    def amend(self, report: Report, view: View) -> Report:
        """Return *report*, on the answer to *view*, with this feature's own figures."""
        del view
        return report

    def used(self, tenant: bytes, conversation: str, usage: Usage) -> None:
        """Note the *usage* of an answer that came to its end. Must not wait."""
        del tenant, conversation, usage

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Note that *view* was answered with *status*. Called after the answer has begun; must not wait.

        Called for each conversation with a layout that is no client's own compaction: at every compaction, when it
        becomes nearly full, and once in ``NOTE_SECONDS``.
        """
        del view, report, status

    def refused(self, view: View, report: Report) -> None:
        """Note that *view*, the smallest there is, was refused and not sent. Must not wait."""
        del view, report


class Features:
    """The features in use, by the methods that they override: no other method is ever called.

    ``markers`` are, by API, those of all features that prepare or answer requests. ``noted`` has the conversations for
    which ``answered`` was called lately, by route, root hash and state: nearly full or not, since which compaction.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self.preparing = _overriding(features, "prepare")
        self.answering = _overriding(features, "answer")
        self.answering_planned = _overriding(features, "answer_planned")
        self.continuing = _overriding(features, "continue_answer")
        self.noting = _overriding(features, "answered")
        self.refusing = _overriding(features, "refused")
        self.amending = _overriding(features, "amend")
        self.counting = _overriding(features, "used")
        self.noted: TTLCache[tuple[str, bytes, object], bool] = TTLCache(MOST_NOTED, NOTE_SECONDS)
        self.adding = next(iter(_overriding(features, "addition")), None)
        self._concerned = [feature for feature in features if feature in (*self.preparing, *self.answering)]
        apis = {api for feature in self._concerned for api in feature.markers}
        self.markers = {api: _markers(self._concerned, api) for api in apis}

    def concerned(self, request: Request) -> list[Feature]:
        """Return the features that *request* concerns, in their order."""
        return [feature for feature in self._concerned if _concerns(feature, request)]


def _overriding(features: Sequence[Feature], method: str) -> list[Feature]:
    return [feature for feature in features if getattr(type(feature), method) is not getattr(Feature, method)]


def _markers(features: Sequence[Feature], api: str) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(marker for feature in features for marker in feature.markers.get(api, ())))


def _concerns(feature: Feature, request: Request) -> bool:
    if request.purpose in feature.purposes:
        return True
    return any(marker in request.body for marker in feature.markers.get(request.api, ()))

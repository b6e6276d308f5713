"""What answers teach about a route: how its count relates to ours, which window it states, what a view really weighed.

One lesson for each route and tenant, in memory and shared through the store; anchors for single conversations.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from proxy.core.budget.calibration import Calibration, is_credible, is_truncated, learn, prior
from proxy.core.budget.catalogue import Route
from proxy.core.overflow.classify import Overflow
from proxy.ports import Clock, Recorder

FRESH_SECONDS = 60.0
"""How long a lesson holds before the store is asked for a newer one of another replica."""

ANCHOR_REACH = 64
"""Items back from the end that are looked at for an anchor: a turn of many parallel results ends one request."""


class Lesson(msgspec.Struct, frozen=True):
    """What is known of a route for one tenant: a window it stated (tokens of its own), and its calibration.

    ``beside`` is what the server told of its window when an overflow stated that one, at the Unix time ``stated``.
    """

    window: int | None
    calibration: Calibration
    beside: int | None = None
    stated: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """A lesson as this process holds it: when the store was last asked (monotonic)."""

    lesson: Lesson
    asked: float = 0.0


@dataclass(frozen=True, slots=True)
class Anchor:
    """A view that was answered: its weight by our count and the provider's, and the event it is of (-1: none)."""

    counted: int
    reported: int
    event: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A counted view that went out: its weight by our count, the conversation's link there, and the event it is of.

    ``plain``: it holds text only. Providers price media each in their own way, which says nothing of a vocabulary.
    """

    route: Route
    tenant: bytes
    tokens: int
    link: bytes
    event: int
    plain: bool = True


class Lessons:
    """Learns and tells. ``known`` and ``anchors`` are bounded mappings."""

    def __init__(
        self,
        recorder: Recorder,
        known: MutableMapping[tuple[str, bytes], Held],
        anchors: MutableMapping[tuple[str, bytes], Anchor],
        clock: Clock,
        wall: Clock = time.time,
    ) -> None:
        self._recorder = recorder
        self._known = known
        self._anchors = anchors
        self._clock = clock
        self._wall = wall

    def now(self, route: Route, tenant: bytes) -> Held:
        """What this process knows of *route*; the family's prior where it knows nothing."""
        return self._known.get((route.name, tenant)) or Held(Lesson(None, prior(route.model, exact=route.exact)))

    def stated(self) -> list[tuple[str, int, float]]:
        """The windows that overflows stated, as (route, tokens, age in seconds); whose they were is not told."""
        now = self._wall()
        found = {
            (name, held.lesson.window, round(max(0.0, now - held.lesson.stated), 1))
            for (name, _), held in self._known.items()
            if held.lesson.window is not None
        }
        return sorted(found)

    async def of(self, route: Route, tenant: bytes) -> Held:
        """What is known of *route*, by other replicas too; asks the store at most once in a while."""
        held, now = self._known.get((route.name, tenant)), self._clock()
        if held is not None and now - held.asked < FRESH_SECONDS:
            return held
        shared = _load(await self._recorder.recall(tenant, route.name))
        held = self._known[route.name, tenant] = Held(shared or self.now(route, tenant).lesson, now)
        return held

    def overflowed(self, route: Route, tenant: bytes, overflow: Overflow, counted: int | None) -> Held:
        """What is known after *route* refused a view of *counted* tokens of ours with what *overflow* states."""
        lesson = self.now(route, tenant).lesson
        window, beside, stated = lesson.window, lesson.beside, lesson.stated
        if overflow.limit and overflow.kind != "payload_too_large":
            still = window if beside == route.told else None
            window, beside, stated = min(overflow.limit, still or overflow.limit), route.told, self._wall()
        calibration = lesson.calibration
        if overflow.prompt and counted:
            calibration = learn(calibration, counted, overflow.prompt)
        return self._keep(route, tenant, Lesson(window, calibration, beside, stated))

    def answered(self, sent: Sent, reported: int) -> bool:
        """Learn from the prompt tokens *reported* for a view; whether they show that the provider cut it silently."""
        route, tenant, counted = sent.route, sent.tenant, sent.tokens
        held = self.now(route, tenant)
        lesson = held.lesson
        if sent.plain and is_truncated(lesson.calibration, counted, reported):
            return True
        if not is_credible(counted, reported, plain=sent.plain):
            return False
        self._anchors[route.name, sent.link] = Anchor(counted, reported, sent.event)
        calibration = learn(lesson.calibration, counted, reported) if sent.plain else lesson.calibration
        if calibration.factor != lesson.calibration.factor:
            self._keep(route, tenant, structs.replace(lesson, calibration=calibration))
        elif calibration != lesson.calibration:
            self._known[route.name, tenant] = replace(held, lesson=structs.replace(lesson, calibration=calibration))
        return False

    def expected(self, route: Route, links: Sequence[bytes], event: int, tokens: int, factor: float) -> int:
        """What the provider will count for a view of *tokens* of ours: exactly so far, estimated from there on.

        *links* name the conversation after each item, *event* the event the view comes from (-1: none).
        """
        name = route.name
        for link in links[: -ANCHOR_REACH - 1 : -1]:
            if (name, link) in self._anchors:
                anchor = self._anchors[name, link]
                fits = anchor.event == event and anchor.counted <= tokens
                return anchor.reported + int((tokens - anchor.counted) * factor) if fits else int(tokens * factor)
        return int(tokens * factor)

    def _keep(self, route: Route, tenant: bytes, lesson: Lesson) -> Held:
        held = self._known[route.name, tenant] = Held(lesson, self._clock())
        self._recorder.remember(tenant, route.name, msgspec.msgpack.encode(lesson))
        return held


def _load(value: bytes | None) -> Lesson | None:
    if value is None:
        return None
    try:
        return msgspec.msgpack.decode(value, type=Lesson)
    except (msgspec.DecodeError, UnicodeError):
        return None

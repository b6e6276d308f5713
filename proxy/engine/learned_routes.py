"""What answers teach about a route: how its count relates to ours, which window it states, what a view really weighed.

One lesson for each route and tenant, in memory and shared through the store; anchors for single conversations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
from msgspec import structs

from proxy.core import learned_window
from proxy.core.decisions import KnownRoute, UsageAnchor
from proxy.core.learned_window import (
    NOTHING,
    Calibration,
    LearnedWindow,
    is_credible,
    is_truncated,
    prior_calibration,
    with_report,
)
from proxy.core.models import Route
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import Usage
from proxy.engine.ports import Clock, Records

FRESH_SECONDS = 60.0
"""How long a lesson holds before the store is asked for a newer one of another replica."""

ANCHOR_REACH = 64
"""Items back from the end that are looked at for an anchor: a turn of many parallel results ends one request."""


MOST_WARNED = 1_000
"""Routes that are remembered as warned of, so that no request repeats it. Their names come from clients."""

RAISE_WINDOW: Mapping[str, str] = MappingProxyType(
    {
        "/api/": "Raise num_ctx in Ollama (OLLAMA_CONTEXT_LENGTH, or PARAMETER num_ctx in a Modelfile)",
        "/props": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/v1/models meta": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/api/v0": "Raise the context length with which LM Studio loads the model",
    }
)
"""What to do about a prompt that was cut, by the route that told the server's window; the longest match holds."""

RAISE_ANY = "Raise the server's context (Ollama: num_ctx; llama.cpp: --ctx-size; others: context length, rope scaling)"

NoticeCallback = Callable[[str, Mapping[str, object]], None]
"""Is told of an event and its facts, for the log."""


class LearnedRoute(msgspec.Struct, frozen=True):
    """What is known of a route for one tenant: what it taught of its window, and its calibration."""

    calibration: Calibration
    belief: LearnedWindow = NOTHING

    @property
    def window(self) -> int | None:
        """The limit an error stated, in the provider's tokens, whether or not it still holds."""
        return self.belief.stated

    @property
    def beside(self) -> int | None:
        """What the server told of its window when an error stated that limit."""
        return self.belief.reported


@dataclass(frozen=True, slots=True)
class CachedRoute:
    """A lesson as this process holds it: when the store was last asked (monotonic)."""

    lesson: LearnedRoute
    asked: float = 0.0


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A counted view that went out: its weight by our count, the conversation's link there, and the event it is of.

    ``output`` is the answer's allowance in the provider's tokens. Not ``counted``: ``tokens`` is what its bytes make at
    least.

    ``plain``: it holds text only. Providers price media each in their own way, which says nothing of a vocabulary.
    """

    route: Route
    tenant: bytes
    tokens: int
    link: bytes
    event: int
    plain: bool = True
    output: int = 0
    counted: bool = True


def ignore_notice(event: str, facts: Mapping[str, object]) -> None:
    """A notice that nobody takes."""
    del event, facts


class LearnedRoutes:
    """Learns and tells. ``known`` and ``anchors`` are bounded mappings, ``wall`` gives seconds since the epoch."""

    def __init__(
        self,
        recorder: Records,
        known: MutableMapping[tuple[str, bytes], CachedRoute],
        anchors: MutableMapping[tuple[str, bytes], UsageAnchor],
        clock: Clock,
        notice: NoticeCallback = ignore_notice,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._recorder = recorder
        self._known = known
        self._anchors = anchors
        self._clock = clock
        self._notice = notice
        self._wall = wall
        self._warned: set[str] = set()

    def known(self, route: Route, tenant: bytes) -> CachedRoute:
        """What this process knows of *route*; the prior of its model's family if it knows nothing."""
        return self._known.get((route.learned_key, tenant)) or CachedRoute(
            LearnedRoute(prior_calibration(route.model, configured_encoding=route.configured_encoding))
        )

    def cached(self, route: Route, tenant: bytes) -> CachedRoute | None:
        """What is known of *route* if the store was asked a moment ago; None if other replicas may know more."""
        held = self._known.get((route.learned_key, tenant))
        if held is not None and self._clock() - held.asked < FRESH_SECONDS:
            return held
        return None

    async def get(self, route: Route, tenant: bytes) -> CachedRoute:
        """What is known of *route*, by other replicas too; asks the store at most once in a while."""
        held = self.cached(route, tenant)
        if held is not None:
            return held
        now, shared = self._clock(), load(await self._recorder.read_route(tenant, route.learned_key))
        held = self._known[route.learned_key, tenant] = CachedRoute(shared or self.known(route, tenant).lesson, now)
        return held

    def window(self, route: Route, learned: LearnedRoute) -> int | None:
        """The window that holds for *route*, in the provider's tokens; None if it is unknown."""
        belief = learned.belief
        return route.window if belief is NOTHING else believed(route, belief, self._wall())

    def known_route(self, route: Route, tenant: bytes, cached: CachedRoute, most: int | None) -> KnownRoute:
        """What is known of *route*, its window no larger than *most* provider tokens if a request asks for that.

        ``stated_window`` is set only if an error stated the window; otherwise it is that of the budget.
        """
        learned = cached.lesson
        window = self.window(route, learned)
        source: str = route.source if window == route.window else "learned"
        if most is not None and (window is None or most < window):
            window, source = most, "request"
        stated = self.stated(route, tenant) if source == "learned" else None
        return KnownRoute(route, window, source, stated, learned.calibration.factor)

    def stated(self, route: Route, tenant: bytes) -> int | None:
        """The window that somebody stated, the provider's own errors included; ``None`` where it was only worked out.

        What was worked out decides what to send, but refuses nothing: it may be one bad moment of a server.
        """
        belief = self.known(route, tenant).lesson.belief
        return route.window_after(learned_window.stated_limit(belief, self._wall()), belief.reported)

    def overflowed(
        self, route: Route, tenant: bytes, overflow: Overflow, counted: int | None, output: int = 0
    ) -> CachedRoute:
        """What is known after *route* refused a view of *counted* tokens of ours with what *overflow* states.

        *output* is the answer's allowance that was sent along, in the provider's tokens.
        """
        lesson, now = self.known(route, tenant).lesson, self._wall()
        belief, limit = lesson.belief, overflow.window
        asked = max(overflow.output or 0, overflow.requested or 0, output)
        if limit and learned_window.is_plausible(limit, counted, asked):
            belief = learned_window.with_stated_limit(belief, limit, route.reported_window, now)
        elif counted and overflow.kind in ("input", "input_plus_output"):
            belief = learned_window.with_refusal(belief, int(counted * lesson.calibration.factor) + output, now)
        calibration = lesson.calibration
        if overflow.prompt and counted:
            calibration = with_report(calibration, counted, overflow.prompt)
        return self._keep(route, tenant, LearnedRoute(calibration, belief))

    def ended(self, sent: SentPrompt, overflow: Overflow, usage: Usage) -> None:
        """Learn from an answer that ran into the window after it had begun: nothing can be sent again."""
        if overflow.kind not in ("input", "input_plus_output", "stop"):
            return
        lesson, now = self.known(sent.route, sent.tenant).lesson, self._wall()
        counted = sent.tokens if sent.counted else None
        weight = usage.input_tokens or overflow.prompt or int((counted or 0) * lesson.calibration.factor)
        if overflow.window and learned_window.is_plausible(overflow.window, counted, sent.output):
            belief = learned_window.with_stated_limit(lesson.belief, overflow.window, sent.route.reported_window, now)
        elif weight:
            # Prompt and answer filled it between them; of an answer without a figure the prompt's part is known.
            belief = learned_window.with_inferred_window(lesson.belief, weight + (usage.output_tokens or 0), now)
        else:
            return
        self._keep(sent.route, sent.tenant, structs.replace(lesson, belief=belief))

    def answered(self, sent: SentPrompt, reported: int) -> bool:
        """Learn from the prompt tokens *reported* for a view; whether they show that the provider cut it silently."""
        route, tenant, counted = sent.route, sent.tenant, sent.tokens
        held = self.known(route, tenant)
        lesson = held.lesson
        if sent.plain and is_truncated(lesson.calibration, counted, reported):
            self._was_cut(sent, lesson, reported)
            return True
        if sent.counted and not is_credible(counted, reported, plain=sent.plain):
            return False
        calibration = lesson.calibration
        if sent.counted:
            self._anchors[route.name, sent.link] = UsageAnchor(counted, reported, sent.event)
            calibration = with_report(calibration, counted, reported) if sent.plain else calibration
        belief = lesson.belief
        if belief is not NOTHING:
            belief = learned_window.with_answer(belief, reported, self._wall())
        if calibration.factor != lesson.calibration.factor or belief is not lesson.belief:
            self._keep(route, tenant, LearnedRoute(calibration, belief))
        elif calibration != lesson.calibration:
            self._known[route.learned_key, tenant] = replace(
                held, lesson=structs.replace(lesson, calibration=calibration)
            )
        return False

    def learned(self) -> list[dict[str, object]]:
        """The windows learned that hold now, in this process, for people: tokens and seconds, no tenant."""
        now = self._wall()
        rows: dict[tuple[str, int, str], float] = {}
        for (name, _), held in list(self._known.items()):
            belief = held.lesson.belief
            if belief is NOTHING:
                continue
            stated, level = learned_window.stated_limit(belief, now), learned_window.inferred_window(belief, now)
            for how, figure, at in (("stated", stated, belief.stated_at), ("worked out", level, belief.inferred_at)):
                if figure is not None:
                    rows[name, figure, how] = max(at, rows.get((name, figure, how), 0.0))
        return [
            {"route": name, "context_window": figure, "how": how, "age_seconds": round(max(0.0, now - at), 1)}
            for (name, figure, how), at in sorted(rows.items())
        ]

    def _was_cut(self, sent: SentPrompt, lesson: LearnedRoute, reported: int) -> None:
        """Learn from a silent cut, and say so once for each route."""
        route = sent.route
        belief = learned_window.with_silent_cut(lesson.belief, reported, self._wall())
        if belief != lesson.belief:
            self._keep(route, sent.tenant, structs.replace(lesson, belief=belief))
        if route.name in self._warned:
            return
        if len(self._warned) >= MOST_WARNED:
            self._warned.clear()
        self._warned.add(route.name)
        facts = {"upstream": route.upstream, "model": route.model, "observed_window": reported, "remedy": remedy(route)}
        self._notice("upstream.silently_truncates", facts)

    def anchor(self, route: Route, prefix_hashes: Sequence[bytes]) -> UsageAnchor | None:
        """The newest prefix of a conversation that a provider has counted on *route*, if it is near the end."""
        name = route.name
        for prefix_hash in prefix_hashes[: -ANCHOR_REACH - 1 : -1]:
            # Taken out at once: the memory is bounded, and may lose it meanwhile.
            anchor = self._anchors.get((name, prefix_hash))
            if anchor is not None:
                return anchor
        return None

    def _keep(self, route: Route, tenant: bytes, lesson: LearnedRoute) -> CachedRoute:
        before, now = self.known(route, tenant).lesson, self._wall()
        held = self._known[route.learned_key, tenant] = CachedRoute(lesson, self._clock())
        self._recorder.save_route(tenant, route.learned_key, msgspec.msgpack.encode(lesson))
        window = believed(route, lesson.belief, now)
        if window is not None and window != believed(route, before.belief, now):
            how = "stated" if lesson.belief.stated_at == now else "worked out"
            facts = {"upstream": route.upstream, "model": route.model, "observed_window": window, "kind": how}
            self._notice("upstream.window_learned", facts)
        return held


def believed(route: Route, belief: LearnedWindow, now: float) -> int | None:
    """The window of *route* given what traffic taught, never above a configured one; ``None`` where nobody knows."""
    window = route.window_after(learned_window.stated_limit(belief, now), belief.reported)
    lower = learned_window.inferred_window(belief, now)
    return window if lower is None else min(window or lower, lower)


def remedy(route: Route) -> str:
    """What to do about a server that cuts prompts without a word."""
    named = [advice for where, advice in RAISE_WINDOW.items() if route.window_origin.startswith(where)]
    return f"{named[-1] if named else RAISE_ANY}, or set context_window to what it has."


def load(value: bytes | None) -> LearnedRoute | None:
    """The lesson that was remembered as *value*; ``None`` where it is none."""
    if value is None:
        return None
    try:
        lesson = msgspec.msgpack.decode(value, type=LearnedRoute)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return structs.replace(lesson, belief=NOTHING) if lesson.belief == NOTHING else lesson

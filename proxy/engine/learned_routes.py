"""Learned routes: how a provider's count relates to ours, and which window it has.

One ``LearnedRoute`` for each route and tenant, cached here and shared through the store; a ``UsageAnchor`` for single
conversations, in this process only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import structs

from proxy.core import learned_window
from proxy.core.decisions import KnownRoute, UncountedView, UsageAnchor, View
from proxy.core.learned_window import (
    NOTHING_LEARNED,
    Calibration,
    LearnedWindow,
    is_credible,
    is_truncated,
    prior_calibration,
    with_report,
)
from proxy.core.models import SMALLEST_WINDOW, Catalogue, Route
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import Usage
from proxy.core.request import Request
from proxy.engine.ports import Cache, Clock, Records

FRESH_SECONDS = 60.0
"""How long a learned route is used before the store is read for a newer one of another replica."""

ANCHOR_REACH = 64
"""Items back from the end that are looked at for an anchor: many parallel results may end one request."""

MOST_WARNED = 1_000
"""Routes whose warning is remembered, so that no request repeats it. Bounded: their names come from clients."""

RAISE_WINDOW: Mapping[str, str] = MappingProxyType(
    {
        "/api/": "Raise num_ctx in Ollama (OLLAMA_CONTEXT_LENGTH, or PARAMETER num_ctx in a Modelfile)",
        "/props": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/v1/models meta": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/api/v0": "Raise the context length with which LM Studio loads the model",
    }
)
"""How to raise a server's window, by the beginning of the path that reported it; the last match holds.

https://docs.ollama.com/context-length, https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

RAISE_ANY = "Raise the server's context (Ollama: num_ctx; llama.cpp: --ctx-size; others: context length, rope scaling)"
"""How to raise the window of a server of unknown kind."""

BYTES_PER_TOKEN = 12
"""A token of a request's JSON has hardly ever more bytes, whitespace and escapes included: English has 4 to 5."""

MEDIA: Final = re.compile(rb'"(?:image|input_(?:image|audio|file)|file"|document"|audio|video|item_reference")')
"""Parts of items whose price says nothing of a vocabulary."""

MOST_KNOWN = 4_096
"""Routes that are remembered with all that is known of them. Model names come from clients, so they are bounded."""

KNOWN_SECONDS = 5.0
"""How long such a route is remembered: servers report new windows, and what was learned expires."""

NoticeCallback = Callable[[str, Mapping[str, object]], None]
"""Logs an event with its facts."""


class LearnedRoute(msgspec.Struct, frozen=True, rename={"learned_window": "belief"}):
    """A route as one tenant's traffic taught it: its window and its calibration.

    The store has it under the names that its first version used.
    """

    calibration: Calibration
    learned_window: LearnedWindow = NOTHING_LEARNED

    @property
    def stated_window(self) -> int | None:
        """The limit that an error stated, in the provider's tokens, whether or not it is still used."""
        return self.learned_window.stated

    @property
    def reported_window(self) -> int | None:
        """The window that the server reported when an error stated that limit."""
        return self.learned_window.reported


class CachedRoute(msgspec.Struct, frozen=True):
    """A learned route and the monotonic second at which the store was last read for it."""

    learned: LearnedRoute
    read_at: float = 0.0


class SentPrompt(msgspec.Struct, frozen=True):
    """A prompt that was sent, as far as its answer can teach something about it.

    ``tokens`` are by our own count, or (not ``is_counted``) what its bytes come to at least. ``prefix_hash`` names the
    conversation so far, ``boundary`` is that of its compaction, -1 if there is none. ``output_tokens`` is the room for
    the answer, in the provider's tokens. ``is_text``: it holds no media, whose price says nothing of a vocabulary.
    """

    route: Route
    tenant: bytes
    tokens: int
    prefix_hash: bytes
    boundary: int
    is_text: bool = True
    output_tokens: int = 0
    is_counted: bool = True


def sent_prompt(view: View) -> SentPrompt | None:
    """Return what the answer to *view* can teach about; None if its count cannot be compared with ours."""
    if isinstance(view, UncountedView):
        if view.is_off or view.bound:
            return None
        return _uncounted_prompt(view)
    if view.observation or view.measured.parsed.envelope.has_unseen_input:
        return None
    measured, record = view.measured, view.edits.record
    output = int((view.edits.lowered_output or view.budget.reserve) * measured.known.token_ratio)
    prefix_hash, boundary = b"", -1
    if measured.prefix_hashes:
        prefix_hash = measured.prefix_hashes[-1]
    if record is not None:
        boundary = record.compaction.boundary
    return SentPrompt(
        measured.known.route,
        measured.request.tenant,
        view.counted,
        prefix_hash,
        boundary,
        is_text=not measured.counts.roles.media,
        output_tokens=output,
    )


def _uncounted_prompt(view: UncountedView) -> SentPrompt:
    """Usage feedback for a request sent without a token count (context window unknown)."""
    body, tenant = view.request.body, view.request.tenant
    is_text = not MEDIA.search(body)
    return SentPrompt(view.known.route, tenant, len(body) // BYTES_PER_TOKEN, b"", -1, is_text, is_counted=False)


def ignore_notice(event: str, facts: Mapping[str, object]) -> None:
    """Log nothing."""
    del event, facts


class LearnedRoutes:
    """Caches and saves what answers teach. *known* and *anchors* are bounded mappings, *wall* gives Unix time."""

    def __init__(
        self,
        records: Records,
        known: Cache[tuple[str, bytes], CachedRoute],
        anchors: Cache[tuple[str, bytes], UsageAnchor],
        clock: Clock,
        notice: NoticeCallback = ignore_notice,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._known = known
        self._anchors = anchors
        self._clock = clock
        self._notice = notice
        self._wall = wall
        self._warned: set[str] = set()
        self.generation = 0
        """Rises with everything that is learned here, so that what was derived from it can be found old."""

    def get_cached(self, route: Route, tenant: bytes) -> CachedRoute:
        """Return what this process knows of *route*; the prior of its model's family if it knows nothing."""
        return self._known.get((route.learned_key, tenant)) or CachedRoute(
            LearnedRoute(prior_calibration(route.model, configured_encoding=route.configured_encoding))
        )

    def get_fresh(self, route: Route, tenant: bytes) -> CachedRoute | None:
        """Return what is known of *route* if the store was read a moment ago; None if other replicas may know more."""
        cached = self._known.get((route.learned_key, tenant))
        if cached is not None and self._clock() - cached.read_at < FRESH_SECONDS:
            return cached
        return None

    async def get(self, route: Route, tenant: bytes) -> CachedRoute:
        """Return what is known of *route*, by other replicas too; reads the store at most once in a while."""
        cached = self.get_fresh(route, tenant)
        if cached is not None:
            return cached
        now, shared = self._clock(), load(await self._records.read_route(tenant, route.learned_key))
        cached = self._known[route.learned_key, tenant] = CachedRoute(
            shared or self.get_cached(route, tenant).learned, now
        )
        return cached

    def window(self, route: Route, learned: LearnedRoute) -> int | None:
        """The window that holds for *route*, in the provider's tokens; None if it is unknown."""
        if learned.learned_window is NOTHING_LEARNED:
            return route.window
        return window_now(route, learned.learned_window, self._wall())

    def known_route(self, route: Route, tenant: bytes, cached: CachedRoute, most: int | None) -> KnownRoute:
        """Return *route* with what is known of it, its window no larger than *most* provider tokens if that is set.

        ``stated_window`` is set only if an error stated the window; otherwise it is that of the budget.
        """
        learned, window = cached.learned, route.window
        if learned.learned_window is not NOTHING_LEARNED:
            window = window_now(route, learned.learned_window, self._wall())
        source: str = route.source
        if window != route.window:
            source = "learned"
        if most is not None and (window is None or most < window):
            window, source = most, "request"
        stated: int | None = None
        if source == "learned":
            stated = self.stated_window(route, tenant)
        return KnownRoute(route, window, source, stated, learned.calibration.factor)

    def stated_window(self, route: Route, tenant: bytes) -> int | None:
        """The window that a person, a server or an error stated; None if it was only inferred.

        An inferred window decides what to send, but refuses nothing: it may come from one bad moment of a server.
        """
        taught = self.get_cached(route, tenant).learned.learned_window
        return route.window_after(learned_window.stated_limit(taught, self._wall()), taught.reported)

    def learn_refusal(
        self, route: Route, tenant: bytes, overflow: Overflow, counted: int | None, output: int = 0
    ) -> CachedRoute:
        """Learn from *route* refusing a view of *counted* tokens of ours with *overflow*; return what is known then.

        *output* is the output figure that was sent along, in the provider's tokens.
        """
        learned, now = self.get_cached(route, tenant).learned, self._wall()
        taught, limit = learned.learned_window, overflow.window
        requested_output = max(overflow.output or 0, overflow.requested or 0, output)
        if limit and learned_window.is_plausible(limit, counted, requested_output):
            taught = learned_window.with_stated_limit(taught, limit, route.reported_window, now)
        elif counted and overflow.kind in ("input", "input_plus_output"):
            taught = learned_window.with_refusal(taught, int(counted * learned.calibration.factor) + output, now)
        calibration = learned.calibration
        if overflow.prompt and counted:
            calibration = with_report(calibration, counted, overflow.prompt)
        return self._save(route, tenant, LearnedRoute(calibration, taught))

    def learn_late_overflow(self, sent: SentPrompt, overflow: Overflow, usage: Usage) -> None:
        """Learn from an answer that reached the window's end after it had begun."""
        if overflow.kind not in ("input", "input_plus_output", "stop"):
            return
        learned, now = self.get_cached(sent.route, sent.tenant).learned, self._wall()
        counted: int | None = None
        if sent.is_counted:
            counted = sent.tokens
        weight = usage.input_tokens or overflow.prompt or int((counted or 0) * learned.calibration.factor)
        if overflow.window and learned_window.is_plausible(overflow.window, counted, sent.output_tokens):
            taught = learned_window.with_stated_limit(
                learned.learned_window, overflow.window, sent.route.reported_window, now
            )
        elif weight:
            # Prompt and answer filled it between them; of an answer without a figure the prompt's part is known.
            taught = learned_window.with_inferred_window(
                learned.learned_window, weight + (usage.output_tokens or 0), now
            )
        else:
            return
        self._save(sent.route, sent.tenant, structs.replace(learned, learned_window=taught))

    def learn_usage(self, sent: SentPrompt, reported: int) -> bool:
        """Learn from the prompt tokens *reported* for a view; True if they show that the provider cut it silently."""
        route, tenant, counted = sent.route, sent.tenant, sent.tokens
        cached = self.get_cached(route, tenant)
        learned = cached.learned
        if sent.is_text and is_truncated(learned.calibration, counted, reported):
            self._was_cut(sent, learned, reported)
            return True
        if sent.is_counted and not is_credible(counted, reported, plain=sent.is_text):
            return False
        calibration = learned.calibration
        if sent.is_counted:
            self._anchors[route.name, sent.prefix_hash] = UsageAnchor(counted, reported, sent.boundary)
        if sent.is_counted and sent.is_text:
            calibration = with_report(calibration, counted, reported)
        taught = learned.learned_window
        if taught is not NOTHING_LEARNED:
            taught = learned_window.with_answer(taught, reported, self._wall())
        if calibration.factor != learned.calibration.factor or taught is not learned.learned_window:
            self._save(route, tenant, LearnedRoute(calibration, taught))
        elif calibration != learned.calibration:
            learned = LearnedRoute(calibration, learned.learned_window)
            self._known[route.learned_key, tenant] = CachedRoute(learned, cached.read_at)
        return False

    def shown_windows(self) -> list[dict[str, object]]:
        """The windows learned in this process that are in use, for people: tokens and seconds, no tenant."""
        now = self._wall()
        rows: dict[tuple[str, int, str], float] = {}
        for (name, _), cached in list(self._known.items()):
            taught = cached.learned.learned_window
            if taught is NOTHING_LEARNED:
                continue
            stated, level = learned_window.stated_limit(taught, now), learned_window.inferred_window(taught, now)
            for how, figure, at in (("stated", stated, taught.stated_at), ("worked out", level, taught.inferred_at)):
                if figure is not None:
                    rows[name, figure, how] = max(at, rows.get((name, figure, how), 0.0))
        return [
            {"route": name, "context_window": figure, "how": how, "age_seconds": round(max(0.0, now - at), 1)}
            for (name, figure, how), at in sorted(rows.items())
        ]

    def _was_cut(self, sent: SentPrompt, learned: LearnedRoute, reported: int) -> None:
        """Learn from a silent cut, and log it once for each route."""
        route = sent.route
        taught = learned_window.with_silent_cut(learned.learned_window, reported, self._wall())
        if taught != learned.learned_window:
            self._save(route, sent.tenant, structs.replace(learned, learned_window=taught))
        if route.name in self._warned:
            return
        if len(self._warned) >= MOST_WARNED:
            self._warned.clear()
        self._warned.add(route.name)
        facts = {"upstream": route.upstream, "model": route.model, "observed_window": reported, "remedy": remedy(route)}
        self._notice("upstream.silently_truncates", facts)

    def find_anchor(self, route: Route, prefix_hashes: Sequence[bytes]) -> UsageAnchor | None:
        """The newest prefix of a conversation that a provider has counted on *route*, if it is near the end."""
        name = route.name
        for prefix_hash in prefix_hashes[: -ANCHOR_REACH - 1 : -1]:
            # Read once: the cache is bounded, and may lose it between two looks.
            anchor = self._anchors.get((name, prefix_hash))
            if anchor is not None:
                return anchor
        return None

    def _save(self, route: Route, tenant: bytes, learned: LearnedRoute) -> CachedRoute:
        before, now = self.get_cached(route, tenant).learned, self._wall()
        cached = self._known[route.learned_key, tenant] = CachedRoute(learned, self._clock())
        self.generation += 1
        self._records.save_route(tenant, route.learned_key, msgspec.msgpack.encode(learned))
        window = window_now(route, learned.learned_window, now)
        if window is not None and window != window_now(route, before.learned_window, now):
            how = "worked out"
            if learned.learned_window.stated_at == now:
                how = "stated"
            facts = {"upstream": route.upstream, "model": route.model, "observed_window": window, "kind": how}
            self._notice("upstream.window_learned", facts)
        return cached


class RememberedRoute(msgspec.Struct, frozen=True):
    """A known route that holds while ``generation`` is current and until the monotonic second ``until``.

    ``limits`` are the input budget and the lowest mark in tokens, by output figure and size of task, as the quick check
    finds them.
    """

    known: KnownRoute
    generation: int
    until: float
    limits: dict[tuple[int | None, str], tuple[int, int]] = {}


def prepare_nothing(encoding: str) -> None:
    """Leave the vocabulary of *encoding* to its first use."""
    del encoding


class KnownRoutes:
    """Finds the route of a request with all that is known of it, and remembers it for some seconds.

    *prepare* is called once with each encoding that a route has: its vocabulary will be needed.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        learned: LearnedRoutes,
        clock: Clock,
        prepare: Callable[[str], None] = prepare_nothing,
    ) -> None:
        self._catalogue = catalogue
        self._learned = learned
        self._clock = clock
        self._prepare = prepare
        self._prepared: set[str] = set()
        self._remembered: dict[tuple[object, ...], RememberedRoute] = {}

    async def get(self, request: Request, model: str) -> RememberedRoute:
        """Return the route of *model* for *request*.

        Waits only for what other replicas learned, once in a while: so a process that has just started knows it before
        it answers. Raises ``NotFound``.
        """
        options, is_small = request.options, len(request.body) <= SMALLEST_WINDOW
        key = (model, request.tenant, options.window, request.window_variant, is_small)
        remembered = self._remembered.get(key)
        generation = self._learned.generation
        if remembered is not None and remembered.generation == generation and self._clock() < remembered.until:
            return remembered
        route = self._catalogue.resolve(model, len(request.body))
        if route.encoding not in self._prepared:
            self._prepared.add(route.encoding)
            self._prepare(route.encoding)
        if request.window_variant:
            route = replace(route, variant=request.window_variant)
        learned = await self._learned.get(route, request.tenant)
        known = self._learned.known_route(route, request.tenant, learned, options.window)
        remembered = RememberedRoute(known, self._learned.generation, self._clock() + KNOWN_SECONDS)
        if known.window is not None:  # a server may be about to report it
            if len(self._remembered) >= MOST_KNOWN:
                self._remembered.clear()
            self._remembered[key] = remembered
        return remembered


def window_now(route: Route, taught: LearnedWindow, now: float) -> int | None:
    """The window of *route* by what traffic *taught*, never above a configured one; None if it is unknown."""
    window = route.window_after(learned_window.stated_limit(taught, now), taught.reported)
    inferred = learned_window.inferred_window(taught, now)
    if inferred is None:
        return window
    return min(window or inferred, inferred)


def remedy(route: Route) -> str:
    """Return how to raise the window of a server that cuts prompts silently."""
    named = [advice for path, advice in RAISE_WINDOW.items() if route.window_origin.startswith(path)]
    advice = [RAISE_ANY, *named][-1]
    return f"{advice}, or set context_window to what it has."


def load(value: bytes | None) -> LearnedRoute | None:
    """The learned route that was saved as *value*; None if it cannot be read."""
    if value is None:
        return None
    try:
        learned = msgspec.msgpack.decode(value, type=LearnedRoute)
    except (msgspec.DecodeError, UnicodeError):
        return None
    if learned.learned_window == NOTHING_LEARNED:
        return structs.replace(learned, learned_window=NOTHING_LEARNED)  # the one that is compared by identity
    return learned

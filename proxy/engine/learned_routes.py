"""Learned routes: the ratio of a provider's token count to ours, and the window that its answers show.

There is one ``LearnedRoute`` for each route and tenant, cached here and shared with other replicas through the store. A
``UsageAnchor`` belongs to one conversation and stays in this process.

    an answer                              what it teaches
    an overflow that states its window     the stated window
    an overflow without a figure           a limit below what was refused
    an answer that reached the end         the window is what prompt and answer took together
    usage near our count                   the ratio of both counts, and an anchor for the conversation
    usage far below our count              the provider silently cut the prompt: the window is what it counted
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec
from cachebox import TTLCache
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
from proxy.tasks import Warn

FRESH_SECONDS = 60.0
"""Seconds for which a learned route is used before the store is read again: another replica may have a newer one."""

ANCHOR_REACH = 64
"""Items from the end that are searched for an anchor. It was at the end of an earlier request, and since then many
parallel results may have come."""

MOST_WARNED = 1_000
"""Routes whose warning is remembered so that it is logged once. Bounded because model names come from clients."""

RAISE_WINDOW: Mapping[str, str] = MappingProxyType(
    {
        "/api/": "Raise num_ctx in Ollama (OLLAMA_CONTEXT_LENGTH, or PARAMETER num_ctx in a Modelfile)",
        "/props": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/v1/models meta": "Raise --ctx-size in llama.cpp (it is shared by its --parallel slots)",
        "/api/v0": "Raise the context length with which LM Studio loads the model",
    }
)
"""Advice on how to raise a server's window, by the beginning of the path that reported it; the last match is used.

https://docs.ollama.com/context-length, https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

RAISE_ANY = "Raise the server's context (Ollama: num_ctx; llama.cpp: --ctx-size; others: context length, rope scaling)"
"""Advice for a server of unknown kind."""

MOST_BYTES_PER_TOKEN = 12
"""Bytes of a request's JSON per token at most, whitespace and escapes included. English text has 4 to 5, so that the
quotient is a low estimate: an answer that reports even less was cut."""

MEDIA: Final = re.compile(rb'"(?:image|input_(?:image|audio|file)|file"|document"|audio|video|item_reference")')
"""Matches parts whose tokens do not depend on a vocabulary, so that their usage cannot calibrate our count of text."""

SERVED_SECONDS = 600.0
"""Seconds for which the largest prompt that a route answered is remembered, as evidence against an error that claims a
far smaller one to be too long. Providers change windows, and a name may stand for several backends."""

MOST_KNOWN = 4_096
"""Routes that are remembered, with their window or that prompt. Bounded because model names come from clients."""

KNOWN_SECONDS = 5.0
"""Seconds for which such a route is remembered: servers report new windows, and learned ones expire."""


class LearnedRoute(msgspec.Struct, frozen=True, rename={"learned_window": "belief"}):
    """The window and the calibration of a route, as learned from one tenant's traffic."""

    # ``rename`` keeps the member names of the first version, so that stored values stay readable.

    calibration: Calibration
    learned_window: LearnedWindow = NOTHING_LEARNED


class CachedRoute(msgspec.Struct, frozen=True):
    """A learned route and the monotonic second at which the store was last read for it."""

    learned: LearnedRoute
    read_at: float = 0.0


class SentPrompt(msgspec.Struct, frozen=True):
    """The facts of a sent prompt that are compared with the usage of its answer.

    ``tokens`` is our own count, or a low estimate from its bytes if not ``is_counted``. ``prefix_hash`` names the
    conversation so far; ``boundary`` is that of its compaction, -1 if there is none. ``output_tokens`` is the room for
    the answer in the provider's tokens. ``is_text``: it holds no media, whose tokens depend on no vocabulary.
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
    """Return the facts of *view* to compare with its answer's usage; None if the two counts are not comparable."""
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
    """Return the facts of a request that was sent without a token count, because its window is unknown."""
    body, tenant = view.request.body, view.request.tenant
    is_text = not MEDIA.search(body)
    return SentPrompt(view.known.route, tenant, len(body) // MOST_BYTES_PER_TOKEN, b"", -1, is_text, is_counted=False)


class LearnedRoutes:
    """Caches and saves what answers teach.

    *cached* and *anchors* are bounded mappings, *wall* gives Unix time. Only the event loop's thread uses it.
    """

    def __init__(
        self,
        records: Records,
        cached: Cache[tuple[str, bytes], CachedRoute],
        anchors: Cache[tuple[str, bytes], UsageAnchor],
        clock: Clock,
        warn: Warn,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._cached = cached
        self._anchors = anchors
        self._clock = clock
        self._warn = warn
        self._wall = wall
        self._warned: set[str] = set()
        self._served: TTLCache[tuple[str, bytes], int] = TTLCache(MOST_KNOWN, SERVED_SECONDS)
        self.generation = 0
        """Rises with everything that is learned here, so that ``KnownRoutes`` can tell that its values are outdated."""

    def get_cached(self, route: Route, tenant: bytes) -> LearnedRoute:
        """Return what this process learned of *route*; the prior of its model's family if it learned nothing."""
        cached = self._cached.get((route.learned_key, tenant))
        if cached is not None:
            return cached.learned
        return LearnedRoute(prior_calibration(route.model, configured_encoding=route.configured_encoding))

    async def get(self, route: Route, tenant: bytes) -> LearnedRoute:
        """Return what this and other replicas learned of *route*; reads the store once in ``FRESH_SECONDS``."""
        # The clock is read first, so that the value never counts as fresher than it is.
        key, now = (route.learned_key, tenant), self._clock()
        before = self._cached.get(key)
        if before is not None and now - before.read_at < FRESH_SECONDS:
            return before.learned
        shared = load(await self._records.read_route(tenant, route.learned_key))
        learned = self.get_cached(route, tenant)
        # What this process learned while the store was read is newer than what was read.
        if shared is not None and self._cached.get(key) is before:
            learned = shared
        self._cached[key] = CachedRoute(learned, now)
        return learned

    def window(self, route: Route, learned: LearnedRoute) -> int | None:
        """Return the window that is in force for *route*, in the provider's tokens; None if it is unknown."""
        if learned.learned_window is NOTHING_LEARNED:
            return route.window
        return window_now(route, learned.learned_window, self._wall())

    def known_route(self, route: Route, tenant: bytes, learned: LearnedRoute, most: int | None) -> KnownRoute:
        """Return *route* with its window and ratio. The window is at most *most* provider tokens if that is set.

        ``stated_window`` is set only for a learned window, if an error stated it.
        """
        window = self.window(route, learned)
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
        """Return the window that a person, a server or an error stated; None if it was only inferred.

        An inferred window limits what is sent, but no request is refused for it: one short failure of a server can
        look like a small window.
        """
        taught = self.get_cached(route, tenant).learned_window
        return route.window_after(learned_window.stated_limit(taught, self._wall()), taught.reported)

    def learn_refusal(
        self, route: Route, tenant: bytes, overflow: Overflow, counted: int | None, output: int = 0
    ) -> None:
        """Learn from an *overflow* that refused a view of *counted* tokens (our count).

        *output* is the output figure that was sent along, in the provider's tokens.
        """
        self._served.pop((route.learned_key, tenant), None)
        learned, now = self.get_cached(route, tenant), self._wall()
        taught, limit = learned.learned_window, overflow.window
        requested_output = max(overflow.output or 0, overflow.requested or 0, output)
        # A limit that cannot be true of this request is not learned; that the request was refused is true anyway.
        if limit and learned_window.is_plausible(limit, counted, requested_output):
            taught = learned_window.with_stated_limit(taught, limit, route.reported_window, now)
        elif counted and overflow.kind in ("input", "input_plus_output"):
            taught = learned_window.with_refusal(taught, int(counted * learned.calibration.factor) + output, now)
        calibration = learned.calibration
        if overflow.prompt and counted:
            calibration = with_report(calibration, counted, overflow.prompt)
        self._save(route, tenant, LearnedRoute(calibration, taught))

    def learn_late_overflow(self, sent: SentPrompt, overflow: Overflow, usage: Usage) -> None:
        """Learn from an answer that reached the window's end after it had begun."""
        if overflow.kind not in ("input", "input_plus_output", "stop"):
            return
        learned, now = self.get_cached(sent.route, sent.tenant), self._wall()
        counted: int | None = None
        if sent.is_counted:
            counted = sent.tokens
        weight = usage.input_tokens or overflow.prompt or int((counted or 0) * learned.calibration.factor)
        if overflow.window and learned_window.is_plausible(overflow.window, counted, sent.output_tokens):
            taught = learned_window.with_stated_limit(
                learned.learned_window, overflow.window, sent.route.reported_window, now
            )
        elif weight:
            # Prompt and answer filled the window together. Without an output figure the prompt is a lower bound.
            taught = learned_window.with_inferred_window(
                learned.learned_window, weight + (usage.output_tokens or 0), now
            )
        else:
            return
        self._served.pop((sent.route.learned_key, sent.tenant), None)
        self._save(sent.route, sent.tenant, structs.replace(learned, learned_window=taught))

    def learn_usage(self, sent: SentPrompt, reported: int) -> bool:
        """Learn from the prompt tokens *reported* for a view; True if they show that the provider cut it silently."""
        route, tenant, counted = sent.route, sent.tenant, sent.tokens
        learned = self.get_cached(route, tenant)
        if sent.is_text and is_truncated(learned.calibration, counted, reported):
            self._learn_silent_cut(sent, learned, reported)
            return True
        if is_credible(counted, reported, plain=sent.is_text):
            self._remember_served(route, tenant, reported)
        elif sent.is_counted:
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
            # Only the evidence changed, and the factor did not: not worth a write to the store for every answer.
            key = (route.learned_key, tenant)
            cached = self._cached.get(key) or CachedRoute(learned)
            self._cached[key] = structs.replace(cached, learned=LearnedRoute(calibration, taught))
        return False

    def _remember_served(self, route: Route, tenant: bytes, reported: int) -> None:
        """Remember the *reported* tokens of an answered prompt if no larger one was answered lately."""
        # Only a larger one may renew the entry, or small prompts would keep a figure that no answer supports any more.
        if reported > self._served.get((route.learned_key, tenant), 0):
            self._served[route.learned_key, tenant] = reported

    def served_lately(self, route: Route, tenant: bytes) -> int | None:
        """Return the tokens of the largest prompt that *route* answered lately; None since it last refused one.

        Known to this process alone: it serves as evidence only, and no window is learned from it.
        """
        return self._served.get((route.learned_key, tenant))

    def shown_windows(self) -> list[dict[str, object]]:
        """Return the learned windows in use, a row each for the admin routes: tokens and seconds, no tenant."""
        now = self._wall()
        rows: dict[tuple[str, int, str], float] = {}
        for (name, _), cached in list(self._cached.items()):
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

    def _learn_silent_cut(self, sent: SentPrompt, learned: LearnedRoute, reported: int) -> None:
        """Learn from a prompt that the provider silently cut to *reported* tokens; warn once for each route."""
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
        self._warn("upstream.silently_truncates", facts)

    def find_anchor(self, route: Route, prefix_hashes: Sequence[bytes]) -> UsageAnchor | None:
        """Return the newest prefix of a conversation that a provider counted on *route*, if it is near the end."""
        name = route.name
        for prefix_hash in prefix_hashes[: -ANCHOR_REACH - 1 : -1]:
            # One ``get`` and no ``in`` before it: the cache may evict the entry between the two.
            anchor = self._anchors.get((name, prefix_hash))
            if anchor is not None:
                return anchor
        return None

    def _save(self, route: Route, tenant: bytes, learned: LearnedRoute) -> None:
        before, now = self.get_cached(route, tenant), self._wall()
        self._cached[route.learned_key, tenant] = CachedRoute(learned, self._clock())
        self.generation += 1
        self._records.save_route(tenant, route.learned_key, msgspec.msgpack.encode(learned))
        window = window_now(route, learned.learned_window, now)
        if window is not None and window != window_now(route, before.learned_window, now):
            how = "worked out"
            if learned.learned_window.stated_at == now:
                how = "stated"
            facts = {"upstream": route.upstream, "model": route.model, "observed_window": window, "kind": how}
            self._warn("upstream.window_learned", facts)


class RememberedRoute(msgspec.Struct, frozen=True):
    """A known route, valid while ``generation`` is current and until the monotonic second ``until``.

    ``limits`` caches the quick check's input budget and lowest mark in tokens, by output figure and size of task.
    """

    known: KnownRoute
    generation: int
    until: float
    limits: dict[tuple[int | None, str], tuple[int, int]] = {}


def prepare_nothing(encoding: str) -> None:
    """Do not load the vocabulary of *encoding* now: its first use does."""
    del encoding


class KnownRoutes:
    """Resolves the route of a request with its window and ratio, and remembers it for ``KNOWN_SECONDS``.

    *prepare* is called once with each encoding that a route uses, so that its vocabulary can be loaded ahead.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        learned: LearnedRoutes,
        clock: Clock,
        prepare: Callable[[str], None],
    ) -> None:
        self._catalogue = catalogue
        self._learned = learned
        self._clock = clock
        self._prepare = prepare
        self._prepared: set[str] = set()
        self._remembered: dict[tuple[object, ...], RememberedRoute] = {}

    async def get(self, request: Request, model: str) -> RememberedRoute:
        """Return the route of *model* for *request*. Raises ``NotFound``.

        Waits for the store once in ``FRESH_SECONDS``, so that a new process has what other replicas learned before it
        answers its first request.
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
        if known.window is not None:  # an unknown window is not remembered: a probe may report it any moment
            if len(self._remembered) >= MOST_KNOWN:
                self._remembered.clear()
            self._remembered[key] = remembered
        return remembered


def window_now(route: Route, taught: LearnedWindow, now: float) -> int | None:
    """Return the window of *route* with what traffic *taught*, never above a configured one; None if unknown."""
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
        return structs.replace(learned, learned_window=NOTHING_LEARNED)  # callers compare it by identity
    return learned

"""After a provider's "too long": what that is worth, what it teaches, and something strictly smaller to send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import structs

from proxy.core.attempts import is_smaller, retries_smaller, retry_targets
from proxy.core.decisions import (
    CountedView,
    FinalDecision,
    Forward,
    KnownRoute,
    MeasuredRequest,
    View,
)
from proxy.core.errors import InvalidRequest
from proxy.core.overflow.evidence import Prior, check_claim
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import Usage
from proxy.core.tokens.budget import answer_reserve
from proxy.engine.body_edits import with_lower_output, with_truncation
from proxy.engine.learned_routes import MEDIA, LearnedRoutes, SentPrompt, sent_prompt
from proxy.engine.measuring import Measurer
from proxy.engine.reading import LocatedBody

STATED = frozenset({"configured", "server", "request"})
"""Sources of a window that a person or the server stated: a table may be wrong about this server."""

UNKNOWN_WINDOW_SHARE = 2
"""Tokens for each byte of the body that a window is taken to have if nothing is known but that the body is too much."""

Decide = Callable[[MeasuredRequest], Awaitable[FinalDecision]]


class Retries:
    """Judges refusals, learns from them, and finds what to send next by the stages that ask no model."""

    def __init__(self, measurer: Measurer, learned: LearnedRoutes) -> None:
        self._measurer = measurer
        self._learned = learned

    def may_retry(self, overflow: Overflow | None) -> bool:
        """True if something smaller may be sent for *overflow*; every other error is the client's to see."""
        return overflow is not None and retries_smaller(overflow, self._measurer.policy.lower_output)

    async def prior(self, view: View) -> Prior:
        """Return what is known of *view*, for a claim about it to be compared with."""
        try:
            located = self._measurer.locate(view.request)
            counted = await self._seen_tokens_of(view, located)
        except InvalidRequest:
            return Prior(body=view.body)  # what cannot be read may still be relayed, and refused for its length
        known = self._known_route(view)
        output = located.envelope.requested_output
        if view.lowered_output is not None:
            output = view.lowered_output
        if counted is not None:
            counted = int(counted * known.token_ratio)
        is_text = not MEDIA.search(view.body)
        return Prior(counted, output, known.window, known.window_source in STATED, is_text, view.body)

    def after_content(self, sent: SentPrompt, overflow: Overflow, usage: Usage) -> Overflow | None:
        """Return *overflow*, which came behind content, if it can be true of what was *sent* and may teach."""
        learned = self._learned.get_cached(sent.route, sent.tenant).learned
        counted = usage.input_tokens
        if counted is None and sent.is_counted:
            counted = int(sent.tokens * learned.calibration.factor)
        window = self._learned.window(sent.route, learned)
        if counted is None and window is not None and not overflow.decisive:
            return None  # it was not even counted, so small was it beside the window
        prior = Prior(counted, sent.output_tokens, window, sent.route.source in STATED, sent.is_text)
        checked = check_claim(overflow, prior)
        if checked is None or not checked.sure:
            return None
        return checked

    async def learn(self, view: View, overflow: Overflow) -> None:
        """Learn what *overflow* teaches, after *view* was refused with it."""
        if overflow.kind == "output_cap":
            return
        route, request = view.known.route, view.request
        located = await self._measurer.located(request)
        if located.envelope.stored:
            return
        counted = await self._seen_tokens_of(view, located)
        output = answer_reserve(located.envelope.requested_output, route.max_output, 0)
        sent = sent_prompt(view)
        if sent is not None:
            output = sent.output_tokens
        self._learned.learn_refusal(route, request.tenant, overflow, counted, output)

    async def smaller(self, view: View, overflow: Overflow, decide: Decide) -> View | None:
        """Something strictly smaller than *view* by what *overflow* states, each target as *decide* has it; else None.

        What *overflow* teaches should have been learned before.
        """
        if overflow.kind == "output_cap":
            return await self._with_less_output(view, overflow)
        request = view.request
        located = await self._measurer.located(request)
        if located.envelope.stored and self._measurer.policy.stored != "truncate":
            return None
        if located.envelope.stored:
            return with_truncation(located, view)
        sent = await self._tokens_of(view, located)
        known, window = self._known_after(view, overflow, sent)
        measured = await self._measurer.count(request, located, known, window)
        for target in retry_targets(overflow, self._measurer.policy.lower_output, sent):
            decision = await decide(structs.replace(measured, target=target))
            if isinstance(decision, Forward) and is_smaller(decision.view, view, sent):
                return _after(view, decision.view)
        return None

    def _known_after(self, view: View, overflow: Overflow, sent: int) -> tuple[KnownRoute, int]:
        """Return the route as known after *view* of *sent* tokens was refused, and the window to measure by."""
        known = self._known_route(view)
        stated = overflow.window
        # A figure too odd to be learned is still what this request was measured by.
        if stated is not None and (known.window is None or stated <= known.window):
            learned_stated = self._learned.stated_window(known.route, view.request.tenant)
            known = structs.replace(known, window=stated, window_source="learned", stated_window=learned_stated)
        ratio = max(known.token_ratio, (overflow.prompt or 0) / max(1, sent))
        window = known.window or UNKNOWN_WINDOW_SHARE * len(view.request.body)
        return structs.replace(known, token_ratio=ratio), window

    def _known_route(self, view: View) -> KnownRoute:
        """Return the route of *view* with what is known of it by now."""
        request, route = view.request, view.known.route
        cached = self._learned.get_cached(route, request.tenant)
        return self._learned.known_route(route, request.tenant, cached, request.options.window)

    async def _seen_tokens_of(self, view: View, located: LocatedBody) -> int | None:
        """Tokens of *view* by our own count; None if the provider counts input that is not in the body."""
        if located.envelope.has_unseen_input:
            return None
        return await self._tokens_of(view, located)

    async def _tokens_of(self, view: View, located: LocatedBody) -> int:
        """Tokens of *view* by our own count, counted now if it was not counted before it was sent."""
        if view.tokens is not None:
            return view.tokens
        return await self._measurer.tokens_of(view.request, located, view.known.route)

    async def _with_less_output(self, view: View, overflow: Overflow) -> View | None:
        """*view* with an output figure of at most what *overflow* allows; None if that is no less."""
        if overflow.limit is None:
            return None
        if view.lowered_output is not None and view.lowered_output <= overflow.limit:
            return None
        located = await self._measurer.located(structs.replace(view.request, body=view.body))
        return with_lower_output(located, view, overflow.limit)


def _after(refused: View, view: View) -> View:
    """*view*, sent after *refused*: the conversation's last view is the one before both."""
    if isinstance(refused, CountedView) and isinstance(view, CountedView):
        return structs.replace(view, edits=structs.replace(view.edits, previous=refused.edits.previous))
    return view

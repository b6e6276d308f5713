"""After an overflow: whether to believe it, what to learn from it, and a strictly smaller view to send."""

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
    Reject,
    UncountedView,
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
from proxy.engine.run import Run
from proxy.engine.stored_histories import StoredHistories

STATED = frozenset({"configured", "server", "request"})
"""Sources of a window that a person or the server stated; a table may be wrong about this server."""

UNKNOWN_WINDOW_SHARE = 2
"""Tokens per byte of the body in the window that is assumed if it is unknown. No body has so many: the window does not
limit the view, only ``SHRINK_SHARE`` does."""

Decide = Callable[[MeasuredRequest], Awaitable[FinalDecision]]


class Retries:
    """Judges refusals, learns from them, and makes smaller views by stages that call no model."""

    def __init__(self, measurer: Measurer, learned: LearnedRoutes) -> None:
        self._measurer = measurer
        self._learned = learned
        self._stored = StoredHistories()

    def may_retry(self, overflow: Overflow | None) -> bool:
        """True if a smaller view may be sent for *overflow*; every other error goes to the client."""
        return overflow is not None and retries_smaller(overflow, self._measurer.policy.lower_output)

    async def prior(self, view: View) -> Prior:
        """Return the facts of *view* with which an overflow that its reply claims is compared."""
        try:
            located = self._measurer.locate(view.request)
            counted = await self._comparable_tokens(view, located)
        except InvalidRequest:
            return Prior(body=view.body)  # a body that we cannot read was relayed, and may still be too long
        known = self._known_route(view)
        output = lowered_figure(view)
        if output is None:
            output = located.envelope.requested_output
        if counted is not None:
            counted = int(counted * known.token_ratio)
        is_text = not MEDIA.search(view.body)
        is_stated = known.window_source in STATED
        served = self._learned.served_lately(known.route, view.request.tenant)
        return Prior(counted, output, known.window, is_stated, is_text, view.body, served=served)

    def after_content(self, sent: SentPrompt, overflow: Overflow, usage: Usage) -> Overflow | None:
        """Return *overflow*, which came behind content, if it can be true of *sent* and is sure; else None."""
        learned = self._learned.get_cached(sent.route, sent.tenant)
        counted = usage.input_tokens
        if counted is None and sent.is_counted:
            counted = int(sent.tokens * learned.calibration.factor)
        window = self._learned.window(sent.route, learned)
        if counted is None and window is not None and not overflow.decisive:
            return None  # it was sent uncounted because its bytes alone showed that it fits
        served = self._learned.served_lately(sent.route, sent.tenant)
        is_stated = sent.route.source in STATED
        prior = Prior(counted, sent.output_tokens, window, is_stated, sent.is_text, served=served)
        checked = check_claim(overflow, prior)
        if checked is None or not checked.sure:
            return None
        return checked

    async def learn_if_sure(self, run: Run, view: View, overflow: Overflow) -> None:
        """Learn from *overflow* at once if it is sure, else once a smaller view has been answered (``run.unsure``)."""
        if overflow.sure and run.unsure is None:
            await self.learn(view, overflow)
        else:
            run.unsure = (view, overflow)

    async def learn(self, view: View, overflow: Overflow) -> None:
        """Learn from *overflow*, with which *view* was refused."""
        if overflow.kind == "output_cap":
            return
        route, request = view.known.route, view.request
        located = await self._measurer.located(request)
        # The provider adds the history that it stores, so the refusal is not about the tokens that were counted here.
        if located.envelope.stored:
            return
        counted = await self._comparable_tokens(view, located)
        output = answer_reserve(located.envelope.requested_output, route.max_output, 0)
        sent = sent_prompt(view)
        if sent is not None:
            output = sent.output_tokens
        self._learned.learn_refusal(route, request.tenant, overflow, counted, output)

    async def smaller(self, view: View, overflow: Overflow, decide: Decide) -> View | None:
        """Return a view strictly smaller than *view*, planned by *decide* for the figures of *overflow*; else None.

        ``learn`` has to come first, so that the route's window is the one after *overflow*.
        """
        if overflow.kind == "output_cap":
            return await self._with_less_output(view, overflow)
        request = view.request
        located = await self._measurer.located(request)
        if located.envelope.stored:
            truncated: View | None = None
            if self._measurer.policy.stored == "truncate":
                truncated = with_truncation(located, view)
            self._stored.refused(view, located, overflow, is_final=truncated is None)
            return truncated
        sent = await self._tokens_of(view, located)
        known, window = self._route_after(view, overflow, sent)
        measured = await self._measurer.count(request, located, known, window)
        for target in retry_targets(overflow, self._measurer.policy.lower_output, sent):
            decision = await decide(structs.replace(measured, target=target))
            if isinstance(decision, Forward) and is_smaller(decision.view, view, sent):
                return _after(view, decision.view)
        return None

    async def continued(self, decision: Forward | Reject) -> Forward | Reject:
        """Return *decision*, whose view continues a history that its upstream stores, as that may accept it.

        Raises ``StoredHistoryTooLong`` if the upstream has refused it before.
        """
        view = decision.view
        if isinstance(decision, Reject) or self._measurer.mode_of(view.request) != "on":
            return decision
        return Forward(self._stored.as_accepted(view, await self._measurer.located(view.request)))

    async def note_continued(self, view: View, head: bytes) -> None:
        """Note the response that begins in *head* and continues a history, so that its own continuation is known."""
        self._stored.answered(view, await self._measurer.located(view.request), head)

    def _route_after(self, view: View, overflow: Overflow, sent: int) -> tuple[KnownRoute, int]:
        """Return the route as known after *view* of *sent* tokens was refused, and the window to measure by."""
        known = self._known_route(view)
        stated = overflow.window
        # A stated limit counts for this request even if it is not plausible enough to be learned.
        if stated is not None and (known.window is None or stated <= known.window):
            learned_stated = self._learned.stated_window(known.route, view.request.tenant)
            known = structs.replace(known, window=stated, window_source="learned", stated_window=learned_stated)
        ratio = max(known.token_ratio, (overflow.prompt or 0) / max(1, sent))
        window = known.window or UNKNOWN_WINDOW_SHARE * len(view.request.body)
        return structs.replace(known, token_ratio=ratio), window

    def _known_route(self, view: View) -> KnownRoute:
        """Return the route of *view* with what is known of it by now."""
        request, route = view.request, view.known.route
        learned = self._learned.get_cached(route, request.tenant)
        return self._learned.known_route(route, request.tenant, learned, request.options.window)

    async def _comparable_tokens(self, view: View, located: LocatedBody) -> int | None:
        """Return the tokens of *view* by our own count; None if the provider counts input that is not in the body."""
        if located.envelope.has_unseen_input:
            return None
        return await self._tokens_of(view, located)

    async def _tokens_of(self, view: View, located: LocatedBody) -> int:
        """Return the tokens of *view* by our own count; an uncounted view is counted now."""
        if view.tokens is not None:
            return view.tokens
        return await self._measurer.tokens_of(located, view.known.route)

    async def _with_less_output(self, view: View, overflow: Overflow) -> View | None:
        """Return *view* with its output figure lowered to the limit of *overflow*; None if that is not lower."""
        if overflow.limit is None:
            return None
        lowered = lowered_figure(view)
        if lowered is not None and lowered <= overflow.limit:
            return None  # the refused request was as low already, so that the same one would follow
        located = await self._measurer.located(structs.replace(view.request, body=view.body))
        return with_lower_output(located, view, overflow.limit)


def lowered_figure(view: View) -> int | None:
    """Return the output figure that *view* was lowered to, in the provider's tokens; None if it was not lowered."""
    lowered = view.lowered_output
    if lowered is None or isinstance(view, UncountedView):
        return lowered
    return int(lowered * view.known.token_ratio)


def _after(refused: View, view: View) -> View:
    """Return *view*, sent after *refused*, with the compaction of the last view that was answered."""
    if isinstance(refused, CountedView) and isinstance(view, CountedView):
        return structs.replace(view, edits=structs.replace(view.edits, previous=refused.edits.previous))
    return view

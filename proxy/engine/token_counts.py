"""Answers ``count_tokens`` with the tokens of the view that would be sent. Nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import structs

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import count_body
from proxy.core.decisions import CountedView, Forward, Reject, View
from proxy.core.report import Report
from proxy.engine.learned_routes import LearnedRoutes
from proxy.engine.measuring import Measurer
from proxy.engine.ports import Answer
from proxy.engine.replies import LocalReply
from proxy.engine.run import Run
from proxy.engine.upstream_calls import UpstreamCalls

CountedBy = Literal["auto", "relay", "own"]
"""The source of the count. ``auto``: the upstream if it has such a route, else our own; ``relay``: always the upstream;
``own``: always our own."""

NO_ROUTE: Final = frozenset({404, 405, 501})
"""Statuses of upstreams that have no such route: https://docs.anthropic.com/en/api/messages-count-tokens is Anthropic's
own, and few other servers have it."""


class CountTokens:
    """Answers ``count_tokens`` from the source that *counted_by* names for each upstream."""

    def __init__(
        self,
        measurer: Measurer,
        learned: LearnedRoutes,
        calls: UpstreamCalls,
        counted_by: Mapping[str, CountedBy],
    ) -> None:
        self._measurer = measurer
        self._learned = learned
        self._calls = calls
        self._counted_by = counted_by

    async def answer(self, run: Run, decision: Forward | Reject, report: Report) -> Answer:
        """Answer with the upstream's count of the view, or with ours. For a refused request the body is counted.

        Raises what the upstream raises.
        """
        view = decision.view
        refused = isinstance(decision, Reject)
        if refused:
            view = structs.replace(view, body=view.request.body)
        is_gemini = view.request.api == gemini.API
        if is_gemini and isinstance(view, CountedView) and view.body != view.request.body:
            view = structs.replace(view, body=count_body(view.body, view.known.route.model))
        counted_by = self._counted_by.get(view.known.route.upstream, "auto")
        if counted_by != "own":
            reply = await self._calls.send_unwatched(run, view)
            if counted_by == "relay" or reply.status not in NO_ROUTE:
                return Answer(report, reply)
        tokens = report.tokens_after
        if tokens is None or report.bounded or refused:
            tokens = await self._own_count(view)
        run.drop()
        member = b"input_tokens"
        if is_gemini:
            member = b"totalTokens"
        return Answer(report, LocalReply(b'{"%b":%d}' % (member, tokens)))

    async def _own_count(self, view: View) -> int:
        """Return the tokens of the body of *view* by our own count, converted to the provider's."""
        counted = structs.replace(view.request, body=view.body)
        route = view.known.route
        tokens = await self._measurer.tokens_of(await self._measurer.located(counted), route)
        return int(tokens * self._learned.get_cached(route, counted.tenant).calibration.factor)

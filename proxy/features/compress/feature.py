"""Answers ``/v1/compress`` with the view that a request would have upstream. Nothing is sent anywhere.

The view is planned as that of any other request, and its compactions are recorded: the same conversation, sent
again with more items, has the same beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import structs

from proxy.core.decisions import API_FORMATS, Reject, UncountedView
from proxy.core.models import Route
from proxy.core.report import Report
from proxy.core.request import ALL_ITEMS, Origin, Request
from proxy.core.tokens.budget import answer_reserve
from proxy.engine.features import Feature, Planning
from proxy.engine.ports import Answer, Outcome, Refusal
from proxy.engine.reading import Reader
from proxy.engine.replies import LocalReply
from proxy.features.compress.body import UnusableBody, ViewRequest, answer_body, read_body
from proxy.features.opening import FeatureParts
from proxy.tasks import offload

API: Final = "compress"
"""The name of these requests in reports."""

ROW_KEEPERS: Final = ("litellm/",)
"""Prefixes of the ``User-Agent`` of gateways that replace each item that they sent by one of the view.

LiteLLM refuses an answer with another number of messages: ``_call_compress`` in its
``proxy/guardrails/guardrail_hooks/headroom/headroom.py``.
"""

ASSUMED_WINDOW: Final = 1_000_000_000
"""Tokens of the window that a request is counted in if no window is known: nothing has to be smaller."""


class Compress(Feature):
    """Answers requests for a view. *resolve* gives the route of a model."""

    purposes = frozenset({"compress"})

    def __init__(self, reader: Reader, resolve: Callable[[str], Route]) -> None:
        self._reader = reader
        self._resolve = resolve

    async def answer(self, request: Request, engine: Planning) -> Outcome | None:
        """Return the view of the request in the body, with its figures; None for any other request."""
        if request.purpose != "compress":
            return None
        try:
            view_request = await offload(len(request.body), read_body, request.body)
        except UnusableBody as error:
            report = Report(request.request_id, API, outcome="refused", reason=error.code)
            return Refusal(report, error, error.api)
        planned = await self._planned(request, view_request)
        decision, report = await engine.preview(planned)
        report = structs.replace(report, api=API, overhead_seconds=engine.run.overhead_so_far())
        if isinstance(decision, Reject):
            return Refusal(report, decision.error, view_request.api)
        view = decision.view
        if isinstance(view, UncountedView):
            measured = await engine.measure(planned, ASSUMED_WINDOW)
            tokens = int(measured.counts.total * measured.known.token_ratio)
            report = structs.replace(report, tokens_before=tokens, tokens_after=tokens, bounded=False)
        if view_request.target is not None and (report.tokens_after or 0) > view_request.target:
            refusal = UnusableBody(
                f"No view is smaller than {report.tokens_after} tokens: raise target.", view_request.api
            )
            return Refusal(structs.replace(report, outcome="refused", reason=refusal.code), refusal, view_request.api)
        body = await offload(len(view.body), answer_body, view.body, report)
        return Answer(report, LocalReply(body))

    async def _planned(self, request: Request, view_request: ViewRequest) -> Request:
        """Return the request to plan. It has no origin: nothing that we send may carry the caller's credentials."""
        options = request.options
        windows = [size for size in (options.window, view_request.window) if size is not None]
        if view_request.target is not None:
            windows.append(await self._window_of(view_request.target, request, view_request))
        keep_items = view_request.keep_items
        if keep_items is None:
            keep_items = _keeps_rows(request.origin)
        conversation = options.conversation
        if keep_items:
            conversation += ALL_ITEMS
        options = structs.replace(
            options,
            window=min(windows, default=None),
            compact_now=options.compact_now or view_request.share is not None,
            compact_to=view_request.share or options.compact_to,
            keep_items=keep_items,
            conversation=conversation,
        )
        return structs.replace(
            request,
            api=view_request.api,
            body=view_request.body,
            options=options,
            origin=None,
            path_model="",
            purpose="answer",
        )

    async def _window_of(self, target: int, request: Request, view_request: ViewRequest) -> int:
        """Return the window in which *target* tokens are left beside the answer."""
        envelope = (
            await self._reader.located(API_FORMATS[view_request.api], request.tenant, view_request.body)
        ).envelope
        most = self._resolve(envelope.model).max_output
        # Without a requested output an eighth of the window is reserved, so that *target* is seven eighths of it.
        return target + answer_reserve(envelope.requested_output, most, target * 8 // 7)


def _keeps_rows(origin: Origin | None) -> bool:
    """True if the caller is a gateway that needs as many items as it sent."""
    if origin is None:
        return False
    agents = [value.lower() for name, value in origin.headers if name.lower() == "user-agent"]
    return any(agent.startswith(ROW_KEEPERS) for agent in agents)


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature: it has no setting, and costs nothing but on its own route."""
    return [Compress(parts.reader, parts.resolve)]

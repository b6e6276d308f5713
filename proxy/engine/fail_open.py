"""Fail open: after a fault of our own a request is still answered, at the price of its compression.

The answer depends on how far the request had come:

    nothing was sent                  the client's own bytes are sent once
    a reply has begun                 that reply, with the bytes already read from it
    an overflow's reply was read      that first overflow's reply, as if there were no retries
    a stream is running               the watcher that failed is dropped, and the stream goes on (the server's observer,
                                      recall)

Nothing is retried and nothing is learned. An ``UllageError`` is no fault: the request was refused on purpose, or the
upstream failed. A cancellation is no fault either: the client has gone.
"""

from __future__ import annotations

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import path_for
from proxy.core.errors import UllageError
from proxy.core.models import Catalogue, Route
from proxy.core.report import INTERNAL_ERROR, Report
from proxy.core.request import Request
from proxy.engine.body_edits import renamed
from proxy.engine.measuring import Measurer
from proxy.engine.ports import Answer, Reply
from proxy.engine.quick_check import model_of
from proxy.engine.run import Run
from proxy.engine.upstream_calls import NO_ORIGIN, UpstreamCalls
from proxy.tasks import Faults

COUNT_TOKENS = "count_tokens"
"""The name of the API in reports on requests for a token count."""


class FailOpen:
    """Answers requests after a fault, with as little of our own code as possible."""

    def __init__(self, catalogue: Catalogue, measurer: Measurer, calls: UpstreamCalls, faults: Faults) -> None:
        self._catalogue = catalogue
        self._measurer = measurer
        self._calls = calls
        self._faults = faults

    async def pass_through(self, run: Run) -> Answer:
        """Return the reply that has begun, the first overflow's, or the reply to the client's own bytes.

        Raises what the upstream raises.
        """
        if run.request.purpose == "compress":
            raise UllageError  # such a request sends nothing
        if run.reply is not None:
            return self._unchanged_answer(run, run.reply, b"".join(run.chunks))
        if run.earlier_reply is not None:
            return self._unchanged_answer(run, *run.earlier_reply)
        upstream, model, body, path_qs = self._destination(run.request)
        reply = await self._calls.send_bytes(run, upstream, body, model, path_qs)
        return self._unchanged_answer(run, reply, b"")

    def _unchanged_answer(self, run: Run, reply: Reply, head: bytes) -> Answer:
        request = run.request
        api = request.api
        if request.purpose == "count":
            api = COUNT_TOKENS
        model = request.path_model or model_of(request.body)
        return Answer(
            Report(request.request_id, api, model, run.upstream, outcome="degraded", reason=INTERNAL_ERROR), reply, head
        )

    def _destination(self, request: Request) -> tuple[str, str, bytes, str]:
        """Return upstream, model's name, body and path. The input of a step that fails is used as it is."""
        attempt, name, path_qs = self._faults.attempt, request.request_id, (request.origin or NO_ORIGIN).path_qs
        model = request.path_model or attempt("request", name, lambda: model_of(request.body), "")
        route = self._plain_route(model, name)
        if route is None:
            return self._catalogue.default_upstream, model, request.body, path_qs
        if request.api == gemini.API:
            return route.upstream, route.requested_model, request.body, path_for(path_qs, route.model)
        if request.path_model or route.model == route.requested_model:
            return route.upstream, route.requested_model, request.body, path_qs

        def rename() -> bytes:
            return renamed(request.body, self._measurer.locate(request), route.model)

        return route.upstream, route.requested_model, attempt("request", name, rename, request.body), path_qs

    def _plain_route(self, model: str, request_id: str) -> Route | None:
        """Return the route of *model*; None if resolving it is what fails. Raises ``NotFound``."""
        try:
            return self._catalogue.resolve(model)
        except UllageError:
            raise
        except Exception as fault:  # noqa: BLE001 - the default upstream may still know the model
            self._faults.report("request", request_id, fault)
            return None

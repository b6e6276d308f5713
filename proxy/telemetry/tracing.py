"""Traces of managed requests for OpenTelemetry. Imported only if ``telemetry.traces`` is on: it needs ``ullage[otel]``.

The spans of a request, each with its parent::

    chat gpt-4o        SERVER    from the engine's beginning to the answer's last byte
      compaction       INTERNAL  until the view that is sent was ready, if it is the first with a new compaction; after
                                 an overflow from there
      wait             CLIENT    from sending a body to the head of its answer
      retry            CLIENT    the same for each further body
      summary          INTERNAL  a job that the request began; it may end later

While a request runs, only times and ids are recorded; ``proxy.telemetry.spans`` builds its spans from them and from its
report when they are exported. Environment variables, sampler and queue are the SDK's. A request that is not sampled
costs the sampler's decision only.

A client's ``traceparent`` is continued, and only then the upstream gets one: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.core.http_headers import NO_HEADERS
from proxy.core.report import Report, SummaryReport
from proxy.core.request import Request
from proxy.engine.ports import Exchange, Outcome, Reply, Upgradable, Upstream
from proxy.telemetry.spans import (
    CHAT,
    SCOPE,
    FinishedSpans,
    OtlpExporter,
    RequestTrace,
    UpstreamCall,
    add_request,
    add_summary,
)

EXPORT_SECONDS: Final = 2.0
"""Time for the last spans to leave when the process ends."""

TRACEPARENT: Final = "traceparent"

_PROPAGATOR: Final = TraceContextTextMapPropagator()

_NO_CONTEXT: Final = Context()
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

_CURRENT: ContextVar[RequestTrace | None] = ContextVar("ullage request trace", default=None)
"""The request that the running task works for; a background job keeps that of the request that began it."""


class Tracing:
    """Records requests that the sampler of *provider* selects, and queues their spans in *processor*.

    ``observe`` ends a request, ``summary`` adds the span of a summary job.
    """

    def __init__(self, provider: TracerProvider, processor: BatchSpanProcessor) -> None:
        self._decide = provider.sampler.should_sample
        self._ids = provider.id_generator
        self._processor = processor
        self._open: dict[str, RequestTrace] = {}

    def begin(self, request: Request) -> None:
        """Record the beginning of *request*, as a child of the span that its headers name, if it is sampled."""
        began, ids = time.time_ns(), self._ids
        context, client = _context_of(request)
        if client is None:
            trace_id, flags = ids.generate_trace_id(), _SAMPLED
        else:
            trace_id, flags = client.trace_id, TraceFlags(client.trace_flags | TraceFlags.SAMPLED)
        decided = self._decide(context, trace_id, CHAT, SpanKind.SERVER)
        opened = None
        if decided.decision is Decision.RECORD_AND_SAMPLE:
            own, state = ids.generate_span_id(), decided.trace_state
            opened = RequestTrace(trace_id, own, began, client, state, flags, dict(decided.attributes or {}))
            self._open[request.request_id] = opened
        _CURRENT.set(opened)  # None, too: a connection's task answers one request after another

    def begin_call(self, current: RequestTrace, target: str) -> UpstreamCall:
        """Record that a body of the *current* request is sent to *target* now."""
        call = UpstreamCall(self._ids.generate_span_id(), target, time.time_ns())
        current.calls.append(call)
        return call

    def observe(self, report: Report, duration: float) -> None:
        """End the spans of a finished request; *duration* in seconds."""
        del duration  # it counts from the request's first byte, the span from ``begin``
        opened = self._open.pop(report.request_id, None)
        if opened is not None:
            ended, compaction = time.time_ns(), 0
            if report.event:
                compaction = self._ids.generate_span_id()
            self._processor.on_end(FinishedSpans(lambda scope: add_request(scope, opened, report, ended, compaction)))

    def summary(self, report: SummaryReport) -> None:
        """Add the span of a summary job that ends now. Call it in the job's task, whose context names the request."""
        current = _CURRENT.get()
        if not report.calls or current is None:
            return
        own, ended = self._ids.generate_span_id(), time.time_ns()
        self._processor.on_end(FinishedSpans(lambda scope: add_summary(scope, current, own, report, ended)))

    def close(self) -> None:
        """Export the waiting spans, for ``EXPORT_SECONDS`` at most."""
        # In a thread that the process need not wait for: the exporter repeats its attempts if no collector answers.
        thread = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(EXPORT_SECONDS)


def _context_of(request: Request) -> tuple[Context, SpanContext | None]:
    """Return the context that the client's headers name, and the client's span; an empty one if they name none."""
    if request.origin is None or not _names_trace(request.origin.headers):
        return _NO_CONTEXT, None
    context = _PROPAGATOR.extract({name.lower(): value for name, value in request.origin.headers}, _NO_CONTEXT)
    client = trace.get_current_span(context).get_span_context()
    if not client.is_valid:
        return _NO_CONTEXT, None
    return context, client


def _names_trace(headers: Sequence[tuple[str, str]]) -> bool:
    """True if *headers* have a ``traceparent``."""
    # This runs twice for each request and all of its headers: comparing lengths first saves most of the calls.
    return TRACEPARENT in [name.lower() for name, _ in headers if len(name) == len(TRACEPARENT)]


class TracedExchange:
    """An engine whose requests are traced."""

    def __init__(self, engine: Exchange, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing

    def exchange(self, request: Request) -> Coroutine[Any, Any, Outcome]:
        """Answer *request* as the engine does."""
        self._tracing.begin(request)
        return self._engine.exchange(request)

    def pass_through(self, request: Request) -> Coroutine[Any, Any, Outcome]:
        """Send the client's own bytes as the engine does."""
        return self._engine.pass_through(request)


class TracedUpstream:
    """Upstreams whose calls are traced, if they are made for a traced request."""

    def __init__(self, upstream: Upstream, tracing: Tracing) -> None:
        self._upstream = upstream
        self._tracing = tracing

    def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterator[bytes] | None,
        added: Mapping[str, str] = NO_HEADERS,
    ) -> Coroutine[Any, Any, Reply]:
        """Return the reply; the upstream gets a ``traceparent`` if the client sent one."""
        current = _CURRENT.get()
        if current is None:
            return self._upstream.send(target, method, path_qs, headers, body, added)
        call = self._tracing.begin_call(current, target)
        if _names_trace(headers):
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(
                carrier, trace.set_span_in_context(NonRecordingSpan(current.context_of(call.id)), _NO_CONTEXT)
            )
            added = {**added, **carrier}
        return _timed(call, self._upstream.send(target, method, path_qs, headers, body, added))

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> Upgradable:
        """Return the reply to a request to leave HTTP, which is not traced."""
        return await self._upstream.upgrade(target, path_qs, headers)


async def _timed(call: UpstreamCall, sending: Coroutine[Any, Any, Reply]) -> Reply:
    """Return the reply of *sending*; record in *call* the time of its head and its status, or the error."""
    try:
        reply = await sending
    except BaseException as error:  # ``CancelledError``, too, if the client has disconnected
        call.error = type(error).__name__
        raise
    finally:
        call.ended = time.time_ns()
    call.status = reply.status
    return reply


def open_tracing(version: str) -> Tracing | None:
    """Return traces over OTLP/HTTP as the standard ``OTEL_*`` variables configure them; None if they disable traces.

    https://opentelemetry-python.readthedocs.io/en/stable/sdk/environment_variables.html
    """
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ullage"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if isinstance(provider.get_tracer(SCOPE), NoOpTracer):
        return None
    return Tracing(provider, BatchSpanProcessor(OtlpExporter(resource, version)))

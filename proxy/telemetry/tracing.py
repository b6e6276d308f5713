"""Traces of managed requests for OpenTelemetry. Imported only if ``telemetry.traces`` is on: it needs ``ullage[otel]``.

The spans of a request, each with its parent::

    chat gpt-4o        SERVER    from the engine's beginning to the answer's last byte
      compaction       INTERNAL  until the view that is sent was ready, if it is the first with a new compaction
      wait             CLIENT    from sending a body to the head of its answer
      retry            CLIENT    the same for each further body
      summary          INTERNAL  a job that the request began; it may end later

A span costs about as much as a small request's plan, most of it for turning it into OTLP: so there are no others, and
what one span says no other repeats. A request that is sampled out costs the sampler's decision only.

Names and attributes are those of the GenAI conventions 1.37, what Ullage did is in ``ullage.*``:
https://github.com/open-telemetry/semantic-conventions/blob/v1.37.0/docs/gen-ai/gen-ai-spans.md
No span holds a text of a conversation.

A client's ``traceparent`` is continued, and only then the upstream gets one: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from proxy.core.report import Report, SummaryReport
from proxy.core.request import Request
from proxy.engine.ports import Exchange, Outcome, Reply, Upgradable, Upstream

EXPORT_SECONDS: Final = 2.0
"""Time for the last spans to leave when the process ends."""

CHAT: Final = "chat"
"""The convention's name for what all the APIs do."""

PROVIDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"chat": "openai", "responses": "openai", "messages": "anthropic", "gemini": "gcp.gemini"}
)
"""The convention's provider by API: the one that the format is from, not the one that answers."""

TRACEPARENT: Final = "traceparent"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
SECOND: Final = 1_000_000_000

_PROPAGATOR: Final = TraceContextTextMapPropagator()

Attributes = dict[str, AttributeValue]


@dataclass(slots=True)
class RequestTrace:
    """The spans of one request under way.

    ``parent`` is the context of its own span, ``began`` its time in ns, ``sent`` that of the first body that was sent,
    ``calls`` the number of bodies.
    """

    span: Span
    parent: Context
    began: int
    sent: int = 0
    calls: int = 0


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("ullage request trace", default=None)
"""The request that the running task works for; a background job keeps that of the request that began it."""


class Tracing:
    """Makes spans with *tracer*. ``observe`` ends those of a request, ``summary`` adds that of a summary job."""

    def __init__(self, tracer: Tracer, provider: TracerProvider) -> None:
        self._tracer = tracer
        self._provider = provider
        self._open: dict[str, RequestTrace] = {}

    def begin(self, request: Request) -> None:
        """Begin the span of *request*, as a child of what its client's headers name, unless it is sampled out."""
        parent = _context_of(request)
        began = time.time_ns()
        span = self._tracer.start_span(CHAT, parent, SpanKind.SERVER, start_time=began)
        opened = None
        if span.is_recording():
            opened = RequestTrace(span, trace.set_span_in_context(span, parent), began)
            self._open[request.request_id] = opened
        _CURRENT.set(opened)  # also None: a connection's task answers one request after another

    def begin_call(self, target: str) -> Span | None:
        """Begin the span of a body that is sent to *target* now; None if it is sent for no traced request."""
        current = _CURRENT.get()
        if current is None:
            return None
        now, name = time.time_ns(), "retry"
        if not current.calls:
            current.sent, name = now, "wait"
        current.calls += 1
        return self._tracer.start_span(
            name, current.parent, SpanKind.CLIENT, {"ullage.upstream": target}, start_time=now
        )

    def observe(self, report: Report, duration: float) -> None:
        """End the spans of a finished request; *duration* in seconds."""
        del duration  # it began with the head of the request, before anything of it was known
        opened = self._open.pop(report.request_id, None)
        if opened is None:
            return
        if report.event and opened.sent:
            compaction = self._tracer.start_span(
                "compaction", opened.parent, attributes=_compaction(report), start_time=opened.began
            )
            compaction.end(opened.sent)
        span = opened.span
        span.update_name(f"{CHAT} {report.model}".strip())
        span.set_attributes(_facts(report))
        if report.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def summary(self, report: SummaryReport) -> None:
        """Add the span of a summary job that ends now. Call it where the job runs."""
        current = _CURRENT.get()
        if not report.calls or current is None:
            return
        now = time.time_ns()
        attributes: Attributes = {
            "gen_ai.operation.name": CHAT,
            "gen_ai.request.model": report.model,
            "gen_ai.usage.input_tokens": report.input_tokens,
            "gen_ai.usage.output_tokens": report.output_tokens,
            "ullage.upstream": report.upstream,
            "ullage.outcome": report.outcome,
            "ullage.reason": report.reason,
        }
        began = now - int(report.seconds * SECOND)
        self._tracer.start_span("summary", current.parent, attributes=attributes, start_time=began).end(now)

    def close(self) -> None:
        """Export what waits, for ``EXPORT_SECONDS`` at most."""
        # The exporter tries a collector that is gone again and again; the process must end all the same.
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(EXPORT_SECONDS)


def _context_of(request: Request) -> Context | None:
    """Return the context that the client's headers name; None if they name none."""
    if request.origin is None:
        return None
    carrier = {name.lower(): value for name, value in request.origin.headers}
    if TRACEPARENT not in carrier:
        return None
    return _PROPAGATOR.extract(carrier)


def _end_call(span: Span, status: int, error: str) -> None:
    """End the *span* of a call: the head of its answer has come with *status*, or an *error* in its place."""
    if status >= 400:
        span.set_attribute("http.response.status_code", status)
    if error or status >= 400:
        span.set_attribute("error.type", error or str(status))
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _facts(report: Report) -> Attributes:
    """Return the attributes of the request's span: the convention's, and what Ullage did."""
    usage, error = report.usage, None
    if report.status >= 400:
        error = str(report.status)
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": CHAT,
        "gen_ai.provider.name": PROVIDERS.get(report.api, report.api),
        "gen_ai.request.model": report.model,
        "gen_ai.conversation.id": report.conversation,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "http.response.status_code": report.status,
        "error.type": error,
        "ullage.request_id": report.request_id,
        "ullage.upstream": report.upstream,
        "ullage.outcome": report.outcome,
        "ullage.reason": report.reason,
        "ullage.agent": report.agent,
        "ullage.project": report.project,
        "ullage.window": report.window,
        "ullage.tokens_before": report.tokens_before,
        "ullage.tokens_after": report.tokens_after,
        "ullage.retries": report.retries or None,
        "ullage.overhead_ms": round(report.overhead_seconds * 1000, 3),
    }
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _compaction(report: Report) -> Attributes:
    return {"ullage.stages": list(report.stages), "ullage.tokens_removed": report.tokens_removed}


class TracedExchange:
    """An engine whose requests are traced."""

    def __init__(self, engine: Exchange, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing

    async def exchange(self, request: Request) -> Outcome:
        """Answer *request* as the engine does."""
        self._tracing.begin(request)
        return await self._engine.exchange(request)

    async def untouched(self, request: Request) -> Outcome:
        """Send the client's own bytes as the engine does."""
        return await self._engine.untouched(request)


class TracedUpstream:
    """Upstreams whose calls are traced, if they are made for a traced request."""

    def __init__(self, upstream: Upstream, tracing: Tracing) -> None:
        self._upstream = upstream
        self._tracing = tracing

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterator[bytes] | None,
        added: Mapping[str, str] = NOTHING,
    ) -> Reply:
        """Return the reply; the upstream gets a ``traceparent`` if the client sent one."""
        span = self._tracing.begin_call(target)
        if span is None:
            return await self._upstream.send(target, method, path_qs, headers, body, added)
        if any(name.lower() == TRACEPARENT for name, _ in headers):
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
            added = {**added, **carrier}
        try:
            reply = await self._upstream.send(target, method, path_qs, headers, body, added)
        except BaseException as error:  # also a client that left: the span tells it
            _end_call(span, 0, type(error).__name__)
            raise
        _end_call(span, reply.status, "")
        return reply

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> Upgradable:
        """Return the reply to a request to leave HTTP, which is not traced."""
        return await self._upstream.upgrade(target, path_qs, headers)


def open_tracing(version: str, exporter: SpanExporter | None = None) -> Tracing:
    """Return what the standard ``OTEL_*`` variables configure; without an *exporter* spans go out as OTLP over HTTP.

    https://opentelemetry-python.readthedocs.io/en/stable/sdk/environment_variables.html
    """
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ullage"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    return Tracing(provider.get_tracer("ullage", version), provider)

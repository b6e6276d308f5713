"""Traces of managed requests for OpenTelemetry. Imported only if ``telemetry.traces`` is on: it needs ``ullage[otel]``.

The spans of a request, each with its parent::

    chat gpt-4o        SERVER    from the engine's beginning to the answer's last byte
      compaction       INTERNAL  until the view that is sent was ready, if it is a smaller one
      chat gpt-4o      CLIENT    each time something was sent; from the second time on inside ``retry``
        wait           INTERNAL  until the head of the answer
      retry            INTERNAL  from the answer that was not passed on
      summary          INTERNAL  a job that the request began; it may end later

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
from dataclasses import dataclass, field
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
class Call:
    """One body that was sent: its span, its times in ns, and the ``retry`` around it if it was not the first."""

    span: Span
    began: int
    retry: Span | None = None
    answered: int = 0
    status: int = 0
    error: str = ""


@dataclass(slots=True)
class RequestTrace:
    """The spans of one request under way. ``parent`` is the context of its own span, ``began`` its time in ns."""

    span: Span
    parent: Context
    began: int
    calls: list[Call] = field(default_factory=list)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("ullage request trace", default=None)
"""The request that the running task works for; a background job keeps that of the request that began it."""


class Tracing:
    """Makes spans with *tracer*. ``observe`` ends those of a request, ``summary`` adds that of a summary job."""

    def __init__(self, tracer: Tracer, provider: TracerProvider) -> None:
        self._tracer = tracer
        self._provider = provider
        self._open: dict[str, RequestTrace] = {}

    def begin(self, request: Request) -> None:
        """Begin the span of *request*, as a child of what its client's headers name."""
        carrier: dict[str, str] = {}
        if request.origin is not None:
            carrier = {name.lower(): value for name, value in request.origin.headers}
        parent = _PROPAGATOR.extract(carrier)
        began = time.time_ns()
        span = self._tracer.start_span(CHAT, parent, SpanKind.SERVER, start_time=began)
        opened = RequestTrace(span, trace.set_span_in_context(span, parent), began)
        self._open[request.request_id] = opened
        _CURRENT.set(opened)

    def begin_call(self, target: str) -> Call | None:
        """Begin the span of a body that is sent to *target* now; None if it is sent for no traced request."""
        current = _CURRENT.get()
        if current is None:
            return None
        now, parent, retry = time.time_ns(), current.parent, None
        if current.calls:
            last = current.calls[-1]
            retry = self._tracer.start_span("retry", parent, start_time=last.answered or last.began)
            parent = trace.set_span_in_context(retry, parent)
        span = self._tracer.start_span(CHAT, parent, SpanKind.CLIENT, {"ullage.upstream": target}, start_time=now)
        call = Call(span, now, retry)
        current.calls.append(call)
        return call

    def observe(self, report: Report, duration: float) -> None:
        """End the spans of a finished request; *duration* in seconds."""
        del duration  # it began with the head of the request, before anything of it was known
        opened = self._open.pop(report.request_id, None)
        if opened is None:
            return
        now = time.time_ns()
        common = _common(report)
        for call, end in zip(opened.calls, _ends(opened.calls, now), strict=True):
            self._end_call(opened, call, end, common)
        if report.outcome == "compacted" and opened.calls:
            compaction = self._tracer.start_span(
                "compaction", opened.parent, attributes=_compaction(report), start_time=opened.began
            )
            compaction.end(opened.calls[0].began)
        span = opened.span
        span.update_name(_name(common))
        span.set_attributes({**common, **_facts(report)})
        if report.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

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

    def _end_call(self, opened: RequestTrace, call: Call, end: int, common: Attributes) -> None:
        """End the span of *call* and those around and inside it."""
        call.span.update_name(_name(common))
        call.span.set_attributes(common)
        if call.status:
            call.span.set_attribute("http.response.status_code", call.status)
        error = call.error or _error_type(call.status)
        if error:
            call.span.set_attribute("error.type", error)
            call.span.set_status(Status(StatusCode.ERROR))
        if call.answered:
            inside = trace.set_span_in_context(call.span, opened.parent)
            self._tracer.start_span("wait", inside, start_time=call.began).end(call.answered)
        call.span.end(end)
        if call.retry is not None:
            call.retry.end(end)


def _ends(calls: Sequence[Call], now: int) -> list[int]:
    """Return when each of *calls* ended: the last one with its answer's last byte, the others with their heads."""
    if not calls:
        return []
    return [*(call.answered or now for call in calls[:-1]), now]


def _common(report: Report) -> Attributes:
    """Return the convention's attributes of the request's span and of each call's."""
    attributes: Attributes = {
        "gen_ai.operation.name": CHAT,
        "gen_ai.provider.name": PROVIDERS.get(report.api, report.api),
        "gen_ai.request.model": report.model,
        "gen_ai.conversation.id": report.conversation,
    }
    return {name: value for name, value in attributes.items() if value}


def _error_type(status: int) -> str | None:
    """Return the convention's ``error.type`` of an HTTP status; None if it is no error."""
    if status < 400:
        return None
    return str(status)


def _name(common: Attributes) -> str:
    return f"{CHAT} {common.get('gen_ai.request.model', '')}".strip()


def _facts(report: Report) -> Attributes:
    """Return the attributes of the request's span about its answer and about what Ullage did."""
    usage = report.usage
    attributes: dict[str, AttributeValue | None] = {
        "http.response.status_code": report.status,
        "error.type": _error_type(report.status),
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "ullage.request_id": report.request_id,
        "ullage.upstream": report.upstream,
        "ullage.outcome": report.outcome,
        "ullage.reason": report.reason or None,
        "ullage.agent": report.agent or None,
        "ullage.project": report.project or None,
        "ullage.window": report.window,
        "ullage.tokens_before": report.tokens_before,
        "ullage.tokens_after": report.tokens_after,
        "ullage.retries": report.retries or None,
        "ullage.overhead_ms": round(report.overhead_seconds * 1000, 3),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _compaction(report: Report) -> Attributes:
    return {
        "ullage.stages": list(report.stages),
        "ullage.new": report.event,
        "ullage.tokens_removed": report.tokens_removed,
    }


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
        call = self._tracing.begin_call(target)
        if call is None:
            return await self._upstream.send(target, method, path_qs, headers, body, added)
        if any(name.lower() == TRACEPARENT for name, _ in headers):
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(call.span))
            added = {**added, **carrier}
        try:
            reply = await self._upstream.send(target, method, path_qs, headers, body, added)
        except BaseException as error:  # also a client that left: the span tells it
            call.error, call.answered = type(error).__name__, time.time_ns()
            raise
        call.status, call.answered = reply.status, time.time_ns()
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

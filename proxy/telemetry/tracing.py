"""Traces of managed requests for OpenTelemetry. Imported only if ``telemetry.traces`` is on: it needs ``ullage[otel]``.

The spans of a request, each with its parent::

    chat gpt-4o        SERVER    from the engine's beginning to the answer's last byte
      compaction       INTERNAL  until the view that is sent was ready, if it is the first with a new compaction
      wait             CLIENT    from sending a body to the head of its answer
      retry            CLIENT    the same for each further body
      summary          INTERNAL  a job that the request began; it may end later

While a request runs, only times and ids are noted. Its spans are made from them and from its report when they are
exported, as the SDK's ``ReadableSpan``: its recording spans, with their locks, limits and checks, take as much CPU as
half of a small request. Variables, sampler, queue and exporter are the SDK's. A request that is sampled out costs the
sampler's decision only. What one span says no other repeats, and each attribute costs its encoding: what stands in the
log line of ``ullage.request_id`` only is not here.

Names and attributes are those of the GenAI conventions 1.37, what Ullage did is in ``ullage.*``:
https://github.com/open-telemetry/semantic-conventions/blob/v1.37.0/docs/gen-ai/gen-ai-spans.md
No span holds a text of a conversation.

A client's ``traceparent`` is continued, and only then the upstream gets one: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
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

SCOPE: Final = "ullage"
"""The name of what makes the spans."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()

_NO_CONTEXT: Final = Context()
_UNSET, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

Attributes = dict[str, AttributeValue]


class UpstreamCall(msgspec.Struct):
    """A body that was sent: when, in ns, and where to; its *status*, or the type of the *error* in its place."""

    id: int
    target: str
    began: int
    ended: int = 0
    status: int = 0
    error: str = ""


class RequestTrace(msgspec.Struct):
    """A request under way; ``id`` is that of its own span, ``began`` its time in ns.

    ``parent`` is the client's span if its headers name one, ``state`` and ``flags`` those of the trace. The sampler may
    have given the request ``attributes``.
    """

    trace: int
    id: int
    began: int
    parent: SpanContext | None
    state: TraceState | None
    flags: TraceFlags
    attributes: Attributes
    calls: list[UpstreamCall] = []

    def context_of(self, span: int) -> SpanContext:
        """Return the context of the span of that id: its own, or that of a call, which the upstream is told."""
        return SpanContext(self.trace, span, is_remote=False, trace_flags=self.flags, trace_state=self.state)


class Span(msgspec.Struct):
    """A span as its request knows it; its times are in ns."""

    name: str
    kind: SpanKind
    context: SpanContext
    parent: SpanContext | None
    began: int
    ended: int
    attributes: Attributes
    failed: bool = False


class FinishedSpans(ReadableSpan):
    """Spans that wait for their export, and are made there by ``make``.

    The SDK's queue asks for the context only, to see that the trace is sampled. One of these stands for all spans of a
    request.
    """

    def __init__(self, make: Callable[[], Iterator[Span]]) -> None:
        self.make = make

    @property
    def context(self) -> SpanContext:
        """A context that is sampled."""
        return _SAMPLED


class SharedResource(Resource):
    """A resource whose hash is worked out once: the SDK writes JSON for it, and asks for it with each span."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Exporter(SpanExporter):
    """Makes the spans of finished requests, which are *resource*'s, and hands them to *exporter*."""

    def __init__(self, exporter: SpanExporter, resource: Resource, version: str) -> None:
        self._exporter = exporter
        self._resource = SharedResource(resource)
        self._scope = InstrumentationScope(SCOPE, version)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans of a batch; called by the SDK, on a thread of its own."""
        made = [self._made(span) for each in spans if isinstance(each, FinishedSpans) for span in each.make()]
        return self._exporter.export(made)

    def shutdown(self) -> None:
        """Try nothing again."""
        self._exporter.shutdown()

    def _made(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            span.context,
            span.parent,
            self._resource,
            span.attributes,
            kind=span.kind,
            instrumentation_scope=self._scope,
            status=_FAILED if span.failed else _UNSET,
            start_time=span.began,
            end_time=span.ended,
        )


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("ullage request trace", default=None)
"""The request that the running task works for; a background job keeps that of the request that began it."""


class Tracing:
    """Notes requests that the sampler of *provider* takes, and queues their spans in *processor*.

    ``observe`` ends a request, ``summary`` adds the span of a summary job.
    """

    def __init__(self, provider: TracerProvider, processor: BatchSpanProcessor) -> None:
        self._decide = provider.sampler.should_sample
        self._ids = provider.id_generator
        self._processor = processor
        self._open: dict[str, RequestTrace] = {}

    def begin(self, request: Request) -> None:
        """Note that *request* begins, as a child of what its client's headers name, unless it is sampled out."""
        began, ids = time.time_ns(), self._ids
        context, client = _context_of(request)
        if client is None:
            trace_id, flags = ids.generate_trace_id(), _SAMPLED.trace_flags
        else:
            trace_id, flags = client.trace_id, TraceFlags(client.trace_flags | TraceFlags.SAMPLED)
        decided = self._decide(context, trace_id, CHAT, SpanKind.SERVER)
        opened = None
        if decided.decision is Decision.RECORD_AND_SAMPLE:
            own, state = ids.generate_span_id(), decided.trace_state
            opened = RequestTrace(trace_id, own, began, client, state, flags, dict(decided.attributes or {}))
            self._open[request.request_id] = opened
        _CURRENT.set(opened)  # also None: a connection's task answers one request after another

    def begin_call(self, current: RequestTrace, target: str) -> UpstreamCall:
        """Note that a body of the *current* request is sent to *target* now."""
        call = UpstreamCall(self._ids.generate_span_id(), target, time.time_ns())
        current.calls.append(call)
        return call

    def observe(self, report: Report, duration: float) -> None:
        """End the spans of a finished request; *duration* in seconds."""
        del duration  # it began with the head of the request, before anything of it was known
        opened = self._open.pop(report.request_id, None)
        if opened is not None:
            ended, compaction = time.time_ns(), 0
            if report.event:
                compaction = self._ids.generate_span_id()
            self._processor.on_end(FinishedSpans(lambda: request_spans(opened, report, ended, compaction)))

    def summary(self, report: SummaryReport) -> None:
        """Add the span of a summary job that ends now. Call it where the job runs."""
        current = _CURRENT.get()
        if not report.calls or current is None:
            return
        span = summary_span(current, self._ids.generate_span_id(), report, time.time_ns())
        self._processor.on_end(FinishedSpans(lambda: iter((span,))))

    def close(self) -> None:
        """Export what waits, for ``EXPORT_SECONDS`` at most."""
        # The exporter tries a collector that is gone again and again; the process must end all the same.
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
    """Return True if there is a ``traceparent`` in *headers*. Each request asks this of all of its headers."""
    return TRACEPARENT in [name.lower() for name, _ in headers if len(name) == 11]


def request_spans(opened: RequestTrace, report: Report, ended: int, compaction: int) -> Iterator[Span]:
    """Yield the spans of a request that ended at *ended*, its own first; *compaction* is the id of such a span."""
    own, name = opened.context_of(opened.id), f"{CHAT} {report.model}".strip()
    facts = {**opened.attributes, **_facts(report)}
    yield Span(name, SpanKind.SERVER, own, opened.parent, opened.began, ended, facts, report.status >= 500)
    name = "wait"
    for call in opened.calls:
        context, until, error = opened.context_of(call.id), call.ended or ended, call.error
        facts = {"ullage.upstream": call.target}
        if call.status >= 400:
            error = str(call.status)
            facts["http.response.status_code"] = call.status
        if error:
            facts["error.type"] = error
        yield Span(name, SpanKind.CLIENT, context, own, call.began, until, facts, bool(error))
        name = "retry"
    if report.event and opened.calls:
        facts = {"ullage.stages": report.stages, "ullage.tokens_removed": report.tokens_removed}
        context, sent = opened.context_of(compaction), opened.calls[0].began
        yield Span("compaction", SpanKind.INTERNAL, context, own, opened.began, sent, facts)


def summary_span(opened: RequestTrace, own: int, report: SummaryReport, ended: int) -> Span:
    """Return the span of a summary job that ended at *ended* and was begun by a request."""
    facts: Attributes = {
        "gen_ai.operation.name": CHAT,
        "gen_ai.request.model": report.model,
        "gen_ai.usage.input_tokens": report.input_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "ullage.upstream": report.upstream,
        "ullage.outcome": report.outcome,
        "ullage.reason": report.reason,
    }
    began, context = ended - int(report.seconds * SECOND), opened.context_of(own)
    return Span("summary", SpanKind.INTERNAL, context, opened.context_of(opened.id), began, ended, facts)


_FACTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gen_ai.request.model": "model",
        "gen_ai.conversation.id": "conversation",
        "gen_ai.usage.input_tokens": "usage.input_tokens",
        "gen_ai.usage.output_tokens": "usage.output_tokens",
        "gen_ai.usage.cache_read.input_tokens": "usage.cached_tokens",
        "http.response.status_code": "status",
        "ullage.request_id": "request_id",
        "ullage.upstream": "upstream",
        "ullage.outcome": "outcome",
        "ullage.reason": "reason",
        "ullage.agent": "agent",
        "ullage.project": "project",
    }
)
"""Attributes of a request's span, the convention's first, each with the member of the report that it is."""

_READ_FACTS: Final = attrgetter(*_FACTS.values())


def _facts(report: Report) -> Attributes:
    """Return the attributes of the request's span: the convention's, and what Ullage did."""
    values = zip(_FACTS, _READ_FACTS(report), strict=True)
    facts: Attributes = {name: value for name, value in values if value is not None and value != ""}
    facts["gen_ai.operation.name"] = CHAT
    facts["gen_ai.provider.name"] = PROVIDERS.get(report.api, report.api)
    if report.status >= 400:
        facts["error.type"] = str(report.status)
    if report.retries:
        facts["ullage.retries"] = report.retries
    if report.tokens_removed:
        facts["ullage.tokens_before"] = report.tokens_before or 0
        facts["ullage.tokens_after"] = report.tokens_after or 0
    return facts


class TracedExchange:
    """An engine whose requests are traced."""

    def __init__(self, engine: Exchange, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing

    def exchange(self, request: Request) -> Coroutine[Any, Any, Outcome]:
        """Answer *request* as the engine does."""
        self._tracing.begin(request)
        return self._engine.exchange(request)

    def untouched(self, request: Request) -> Coroutine[Any, Any, Outcome]:
        """Send the client's own bytes as the engine does."""
        return self._engine.untouched(request)


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
        added: Mapping[str, str] = NOTHING,
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
        return _noted(call, self._upstream.send(target, method, path_qs, headers, body, added))

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> Upgradable:
        """Return the reply to a request to leave HTTP, which is not traced."""
        return await self._upstream.upgrade(target, path_qs, headers)


async def _noted(call: UpstreamCall, sending: Coroutine[Any, Any, Reply]) -> Reply:
    """Return the reply of *sending*, and note in *call* when its head came, and its status."""
    try:
        reply = await sending
    except BaseException as error:  # also a client that left: the span tells it
        call.error = type(error).__name__
        raise
    finally:
        call.ended = time.time_ns()
    call.status = reply.status
    return reply


def open_tracing(version: str, exporter: SpanExporter | None = None) -> Tracing | None:
    """Return what the standard ``OTEL_*`` variables configure, None if they disable it.

    Without an *exporter* spans go out as OTLP over HTTP.
    https://opentelemetry-python.readthedocs.io/en/stable/sdk/environment_variables.html
    """
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ullage"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if isinstance(provider.get_tracer(SCOPE), NoOpTracer):
        return None
    processor = BatchSpanProcessor(Exporter(exporter or OTLPSpanExporter(), resource, version))
    return Tracing(provider, processor)

"""The spans of finished requests as OTLP's messages, and their export. Imported by ``proxy.telemetry.tracing`` only.

The SDK would create a recording span of each, and its exporter a second object and one message for each attribute: that
takes as much CPU as half of a small request. Here a request's spans become messages when their batch is exported.
Requests of one kind share most attributes, so those are encoded once (``_common_span``) and merged into each span in
one step. The messages are those of OpenTelemetry's own package; queue, retries and HTTP are the SDK's.

Each attribute costs its encoding, so no span repeats an attribute of another, and fields that are only of use in the
log are not here: ``ullage.request_id`` leads to the log line. No span has a text of a conversation.

Names and attributes are those of the GenAI conventions 1.37; those of Ullage begin with ``ullage.``:
https://github.com/open-telemetry/semantic-conventions/blob/v1.37.0/docs/gen-ai/gen-ai-spans.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from proxy.core.report import Report, SummaryReport

CHAT: Final = "chat"
"""The convention's name of the operation, which is the same for all APIs."""

PROVIDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"chat": "openai", "responses": "openai", "messages": "anthropic", "gemini": "gcp.gemini"}
)
"""The convention's provider by API: the one that defined the API, not the one that answers."""

SCOPE: Final = "ullage"
"""The name of the instrumentation scope: https://opentelemetry.io/docs/concepts/instrumentation-scope/"""

LONGEST_TEXT: Final = 200
"""Characters of an attribute: clients choose the names of models and projects."""

LARGEST_FIGURE: Final = 2**63 - 1
"""OTLP's integers have 64 bits; an upstream may report any ``usage``."""

MOST_KINDS: Final = 512
"""Kinds of requests whose common attributes stay encoded, a few hundred bytes each."""

SECOND: Final = 1_000_000_000

_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_LOCAL: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_FAILED: Final = Status(code=Status.STATUS_CODE_ERROR)

Attributes = Mapping[str, AttributeValue]


class UpstreamCall(msgspec.Struct):
    """A body that was sent to ``target``; times in Unix ns. Without an answer ``error`` is the exception's type."""

    id: int
    target: str
    began: int
    ended: int = 0
    status: int = 0
    error: str = ""


class RequestTrace(msgspec.Struct):
    """A request under way; ``id`` is that of its own span, ``began`` the time of its beginning in Unix nanoseconds.

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
        """Return the context of the span of that id: the request's own, or that of a call, which is sent upstream."""
        return SpanContext(self.trace, span, is_remote=False, trace_flags=self.flags, trace_state=self.state)


class FinishedSpans(ReadableSpan):
    """Spans that wait for their export, where ``add_to`` adds them to the messages of their batch.

    The SDK's queue only reads the context, to check that the trace is sampled. One instance is for all spans of a
    request.
    """

    def __init__(self, add_to: Callable[[ScopeSpans], None]) -> None:
        self.add_to = add_to

    @property
    def context(self) -> SpanContext:
        """A context that is sampled."""
        return _SAMPLED


class OtlpExporter(OTLPSpanExporter):
    """Encodes the spans of finished requests, which are *resource*'s; sends them as the ``OTEL_*`` variables say."""

    def __init__(self, resource: Resource, version: str) -> None:
        super().__init__()
        scope = ScopeSpans(scope=InstrumentationScope(name=SCOPE, version=version))
        whole = ResourceSpans(scope_spans=[scope], schema_url=resource.schema_url)
        for name, value in resource.attributes.items():
            _add_attribute(whole.resource.attributes, name, value)
        self._beginning = ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans of a batch; called by the SDK, on a thread of its own."""
        message = ExportTraceServiceRequest.FromString(self._beginning)
        scope = message.resource_spans[0].scope_spans[0]
        for span in spans:
            if isinstance(span, FinishedSpans):
                span.add_to(scope)
        if self.send(message.SerializeToString()):
            return SpanExportResult.SUCCESS
        return SpanExportResult.FAILURE

    def send(self, message: bytes) -> bool:
        """Return True if the collector took *message*. Failures that may pass are tried again for a while."""
        # The library has no public method for encoded messages, so pyproject.toml holds its minor version.
        return self._client.export(message).success


def add_request(scope: ScopeSpans, opened: RequestTrace, report: Report, ended: int, compaction: int) -> None:
    """Add the spans of a request that ended at *ended*, its own first; *compaction* is the id of such a span."""
    common = _common_span(*_READ_COMMON(report))
    span = _add_span(scope, common, opened, opened.id, opened.began, ended)
    parent = opened.parent
    if parent is not None:
        span.parent_span_id = parent.span_id.to_bytes(8, "big")
        span.flags = _REMOTE
    _add_own_attributes(span, report)
    for name, value in opened.attributes.items():
        _add_attribute(span.attributes, name, value)
    own, name = opened.id, "wait"
    for call in opened.calls:
        common = _call_span(name, call.target, call.status, call.error)
        _add_span(scope, common, opened, call.id, call.began, call.ended or ended, own)
        name = "retry"
    if report.event and opened.calls:
        began, sent = _compaction_times(opened, report.overflows)
        span = _add_span(scope, _COMPACTION, opened, compaction, began, sent, own)
        _add_attribute(span.attributes, "ullage.stages", report.stages)
        _add_attribute(span.attributes, "ullage.tokens_removed", report.tokens_removed)


def _compaction_times(opened: RequestTrace, overflows: int) -> tuple[int, int]:
    """Return when the answered view's compaction began and ended: before the first call, or after the last overflow."""
    last = min(overflows, len(opened.calls) - 1)
    if last < 1:
        return opened.began, opened.calls[0].began
    return opened.calls[last - 1].ended, opened.calls[last].began


def add_summary(scope: ScopeSpans, opened: RequestTrace, own: int, report: SummaryReport, ended: int) -> None:
    """Add the span of a summary job that ended at *ended* and was begun by a request."""
    attributes: Attributes = {
        "gen_ai.operation.name": CHAT,
        "gen_ai.request.model": report.model,
        "gen_ai.usage.input_tokens": report.input_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "ullage.upstream": report.upstream,
        "ullage.outcome": report.outcome,
        "ullage.reason": report.reason,
    }
    began = ended - int(report.seconds * SECOND)
    span = _add_span(scope, _SUMMARY, opened, own, began, ended, opened.id)
    for name, value in attributes.items():
        _add_attribute(span.attributes, name, value)


def _add_span(
    scope: ScopeSpans, common: bytes, opened: RequestTrace, own: int, began: int, ended: int, parent: int = 0
) -> Span:
    """Add the span *own* with the encoded attributes *common*, as a child of the span *parent*, and return it."""
    span: Span = scope.spans.add(
        trace_id=opened.trace.to_bytes(16, "big"),
        span_id=own.to_bytes(8, "big"),
        start_time_unix_nano=began,
        end_time_unix_nano=ended,
    )
    span.MergeFromString(common)
    if parent:
        span.parent_span_id = parent.to_bytes(8, "big")
    if opened.state:
        span.trace_state = opened.state.to_header()
    return span


_COMMON: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gen_ai.request.model": "model",
        "http.response.status_code": "status",
        "ullage.upstream": "upstream",
        "ullage.outcome": "outcome",
        "ullage.reason": "reason",
        "ullage.agent": "agent",
        "ullage.project": "project",
    }
)
"""Attributes that requests of one kind share, each with the attribute of the report that it comes from."""

_READ_COMMON: Final = attrgetter("api", *_COMMON.values())

_OWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ullage.request_id": "request_id",
        "gen_ai.conversation.id": "conversation",
        "gen_ai.usage.input_tokens": "usage.input_tokens",
        "gen_ai.usage.output_tokens": "usage.output_tokens",
        "gen_ai.usage.cache_read.input_tokens": "usage.cached_tokens",
    }
)
"""Attributes that differ for each request, likewise."""

_READ_OWN: Final = attrgetter(*_OWN.values())


@lru_cache(maxsize=MOST_KINDS)
def _common_span(api: str, model: str, status: int, *names: str) -> bytes:
    """Return an encoded span with the attributes that requests of one kind share, in the order of ``_READ_COMMON``."""
    values: tuple[str | int, ...] = (model, status, *names)
    attributes: dict[str, AttributeValue] = {
        name: value for name, value in zip(_COMMON, values, strict=True) if value != ""
    }
    attributes["gen_ai.operation.name"] = CHAT
    attributes["gen_ai.provider.name"] = PROVIDERS.get(api, api)
    if status >= 400:
        attributes["error.type"] = str(status)
    name = f"{CHAT} {_text(model)}".strip()
    return _encoded(name, Span.SPAN_KIND_SERVER, attributes, failed=status >= 500)


def _add_own_attributes(span: Span, report: Report) -> None:
    """Add the attributes of the request's span that no other request has."""
    for name, value in zip(_OWN, _READ_OWN(report), strict=True):
        if value is not None and value != "":
            _add_attribute(span.attributes, name, value)
    if report.retries:
        _add_attribute(span.attributes, "ullage.retries", report.retries)
    if report.tokens_removed:
        _add_attribute(span.attributes, "ullage.tokens_before", report.tokens_before or 0)
        _add_attribute(span.attributes, "ullage.tokens_after", report.tokens_after or 0)


@lru_cache(maxsize=MOST_KINDS)
def _call_span(name: str, target: str, status: int, error: str) -> bytes:
    """Return an encoded span for a call of *target* that was answered with *status*, or failed with *error*."""
    attributes: dict[str, AttributeValue] = {"ullage.upstream": target}
    if status >= 400:
        error = str(status)
        attributes["http.response.status_code"] = status
    if error:
        attributes["error.type"] = error
    return _encoded(name, Span.SPAN_KIND_CLIENT, attributes, failed=bool(error))


def _encoded(name: str, kind: Span.SpanKind.ValueType, attributes: Attributes, *, failed: bool = False) -> bytes:
    """Return an encoded span with all but its ids and times."""
    span = Span(name=name, kind=kind, flags=_LOCAL)
    for key, value in attributes.items():
        _add_attribute(span.attributes, key, value)
    if failed:
        span.status.CopyFrom(_FAILED)
    encoded: bytes = span.SerializeToString()
    return encoded


_COMPACTION: Final = _encoded("compaction", Span.SPAN_KIND_INTERNAL, {})
_SUMMARY: Final = _encoded("summary", Span.SPAN_KIND_INTERNAL, {})


def _add_attribute(attributes: Any, name: str, value: AttributeValue) -> None:
    """Add an attribute to *attributes*, which is a message's list of them."""
    _set_value(attributes.add(key=name).value, value)


def _set_value(attribute: AnyValue, value: AttributeValue) -> None:
    """Set *attribute* to *value*, within the limits of OTLP."""
    match value:
        case str():
            attribute.string_value = _text(value)
        case bool():
            attribute.bool_value = value
        case int():
            attribute.int_value = max(-LARGEST_FIGURE, min(value, LARGEST_FIGURE))
        case float():
            attribute.double_value = value
        case Sequence():
            for element in value:
                _set_value(attribute.array_value.values.add(), element)
        case _:  # of a sampler only: nothing, or a mapping
            attribute.string_value = _text(str(value))


def _text(text: str) -> str:
    """Return *text*, short, with lone surrogates replaced: a text that cannot be encoded would lose its whole batch."""
    return text[:LONGEST_TEXT].encode("utf-8", "replace").decode()

"""Spans as they go out: OTLP's messages, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource

from proxy.telemetry.spans import OtlpExporter


def plain(value: AnyValue) -> Any:
    """An attribute's value as Python has it."""
    if value.HasField("array_value"):
        return tuple(plain(each) for each in value.array_value.values)
    return getattr(value, value.WhichOneof("value"))


@dataclass(frozen=True)
class Exported:
    """A span as it went out; ``resource`` and ``scope`` are those that it stood under."""

    span: Span
    resource: Mapping[str, Any]
    scope: tuple[str, str]

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: plain(pair.value) for pair in self.span.attributes}

    @property
    def name(self) -> str:
        return f"{Span.SpanKind.Name(self.span.kind).removeprefix('SPAN_KIND_')} {self.span.name}"

    @property
    def times(self) -> tuple[int, int]:
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def has_remote_parent(self) -> bool:
        return bool(self.span.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)


class Collected(OtlpExporter):
    """An exporter whose messages a collector would get; they are here instead."""

    def __init__(self, resource: Resource, version: str = "1") -> None:
        super().__init__(resource, version)
        self.messages: list[bytes] = []

    def send(self, message: bytes) -> bool:
        self.messages.append(message)
        return True


def decoded(messages: Sequence[bytes]) -> list[Exported]:
    """The spans of *messages*."""
    exported = []
    for message in messages:
        (whole,) = ExportTraceServiceRequest.FromString(message).resource_spans
        resource = {pair.key: plain(pair.value) for pair in whole.resource.attributes}
        (scope,) = whole.scope_spans
        exported += [Exported(span, resource, (scope.scope.name, scope.scope.version)) for span in scope.spans]
    return exported

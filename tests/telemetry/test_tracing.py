"""Traces through the real engine and the real SDK: which spans there are, when, and what they say."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_OFF, Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode

from proxy.core.report import Report, SummaryReport, Usage
from proxy.core.request import Origin, Request
from proxy.engine.ports import Answer
from proxy.telemetry.tracing import EXPORT_SECONDS, Exporter, TracedExchange, TracedUpstream, Tracing, open_tracing
from tests.support.engine_fixtures import TENANT, chat_body
from tests.support.sample_conversations import prose
from tests.support.scripted_upstream import (
    TOO_LONG,
    EngineFixture,
    ScriptedReply,
    agent_body,
    upstream_replying,
)
from tests.telemetry.test_golden import COMPACTED

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
CANARY = "CANARY"


class Traced:
    """An engine with traces around it, and the spans that have ended."""

    def __init__(self, *replies: ScriptedReply, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(Exporter(self.exporter, Resource({}), "1"))
        self.tracing = Tracing(provider, self._processor)
        fixture = EngineFixture()
        self.upstream = Recording(*replies)
        fixture.switch.upstream = TracedUpstream(self.upstream, self.tracing)
        self.exchange = TracedExchange(fixture.engine, self.tracing)

    async def ask(
        self, body: bytes, headers: tuple[tuple[str, str], ...] = (), **facts: Any
    ) -> dict[str, ReadableSpan]:
        """Answer a request, report it, and return its spans by name; further ones of a name have a number."""
        self.finished()
        self.exporter.clear()
        origin = Origin("/v1/chat/completions", headers)
        outcome = await self.exchange.exchange(Request("chat", body, TENANT, "r1", origin=origin))
        status = outcome.reply.status if isinstance(outcome, Answer) else outcome.error.status
        self.tracing.observe(outcome.report.with_(status=status, **facts), 0.1)
        return self.spans()

    def finished(self) -> tuple[ReadableSpan, ...]:
        self._processor.force_flush()
        return self.exporter.get_finished_spans()

    def spans(self) -> dict[str, ReadableSpan]:
        by_name: dict[str, ReadableSpan] = {}
        for span in sorted(self.finished(), key=lambda span: span.start_time or 0):
            name = f"{span.kind.name} {span.name}"
            by_name[f"{name} {sum(key.startswith(name) for key in by_name)}" if name in by_name else name] = span
        return by_name


class Recording:
    """An upstream that replies in turn and keeps the headers that were added."""

    def __init__(self, *replies: ScriptedReply) -> None:
        self.added: list[dict[str, str]] = []
        self._upstream = upstream_replying(*replies)

    async def send(self, target: str, method: str, path_qs: str, headers: Any, body: Any, added: Any = ()) -> Any:
        self.added.append(dict(added))
        return await self._upstream.send(target, method, path_qs, headers, body)

    async def upgrade(self, target: str, path_qs: str, headers: Any) -> Any:
        return await self._upstream.upgrade(target, path_qs, headers)


OK = ScriptedReply(200, [b"{}"])
SERVER, WAIT, RETRY = "SERVER chat gpt-4o", "CLIENT wait", "CLIENT retry"


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    return child.parent is not None and child.parent.span_id == parent.context.span_id


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_a_request_has_its_spans() -> None:
    """One for the request with GenAI's names, and inside it one for the wait until the answer's head."""
    body = chat_body([{"role": "user", "content": CANARY}], model="gpt-4o")
    spans = await Traced(OK).ask(body, usage=Usage(90, 12, 40), agent="codex", conversation="c")
    assert set(spans) == {SERVER, WAIT}
    server, wait = spans[SERVER], spans[WAIT]
    assert is_child(wait, server)
    assert server.parent is None
    assert times(server)[0] <= times(wait)[0] <= times(wait)[1] <= times(server)[1]
    assert wait.attributes == {"ullage.upstream": "stub"}
    assert server.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-4o",
        "gen_ai.conversation.id": "c", "gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 40, "http.response.status_code": 200, "ullage.agent": "codex",
        "ullage.outcome": "verbatim", "ullage.upstream": "stub",
    }  # fmt: skip
    assert expected.items() <= server.attributes.items()
    assert CANARY not in "".join(span.to_json() for span in spans.values())


async def test_a_compaction_is_a_child() -> None:
    """It lies between the beginning of the request and the call, and names its stages."""
    spans = await Traced(OK).ask(agent_body(20_000, model="gpt-4o"))
    compaction = spans["INTERNAL compaction"]
    assert is_child(compaction, spans[SERVER])
    assert times(compaction) == (times(spans[SERVER])[0], times(spans[WAIT])[0])
    assert compaction.attributes is not None
    assert compaction.attributes["ullage.stages"] == ("fold",)


async def test_a_view_that_was_made_before_is_no_compaction() -> None:
    """Requests that follow a compaction send its view again: their own span has the tokens before and after."""
    traced = Traced(OK, OK)
    body = agent_body(20_000, model="gpt-4o")
    await traced.ask(body)
    spans = await traced.ask(body)
    assert set(spans) == {SERVER, WAIT}
    assert spans[SERVER].attributes is not None
    assert spans[SERVER].attributes["ullage.outcome"] == "compacted"
    assert spans[SERVER].attributes["ullage.tokens_before"] > spans[SERVER].attributes["ullage.tokens_after"]


async def test_each_retry_has_its_spans() -> None:
    """A refusal ends its own call with its status; what is sent after it is a retry."""
    traced = Traced(ScriptedReply(400, [TOO_LONG]), OK)
    spans = await traced.ask(agent_body(6_000, model="gpt-4o"))
    first, second = spans[WAIT], spans[RETRY]
    assert is_child(first, spans[SERVER])
    assert is_child(second, spans[SERVER])
    assert first.attributes is not None
    assert (first.attributes["http.response.status_code"], first.attributes["error.type"]) == (400, "400")
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET
    assert times(first)[1] <= times(second)[0]
    assert spans[SERVER].attributes is not None
    assert spans[SERVER].attributes["ullage.retries"] == 1


async def test_a_refusal_of_ours_has_a_span_without_a_call() -> None:
    """Nothing was sent, and the client's error is no error of the server."""
    spans = await Traced(OK).ask(chat_body([{"role": "system", "content": prose(1, 9_000)}], model="gpt-4o"))
    assert set(spans) == {SERVER}
    assert spans[SERVER].attributes is not None
    assert spans[SERVER].attributes["error.type"] == "400"
    assert spans[SERVER].status.status_code is StatusCode.UNSET


async def test_a_clients_trace_is_continued() -> None:
    """The request is a child of the client's span; the upstream gets the call's name in its place, with the state."""
    traced = Traced(OK)
    headers = (("Traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
    spans = await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"), headers)
    parent = spans[SERVER].parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert parent.is_remote
    wait = spans[WAIT].context
    assert spans[WAIT].parent is not None
    assert not spans[WAIT].parent.is_remote
    assert {span.context.trace_state.to_header() for span in spans.values()} == {"vendor=1"}
    assert traced.upstream.added == [{"traceparent": f"00-{TRACE}-{wait.span_id:016x}-01", "tracestate": "vendor=1"}]


@pytest.mark.parametrize("headers", [(), (("traceparent", "nonsense"),)])
async def test_without_a_clients_trace_none_is_invented_upstream(headers: tuple[tuple[str, str], ...]) -> None:
    """The request begins a trace of its own; an upstream that was told of none still is not."""
    traced = Traced(OK)
    spans = await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"), headers)
    assert spans[SERVER].parent is None
    assert bool(traced.upstream.added[0]) is bool(headers)


@pytest.mark.parametrize("headers", [(), (("traceparent", TRACEPARENT),)])
async def test_a_request_that_is_sampled_out_costs_one_decision(headers: tuple[tuple[str, str], ...]) -> None:
    """It has no span, no call of it either, and what the client said of its trace goes on as it came."""
    traced = Traced(OK, sampler=ALWAYS_OFF)
    assert await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"), headers) == {}
    assert traced.upstream.added == [{}]


async def test_one_task_answers_traced_and_other_requests() -> None:
    """A request of a connection that is sampled out is no part of the one before it, which was traced."""
    traced = Traced(OK, OK, sampler=DEFAULT_OFF)
    body = chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o")
    assert set(await traced.ask(body, (("traceparent", TRACEPARENT),))) == {SERVER, WAIT}
    assert await traced.ask(body) == {}


async def test_a_summary_belongs_to_the_request_that_began_it() -> None:
    """Its span ends where the job does; a job that called no model, or that no request began, has none."""
    traced = Traced(OK)
    server = (await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o")))[SERVER]
    traced.tracing.summary(SummaryReport("written", "", "t", "small", "up", 2, 900, 80, 1.5))
    traced.tracing.summary(SummaryReport("skipped", "budget", "t", "small", "up"))
    summary = traced.spans()["INTERNAL summary"]
    assert is_child(summary, server)
    assert summary.attributes is not None
    assert summary.attributes["gen_ai.usage.output_tokens"] == 80
    began, ended = times(summary)
    assert (ended - began) // 1_000_000 == 1500
    assert len(traced.finished()) == 3


async def test_an_upstream_that_fails_is_named() -> None:
    """The exception's type is the error of the call; the request's span says what the client got."""
    traced = Traced(OK)

    async def fail(*_: object) -> None:
        raise ConnectionResetError("CANARY")

    traced.upstream.send = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ConnectionResetError):
        await traced.exchange.exchange(Request("chat", b'{"model":"m","messages":[]}', TENANT, "r1"))
    assert SERVER not in traced.spans(), "it ends with the request's report"
    traced.tracing.observe(Report("r1", "chat", model="gpt-4o", status=502, reason="upstream_unreachable"), 0.1)
    spans = traced.spans()
    assert spans[WAIT].attributes is not None
    assert spans[WAIT].attributes["error.type"] == "ConnectionResetError"
    assert spans[SERVER].status.status_code is StatusCode.ERROR
    assert CANARY not in "".join(span.to_json() for span in spans.values())


def test_reports_of_other_requests_are_no_spans() -> None:
    """A relayed request was never begun, and is not ended."""
    traced = Traced(OK)
    traced.tracing.observe(COMPACTED, 0.1)
    assert traced.spans() == {}


@pytest.fixture
def no_otel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def opened(exporter: InMemorySpanExporter) -> Tracing:
    tracing = open_tracing("1.2", exporter)
    assert tracing is not None
    return tracing


def ask_once(tracing: Tracing) -> None:
    tracing.begin(Request("chat", b"", TENANT, "r1"))
    tracing.observe(COMPACTED.with_(request_id="r1"), 0.1)
    tracing.close()


@pytest.mark.parametrize(("name", "service"), [(None, "ullage"), ("mine", "mine")])
def test_the_standard_variables_hold(no_otel: pytest.MonkeyPatch, name: str | None, service: str) -> None:
    """The service is called ullage unless a variable says otherwise; OTEL_RESOURCE_ATTRIBUTES stand beside it."""
    if name:
        no_otel.setenv("OTEL_SERVICE_NAME", name)
    no_otel.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    exporter = InMemorySpanExporter()
    ask_once(opened(exporter))
    (span,) = exporter.get_finished_spans()
    assert span.kind is SpanKind.SERVER
    expected = {"service.name": service, "service.version": "1.2", "deployment.environment": "test"}
    assert expected.items() <= span.resource.attributes.items()
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("ullage", "1.2")
    assert EXPORT_SECONDS < 5


@pytest.mark.parametrize(("share", "expected"), [("0.0", 0), ("1.0", 1)])
def test_the_sampler_is_that_of_the_variables(no_otel: pytest.MonkeyPatch, share: str, expected: int) -> None:
    """OTEL_TRACES_SAMPLER and its argument say which requests have spans."""
    no_otel.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    no_otel.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    exporter = InMemorySpanExporter()
    ask_once(opened(exporter))
    assert len(exporter.get_finished_spans()) == expected


async def test_a_sampler_adds_its_attributes() -> None:
    """What a sampler of one's own says of a request stands in its span."""

    class Telling(Sampler):
        def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, {"rule": "all", "weight": 2})

        def get_description(self) -> str:
            return "telling"

    spans = await Traced(OK, sampler=Telling()).ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"))
    assert spans[SERVER].attributes is not None
    assert {"rule": "all", "weight": 2}.items() <= spans[SERVER].attributes.items()


def test_a_collector_that_hangs_does_not_hold_the_process(no_otel: pytest.MonkeyPatch) -> None:
    """The last spans have a while to leave; then the process ends without them."""
    no_otel.setattr("proxy.telemetry.tracing.EXPORT_SECONDS", 0.05)
    can_go_on, ended = threading.Event(), threading.Event()

    class Hanging(InMemorySpanExporter):
        def shutdown(self) -> None:
            can_go_on.wait(60)
            ended.set()

    opened(Hanging()).close()
    assert not ended.is_set()
    can_go_on.set()


def test_a_disabled_sdk_makes_no_spans(no_otel: pytest.MonkeyPatch) -> None:
    """OTEL_SDK_DISABLED turns everything off: nothing is put around engine and upstream."""
    no_otel.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("1.2") is None

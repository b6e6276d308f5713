"""Traces through the real engine and the real SDK: which spans there are, when, and what they say."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_OFF, Sampler

from proxy.core.report import Report, SummaryReport, Usage
from proxy.core.request import Origin, Request
from proxy.engine.ports import Answer
from proxy.telemetry.tracing import EXPORT_SECONDS, TracedExchange, TracedUpstream, Tracing, open_tracing
from tests.support.engine_fixtures import TENANT, chat_body
from tests.support.exported_spans import Collected, Exported, decoded
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
        self.exporter = Collected(Resource({}))
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(self.exporter)
        self.tracing = Tracing(provider, self._processor)
        fixture = EngineFixture()
        self.upstream = Recording(*replies)
        fixture.switch.upstream = TracedUpstream(self.upstream, self.tracing)
        self.exchange = TracedExchange(fixture.engine, self.tracing)

    async def ask(self, body: bytes, headers: tuple[tuple[str, str], ...] = (), **facts: Any) -> dict[str, Exported]:
        """Answer a request, report it, and return its spans by name; further ones of a name have a number."""
        self.finished()
        self.exporter.messages.clear()
        origin = Origin("/v1/chat/completions", headers)
        outcome = await self.exchange.exchange(Request("chat", body, TENANT, "r1", origin=origin))
        status = outcome.reply.status if isinstance(outcome, Answer) else outcome.error.status
        self.tracing.observe(outcome.report.with_(status=status, **facts), 0.1)
        return self.spans()

    def finished(self) -> list[Exported]:
        self._processor.force_flush()
        return decoded(self.exporter.messages)

    def spans(self) -> dict[str, Exported]:
        by_name: dict[str, Exported] = {}
        for each in sorted(self.finished(), key=lambda each: each.times):
            again = sum(key.startswith(each.name) for key in by_name)
            by_name[f"{each.name} {again}" if again else each.name] = each
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


def is_child(child: Exported, parent: Exported) -> bool:
    same_trace = child.span.trace_id == parent.span.trace_id
    return same_trace and child.span.parent_span_id == parent.span.span_id


async def test_a_request_has_its_spans() -> None:
    """One for the request with GenAI's names, and inside it one for the wait until the answer's head."""
    body = chat_body([{"role": "user", "content": CANARY}], model="gpt-4o")
    spans = await Traced(OK).ask(body, usage=Usage(90, 12, 40), agent="codex", conversation="c")
    assert set(spans) == {SERVER, WAIT}
    server, wait = spans[SERVER], spans[WAIT]
    assert is_child(wait, server)
    assert server.span.parent_span_id == b""
    assert server.times[0] <= wait.times[0] <= wait.times[1] <= server.times[1]
    assert wait.attributes == {"ullage.upstream": "stub"}
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-4o",
        "gen_ai.conversation.id": "c", "gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 40, "http.response.status_code": 200, "ullage.agent": "codex",
        "ullage.outcome": "verbatim", "ullage.upstream": "stub",
    }  # fmt: skip
    assert expected.items() <= server.attributes.items()
    assert CANARY not in "".join(str(each.span) for each in spans.values())


async def test_a_compaction_is_a_child() -> None:
    """It lies between the beginning of the request and the call, and names its stages."""
    spans = await Traced(OK).ask(agent_body(20_000, model="gpt-4o"))
    compaction = spans["INTERNAL compaction"]
    assert is_child(compaction, spans[SERVER])
    assert compaction.times == (spans[SERVER].times[0], spans[WAIT].times[0])
    assert compaction.attributes["ullage.stages"] == ("fold",)


async def test_a_view_that_was_made_before_is_no_compaction() -> None:
    """Requests that follow a compaction send its view again: their own span has the tokens before and after."""
    traced = Traced(OK, OK)
    body = agent_body(20_000, model="gpt-4o")
    await traced.ask(body)
    spans = await traced.ask(body)
    assert set(spans) == {SERVER, WAIT}
    assert spans[SERVER].attributes["ullage.outcome"] == "compacted"
    assert spans[SERVER].attributes["ullage.tokens_before"] > spans[SERVER].attributes["ullage.tokens_after"]


async def test_each_retry_has_its_spans() -> None:
    """A refusal ends its own call with its status; what is sent after it is a retry."""
    traced = Traced(ScriptedReply(400, [TOO_LONG]), OK)
    spans = await traced.ask(agent_body(6_000, model="gpt-4o"))
    first, second = spans[WAIT], spans[RETRY]
    assert is_child(first, spans[SERVER])
    assert is_child(second, spans[SERVER])
    assert (first.attributes["http.response.status_code"], first.attributes["error.type"]) == (400, "400")
    assert first.failed
    assert not second.failed
    assert first.times[1] <= second.times[0]
    assert spans[SERVER].attributes["ullage.retries"] == 1


async def test_a_refusal_of_ours_has_a_span_without_a_call() -> None:
    """Nothing was sent, and the client's error is no error of the server."""
    spans = await Traced(OK).ask(chat_body([{"role": "system", "content": prose(1, 9_000)}], model="gpt-4o"))
    assert set(spans) == {SERVER}
    assert spans[SERVER].attributes["error.type"] == "400"
    assert not spans[SERVER].failed


async def test_a_clients_trace_is_continued() -> None:
    """The request is a child of the client's span; the upstream gets the call's name in its place, with the state."""
    traced = Traced(OK)
    headers = (("Traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
    spans = await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"), headers)
    server, wait = spans[SERVER], spans[WAIT]
    assert (server.span.trace_id.hex(), server.span.parent_span_id.hex()) == (TRACE, PARENT)
    assert server.has_remote_parent
    assert is_child(wait, server)
    assert not wait.has_remote_parent
    assert {each.span.trace_state for each in spans.values()} == {"vendor=1"}
    called = f"00-{TRACE}-{wait.span.span_id.hex()}-01"
    assert traced.upstream.added == [{"traceparent": called, "tracestate": "vendor=1"}]


@pytest.mark.parametrize("headers", [(), (("traceparent", "nonsense"),)])
async def test_without_a_clients_trace_none_is_invented_upstream(headers: tuple[tuple[str, str], ...]) -> None:
    """The request begins a trace of its own; an upstream that was told of none still is not."""
    traced = Traced(OK)
    spans = await traced.ask(chat_body([{"role": "user", "content": "Hi"}], model="gpt-4o"), headers)
    assert spans[SERVER].span.parent_span_id == b""
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
    assert summary.attributes["gen_ai.usage.output_tokens"] == 80
    began, ended = summary.times
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
    assert spans[WAIT].attributes["error.type"] == "ConnectionResetError"
    assert spans[SERVER].failed
    assert CANARY not in "".join(str(each.span) for each in spans.values())


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


async def trace_one_request(environment: pytest.MonkeyPatch, collector: TestServer) -> None:
    """Export the spans of one request to *collector*, and end tracing."""
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(collector.make_url("")))
    tracing = open_tracing("1.2")
    assert tracing is not None
    tracing.begin(Request("chat", b"", TENANT, "r1"))
    tracing.observe(COMPACTED.with_(request_id="r1"), 0.1)
    await asyncio.to_thread(tracing.close)


async def exported_by(environment: pytest.MonkeyPatch) -> list[Exported]:
    """The spans that a real collector gets of one request, as the variables of *environment* have it."""
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with TestServer(app) as server:
        await trace_one_request(environment, server)
    return decoded(bodies)


@pytest.mark.parametrize(("name", "service"), [(None, "ullage"), ("mine", "mine")])
async def test_the_standard_variables_hold(no_otel: pytest.MonkeyPatch, name: str | None, service: str) -> None:
    """The service is called ullage unless a variable says otherwise; OTEL_RESOURCE_ATTRIBUTES stand beside it."""
    if name:
        no_otel.setenv("OTEL_SERVICE_NAME", name)
    no_otel.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    (server,) = await exported_by(no_otel)
    assert server.span.kind == Span.SPAN_KIND_SERVER
    expected = {"service.name": service, "service.version": "1.2", "deployment.environment": "test"}
    assert expected.items() <= server.resource.items()
    assert server.scope == ("ullage", "1.2")
    assert EXPORT_SECONDS < 5


@pytest.mark.parametrize(("share", "expected"), [("0.0", 0), ("1.0", 1)])
async def test_the_sampler_is_that_of_the_variables(no_otel: pytest.MonkeyPatch, share: str, expected: int) -> None:
    """OTEL_TRACES_SAMPLER and its argument say which requests have spans."""
    no_otel.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    no_otel.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    assert len(await exported_by(no_otel)) == expected


async def test_a_collector_that_hangs_does_not_hold_the_process(no_otel: pytest.MonkeyPatch) -> None:
    """The last spans have a while to leave; then the process ends without them."""
    no_otel.setattr("proxy.telemetry.tracing.EXPORT_SECONDS", 0.05)
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await may_answer.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", hang)
    async with TestServer(app) as server:
        await trace_one_request(no_otel, server)
        await asked.wait()
        may_answer.set()


def test_a_disabled_sdk_makes_no_spans(no_otel: pytest.MonkeyPatch) -> None:
    """OTEL_SDK_DISABLED turns everything off: nothing is put around engine and upstream."""
    no_otel.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("1.2") is None

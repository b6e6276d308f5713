"""Traces of a real proxy, as a real OTLP receiver gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.conftest import StartProxy, StartStub
from tests.support.loopback import loopback_client
from tests.support.sample_conversations import agent_session

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONFIG = {"telemetry": {"traces": True}}


class Receiver:
    """A collector: keeps the spans that were posted to it."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.headers: list[str] = []

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.headers.append(request.headers.get("x-team", ""))
        return web.Response(body=b"", content_type="application/x-protobuf")

    def spans(self) -> list[tuple[str, Any]]:
        """Each span with the name of its service."""
        spans = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return spans


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/traces", receiver.take)
    async with TestServer(app) as server:
        receiver.url = str(server.make_url("")).rstrip("/")
        yield receiver


async def test_a_collector_gets_the_spans(stub: StartStub, proxy: StartProxy, receiver: Receiver) -> None:
    """The standard variables name collector, service and headers; the trace of the client goes on to the upstream."""
    server = await stub(window=8192)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-team=models",
        "OTEL_SERVICE_NAME": "gateway",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    front = await proxy(server.url, window=8192, config=CONFIG, environment=environment)
    messages = agent_session(30, 300)
    messages[1]["content"] += " CANARY"
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with loopback_client() as client:
        for sent in (headers, {}):
            request = {"model": "gpt-4o-mini", "messages": messages, "stream": bool(sent)}
            answer = await client.post(f"{front.url}/chat/completions", json=request, headers=sent)
            assert answer.status_code == 200
    await asyncio.to_thread(front.end)  # what waits is sent before the process ends
    spans = receiver.spans()
    assert {service for service, _ in spans} == {"gateway"}
    assert set(receiver.headers) == {"models"}
    # A summary of what was folded may have been written behind the answer.
    ours = [span for _, span in spans if span.trace_id.hex() == TRACE and span.name != "summary"]
    assert sorted(span.name for span in ours) == ["chat gpt-4o-mini", "compaction", "wait"]
    (root,) = [span for span in ours if span.parent_span_id.hex() == PARENT]
    (call,) = [span for span in ours if span.kind == span.SPAN_KIND_CLIENT]
    assert call.parent_span_id == root.span_id
    assert root.kind == root.SPAN_KIND_SERVER
    traced, untraced = server.seen[-2:]
    assert traced.header("traceparent") == f"00-{TRACE}-{call.span_id.hex()}-01"
    assert untraced.header("traceparent") == ""
    assert traced.body.replace(b"true", b"false") == untraced.body.replace(b"true", b"false")
    assert b"CANARY" not in b"".join(receiver.bodies)


async def test_a_collector_that_is_gone_costs_nothing(stub: StartStub, proxy: StartProxy) -> None:
    """Requests are answered, and the process ends in time."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    front = await proxy((await stub(window=8192)).url, window=8192, config=CONFIG, environment=environment)
    async with loopback_client() as client:
        request = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "CANARY"}]}
        answer = await client.post(f"{front.url}/chat/completions", json=request)
    assert answer.status_code == 200
    async with asyncio.timeout(60):
        await asyncio.to_thread(front.end)
    assert "CANARY" not in front.log.read_text()

"""The proxy's own routes."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.core.report import Report
from proxy.server import Server, ServerConfig
from tests.support.server_fixture import HOSTS, running_server

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health/live", {"status": "ok"}),
        ("/healthz", {"status": "ok"}),
        ("/health/liveliness", {"status": "ok"}),
        ("/health/ready", {"status": "ready"}),
        ("/readyz", {"status": "ready"}),
        ("/health/readiness", {"status": "ready"}),
        ("/ullage/api/status", {"version": "test"}),
    ],
)
async def test_the_proxys_own_routes(path, body):
    """Health and status are answered here, uncounted."""
    async with running_server() as at:
        got = await at.ask("GET", path + "?x=1")
        assert (got.line, json.loads(got.body)) == ("HTTP/1.1 200 OK", body)
        assert (at.stage.heard, at.reports) == ([], [])


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/"), ("GET", "/ullage/"), ("GET", "/ullage/api/x"), ("GET", "/health/x"), ("POST", "/metrics")],
)
async def test_our_own_paths_are_never_relayed(method, path):
    """An unknown path under our own prefixes is a 404 of ours."""
    async with running_server() as at:
        assert (await at.ask(method, path)).line == "HTTP/1.1 404 Not Found"
        assert at.stage.heard == []


async def test_the_root_and_metrics():
    """The root says who answers, to HEAD as well; metrics are what the callable gives."""
    async with running_server() as at:
        assert json.loads((await at.ask("GET", "/")).body)["service"] == "ullage"
        reader, writer = await at.connect()
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"\r\n\r\n")
        writer.close()
        got = await at.ask("GET", "/metrics")
        assert (got.body, got.all("content-type")) == (b"ullage_up 1\n", ["text/plain; version=0.0.4"])


async def test_without_metrics_there_is_no_such_page():
    """If metrics are turned off the path is a 404 of ours and is not relayed."""
    async with running_server() as at:
        reports: list[Report] = []
        config = ServerConfig("up", hosts=HOSTS)
        server = Server(
            config,
            at.engine,
            at.upstream,
            lambda model: "up",
            [lambda r, s: reports.append(r)],
            None,
            dict,
            at.models,
        )
        at.port = await server.start("127.0.0.1", 0)
        try:
            assert (await at.ask("GET", "/metrics")).line == "HTTP/1.1 404 Not Found"
            assert (await at.ask("GET", "/health/live")).line == "HTTP/1.1 200 OK"
        finally:
            await server.close()
        assert (at.stage.heard, reports) == ([], [])

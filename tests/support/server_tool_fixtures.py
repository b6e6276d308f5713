"""A whole proxy in this process, in front of a strict upstream whose model calls tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.core.report import Report
from proxy.features.opening import open_all_routes, open_history
from proxy.features.settings import AllSettings
from proxy.server import Models, Server, ServerConfig
from proxy.store import open_store
from proxy.tasks import Faults, Tasks
from proxy.upstream_wiring import open_catalogue, open_upstream
from proxy.wiring import call_settings, open_engine
from tests.stub import Answer, Seen, Stub
from tests.support.engine_fixtures import tokenizers
from tests.support.loopback import loopback_client

APIS = ("chat", "messages", "responses")
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}
KEYS = {"authorization": "Bearer sk-test-0123456789abcdef", "anthropic-version": "2023-06-01"}
WORDING = {"chat": "openai", "messages": "anthropic", "responses": "openai"}

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
every = pytest.mark.parametrize("api", APIS)


def model_answering(*answers: Answer) -> Callable[[Seen], Answer]:
    """A model that gives *answers* in turn, the last one for ever; it only calls tools that are declared."""
    left = list(answers)

    def script(seen: Seen) -> Answer:
        answer = left.pop(0) if len(left) > 1 else left[0]
        assert {call.name for call in answer.calls} <= {*seen.tools, *[c.name for c in answer.calls if c.id == "wild"]}
        return answer

    return script


@dataclass
class ProxyInProcess:
    """A running proxy; ``reports`` are those of its requests, in order, ``faults`` what cost none of them anything.

    ``failures`` are those of background tasks; at the end there must be none.
    """

    url: str
    client: httpx.AsyncClient
    reports: list[Report] = field(default_factory=list)
    faults: list[tuple[str, str, Exception]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    async def ask(self, api: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        """The answer to *body*, whole."""
        return await self.client.post(PATHS[api], json=body, headers=headers)


@contextlib.asynccontextmanager
async def proxy_in_process(
    stub: Stub,
    folder: Path,
    *,
    usage: bool = False,
    store_url: str = "memory",
    **more: Mapping[str, Any] | Sequence[Any],
) -> AsyncIterator[ProxyInProcess]:
    """A proxy in front of *stub*; with *usage* it asks for that of streams by itself. *more* are settings.

    An ``embedded`` store is in *folder*, and outlives the proxy.
    """
    settings = AllSettings.model_validate(
        {
            "upstreams": [{"name": "stub", "base_url": stub.url, "probe": False}],
            "models": [{"name": "*", "context_window": 8192}],
            "summaries": {"mode": "off"},
            **more,
        }
    )
    failures: list[BaseException] = []
    tasks = Tasks(lambda name, error: failures.append(error))
    store = await open_store(store_url, directory=folder, key=None, spawn=tasks.spawn, warn=lambda event, facts: None)
    upstream = open_upstream(settings)
    faults: list[tuple[str, str, Exception]] = []
    noticed = Faults(lambda phase, name, fault: faults.append((phase, name, fault)))
    history = open_history(settings, store, tasks, lambda outcome, count: None, lambda event, facts: None)
    catalogue = open_catalogue(settings)
    config = ServerConfig(default_upstream="stub", usage_upstreams=frozenset({"stub"} if usage else ()))
    engine = open_engine(
        settings,
        catalogue,
        tokenizers(),
        store,
        upstream,
        observers=history.features,
        calls=call_settings(config),
        faults=noticed,
        spawn=tasks.spawn,
    )
    reports: list[Report] = []
    server = Server(
        config,
        engine,
        upstream,
        route=lambda model: catalogue.resolve(model).upstream,
        observers=[lambda report, seconds: reports.append(report)],
        metrics=None,
        status=dict,
        models=Models(upstream, {"stub": True}, "stub", [], lambda model: {}),
        open_routes=open_all_routes(settings, store, history),
        faults=noticed,
    )
    port = await server.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        async with loopback_client(base_url=url, headers=KEYS) as client:
            yield ProxyInProcess(url, client, reports, faults, failures)
    finally:
        await server.close()
        await upstream.close()
        await history.finish(5)
        async with asyncio.timeout(60):
            while len(tasks) > (store_url != "memory"):  # noqa: ASYNC110 - any other store has a monitor that never ends
                await asyncio.sleep(0.01)
        await store.close()
        await tasks.finish(5)
    assert failures == []

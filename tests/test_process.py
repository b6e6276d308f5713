"""A whole process: built, serving, exposing its metrics, and closed again."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy import process as process_module
from proxy.process import Process, StartOptions, Surroundings
from proxy.settings import Settings
from proxy.startup import CannotListen
from proxy.tasks import Tasks
from proxy.telemetry.logs import Logs
from proxy.upstream import probes
from proxy.workers import Worker
from tests.conftest import StartStub
from tests.store.conftest import short_path
from tests.support.loopback import loopback_client
from tests.support.ports import free_port
from tests.support.proxy_process import until
from tests.support.server_fixture import ScriptedServer, listening, raw_answer

__all__ = ["short_path"]

CHAT = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello."}]}
ONE = Worker(0, 1)


def settings(base_url: str = "http://127.0.0.1:9/v1", **sections: Any) -> Settings:
    """A proxy in front of *base_url* that keeps nothing."""
    sections: dict[str, Any] = {
        "upstreams": [{"name": "up", "base_url": base_url}],
        "store": {"url": "memory"},
        **sections,
    }
    sections["server"] = {"port": 0, **sections.get("server", {})}
    sections.setdefault("models", [{"name": "*", "context_window": 8192}])  # known, so that no server is probed
    return Settings.model_validate(sections)


class Part:
    """Logs and tasks of a process under test; ``failed`` names tasks that failed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "log"
        self.handle = os.open(self.file, os.O_CREAT | os.O_WRONLY)
        self.logs = Logs("info", "json", self.handle)
        self.failed: list[str] = []
        self.tasks = Tasks(lambda name, error: self.failed.append(f"{name}: {error!r}"))
        self.surroundings = Surroundings(ONE, self.logs, self.tasks)

    async def close(self) -> str:
        """End both; what was logged."""
        await self.tasks.finish(1.0)
        self.logs.close()
        os.close(self.handle)
        assert self.failed == []
        return self.file.read_text()


@asynccontextmanager
async def running(folder: Path, configured: Settings) -> AsyncIterator[tuple[Process, str, Part]]:
    """A built process, its address, and its parts."""
    part = Part(folder)
    port = free_port()
    server = configured.server.model_copy(update={"port": port})
    process = await Process.build(StartOptions(configured.model_copy(update={"server": server})), part.surroundings)
    try:
        yield process, f"http://127.0.0.1:{port}", part
    finally:
        await process.close()
        await part.close()


async def test_a_process_serves_and_tells_its_figures(
    stub: StartStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A built process answers, counts what it did and what the store is, and announces itself on standard error."""
    server = await stub()
    async with running(tmp_path, settings(server.url)) as (process, address, part):
        keeping = part.tasks.spawn(process.update_gauges(), "housekeeping")
        async with loopback_client() as client:
            assert (await client.post(f"{address}/v1/chat/completions", json=CHAT)).status_code == 200
            figures = (await client.get(f"{address}/metrics")).text
            status = (await client.get(f"{address}/ullage/api/status")).json()
        assert 'ullage_requests_total{api="chat",model="gpt-4o-mini"' in figures
        assert "ullage_store_up 1.0" in figures
        assert (status["upstreams"], status["workers"], status["store"]["kind"]) == (["up"], 1, "memory")
        keeping.cancel()
    output = capsys.readouterr()
    assert output.out == ""
    assert f"listening    {address}/v1" in output.err
    assert "memory  (this process only)" in output.err


async def test_what_a_server_says_of_its_window_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that states its window is probed once a request is worth it, and the log names model and window."""
    # A probe that fails is repeated after a minute: the machine may be busy for the usual three seconds.
    monkeypatch.setattr(probes, "DEADLINE", 60.0)
    stage = ScriptedServer()
    entry = b'{"id": "m1", "object": "model", "owned_by": "vllm", "max_model_len": 4096}'
    stage.reply = raw_answer(b'{"object": "list", "data": [' + entry + b"]}", "Content-Type: application/json")
    body = {"model": "m1", "messages": [{"role": "user", "content": "word " * 8000}]}
    async with listening(stage) as port:
        configured = settings(f"http://127.0.0.1:{port}/v1", models=[])
        async with (
            running(tmp_path, configured) as (_, address, part),
            loopback_client() as client,
        ):
            await client.post(f"{address}/v1/chat/completions", json=body)
            await until(lambda: "upstream.windows" in part.file.read_text())
            (line,) = [json.loads(text) for text in part.file.read_text().splitlines() if "upstream.windows" in text]
            status = (await client.get(f"{address}/ullage/api/status")).json()
    assert (line["upstream"], line["windows"][0]) == ("up", "m1=4096")
    assert "dropped_fields" not in line
    assert status["windows"][0]["context_window"] == 4096
    (model,) = status["models"]
    assert (model["model"], model["context_window"], model["source"]) == ("m1", 4096, "server")
    assert 0 <= model["age_seconds"] < 60
    assert status["learned"] == []


async def test_metrics_can_be_turned_off(stub: StartStub, tmp_path: Path) -> None:
    """With ``telemetry.metrics: false`` there is no such page, and nothing is relayed in its place."""
    server = await stub()
    async with (
        running(tmp_path, settings(server.url, telemetry={"metrics": False})) as (_, address, _part),
        loopback_client() as client,
    ):
        assert (await client.get(f"{address}/metrics")).status_code == 404
        assert server.seen == []


async def test_a_key_in_a_header_is_a_shared_key(stub: StartStub, tmp_path: Path) -> None:
    """Behind access keys, an upstream whose key stands in its headers is guarded like one with ``api_key``."""
    server = await stub()
    upstream = {"name": "up", "base_url": server.url, "headers": {"Authorization": "Bearer shared"}}
    configured = settings(server={"access_keys": ["k"]}, upstreams=[upstream])
    async with (
        running(tmp_path, configured) as (_, address, _part),
        loopback_client() as client,
    ):
        assert (await client.get(f"{address}/v1/files", headers={"x-api-key": "k"})).status_code == 403
        assert (await client.get(f"{address}/v1/models", headers={"x-api-key": "k"})).status_code == 200
    assert [seen.header("authorization") for seen in server.seen] == ["Bearer shared"]


async def test_a_taken_port_closes_what_was_opened(tmp_path: Path) -> None:
    """A process that cannot listen says where and why, and leaves no store and no task behind."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        part = Part(tmp_path)
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: address already in use. Give another --port"):
            await Process.build(StartOptions(settings(server={"port": port})), part.surroundings)
        assert len(part.tasks) == 0
        await part.close()


async def test_a_start_that_breaks_in_the_middle_leaves_no_store_open(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any fault behind the opening of the embedded store its threads end with the start."""

    def broken(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(process_module, "open_catalogue", broken)
    part = Part(short_path)
    with pytest.raises(LookupError):
        await Process.build(
            StartOptions(settings(store={"url": "embedded", "path": str(short_path / "d")})), part.surroundings
        )
    assert (short_path / "d" / "store.db").exists(), "it was never opened: nothing was tested"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("store ")]
    await part.close()

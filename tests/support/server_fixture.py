"""A running server in front of a scripted upstream, both on real sockets of this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.core.decisions import KnownRoute, UncountedView
from proxy.core.models import Route
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.engine.ports import Answer
from proxy.engine.run import Run
from proxy.engine.upstream_calls import CallSettings
from proxy.server import Models, Server, ServerConfig
from proxy.server.access import Access
from proxy.server.admin import OpenPage, OpenRoutes, no_routes
from proxy.store.conversation_table import ConversationTable
from proxy.store.encryption import Sealer
from proxy.store.operations import MemoryBackend
from proxy.store.tables import TableAccess, ThrottledWarnings
from proxy.tasks import Faults, Tasks
from proxy.upstream import Target, Timeouts, Upstreams
from tests.support.engine_fixtures import Replica

HOSTS = frozenset({"x", "proxy.test"})
"""The names by which tests call the server."""


class PassThrough:
    """An engine that sends what it gets to one upstream, and has a list of its requests."""

    def __init__(self, name: str, upstream: Upstreams, settings: CallSettings) -> None:
        self.seen: list[Request] = []
        self._route = Route(name, "m", None, None, "o200k_base", "unknown", requested_model="m")
        self._calls = Replica(upstream=upstream, calls=settings).calls

    async def exchange(self, request: Request) -> Answer:
        self.seen.append(request)
        known = KnownRoute(self._route, None, "unknown", None, 1.0)
        view = UncountedView(request, known, "m", False, "", request.body, is_off=True)
        run = Run(request, time.perf_counter)
        hides_usage = await self._calls._call(run, view)
        assert run.reply is not None
        report = Report(request.request_id, request.api, upstream=self._route.upstream)
        return Answer(report, run.reply, hides_usage=hides_usage)

    async def pass_through(self, request: Request) -> Answer:
        return await self.exchange(request)


@dataclass
class RawMessage:
    """One request as it reached the upstream, byte for byte."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


Script = Callable[[RawMessage, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> RawMessage | None:
    """The next request of a connection, or ``None`` at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    line, *rest = head[:-4].split("\r\n")
    headers = [(key, value.strip()) for key, _, value in (text.partition(":") for text in rest)]
    heard = RawMessage(line, headers, b"")
    if heard.all("transfer-encoding"):
        while size := int(await reader.readline(), 16):
            heard.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    elif heard.all("content-length"):
        heard.body = await reader.readexactly(int(heard.all("content-length")[0]))
    return heard


def raw_answer(body: bytes = b"{}", *headers: str, status: str = "200 OK") -> bytes:
    """A whole raw answer."""
    lines = [f"HTTP/1.1 {status}", *(headers or ("Content-Type: application/json",)), f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class ScriptedServer:
    """The scripted upstream: it answers with ``reply``, or as ``script`` says."""

    reply: bytes = field(default_factory=raw_answer)
    script: Script | None = None
    heard: list[RawMessage] = field(default_factory=list)
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (heard := await read_request(reader)) is not None:
                self.heard.append(heard)
                if self.script is not None:
                    await self.script(heard, reader, writer)
                else:
                    writer.write(self.reply)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended.set()
            writer.close()


@dataclass
class RunningServer:
    server: Server
    stage: ScriptedServer
    engine: PassThrough
    upstream: Upstreams
    port: int
    reports: list[Report]
    models: Models
    register: ConversationTable
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def raw(self, request: bytes) -> RawMessage:
        """The answer to raw bytes; the connection is closed afterwards."""
        reader, writer = await self.connect()
        writer.write(request)
        heard = await read_request(reader)
        writer.close()
        assert heard is not None
        return heard

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> RawMessage:
        """The answer to one request; ``line`` is its status line."""
        named = any(header.lower().startswith("host:") for header in headers)
        lines = [f"{method} {path} HTTP/1.1", *([] if named else ["Host: proxy.test"]), *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def chat(self, body: bytes = b'{"model":"m","messages":[]}', *headers: str) -> RawMessage:
        return await self.ask("POST", "/v1/chat/completions", body, "Content-Type: application/json", *headers)


def abort(writers: Iterable[asyncio.StreamWriter]) -> None:
    """End those of the connections that are still open.

    A transport that was closed before all of its bytes had left cannot be aborted once they have: it no longer has its
    loop (https://github.com/agronholm/anyio/issues/1250).
    """
    for writer in writers:
        if writer.get_extra_info("socket").fileno() >= 0:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(stage: ScriptedServer) -> AsyncIterator[int]:
    """The stage's port while it listens."""
    tasks: set[asyncio.Task[Any]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        # A cancelled handler is logged as an error by the streams of Python 3.11.
        with contextlib.suppress(asyncio.CancelledError):
            await stage.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24)
    stage.port = server.sockets[0].getsockname()[1]
    try:
        yield stage.port
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        abort(writers)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running_server(
    config: ServerConfig | None = None,
    *,
    base: str = "/v1",
    api_key: str | None = None,
    timeouts: Timeouts | None = None,
    host: str = "127.0.0.1",
    open_routes: Callable[[ConversationTable], OpenRoutes] = lambda register: no_routes,
    open_page: OpenPage | None = None,
    faults: Faults | None = None,
    **target: Any,
) -> AsyncIterator[RunningServer]:
    """A server whose only upstream, ``up``, is a fresh stage. *open_routes* gives routes over its conversations."""
    stage = ScriptedServer()
    config = config or ServerConfig(default_upstream="up")
    config = replace(config, hosts=config.hosts | HOSTS)
    if api_key is not None:
        config = replace(config, keyed_upstreams=frozenset({"up"}))
    async with listening(stage) as port:
        place = Target("up", f"http://127.0.0.1:{port}{base}", api_key, timeouts=timeouts or Timeouts(), **target)
        upstream = Upstreams([place])
        settings = CallSettings(config.headers_of, config.usage_upstreams, Access(config).check_stored)
        engine = PassThrough("up", upstream, settings)
        reports: list[Report] = []
        models = Models(upstream, {"up": True}, "up", [], lambda model: {"context_length": 4096})
        register = a_register()
        server = Server(
            config,
            engine,
            upstream,
            route=lambda model: "up",
            observers=[lambda report, seconds: reports.append(report)],
            metrics=lambda: (b"ullage_up 1\n", "text/plain; version=0.0.4"),
            status=lambda: {"version": "test"},
            models=models,
            open_routes=open_routes(register),
            faults=faults,
        )
        server.show(open_page)
        at = await server.start(host, 0)
        try:
            built = RunningServer(server, stage, engine, upstream, at, reports, models, register)
            yield built
        finally:
            abort(built.writers)
            await server.close()
            await upstream.close()


def a_register(memory: MemoryBackend | None = None) -> ConversationTable:
    """A register over a store of this process, or over *memory*."""
    tasks = Tasks(lambda name, error: None)
    warnings = ThrottledWarnings(lambda event, facts: None, time.monotonic)
    return ConversationTable(
        TableAccess(memory or MemoryBackend(), Sealer(b"m" * 32), spawn=tasks.spawn, warnings=warnings)
    )


def chunk(data: bytes) -> bytes:
    """*data* as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def eventually(check: Callable[[], object], seconds: float = 60.0) -> bool:
    """True if *check* turned true within *seconds*."""
    end = asyncio.get_running_loop().time() + seconds
    while not check():
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(0.01)
    return True

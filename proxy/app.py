"""The one place where things are constructed, wired, started and stopped."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from proxy import settings as configuration
from proxy.core.budget.catalogue import Catalogue, Facts, Rule
from proxy.core.budget.figures import Marks, Shares
from proxy.core.compression.schedule import Rules, Rungs
from proxy.core.report import Report
from proxy.engine import Engine
from proxy.fitting import Fitter, Policy
from proxy.reading import Reader
from proxy.server import Limits, Server, ServerConfig
from proxy.settings import Settings
from proxy.store import (
    Embedded,
    EmbeddedUnavailable,
    Store,
    StoreMisconfigured,
    StoreUnsupported,
    master_key,
    open_store,
)
from proxy.tasks import Tasks
from proxy.telemetry import shared
from proxy.telemetry.logs import Logs
from proxy.tokenizers import Tokenizers
from proxy.upstream import DirectUpstream, Target, Timeouts
from proxy.workers import Supervisor, Worker, new_event_loop, reserve

ITEMS, OUTLINES, PREFIXES, RECORD_BYTES, TOOL_ARRAYS, LEARNED = 300_000, 2_000, 4_000, 64 * 2**20, 64, 10_000
"""Bounds of a process's memories: items (about 250 bytes each), outlines, prefixes, record bytes, tools, routes."""

HOUSEKEEPING_SECONDS = 1.0

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def run(settings: Settings) -> int:
    """Serve until told to stop; the exit code."""
    if settings.server.workers > 1:
        return _run_many(settings)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve(Start(settings), Worker(0, 1)))


@dataclass(frozen=True, slots=True)
class Start:
    """What a process starts with; ``key`` is the master key where the parent knows it."""

    settings: Settings
    key: bytes | None = field(default=None, repr=False)


async def serve(start: Start, worker: Worker) -> int:
    """One process's life: build, listen, work, drain, close; the exit code."""
    settings = start.settings
    _keep_large_blocks()
    logs = Logs(settings.telemetry.log.level, settings.telemetry.log.format)
    logs.adopt_libraries()
    asyncio.get_running_loop().set_exception_handler(logs.loop_failed)
    tasks = Tasks(logs.task_failed)
    stopping = _on_signals()
    try:
        house = await House.build(start, worker, logs, tasks)
    except (StoreMisconfigured, StoreUnsupported, OSError) as error:
        print(f"ullage: cannot start: {error}", file=sys.stderr)  # noqa: T201 - the operator's terminal
        logs.close()
        return 1
    tasks.spawn(house.keep(), "housekeeping")
    gc.freeze()  # what start-up built stays: no collection needs to look at it again
    await stopping[0].wait()
    await _unless(stopping[1], house.server.drain(settings.server.drain))
    await house.close()
    await tasks.finish(1.0)
    logs.close()
    return 0


class House:
    """Everything one process is made of. Made by ``build``, ended by ``close``."""

    def __init__(self, server: Server, upstream: DirectUpstream, store: Store, telemetry: Any, logs: Logs) -> None:
        self.server = server
        self._upstream = upstream
        self._store = store
        self._telemetry = telemetry
        self._logs = logs
        self._store_errors: Counter[str] = Counter()

    @classmethod
    async def build(cls, start: Start, worker: Worker, logs: Logs, tasks: Tasks) -> House:
        """A process that serves. Raises ``OSError`` where the port is taken, and what ``open_store`` raises."""
        # Only here: in a worker the metrics' folder must be in the environment before their client is imported.
        from proxy.telemetry.metrics import Telemetry

        settings = start.settings
        folder = os.environ.get(shared.VARIABLE)
        telemetry = Telemetry(configuration.version(), Path(folder) if folder else None)
        store = await _open_store(start, logs, tasks)
        tokenizers = Tokenizers()
        catalogue = await asyncio.to_thread(_catalogue, settings)
        engine = _engine(settings, catalogue, tokenizers, store)
        upstream = _upstream(settings)

        def observe(report: Report, duration: float) -> None:
            telemetry.observe(report, duration)
            logs.request_done(report, duration)

        def status() -> Mapping[str, object]:
            return {
                "version": configuration.version(),
                "workers": worker.count,
                "upstreams": list(upstream.names),
                "store": _store_status(store),
                "estimated_encodings": sorted(tokenizers.estimated),
            }

        config = _server_config(settings)
        server = Server(config, engine, upstream, engine.upstream_of, observe, telemetry.exposition, status)
        host, many = settings.server.host, worker.count > 1
        try:
            port = await server.start(host, settings.server.port, reuse_port=many)
        except OSError:
            await upstream.close()
            await store.close()
            raise
        if not many:
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _announce(settings, catalogue, address, _describe(store, settings))
        tasks.spawn(asyncio.to_thread(tokenizers.counter, "o200k_base"), "load the common vocabulary")
        return cls(server, upstream, store, telemetry, logs)

    async def keep(self) -> None:
        """Tell the metrics, every second, what no request tells them."""
        while True:
            state = self._store.state()
            self._telemetry.store_state(up=state.up, breaker=state.breaker)
            fresh = Counter(state.errors) - self._store_errors
            for kind in fresh.elements():
                self._telemetry.store_error(kind)
            self._store_errors += fresh
            self._telemetry.in_flight(self.server.in_flight)
            self._telemetry.lines_dropped(self._logs.writer.dropped)
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    async def close(self) -> None:
        """Stop listening, then close what was behind."""
        await self.server.close()
        await self._upstream.close()
        await self._store.close()


def _run_many(settings: Settings) -> int:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_supervise(settings))


async def _supervise(settings: Settings) -> int:
    """Own the embedded store and the port, keep the workers running; the exit code."""
    logs = Logs(settings.telemetry.log.level, settings.telemetry.log.format)
    tasks = Tasks(logs.task_failed)
    embedded: Embedded | None = None
    try:
        held = reserve(settings.server.host, settings.server.port)
    except OSError as error:
        print(f"ullage: cannot start: {error}", file=sys.stderr)  # noqa: T201 - the operator's terminal
        return 1
    port = held.getsockname()[1]
    server = settings.server.model_copy(update={"port": port})
    settings = settings.model_copy(update={"server": server})
    kind = settings.store.url
    given = Start(settings)
    if settings.store.url == "embedded":
        try:
            embedded = await Embedded.start(settings.store.path, tasks.spawn)
            given = _shared_store(settings, embedded)
        except (EmbeddedUnavailable, OSError) as error:
            logs.log.warning("store.memory_instead", cause=str(error))
            kind = "memory"
    if kind == "memory":
        logs.log.warning("store.memory_per_worker", advice="workers may word the same event differently")
        given = Start(_with_store(settings, "memory"))
    folder = shared.make_directory()
    host = settings.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    catalogue = await asyncio.to_thread(_catalogue, settings)
    _announce(settings, catalogue, address, f"{kind}  ({settings.store.path})" if embedded else "")
    supervisor = Supervisor(
        "proxy.app:serve",
        given,
        settings.server.workers,
        environ={**os.environ, shared.VARIABLE: str(folder)},
        drain=settings.server.drain,
        events=lambda event, **facts: logs.log.info(event, **facts),
        on_exit=lambda pid: shared.forget_worker(folder, pid),
    )
    try:
        return await supervisor.run()
    finally:
        held.close()
        if embedded is not None:
            await embedded.close()
        await tasks.finish(1.0)
        shared.remove_directory(folder)
        logs.close()


def _shared_store(settings: Settings, embedded: Embedded) -> Start:
    """What workers start with: the parent's server by its socket, and the master key that lies beside it."""
    key = None if settings.store.key else master_key(settings.store.path)
    return Start(_with_store(settings, embedded.url), key)


def _with_store(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": url})})


async def _open_store(start: Start, logs: Logs, tasks: Tasks) -> Store:
    store = start.settings.store
    return await open_store(
        store.url,
        directory=store.path,
        key=store.key.get_secret_value().encode() if store.key else start.key,
        spawn=tasks.spawn,
        warn=lambda event, facts: logs.log.warning(event, **facts),
    )


def _catalogue(settings: Settings) -> Catalogue:
    table = {
        name: Facts(facts.max_input_tokens, facts.max_output_tokens)
        for name, facts in configuration.model_table().items()
    }
    default = settings.default_upstream().name
    rules = [
        Rule(
            rule.name,
            rule.upstream or default,
            rule.context_window,
            rule.max_output_tokens,
            rule.tokenizer,
            rule.unknown_window if isinstance(rule.unknown_window, int) else None,
        )
        for rule in settings.models
    ]
    return Catalogue(rules, table, default)


def _engine(settings: Settings, catalogue: Catalogue, tokenizers: Tokenizers, store: Store) -> Engine:
    wanted = settings.compression
    marks = Marks(wanted.high_mark, wanted.soft_mark, wanted.low_mark)
    shares = Shares(wanted.shares.pins, wanted.shares.digest, wanted.shares.steps)
    stages = wanted.stages
    rungs = Rungs(stages.fold.enabled, stages.drop.enabled, stages.clip.enabled, stages.tools.enabled)
    reader = Reader(tokenizers, LRUCache(ITEMS), LRUCache(OUTLINES), LRUCache(OUTLINES), LRUCache(PREFIXES))
    records: LRUCache[Any, Any] = LRUCache(RECORD_BYTES, getsizeof=_record_bytes)
    fitter = Fitter(
        reader, store, Policy(Rules(marks, shares, rungs), wanted.lower_output), records, LRUCache(TOOL_ARRAYS)
    )
    return Engine(catalogue, fitter, marks, wanted.mode, LRUCache(LEARNED), time.perf_counter)


def _record_bytes(record: Any) -> int:
    return 512 + len(record.block) + sum(map(len, record.edits.values()))


def _upstream(settings: Settings) -> DirectUpstream:
    targets = [
        Target(
            upstream.name,
            upstream.base_url,
            upstream.api_key.get_secret_value() if upstream.api_key else None,
            headers={name: value.get_secret_value() for name, value in upstream.headers.items()},
            timeouts=Timeouts(upstream.timeouts.connect, upstream.timeouts.first_byte, upstream.timeouts.idle),
        )
        for upstream in settings.upstreams
    ]
    return DirectUpstream(targets)


def _server_config(settings: Settings) -> ServerConfig:
    server, limits = settings.server, settings.server.limits
    return ServerConfig(
        default_upstream=settings.default_upstream().name,
        version=configuration.version(),
        access_keys=tuple(key.get_secret_value() for key in server.access_keys),
        admin_key=server.admin_key.get_secret_value() if server.admin_key else None,
        keyed_upstreams=frozenset(upstream.name for upstream in settings.upstreams if upstream.api_key),
        relay=server.relay,
        origins=frozenset(server.origins),
        limits=replace(
            Limits(),
            body=limits.body,
            held=limits.in_flight_bytes,
            in_flight=limits.in_flight,
            header=limits.headers,
        ),
    )


def _announce(settings: Settings, catalogue: Catalogue, address: str, store: str) -> None:
    """Print the start-up summary on standard error: standard output is for log lines."""
    facts = {"address": address}
    if store:
        facts["store"] = store
    for rule in settings.models:
        route = catalogue.resolve(rule.name)
        if rule.context_window is None and route.source == "table":
            facts[f"window {rule.name}"] = f"{route.window:,} tokens, by the model table"
    text = configuration.summary(settings, facts)
    print(f"ullage {configuration.version()}\n{text}", file=sys.stderr, flush=True)  # noqa: T201


def _describe(store: Store, settings: Settings) -> str:
    state = store.state()
    where = {"embedded": str(settings.store.path), "memory": "this process only"}.get(state.kind, state.url_redacted)
    guest = "" if state.owner is not False else ", shared with the process that started it"
    return f"{state.kind}  ({where}{guest}{'' if state.up else ', not reachable: serving without it'})"


def _store_status(store: Store) -> dict[str, object]:
    state = store.state()
    return {"kind": state.kind, "up": state.up, "breaker": state.breaker, "errors": dict(state.errors)}


def _on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first signal asks for a drain, the second for an end at once."""
    stop, now = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told)
    return stop, now


async def _unless(event: asyncio.Event, work: Any) -> None:
    """Await *work* unless *event* is set first."""
    async with asyncio.TaskGroup() as group:
        job = group.create_task(work, name="drain")
        alarm = group.create_task(event.wait(), name="second signal")
        await asyncio.wait({job, alarm}, return_when=asyncio.FIRST_COMPLETED)
        job.cancel()
        alarm.cancel()


def _keep_large_blocks() -> None:
    """Let the C library keep buffers of a body's size: given back and mapped anew, each costs its page faults again."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option, value in ((M_MMAP_THRESHOLD, 2**26), (M_TRIM_THRESHOLD, 2**28), (M_TOP_PAD, 2**24)):
            library.mallopt(option, value)

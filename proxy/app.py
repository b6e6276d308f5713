"""The one place where things are constructed, wired, started and stopped."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from proxy import caches
from proxy import settings as configuration
from proxy.core.models import ServerWindow
from proxy.core.report import Report, SummaryReport
from proxy.engine.engine import Engine
from proxy.features.history.archive import Archive
from proxy.offload import SWITCH_SECONDS
from proxy.server import Server
from proxy.settings import Settings
from proxy.startup import bracketed, print_summary, warn_of_unreachable
from proxy.store import (
    INSTEAD,
    Embedded,
    EmbeddedUnavailable,
    Store,
    StoreMisconfigured,
    StoreUnsupported,
    describe_store,
    existing_key,
    master_key,
    open_store,
    store_status,
)
from proxy.summaries import Jobs
from proxy.tasks import Faults, Tasks
from proxy.telemetry import multiprocess
from proxy.telemetry.lag import LagWatch
from proxy.telemetry.logs import Logs
from proxy.tokenizers import Tokenizers
from proxy.upstream import Probes, Upstreams
from proxy.upstream_wiring import open_bridge, open_catalogue, open_probes, open_summaries, open_upstream
from proxy.wiring import (
    call_settings,
    open_archive,
    open_engine,
    open_history,
    open_history_recorder,
    open_models,
    server_config,
    windows_status,
)
from proxy.workers import Shutdown, Supervisor, Worker, new_event_loop, reserve

if TYPE_CHECKING:
    from proxy.telemetry.metrics import Telemetry

HOUSEKEEPING_SECONDS = 1.0

ARCHIVE_SECONDS = 2.0
"""What a process that ends gives originals to reach the store."""


def run(settings: Settings) -> int:
    """Serve until told to stop; the exit code."""
    if settings.server.workers > 1:
        return _run_many(settings)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve(StartOptions(settings), Worker(0, 1)))


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What a process starts with; ``key`` is the master key where the parent knows it, ``before`` one before it.

    ``instead``: the store in ``settings`` stands in for the configured one, which cannot be used.
    """

    settings: Settings
    key: bytes | None = field(default=None, repr=False)
    before: bytes | None = field(default=None, repr=False)
    instead: bool = False


async def serve(start: StartOptions, worker: Worker) -> int:
    """One process's life: build, listen, work, drain, close; the exit code."""
    settings = start.settings
    caches.keep_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    logs, tasks = _begin(settings)
    ending = Shutdown()
    ending.handle_signals()
    try:
        house = await Process.build(start, worker, logs, tasks)
    except (CannotListen, StoreMisconfigured, StoreUnsupported) as error:
        await tasks.finish(1.0)
        logs.close()
        return _cannot_start(error)
    housekeeping = tasks.spawn(house.keep(), "housekeeping")
    lag = LagWatch(house.telemetry.loop_lag, logs.loop_lagged)
    caches.collect_rarely()
    lag.start()
    await ending.requested.wait()
    await ending.run_unless_immediate(house.drain(settings.server.drain))
    lag.stop()
    housekeeping.cancel()  # it never ends by itself: nothing should wait for it
    await house.close()
    await tasks.finish(1.0)
    logs.close()
    return 0


class Process:
    """Everything one process is made of. Made by ``build``, ended by ``close``."""

    def __init__(
        self,
        server: Server,
        upstream: Upstreams,
        probes: Probes,
        store: Store,
        telemetry: Telemetry,
        logs: Logs,
        engine: Engine,
        jobs: Jobs | None,
        archive: Archive | None,
    ) -> None:
        self._archive = archive
        self.server = server
        self._engine = engine
        self._probes = probes
        self._upstream = upstream
        self._store = store
        self.telemetry = telemetry
        self._logs = logs
        self._jobs = jobs
        self._store_errors: Counter[str] = Counter()
        self._without_descriptor = 0

    @classmethod
    async def build(cls, start: StartOptions, worker: Worker, logs: Logs, tasks: Tasks) -> Process:
        """A process that serves. Raises ``CannotListen``, and what ``open_store`` raises."""
        store = await _open_store(start, logs, tasks)
        bridge = open_bridge(start.settings, tasks)
        upstream = open_upstream(start.settings, bridge)
        try:
            return await cls._serving(start.settings, worker, logs, tasks, store, upstream)
        except BaseException:  # whatever it is, the private server must not outlive it
            await upstream.close()
            await store.close()
            raise

    @classmethod
    async def _serving(
        cls, settings: Settings, worker: Worker, logs: Logs, tasks: Tasks, store: Store, upstream: Upstreams
    ) -> Process:
        # Only here: in a worker the metrics' folder must be in the environment before their client is imported.
        from proxy.telemetry.metrics import Telemetry

        folder = os.environ.get(multiprocess.VARIABLE)
        telemetry = Telemetry(configuration.version(), Path(folder) if folder else None)
        tokenizers = Tokenizers()

        def told(name: str, windows: Mapping[str, ServerWindow]) -> None:
            few = [f"{model}={window.context_window}" for model, window in list(windows.items())[:5]]
            logs.log.info("upstream.windows", upstream=name, count=len(windows), windows=few)

        probes = open_probes(settings, upstream, tasks, told, store.records)
        catalogue = await asyncio.to_thread(open_catalogue, settings, probes.told)

        def summarised(report: SummaryReport) -> None:
            telemetry.summary(report)
            logs.summary_done(report)

        faults = Faults(logs.fault, telemetry.fault)
        archive = open_archive(settings, store, tasks, telemetry.archived)
        chronicle = open_history_recorder(store, archive)
        jobs = open_summaries(settings, catalogue, tokenizers, store, upstream, tasks, summarised, chronicle.job)
        config = server_config(settings)
        engine = await asyncio.to_thread(
            open_engine,
            settings,
            catalogue,
            tokenizers,
            store,
            upstream,
            logs.noticed,
            jobs,
            chronicle,
            call_settings(config),
            faults,
        )

        def observe(report: Report, duration: float) -> None:
            telemetry.observe(report, duration)
            logs.request_done(report, duration)

        def upstream_of(model: str) -> str:
            return catalogue.resolve(model).upstream

        def status() -> Mapping[str, object]:
            return {
                "version": configuration.version(),
                "workers": worker.count,
                "upstreams": list(upstream.names),
                "windows": probes.known(),
                "probes": probes.surveys(),
                **windows_status(catalogue, engine.learned, time.perf_counter()),
                "store": store_status(store.state()),
                "summaries": jobs.status() if jobs is not None else {"mode": "off"},
                "estimated_encodings": sorted(tokenizers.estimated),
            }

        models = open_models(settings, catalogue, upstream)
        metrics = telemetry.exposition if settings.telemetry.metrics else None
        told_of = open_history(settings, store)
        server = Server(config, engine, upstream, upstream_of, observe, metrics, status, models, told_of, faults)
        host, many = settings.server.host, worker.count > 1
        try:
            port = await server.start(host, settings.server.port, reuse_port=many)
        except OSError as error:
            raise CannotListen(host, settings.server.port, error) from error
        if not many:
            print_summary(settings, catalogue, port, describe_store(store.state(), settings.store.path))
            tasks.spawn(warn_of_unreachable(settings, logs.warn), "look for the upstreams")
        tasks.spawn(asyncio.to_thread(tokenizers.counter, "o200k_base"), "load the common vocabulary")
        tasks.spawn(upstream.warm(), "load LiteLLM")
        return cls(server, upstream, probes, store, telemetry, logs, engine, jobs, archive)

    async def keep(self) -> None:
        """Tell the metrics, every second, what no request tells them."""
        while True:
            state = self._store.state()
            self.telemetry.store_state(up=state.up, breaker=state.breaker)
            fresh = Counter(state.errors) - self._store_errors
            for kind in fresh.elements():
                self.telemetry.store_error(kind)
            self._store_errors += fresh
            self.telemetry.in_flight(self.server.in_flight)
            self.telemetry.refused_connections(self.server.refusals)
            self.telemetry.learned_windows(len(self._engine.learned.learned()))
            self.telemetry.lines_dropped(self._logs.writer.dropped)
            self._note_descriptors()
            self._logs.tell_refusals()
            if self._jobs is not None:
                self.telemetry.summaries_state(running=self._jobs.running, broken=self._jobs.open_breakers)
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _note_descriptors(self) -> None:
        """Tell of connections that met the limit of open files since the last time."""
        count = self.server.without_descriptor + self._upstream.without_descriptor
        fresh, self._without_descriptor = count - self._without_descriptor, count
        if fresh:
            self.telemetry.without_descriptor(fresh)
            advice = "raise the limit of open files (ulimit -n, LimitNOFILE), or run more replicas"
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._logs.log.warning("server.out_of_descriptors", count=fresh, limit=limit, advice=advice)

    async def drain(self, seconds: float) -> None:
        """Let running requests end, then the summaries they started, all within *seconds*."""
        began = time.monotonic()
        await self.server.drain(seconds)
        if self._jobs is not None:
            await self._jobs.finish(max(0.0, seconds - (time.monotonic() - began)))

    async def close(self) -> None:
        """Stop listening, then close what was behind."""
        await self.server.close()
        if self._jobs is not None:
            await self._jobs.finish(0.0)
        if self._archive is not None:
            await self._archive.finish(ARCHIVE_SECONDS)
        await self._probes.close()
        await self._upstream.close()
        await self._store.close()


def _run_many(settings: Settings) -> int:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_supervise(settings))


async def _supervise(settings: Settings) -> int:
    """Own the embedded store and the port, keep the workers running; the exit code."""
    logs, tasks = _begin(settings)
    # From here on a signal no longer ends this process on the spot: what it has started must be ended first.
    ending = Shutdown()
    ending.handle_signals()
    async with AsyncExitStack() as opened:
        opened.callback(logs.close)
        opened.push_async_callback(tasks.finish, 1.0)
        try:
            held = opened.enter_context(_reserved(settings))
            given, store = await _shared_store(settings, opened, logs, tasks)
        except (CannotListen, StoreMisconfigured, StoreUnsupported) as error:
            return _cannot_start(error)
        port = held.getsockname()[1]
        server = settings.server.model_copy(update={"port": port})
        given = replace(given, settings=given.settings.model_copy(update={"server": server}))
        try:
            folder = multiprocess.make_directory()
        except OSError as error:
            return _cannot_start(NoMetricsDirectory(error))
        opened.callback(multiprocess.remove_directory, folder)
        supervisor = Supervisor(
            "proxy.app:serve",
            given,
            settings.server.workers,
            environ={**os.environ, multiprocess.VARIABLE: str(folder)},
            drain=settings.server.drain,
            ending=ending,
            events=lambda event, **facts: logs.log.info(event, **facts),
            on_exit=lambda pid: multiprocess.forget_worker(folder, pid),
        )
        catalogue = await asyncio.to_thread(open_catalogue, settings)
        if ending.requested.is_set():
            return 0
        print_summary(settings, catalogue, port, store)
        tasks.spawn(warn_of_unreachable(settings, logs.warn), "look for the upstreams")
        return await supervisor.run()


def _begin(settings: Settings) -> tuple[Logs, Tasks]:
    """A process's log and the keeper of its background tasks, taking over what libraries and the loop report."""
    logs = Logs(settings.telemetry.log.level, settings.telemetry.log.format)
    logs.adopt_libraries()
    asyncio.get_running_loop().set_exception_handler(logs.loop_failed)
    return logs, Tasks(logs.task_failed)


class NoMetricsDirectory(Exception):
    """There is no directory in which workers can share their figures; the text says what to do."""

    def __init__(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"workers share figures in a temporary directory: {reason}. Set TMPDIR, or use one worker.")


class CannotListen(Exception):
    """The configured address cannot be listened on; the text says which, why, and what to do."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        taken = error.errno == errno.EADDRINUSE
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or type(error).__name__
        remedy = " Give another --port, or 0 for any free one." if taken else ""
        super().__init__(f"{bracketed(host)}:{port}: {reason.lower()}.{remedy}")


def _cannot_start(error: Exception) -> int:
    print(f"ullage: cannot start: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the operator's terminal
    return 1


def _reserved(settings: Settings) -> socket.socket:
    server = settings.server
    try:
        return reserve(server.host, server.port)
    except OSError as error:
        raise CannotListen(server.host, server.port, error) from error


async def _shared_store(
    settings: Settings, opened: AsyncExitStack, logs: Logs, tasks: Tasks
) -> tuple[StartOptions, str]:
    """What workers start with, and the store in words. A private server is theirs until *opened* is closed."""
    url, path = settings.store.url, settings.store.path
    if url not in ("embedded", "memory"):
        # What is wrong with it is said once, and not by every worker at each of its starts.
        store = await _open_store(StartOptions(settings), logs, tasks)
        await store.close()
        return StartOptions(settings), describe_store(store.state(), settings.store.path)
    instead = url == "embedded"
    if instead:
        embedded: Embedded | None = None
        try:
            embedded = await Embedded.start(path, tasks.spawn, logs.warn)
            key = None if settings.store.key else master_key(path)
            before = existing_key(path) if settings.store.key else None
        except (EmbeddedUnavailable, OSError, ValueError) as error:
            if embedded is not None:
                await embedded.close()
            logs.log.warning("store.memory_instead", cause=str(error))
        else:
            opened.push_async_callback(embedded.close)
            return StartOptions(_with_store(settings, embedded.url), key, before), f"embedded  ({path})"
    logs.log.warning("store.memory_per_worker", advice="workers may word the same event differently")
    words = "memory  (each worker its own" + (INSTEAD if instead else "") + ")"
    return StartOptions(_with_store(settings, "memory"), instead=instead), words


def _with_store(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": url})})


async def _open_store(start: StartOptions, logs: Logs, tasks: Tasks) -> Store:
    store = start.settings.store
    others = [key.get_secret_value().encode() for key in store.other_keys]
    if start.before is not None:
        others.append(start.before)
    return await open_store(
        store.url,
        directory=store.path,
        key=store.key.get_secret_value().encode() if store.key else start.key,
        others=others,
        instead=start.instead,
        spawn=tasks.spawn,
        warn=logs.warn,
    )

"""The parts of one process: how they are opened, watched, exchanged for those of other settings, and closed."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from proxy import caches
from proxy import settings as configuration
from proxy.core.models import DEFAULT_ENCODING, ServerWindow
from proxy.core.report import SummaryReport
from proxy.engine.engine import Engine
from proxy.features.opening import OpenHistory, open_all_routes, open_history
from proxy.page.board import Reports
from proxy.page.opening import LivePage
from proxy.reload import STARTED, ConfigState, CurrentState
from proxy.server import Server
from proxy.settings import Settings
from proxy.startup import CannotListen, print_summary, warn_of_unreachable
from proxy.store import (
    Store,
    describe_store,
    store_status,
)
from proxy.summaries import Jobs
from proxy.tasks import Faults, Spawn, Tasks
from proxy.telemetry import multiprocess
from proxy.telemetry.exports import NO_EXPORTS, Exports
from proxy.telemetry.logs import Logs
from proxy.tokenizers import Tokenizers
from proxy.upstream import Probes, Upstreams
from proxy.upstream_wiring import open_bridge, open_catalogue, open_probes, open_summaries, open_upstream
from proxy.wiring import (
    call_settings,
    open_configured_store,
    open_engine,
    open_models,
    server_config,
    windows_status,
)
from proxy.workers import Worker

if TYPE_CHECKING:
    from proxy.telemetry.metrics import Telemetry

HOUSEKEEPING_SECONDS: Final = 1.0
"""Interval at which the gauges of ``/metrics`` are updated."""

HISTORY_SECONDS: Final = 2.0
"""Time for queued originals to reach the store when a process ends."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The settings of a process, and a fact about the store that its parent already knows.

    ``is_fallback``: the store in ``settings`` replaces the configured one, which cannot be used. ``state`` is that of
    the configuration.
    """

    settings: Settings
    is_fallback: bool = False
    state: ConfigState = STARTED


class Process:
    """Everything that one process owns. ``build`` opens it, ``close`` closes it. It listens on ``port``."""

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
        history: OpenHistory,
        page: LivePage,
        port: int,
        tokenizers: Tokenizers,
        config: CurrentState,
        exports: Exports,
    ) -> None:
        self.server = server
        self.port = port
        self.tokenizers = tokenizers
        self.config = config
        self.exports = exports
        self.telemetry = telemetry
        self._upstream = upstream
        self._probes = probes
        self._store = store
        self._logs = logs
        self._engine = engine
        self._jobs = jobs
        self._history = history
        self.page = page
        self._store_errors: Counter[str] = Counter()
        self._without_descriptor = 0

    async def changed(self, options: StartOptions, worker: Worker, logs: Logs, tasks: Tasks) -> Process:
        """Return a process with other settings and with this one's store and metrics; it does not answer yet."""
        bridge = open_bridge(options.settings, tasks)
        upstream = open_upstream(options.settings, bridge)
        try:
            changed = await self._listening(
                options, worker, logs, tasks, self._store, upstream, self.exports, quiet=True, before=self
            )
        except BaseException:
            await upstream.close()
            raise
        changed._store_errors = self._store_errors
        changed._without_descriptor = self.server.without_descriptor
        return changed

    async def retire(self, under_way: set[asyncio.Task[object]], seconds: float) -> None:
        """Close what another process replaced once its requests have ended; its summaries get *seconds*."""
        if self._jobs is not None:
            await self._jobs.finish(seconds)
        await self._probes.close()
        if under_way:
            await asyncio.wait(under_way)
        await self._history.finish(HISTORY_SECONDS)
        await self._upstream.close()

    @classmethod
    async def build(
        cls,
        options: StartOptions,
        worker: Worker,
        logs: Logs,
        tasks: Tasks,
        exports: Exports = NO_EXPORTS,
        *,
        quiet: bool = False,
    ) -> Process:
        """Return a process that listens; if it is *quiet* it prints nothing.

        Raises ``CannotListen``, and the errors of ``open_store``.
        """
        store = await open_configured_store(options.settings, tasks, logs.warn, is_fallback=options.is_fallback)
        bridge = open_bridge(options.settings, tasks)
        upstream = open_upstream(options.settings, bridge)
        try:
            return await cls._listening(options, worker, logs, tasks, store, upstream, exports, quiet=quiet)
        except BaseException:  # also after a cancellation: the store must be closed whatever happens
            await upstream.close()
            await store.close()
            raise

    @classmethod
    async def _listening(
        cls,
        options: StartOptions,
        worker: Worker,
        logs: Logs,
        tasks: Tasks,
        store: Store,
        upstream: Upstreams,
        exports: Exports,
        *,
        quiet: bool,
        before: Process | None = None,
    ) -> Process:
        """Build what *options* configure, and listen, unless there was a process *before*."""
        settings, current = options.settings, CurrentState(options.state)
        page, telemetry, tokenizers, server_before = _shared_parts(before, settings, worker, logs)
        load_vocabulary = _vocabulary_loader(tokenizers, tasks.spawn)
        probes = open_probes(settings, upstream, tasks, partial(_log_windows, logs), store.records)
        if before is not None:
            probes.adopt(before._probes)
        catalogue = await asyncio.to_thread(open_catalogue, settings, probes.window_of)

        def observe_summary(report: SummaryReport) -> None:
            telemetry.summary(report)
            logs.summary_done(report)
            exports.summary(report)

        history = open_history(settings, store, tasks, telemetry.archived, logs.warn)
        note = history.note_summary
        jobs = open_summaries(settings, catalogue, tokenizers, store, upstream, tasks, observe_summary, note)
        config = server_config(settings)
        faults = Faults(logs.fault, telemetry.fault)
        engine = await asyncio.to_thread(
            open_engine,
            settings,
            catalogue,
            tokenizers,
            store,
            exports.traced_upstream(upstream),
            logs.noticed,
            jobs,
            (*history.features, *page.features),
            call_settings(config),
            faults,
            tasks.spawn,
            load_vocabulary,
        )

        def upstream_of(model: str) -> str:
            return catalogue.resolve(model).upstream

        def status() -> Mapping[str, object]:
            summaries: Mapping[str, object] = {"mode": "off"}
            if jobs is not None:
                summaries = jobs.status()
            return {
                "version": configuration.version(),
                "configuration": current.state.status(),
                "workers": worker.count,
                "upstreams": list(upstream.names),
                "windows": probes.stated_windows(),
                "probes": probes.last_probes(),
                **windows_status(catalogue, engine.learned, time.perf_counter()),
                "store": store_status(store.state()),
                "summaries": summaries,
                "estimated_encodings": sorted(tokenizers.estimated),
                "counted_by": tokenizers.counted_by(),
            }

        models = open_models(settings, catalogue, upstream)
        metrics = None
        if settings.telemetry.metrics:
            metrics = telemetry.exposition
        observers = (telemetry.observe, logs.request_done, *exports.observers)
        exchange = exports.traced_exchange(engine)
        routes = open_all_routes(settings, store, history)
        server = Server(
            config,
            exchange,
            upstream,
            upstream_of,
            observers,
            metrics,
            status,
            models,
            routes,
            faults,
            server_before,
        )
        server.show(page.routes(status))
        is_alone = worker.count == 1
        if before is not None:
            port = before.port
        else:
            port = await _listen(server, settings, shared=not is_alone)
            await page.start(tasks.spawn)
        if is_alone and not quiet:
            print_summary(settings, catalogue, port, describe_store(store.state(), settings.store.path))
            tasks.spawn(warn_of_unreachable(settings, logs.warn), "look for the upstreams")
        if tokenizers.is_fast and before is None:
            load_vocabulary(DEFAULT_ENCODING)  # holds the interpreter's lock: better now than beside the first request
        tasks.spawn(upstream.warm(), "load LiteLLM")
        return cls(
            server,
            upstream,
            probes,
            store,
            telemetry,
            logs,
            engine,
            jobs,
            history,
            page,
            port,
            tokenizers,
            current,
            exports,
        )

    async def update_gauges(self) -> None:
        """Update every second what no request updates, of the metrics and the page. Never returns."""
        while True:
            self.telemetry.flush()
            state = self._store.state()
            self.telemetry.store_state(up=state.up, breaker=state.breaker)
            new_errors = Counter(state.errors) - self._store_errors
            for kind in new_errors.elements():
                self.telemetry.store_error(kind)
            self._store_errors += new_errors
            self.telemetry.in_flight(self.server.in_flight)
            self.telemetry.refused_connections(self.server.refusals)
            self.telemetry.learned_windows(len(self._engine.learned.shown_windows()))
            self.telemetry.lines_dropped(self._logs.writer.dropped)
            self._report_descriptors()
            self._logs.log_refusals()
            self.page.tick()
            if self._jobs is not None:
                self.telemetry.summaries_state(running=self._jobs.running, broken=self._jobs.open_breakers)
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _report_descriptors(self) -> None:
        """Count and log the connections refused since the last call because no file descriptor was left."""
        total = self.server.without_descriptor + self._upstream.without_descriptor
        new, self._without_descriptor = total - self._without_descriptor, total
        if not new:
            return
        self.telemetry.without_descriptor(new)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = "raise the limit of open files (ulimit -n, LimitNOFILE), or run more replicas"
        self._logs.log.warning("server.out_of_descriptors", count=new, limit=limit, advice=advice)

    async def drain(self, seconds: float) -> None:
        """Wait for running requests, then for the summaries that they started: *seconds* in all."""
        deadline = time.monotonic() + seconds
        self.page.close()
        await self.server.drain(seconds)
        if self._jobs is not None:
            await self._jobs.finish(max(0.0, deadline - time.monotonic()))

    async def close(self) -> None:
        """Stop listening, then close what the server used."""
        await self.server.close()
        self.telemetry.flush()
        if self._jobs is not None:
            await self._jobs.finish(0.0)
        await self._history.finish(HISTORY_SECONDS)
        await self._probes.close()
        await self._upstream.close()
        await self._store.close()


def _shared_parts(
    before: Process | None, settings: Settings, worker: Worker, logs: Logs
) -> tuple[LivePage, Telemetry, Tokenizers, Server | None]:
    """Return what a process shares with the one before it, if there was one; the last is its server."""
    if before is not None:
        return before.page, before.telemetry, before.tokenizers, before.server
    page = LivePage(settings, worker, multiprocess.shared_directory(), logs.warn)
    return page, _open_telemetry(page.reports), Tokenizers(release=caches.release_free_memory), None


def _vocabulary_loader(tokenizers: Tokenizers, spawn: Spawn) -> Callable[[str], None]:
    """Return a callback that loads the vocabulary of an encoding in a thread.

    A vocabulary takes 40 MiB and a third of a second: a process that was asked for nothing has none.
    """

    def load(encoding: str) -> None:
        spawn(asyncio.to_thread(tokenizers.counter, encoding), "load a vocabulary")

    return load


def _open_telemetry(reports: Reports | None) -> Telemetry:
    """Return the metrics of this process, in the directory that workers share. *reports* wait there for the page."""
    # prometheus_client reads that folder from the environment, once, when it is imported:
    # https://prometheus.github.io/client_python/multiprocess/
    from proxy.telemetry.metrics import Telemetry

    return Telemetry(configuration.version(), multiprocess.shared_directory(), reports)


def _log_windows(logs: Logs, upstream: str, windows: Mapping[str, ServerWindow]) -> None:
    """Log how many windows *upstream* states, with the first five of them."""
    examples = [f"{model}={window.context_window}" for model, window in list(windows.items())[:5]]
    logs.log.info("upstream.windows", upstream=upstream, count=len(windows), windows=examples)


async def _listen(server: Server, settings: Settings, *, shared: bool) -> int:
    """Listen on the configured address; return the port. If *shared*, workers use it too. Raises ``CannotListen``."""
    host, port = settings.server.host, settings.server.port
    try:
        return await server.start(host, port, reuse_port=shared)
    except OSError as error:
        raise CannotListen(host, port, error) from error

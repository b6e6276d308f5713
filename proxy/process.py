"""The parts of one process: how they are opened, watched, exchanged for those of other settings, and closed."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from proxy import caches
from proxy import settings as configuration
from proxy.core.models import Catalogue, ServerWindow
from proxy.core.report import SummaryReport
from proxy.engine.engine import Engine
from proxy.features.opening import OpenHistory, open_all_routes, open_history
from proxy.page.board import Reports
from proxy.page.opening import LivePage
from proxy.reload import STARTED, ConfigState, CurrentState
from proxy.server import Server, ServerConfig
from proxy.settings import Settings
from proxy.startup import CannotListen, print_summary, warn_of_unreachable
from proxy.store import Store, describe_store, store_status
from proxy.summaries import Jobs
from proxy.tasks import Faults, Tasks
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


class StartOptions(msgspec.Struct, frozen=True):
    """The settings of a process, and a fact about the store that its parent already knows.

    ``is_fallback``: the store in ``settings`` replaces the configured one, which cannot be used. ``state`` is that of
    the configuration.
    """

    settings: Settings
    is_fallback: bool = False
    state: ConfigState = STARTED


class Surroundings(msgspec.Struct, frozen=True):
    """The parts that a process has before its settings are read, and keeps when they change."""

    worker: Worker
    logs: Logs
    tasks: Tasks
    exports: Exports = NO_EXPORTS


class StatusSources(msgspec.Struct, frozen=True):
    """The parts that the server reads, for the operator's status and for the upstream of a model.

    It refers to no ``Process``: the server refers to it, and such a cycle would outlive a replaced process until the
    next garbage collection.
    """

    workers: int
    config: CurrentState
    store: Store
    upstream: Upstreams
    probes: Probes
    catalogue: Catalogue
    tokenizers: Tokenizers
    jobs: Jobs | None
    engine: Engine

    def upstream_of(self, model: str) -> str:
        """Return the upstream of *model*. Raises ``NotFound``."""
        return self.catalogue.resolve(model).upstream

    def status(self) -> Mapping[str, object]:
        """Return the state of the process, as the operator's status shows it."""
        summaries: Mapping[str, object] = {"mode": "off"}
        if self.jobs is not None:
            summaries = self.jobs.status()
        return {
            "version": configuration.version(),
            "configuration": self.config.state.status(),
            "workers": self.workers,
            "upstreams": list(self.upstream.names),
            "windows": self.probes.stated_windows(),
            "probes": self.probes.last_probes(),
            **windows_status(self.catalogue, self.engine.learned, time.perf_counter()),
            "store": store_status(self.store.state()),
            "summaries": summaries,
            "estimated_encodings": sorted(self.tokenizers.estimated),
            "counted_by": self.tokenizers.counted_by(),
        }


@dataclass(slots=True, eq=False)
class Process:
    """Everything that one process owns. ``build`` opens it, ``close`` closes it. It listens on ``port``."""

    surroundings: Surroundings
    store: Store
    upstream: Upstreams
    probes: Probes
    catalogue: Catalogue
    tokenizers: Tokenizers
    telemetry: Telemetry
    page: LivePage
    history: OpenHistory
    jobs: Jobs | None
    engine: Engine
    config: CurrentState
    server: Server = field(init=False)
    port: int = 0
    _store_errors: Counter[str] = field(default_factory=Counter)
    _without_descriptor: int = 0

    @classmethod
    async def build(cls, options: StartOptions, surroundings: Surroundings, *, quiet: bool = False) -> Process:
        """Return a process that listens; if it is *quiet* it prints nothing.

        Raises ``CannotListen``, and the errors of ``open_store``.
        """
        settings, logs, tasks = options.settings, surroundings.logs, surroundings.tasks
        store = await open_configured_store(settings, tasks, logs.warn, is_fallback=options.is_fallback)
        upstream = open_upstream(settings, open_bridge(settings, tasks))
        try:
            process = await cls._assemble(options, surroundings, store, upstream)
            await process._listen(settings)
        except BaseException:  # also after a cancellation: the store must be closed whatever happens
            await upstream.close()
            await store.close()
            raise
        if surroundings.worker.count == 1 and not quiet:
            print_summary(settings, process.catalogue, process.port, describe_store(store.state(), settings.store.path))
            tasks.spawn(warn_of_unreachable(settings, logs.warn), "look for the upstreams")
        tasks.spawn(upstream.warm(), "load LiteLLM")
        return process

    async def changed(self, options: StartOptions) -> Process:
        """Return a process with other settings and with this one's store and metrics; it does not answer yet."""
        upstream = open_upstream(options.settings, open_bridge(options.settings, self.surroundings.tasks))
        try:
            process = await self._assemble(options, self.surroundings, self.store, upstream, before=self)
        except BaseException:
            await upstream.close()
            raise
        self.surroundings.tasks.spawn(upstream.warm(), "load LiteLLM")
        process.port = self.port
        process._store_errors = self._store_errors
        process._without_descriptor = self.server.without_descriptor
        return process

    @classmethod
    async def _assemble(
        cls,
        options: StartOptions,
        surroundings: Surroundings,
        store: Store,
        upstream: Upstreams,
        before: Process | None = None,
    ) -> Process:
        """Build the parts that *options* configure, with page, metrics and vocabularies of the process *before*."""
        settings, config = options.settings, server_config(options.settings)
        logs, tasks, exports = surroundings.logs, surroundings.tasks, surroundings.exports
        page, telemetry, tokenizers = _lasting_parts(settings, surroundings, before)
        probes = open_probes(settings, upstream, tasks, partial(_log_windows, logs), store.records)
        if before is not None:
            probes.adopt(before.probes)
        catalogue = await asyncio.to_thread(open_catalogue, settings, probes.window_of)
        history = open_history(settings, store, tasks, telemetry.archived, logs.warn)
        report_summary = partial(_report_summary, telemetry, logs, exports)
        jobs = open_summaries(
            settings, catalogue, tokenizers, store, upstream, tasks, report_summary, history.note_summary
        )
        faults = Faults(logs.fault, telemetry.fault)
        engine = await asyncio.to_thread(
            open_engine,
            settings,
            catalogue,
            tokenizers,
            store,
            exports.traced_upstream(upstream),
            warn=logs.noticed,
            jobs=jobs,
            observers=(*history.features, *page.features),
            calls=call_settings(config),
            faults=faults,
            spawn=tasks.spawn,
            prepare=partial(_load_vocabulary, tokenizers, tasks),
        )
        process = cls(
            surroundings=surroundings,
            store=store,
            upstream=upstream,
            probes=probes,
            catalogue=catalogue,
            tokenizers=tokenizers,
            telemetry=telemetry,
            page=page,
            history=history,
            jobs=jobs,
            engine=engine,
            config=CurrentState(options.state),
        )
        process.server = process._open_server(settings, config, faults, before)
        return process

    def _open_server(self, settings: Settings, config: ServerConfig, faults: Faults, before: Process | None) -> Server:
        """Return the server of these parts, which takes over from that of *before*. It does not listen yet."""
        exports = self.surroundings.exports
        sources = StatusSources(
            self.surroundings.worker.count,
            self.config,
            self.store,
            self.upstream,
            self.probes,
            self.catalogue,
            self.tokenizers,
            self.jobs,
            self.engine,
        )
        metrics, server_before = None, None
        if settings.telemetry.metrics:
            metrics = self.telemetry.exposition
        if before is not None:
            server_before = before.server
        server = Server(
            config,
            exports.traced_exchange(self.engine),
            self.upstream,
            route=sources.upstream_of,
            observers=(self.telemetry.observe, self.surroundings.logs.request_done, *exports.observers),
            metrics=metrics,
            status=sources.status,
            models=open_models(settings, self.catalogue, self.upstream),
            open_routes=open_all_routes(settings, self.store, self.history),
            faults=faults,
            before=server_before,
        )
        server.show(self.page.routes(sources.status))
        return server

    async def _listen(self, settings: Settings) -> None:
        """Listen on the configured address, and answer the pages of other workers. Raises ``CannotListen``."""
        host, port = settings.server.host, settings.server.port
        try:
            self.port = await self.server.start(host, port, self.surroundings.worker.listener)
        except OSError as error:
            raise CannotListen(host, port, error) from error
        await self.page.start(self.surroundings.tasks.spawn)

    async def retire(self, under_way: set[asyncio.Task[object]], seconds: float) -> None:
        """Close this replaced process once its requests have ended; its summaries get *seconds*."""
        if self.jobs is not None:
            # First, so that the requests under way start no more summaries: nothing would wait for those.
            await self.jobs.finish(seconds)
        await self.probes.close()
        if under_way:
            await asyncio.wait(under_way)
        await self.history.finish(HISTORY_SECONDS)
        await self.upstream.close()

    async def update_gauges(self) -> None:
        """Update every second the metrics and figures of the page that no request updates. Never returns."""
        while True:
            self.telemetry.flush()
            state = self.store.state()
            self.telemetry.store_state(up=state.up, breaker=state.breaker)
            new_errors = Counter(state.errors) - self._store_errors
            for kind in new_errors.elements():
                self.telemetry.store_error(kind)
            self._store_errors += new_errors
            self.telemetry.in_flight(self.server.in_flight)
            self.telemetry.refused_connections(self.server.refusals)
            self.telemetry.learned_windows(len(self.engine.learned.shown_windows()))
            self.telemetry.lines_dropped(self.surroundings.logs.writer.dropped)
            self._report_descriptors()
            self.surroundings.logs.log_refusals()
            self.page.tick()
            if self.jobs is not None:
                self.telemetry.summaries_state(running=self.jobs.running, broken=self.jobs.open_breakers)
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _report_descriptors(self) -> None:
        """Count and log the connections refused since the last call because no file descriptor was left."""
        total = self.server.without_descriptor + self.upstream.without_descriptor
        new, self._without_descriptor = total - self._without_descriptor, total
        if not new:
            return
        self.telemetry.without_descriptor(new)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = "raise the limit of open files (ulimit -n, LimitNOFILE), or run more replicas"
        self.surroundings.logs.log.warning("server.out_of_descriptors", count=new, limit=limit, advice=advice)

    async def drain(self, seconds: float) -> None:
        """Wait for running requests, then for the summaries they started, *seconds* in all; then stop listening."""
        deadline = time.monotonic() + seconds
        self.page.close()
        await self.server.drain(seconds)
        if self.jobs is not None:
            await self.jobs.finish(max(0.0, deadline - time.monotonic()))
        await self.server.stop_listening()

    async def close(self) -> None:
        """Stop listening, then close the parts that the server uses."""
        await self.server.close()
        self.telemetry.flush()
        if self.jobs is not None:
            await self.jobs.finish(0.0)
        await self.history.finish(HISTORY_SECONDS)
        await self.probes.close()
        await self.upstream.close()
        await self.store.close()


def _lasting_parts(
    settings: Settings, surroundings: Surroundings, before: Process | None
) -> tuple[LivePage, Telemetry, Tokenizers]:
    """Return page, metrics and vocabularies: those of the process *before*, which a reload keeps, or new ones."""
    if before is not None:
        return before.page, before.telemetry, before.tokenizers
    page = LivePage(settings, surroundings.worker, multiprocess.shared_directory(), surroundings.logs.warn)
    tokenizers = Tokenizers(fast_later=True, release=caches.release_free_memory)
    return page, _open_telemetry(page.reports), tokenizers


def _report_summary(telemetry: Telemetry, logs: Logs, exports: Exports, report: SummaryReport) -> None:
    """Count, log and trace a summary job that has ended."""
    telemetry.summary(report)
    logs.summary_done(report)
    exports.summary(report)


def _load_vocabulary(tokenizers: Tokenizers, tasks: Tasks, encoding: str) -> None:
    """Load the vocabulary of an encoding in a thread.

    It takes 40 MiB and a third of a second: a process without requests has none.
    """
    tasks.spawn(asyncio.to_thread(tokenizers.counter, encoding), "load a vocabulary")


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

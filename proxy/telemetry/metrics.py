"""Prometheus metrics, all derived from a frozen report; with several workers one answer covers them all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.core.report import Report, SummaryReport

# Label values live as long as the process, and model names come from clients.
MOST_MODELS = 100
LONGEST_MODEL = 100
OTHER = "other"

Breaker = Literal["closed", "half-open", "open"]
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}
_OVERHEAD = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LAG = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_FILL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Telemetry:
    """Counts what requests and the store did.

    *directory* is where worker processes keep their figures; ``PROMETHEUS_MULTIPROC_DIR`` must have named it before
    this module was imported. ``None``: this process is the only one.
    """

    def __init__(self, version: str, directory: Path | None = None) -> None:
        shared = bool(getattr(values.ValueClass, "_multiprocess", False))
        if shared != (directory is not None):
            raise ValueError("PROMETHEUS_MULTIPROC_DIR must be set before the import exactly when a directory is given")
        self._registry = CollectorRegistry()
        self._shown = self._registry
        if directory is not None:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, path=str(directory))  # type: ignore[no-untyped-call]
        self._models: set[str] = set()
        self._tenants: set[str] = set()
        self._projects: set[str] = set()
        self._refused: dict[str, int] = {}
        self._windows: dict[tuple[str, str], tuple[str, int]] = {}
        self._routes: dict[tuple[str, str, str, int, str], _Route] = {}
        self._families = _Families(self._registry)
        self._families.build_info.labels(version).set(1)

    def observe(self, report: Report, duration: float) -> None:
        """Count one finished request; *duration* in seconds."""
        model = self._model(report.model)
        key = (report.api, model, report.upstream, report.status, report.outcome)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route(self._families, key)
        route.requests.inc()
        route.overhead.observe(report.overhead_seconds)
        route.seconds.observe(duration)
        if report.tokens_before is not None:
            route.before.inc(report.tokens_before)
        sent = report.tokens_before if report.observed else report.tokens_after
        if sent is not None and report.outcome != "refused":  # of a refused one nothing went upstream
            route.after.inc(sent)
            if report.window:
                route.fill.observe(sent / report.window)
                if report.source != "request":
                    self._window(report.upstream, model, report.source, report.window)
            for region, tokens in report.regions.items():
                route.region(region, tokens)
        if report.borrowed or report.project or report.task_size or report.client_compaction:
            self._observe_labelled(report, sent)
        if report.outcome != "verbatim" or report.retries or report.overflows or report.reason or report.status >= 400:
            self._observe_rare(report, route)

    def summary(self, report: SummaryReport) -> None:
        """Count one summary job."""
        families, tenant = self._families, _bounded(self._tenants, report.tenant)
        families.summaries.labels(tenant, report.outcome, report.reason).inc()
        if report.calls:
            families.summary_calls.labels(report.upstream, self._model(report.model)).inc(report.calls)
            families.summary_tokens.labels(tenant, "input").inc(report.input_tokens)
            families.summary_tokens.labels(tenant, "output").inc(report.output_tokens)
            families.summary_seconds.observe(report.seconds)

    def summaries_state(self, *, running: int, broken: int) -> None:
        """Say how many summary jobs run, and how many summarisers are not asked because they failed."""
        self._families.summaries_running.set(running)
        self._families.summary_breakers.set(broken)

    def loop_lag(self, seconds: float) -> None:
        """Note how late the event loop was for something that was due."""
        self._families.loop_lag.observe(seconds)

    def in_flight(self, count: int) -> None:
        """Say how many requests this process has under way."""
        self._families.in_flight.set(count)

    def refused_connections(self, totals: Mapping[str, int]) -> None:
        """Count what was refused before it was a request, by this process's totals so far for each reason."""
        for reason, total in totals.items():
            self._families.refused_connections.labels(reason).inc(total - self._refused.get(reason, 0))
            self._refused[reason] = total

    def store_state(self, *, up: bool, breaker: Breaker = "closed") -> None:
        """Say how the store is. Call it on every change: several workers cannot be asked when metrics are read."""
        self._families.store_up.set(1 if up else 0)
        self._families.breaker.set(_BREAKER[breaker])

    def store_error(self, kind: str) -> None:
        """Count a store error; *kind* is a fixed word such as ``timeout``."""
        self._families.store_errors.labels(kind).inc()

    def fault(self, where: str, request_id: str, fault: Exception) -> None:
        """Count a fault of ours that cost no request; *where* is a fixed word."""
        del request_id, fault
        self._families.faults.labels(where).inc()

    def archived(self, outcome: str, count: int) -> None:
        """Count *count* originals with which something happened."""
        self._families.archived.labels(outcome).inc(count)

    def lines_dropped(self, count: int) -> None:
        """Say how many log lines this process has dropped so far."""
        self._families.lines_dropped.set(count)

    def without_descriptor(self, count: int) -> None:
        """Count *count* connections that met the limit of open files."""
        self._families.without_descriptor.inc(count)

    def learned_windows(self, count: int) -> None:
        """Say how many windows hold in this process because overflows or cuts taught them."""
        self._families.windows.set(count)

    def exposition(self) -> tuple[bytes, str]:
        """The metrics as text and its content type. Reads files when there are several workers: call it in a thread."""
        return generate_latest(self._shown), CONTENT_TYPE_PLAIN_0_0_4

    def _observe_rare(self, report: Report, route: _Route) -> None:
        families = self._families
        if report.observed and report.reason.startswith("would_"):
            families.observed.labels(report.reason.removeprefix("would_")).inc()
        if not report.observed and report.outcome != "refused":
            route.removed.inc(report.tokens_removed)
            for stage in report.stages:
                families.stages.labels(stage).inc()
            if report.event:
                families.compactions.labels(route.model).inc()
        self._observe_overflows(report)
        if report.recalls:
            families.recalls.labels(route.model).inc(report.recalls)
            families.recall_tokens.labels(route.model).inc(report.recall_tokens)
        if report.fallback:
            families.fallbacks.labels(route.model, report.fallback).inc()
        if report.reason == "silently_truncated":
            families.cuts.labels(route.model).inc()
        if kind := _error_class(report):
            families.upstream_errors.labels(report.upstream, kind).inc()

    def _observe_overflows(self, report: Report) -> None:
        families = self._families
        if report.retries:
            families.retries.labels(report.upstream).inc(report.retries)
        retried = min(report.overflows, report.retries)
        if retried:
            families.overflows.labels("retried").inc(retried)
        if report.overflows > retried:
            families.overflows.labels("returned").inc(report.overflows - retried)

    def _observe_labelled(self, report: Report, sent: int | None) -> None:
        families = self._families
        for part, tokens in report.borrowed.items():
            families.borrowed.labels(part).inc(tokens)
        if report.client_compaction:
            families.client_compactions.labels(report.client_compaction).inc()
        if report.project or report.task_size:
            labels = (_bounded(self._projects, report.project), report.task_size)
            families.projects.labels(*labels).inc()
            if report.outcome != "refused":
                families.project_tokens.labels(*labels).inc(sent or 0)

    def _window(self, upstream: str, model: str, source: str, tokens: int) -> None:
        """Say how large a window is, and that nobody else says so any more."""
        before = self._windows.get((upstream, model))
        if before == (source, tokens):
            return
        self._windows[upstream, model] = (source, tokens)
        if before is not None and before[0] != source:
            # A label cannot be taken out again when worker processes keep their figures in files.
            self._families.window.labels(upstream, model, before[0]).set(0)
        self._families.window.labels(upstream, model, source).set(tokens)

    def _model(self, name: str) -> str:
        return _bounded(self._models, name)


def _bounded(known: set[str], name: str) -> str:
    """*name* as the value of a label: itself while there are few, since values come from clients and stay."""
    if name in known:
        return name
    if len(known) >= MOST_MODELS or len(name) > LONGEST_MODEL or not name.isprintable():
        return OTHER
    known.add(name)
    return name


def _error_class(report: Report) -> str:
    """What kind of error the upstream made, or an empty string."""
    if report.reason.startswith("upstream_"):
        return report.reason.removeprefix("upstream_")
    if report.status < 400 or report.outcome == "refused" or report.reason == "client_left":
        return ""
    if report.status == 429:
        return "rate_limited"
    return "server" if report.status >= 500 else "client"


class _Families:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        gauge = partial(Gauge, registry=registry)
        route = ("api", "model", "upstream", "status", "outcome")
        model = ("model",)
        self.requests = counter("ullage_requests_total", "Finished requests.", route)
        self.overhead = histogram(
            "ullage_overhead_seconds", "Time spent in the proxy itself.", ("api",), buckets=_OVERHEAD
        )
        self.seconds = histogram(
            "ullage_request_seconds", "From a request's head to its answer's last byte.", ("api",), buckets=_DURATION
        )
        self.tokens = counter(
            "ullage_context_tokens_total",
            "Input tokens, as the client sent them (before) and as they went upstream (after).",
            ("model", "region"),
        )
        self.regions = counter(
            "ullage_region_tokens_total",
            "Input tokens that went upstream, by region, and the room kept for answers (reserve).",
            ("model", "region"),
        )
        self.borrowed = counter(
            "ullage_share_borrowed_tokens_total", "Tokens by which parts exceeded their share.", ("part",)
        )
        self.window = gauge(
            "ullage_window_tokens",
            "A model's window; 0 once another source says how large it is.",
            ("upstream", "model", "source"),
            multiprocess_mode="livemostrecent",
        )
        project = ("project", "task_size")
        self.projects = counter("ullage_project_requests_total", "Requests that named a project or size.", project)
        self.project_tokens = counter("ullage_project_tokens_total", "Input tokens of those requests.", project)
        self.removed = counter("ullage_tokens_removed_total", "Input tokens that did not go upstream.", model)
        self.stages = counter("ullage_stages_total", "Compression stages used.", ("stage",))
        self.compactions = counter("ullage_compactions_total", "Compactions sent for the first time.", model)
        self.client_compactions = counter(
            "ullage_client_compactions_total", "Requests by which clients compacted themselves.", ("client",)
        )
        self.observed = counter("ullage_observed_total", "Requests that mode observe let pass.", ("would",))
        self.fill = histogram(
            "ullage_context_fill_ratio", "Input sent upstream over the model's window.", model, buckets=_FILL
        )
        self.retries = counter("ullage_retries_total", "Requests sent again.", ("upstream",))
        self.overflows = counter("ullage_overflow_errors_total", "Overflows that upstreams reported.", ("stage",))
        self.fallbacks = counter(
            "ullage_fallbacks_total", "Requests that went to a fallback model.", ("model", "fallback")
        )
        self.recalls = counter(
            "ullage_recalls_total", "Generations that followed a look at what had left the view.", model
        )
        self.recall_tokens = counter(
            "ullage_recall_tokens_total", "Tokens of all generations of answers with recalls.", model
        )
        self.cuts = counter("ullage_silent_truncations_total", "Prompts that a server cut without a word.", model)
        self.windows = gauge(
            "ullage_learned_windows", "Windows that hold because traffic taught them.", multiprocess_mode="livemax"
        )
        self.upstream_errors = counter("ullage_upstream_errors_total", "Errors of upstreams.", ("upstream", "class"))
        self.faults = counter(
            "ullage_internal_errors_total", "Faults of the proxy's own that cost no request.", ("where",)
        )
        self.store_errors = counter("ullage_store_errors_total", "Errors of the store.", ("kind",))
        self.loop_lag = histogram(
            "ullage_loop_lag_seconds", "How late the event loop is for what is due, every 50 ms.", buckets=_LAG
        )
        # Over several workers: requests add up, and the store is as bad as the worst of them sees it.
        self.refused_connections = counter(
            "ullage_refused_connections_total",
            "Client connections closed for what came on them, or to keep their number.",
            ("reason",),
        )
        self.in_flight = gauge("ullage_in_flight", "Requests under way.", multiprocess_mode="livesum")
        self.store_up = gauge("ullage_store_up", "1 if the store answers.", multiprocess_mode="livemin")
        self.breaker = gauge(
            "ullage_store_breaker_state", "0 closed, 1 half open, 2 open.", multiprocess_mode="livemax"
        )
        self.lines_dropped = gauge(
            "ullage_log_lines_dropped", "Log lines nobody read in time.", multiprocess_mode="livesum"
        )
        self.without_descriptor = counter(
            "ullage_out_of_descriptors_total", "Connections that met the limit of open files."
        )
        self.summaries = counter(
            "ullage_summaries_total",
            "Summary jobs, by client and by what became of them.",
            ("tenant", "outcome", "reason"),
        )
        self.summary_calls = counter("ullage_summary_calls_total", "Calls of summarisers.", ("upstream", "model"))
        self.summary_tokens = counter(
            "ullage_summary_tokens_total", "Tokens that summaries took, by client.", ("tenant", "direction")
        )
        self.summary_seconds = histogram(
            "ullage_summary_seconds", "From a summary job's beginning to its end.", buckets=_DURATION
        )
        self.summaries_running = gauge(
            "ullage_summaries_running", "Summary jobs under way.", multiprocess_mode="livesum"
        )
        self.summary_breakers = gauge(
            "ullage_summary_breakers_open",
            "Summarisers, each for one client, that are not asked because they failed.",
            multiprocess_mode="livesum",
        )
        self.archived = counter(
            "ullage_archive_items_total", "Originals of what left views, by what became of them.", ("outcome",)
        )
        self.build_info = gauge("ullage_build_info", "The version.", ("version",), multiprocess_mode="livemax")


class _Route:
    """The label children of one kind of request, looked up once: ``labels()`` costs more than the count itself."""

    def __init__(self, families: _Families, key: tuple[str, str, str, int, str]) -> None:
        api, self.model, upstream, status, outcome = key
        self.requests = families.requests.labels(api, self.model, upstream, str(status), outcome)
        self.overhead = families.overhead.labels(api)
        self.seconds = families.seconds.labels(api)
        self.before = families.tokens.labels(self.model, "before")
        self.after = families.tokens.labels(self.model, "after")
        self.removed = families.removed.labels(self.model)
        self.fill = families.fill.labels(self.model)
        self._regions: dict[str, Counter] = {}
        self._families = families

    def region(self, name: str, tokens: int) -> None:
        """Count *tokens* of a region."""
        child = self._regions.get(name)
        if child is None:
            child = self._regions[name] = self._families.regions.labels(self.model, name)
        child.inc(tokens)

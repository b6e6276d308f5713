"""Prometheus metrics: those of requests from the table of a report's fields, the others from ``PROCESS`` below.

With several workers each answer of ``/metrics`` covers them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.core.report import DURATION, DURATION_BUCKETS, FIELDS, Metric, Report, SummaryReport, Value

# Label values live as long as the process, and model names come from clients.
MOST_MODELS = 100
LONGEST_MODEL = 100
OTHER = "other"

Breaker = Literal["closed", "half-open", "open"]
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}
LAG_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# fmt: off
LOOP_LAG: Final = Metric("ullage_loop_lag_seconds", "How late the event loop is for what is due, every 50 ms.",
                         kind="histogram", buckets=LAG_BUCKETS,
                         doc="What every other client waits beside its own request. From 0.2 s on the line "
                             "`proxy.loop_lagged` says what ran.")
REFUSED_CONNECTIONS: Final = Metric(
    "ullage_refused_connections_total", "Client connections closed for what came on them, or to keep their number.",
    by=("reason",),
    doc="The head too large or with too many fields (`head_too_large`), `not_http`, one too many (`full`), or idle "
        "while others waited (`made_room`).")
WITHOUT_DESCRIPTOR: Final = Metric("ullage_out_of_descriptors_total",
                                   "Connections that met the limit of open files.",
                                   doc="Of clients and to upstreams. Raise the limit (`ulimit -n`, `LimitNOFILE`).")
IN_FLIGHT: Final = Metric("ullage_in_flight", "Requests under way.", kind="gauge")
LINES_DROPPED: Final = Metric("ullage_log_lines_dropped", "Log lines nobody read in time.", kind="gauge")
INTERNAL_ERRORS: Final = Metric("ullage_internal_errors_total", "Faults of the proxy's own that cost no request.",
                                by=("where",),
                                doc="In making a `request` smaller, in watching an `answer`, in what is noted `after`.")
LEARNED_WINDOWS: Final = Metric("ullage_learned_windows", "Windows that hold because traffic taught them.",
                                kind="gauge", across="livemax")
STORE_UP: Final = Metric("ullage_store_up", "1 if the store answers.", kind="gauge", across="livemin",
                         doc="0 for memory in its place, and if the store refuses what it is asked.")
STORE_BREAKER: Final = Metric("ullage_store_breaker_state", "0 closed, 1 half open, 2 open.", kind="gauge",
                              across="livemax")
STORE_ERRORS: Final = Metric("ullage_store_errors_total", "Errors of the store.", by=("kind",))
ARCHIVED: Final = Metric("ullage_archive_items_total", "Originals of what left views, by what became of them.",
                         by=("outcome",), doc="`kept`, `too_big`, `dropped` (too much waited already) or `failed`.")
SUMMARIES: Final = Metric("ullage_summaries_total", "Summary jobs, by client and by what became of them.",
                          by=("tenant", "outcome", "reason"),
                          doc="`written`, `adopted` (another replica was first), `failed` or `skipped`, and why.")
SUMMARY_CALLS: Final = Metric("ullage_summary_calls_total", "Calls of summarisers.", by=("upstream", "model"))
SUMMARY_TOKENS: Final = Metric("ullage_summary_tokens_total", "Tokens that summaries took, by client.",
                               by=("tenant", "direction"),
                               doc="`input` and `output`; a client is a short keyed name, `other` after 100 of them.")
SUMMARY_SECONDS: Final = Metric("ullage_summary_seconds", "From a summary job's beginning to its end.",
                                kind="histogram", buckets=DURATION_BUCKETS)
SUMMARIES_RUNNING: Final = Metric("ullage_summaries_running", "Summary jobs under way.", kind="gauge")
SUMMARY_BREAKERS: Final = Metric("ullage_summary_breakers_open",
                                 "Summarisers, each for one client, that are not asked because they failed.",
                                 kind="gauge")
BUILD_INFO: Final = Metric("ullage_build_info", "The version.", by=("version",), kind="gauge", across="livemax")
# fmt: on

PROCESS: Final = (
    LOOP_LAG, REFUSED_CONNECTIONS, WITHOUT_DESCRIPTOR, IN_FLIGHT, LINES_DROPPED, INTERNAL_ERRORS, LEARNED_WINDOWS,
    STORE_UP, STORE_BREAKER, STORE_ERRORS, ARCHIVED, SUMMARIES, SUMMARY_CALLS, SUMMARY_TOKENS, SUMMARY_SECONDS,
    SUMMARIES_RUNNING, SUMMARY_BREAKERS, BUILD_INFO,
)  # fmt: skip
"""The metrics that do not come from reports of requests."""

_ROWS: Final = tuple((metric, metric.when or field.name) for field in FIELDS for metric in field.metrics)
"""The metrics that a report adds to, each with the attribute of the report that it depends on."""

_WHEN: Final = tuple(dict.fromkeys(when for _, when in _ROWS if when != DURATION))
_READ: Final = attrgetter(*_WHEN)
_BLANK: Final = dict(zip(_WHEN, _READ(Report("", "")), strict=True))
_AT: Final = {when: index for index, when in enumerate((*_WHEN, DURATION))}

_OF_REPORTS: Final = tuple(
    (metric, _AT[when], object() if metric.always else _BLANK.get(when)) for metric, when in _ROWS
)
"""Each of these metrics with the index of its attribute in ``(*_READ(report), duration)``, and the value that adds
nothing."""

_ROUTE: Final = ("api", "model", "upstream", "status", "outcome")
"""The labels that a report's metrics may have beside their own; together they name one kind of request."""

Add = Callable[[float], None]


class Telemetry:
    """Counts what requests and the store did.

    *directory* is where worker processes keep their figures; ``PROMETHEUS_MULTIPROC_DIR`` must have named it before
    this module was imported. ``None``: this process is the only one. ``loop_lag`` adds the seconds by which the event
    loop was late for something that was due.
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
        self._routes: dict[tuple[str, str, str, int, str], _Route] = {}
        self._families = _Families(self._registry)
        self._families.gauges[BUILD_INFO.name].labels(version).set(1)
        self.loop_lag: Add = self._families.histograms[LOOP_LAG.name].observe

    def observe(self, report: Report, duration: float) -> None:
        """Count one finished request; *duration* in seconds."""
        route = self._routes.get((report.api, report.model, report.upstream, report.status, report.outcome))
        if route is None:
            route = self._route(report)
        values = (*_READ(report), duration)
        for metric, at, nothing in _OF_REPORTS:
            value = values[at]
            if value == nothing:
                continue
            amount: Any = value if metric.amount is None else metric.amount(report, value)
            if amount in (None, route.shown.get(metric)):
                continue  # nothing to add, or a gauge shows it already
            if metric.own is not None:
                route[metric, metric.own](amount)
                continue
            for own, part in amount.items():
                route[metric, own](part)

    def summary(self, report: SummaryReport) -> None:
        """Count one summary job."""
        counters, tenant = self._families.counters, _bounded(self._tenants, report.tenant)
        counters[SUMMARIES.name].labels(tenant, report.outcome, report.reason).inc()
        if report.calls:
            counters[SUMMARY_CALLS.name].labels(report.upstream, self._model(report.model)).inc(report.calls)
            counters[SUMMARY_TOKENS.name].labels(tenant, "input").inc(report.input_tokens)
            counters[SUMMARY_TOKENS.name].labels(tenant, "output").inc(report.output_tokens)
            self._families.histograms[SUMMARY_SECONDS.name].observe(report.seconds)

    def summaries_state(self, *, running: int, broken: int) -> None:
        """Show the numbers of summary jobs that run, and of summarisers that are not called because they failed."""
        self._families.gauges[SUMMARIES_RUNNING.name].set(running)
        self._families.gauges[SUMMARY_BREAKERS.name].set(broken)

    def in_flight(self, count: int) -> None:
        """Show the number of requests that this process has under way."""
        self._families.gauges[IN_FLIGHT.name].set(count)

    def refused_connections(self, totals: Mapping[str, int]) -> None:
        """Count refusals before a request was read, from this process's totals so far for each reason."""
        refused = self._families.counters[REFUSED_CONNECTIONS.name]
        for reason, total in totals.items():
            refused.labels(reason).inc(total - self._refused.get(reason, 0))
            self._refused[reason] = total

    def store_state(self, *, up: bool, breaker: Breaker = "closed") -> None:
        """Show the store's state. Call it on every change: reading metrics reaches files of other workers, not them."""
        self._families.gauges[STORE_UP.name].set(int(up))
        self._families.gauges[STORE_BREAKER.name].set(_BREAKER[breaker])

    def store_error(self, kind: str) -> None:
        """Count a store error; *kind* is a fixed word such as ``timeout``."""
        self._families.counters[STORE_ERRORS.name].labels(kind).inc()

    def fault(self, where: str, request_id: str, fault: Exception) -> None:
        """Count a fault of ours that cost no request; *where* is a fixed word."""
        del request_id, fault
        self._families.counters[INTERNAL_ERRORS.name].labels(where).inc()

    def archived(self, outcome: str, count: int) -> None:
        """Count *count* originals, by the *outcome* of archiving them."""
        self._families.counters[ARCHIVED.name].labels(outcome).inc(count)

    def lines_dropped(self, count: int) -> None:
        """Show the number of log lines that this process has dropped so far."""
        self._families.gauges[LINES_DROPPED.name].set(count)

    def without_descriptor(self, count: int) -> None:
        """Count *count* connections that met the limit of open files."""
        self._families.counters[WITHOUT_DESCRIPTOR.name].inc(count)

    def learned_windows(self, count: int) -> None:
        """Show the number of windows that this process has learned from overflows and cuts."""
        self._families.gauges[LEARNED_WINDOWS.name].set(count)

    def exposition(self) -> tuple[bytes, str]:
        """Return the metrics as text and its content type. Call it in a thread: with several workers it reads files."""
        return generate_latest(self._shown), CONTENT_TYPE_PLAIN_0_0_4

    def _route(self, report: Report) -> _Route:
        """Return the series for requests like that of *report*. Make them for the first one."""
        model = self._model(report.model)
        key = (report.api, model, report.upstream, report.status, report.outcome)
        route = self._routes.get(key)
        if route is None:
            labels = dict(zip(_ROUTE, map(str, key), strict=True))
            route = self._routes[key] = _Route(self._families, labels, self._projects)
        return route

    def _model(self, name: str) -> str:
        return _bounded(self._models, name)


def _bounded(known: set[str], name: str) -> str:
    """Return *name* as the value of a label, or ``OTHER`` if there are many: values come from clients and stay."""
    if name in known:
        return name
    if len(known) >= MOST_MODELS or len(name) > LONGEST_MODEL or not name.isprintable():
        return OTHER
    known.add(name)
    return name


class _Families:
    """Every metric of the tables, registered under its name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.histograms: dict[str, Histogram] = {}
        self.shown: dict[tuple[Metric, tuple[str, ...]], dict[Value, float]] = {}
        metrics = {metric.name: metric for metric in (*(metric for metric, _ in _ROWS), *PROCESS)}
        for name, metric in metrics.items():
            labels = metric.labels + metric.by
            if metric.kind == "counter":
                self.counters[name] = Counter(name, metric.about, labels, registry=registry)
            elif metric.kind == "gauge":
                self.gauges[name] = Gauge(
                    name, metric.about, labels, registry=registry, multiprocess_mode=metric.across
                )
            else:
                self.histograms[name] = Histogram(name, metric.about, labels, registry=registry, buckets=metric.buckets)

    def adder(self, metric: Metric, labels: tuple[str, ...], own: Value) -> Add:
        """Return the function that adds to the series of *metric* with *labels* and its *own*; it sets a gauge."""
        if metric.kind == "gauge":
            return partial(self._set, metric, labels, own)
        every = labels + _own_labels(own)
        if metric.kind == "histogram":
            histogram = self.histograms[metric.name]
            if every:
                histogram = histogram.labels(*every)
            return histogram.observe
        counter = self.counters[metric.name]
        if every:
            counter = counter.labels(*every)
        return counter.inc

    def _set(self, metric: Metric, labels: tuple[str, ...], own: Value, amount: float) -> None:
        """Let a gauge show *amount* under its *own* labels only, among all with the same *labels*."""
        gauge = self.gauges[metric.name]
        shown = self.shown[metric, labels]
        for other in shown.keys() - {own}:
            # A label cannot be taken out again when worker processes keep their figures in files.
            gauge.labels(*labels, *_own_labels(other)).set(0)
        shown.clear()
        shown[own] = amount
        gauge.labels(*labels, *_own_labels(own)).set(amount)


def _own_labels(own: Value) -> tuple[str, ...]:
    if isinstance(own, tuple):
        return own
    return (own,)


class _Route(dict[tuple[Metric, Value], Add]):
    """The functions that add to each series of one kind of request.

    They are looked up once: ``labels()`` costs more than the count itself.

    A key is a metric and the value or values of its own labels. ``shown`` is what each gauge shows, on all routes with
    the same labels of it.
    """

    def __init__(self, families: _Families, labels: Mapping[str, str], projects: set[str]) -> None:
        super().__init__()
        self._families = families
        self._labels = labels
        self._projects = projects
        self.shown = {
            metric: families.shown.setdefault((metric, self._labels_of(metric)), {})
            for metric, _ in _ROWS
            if metric.kind == "gauge"
        }
        for metric, _ in _ROWS:
            if metric.from_zero and metric.own is not None:
                self[metric, metric.own] = self._adder(metric, metric.own)

    def __missing__(self, key: tuple[Metric, Value]) -> Add:
        metric, own = key
        if metric.by[:1] == ("project",) and isinstance(own, tuple):
            # Clients choose these names: not even their keys are remembered without bound.
            return self._adder(metric, (_bounded(self._projects, own[0]), *own[1:]))
        add = self[key] = self._adder(metric, own)
        return add

    def _adder(self, metric: Metric, own: Value) -> Add:
        return self._families.adder(metric, self._labels_of(metric), own)

    def _labels_of(self, metric: Metric) -> tuple[str, ...]:
        return tuple(self._labels[name] for name in metric.labels)

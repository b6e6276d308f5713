"""Prometheus metrics: those of requests from the table of a report's fields, the others from ``PROCESS`` below.

Names and units are as Prometheus recommends: seconds, and ``_total`` for counters
(https://prometheus.io/docs/practices/naming/). With several workers each answer of ``/metrics`` covers them all.

A report first waits in the tally of its route, because counting many reports together takes a third of the time.
``flush`` counts them before each answer of ``/metrics`` and every second, and a tally is counted when ``MOST_WAITING``
wait in it. Only the event loop's thread adds reports, and it never waits for another thread that counts them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.core.report import DURATION, DURATION_BUCKETS, FIELDS, Metric, Report, SummaryReport, Value

MOST_MODELS, LONGEST_MODEL = 100, 100
"""Most names of each kind that become labels, and most characters of one: labels live as long as the process, and each
one is a further time series (https://prometheus.io/docs/practices/instrumentation/#do-not-overuse-labels).
"""

OTHER = "other"
"""The label of all further names, which come from clients."""

MOST_WAITING: Final = 64
"""Reports that wait in a tally, unless another thread is counting: half a millisecond of work."""

Breaker = Literal["closed", "half-open", "open"]
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}
"""The value of the gauge for each state of the store's breaker."""

LAG_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds of lag, from what no client notices to a loop that hangs."""

# fmt: off
LOOP_LAG: Final = Metric("ullage_loop_lag_seconds", "How late the event loop is for what is due.",
                         kind="histogram", buckets=LAG_BUCKETS,
                         doc="Every 50 ms while requests are under way, else every second: what every other client "
                             "waits beside its own request. From 0.2 s on the line "
                             "`proxy.loop_lagged` says what ran.")
REFUSED_CONNECTIONS: Final = Metric(
    "ullage_refused_connections_total", "Client connections closed for what came on them, or to keep their number.",
    by=("reason",), initial=("head_too_large", "not_http", "full", "made_room"),
    doc="The head too large or with too many fields (`head_too_large`), `not_http`, one too many (`full`), or idle "
        "while others waited (`made_room`).")
WITHOUT_DESCRIPTOR: Final = Metric("ullage_out_of_descriptors_total",
                                   "Connections that met the limit of open files.",
                                   doc="Of clients and to upstreams. Raise the limit (`ulimit -n`, `LimitNOFILE`).")
IN_FLIGHT: Final = Metric("ullage_in_flight", "Requests under way.", kind="gauge")
LINES_DROPPED: Final = Metric("ullage_log_lines_dropped", "Log lines that were not read in time.", kind="gauge")
INTERNAL_ERRORS: Final = Metric("ullage_internal_errors_total", "Faults of the proxy's own that cost no request.",
                                by=("where",), initial=("request", "answer", "after"),
                                doc="In making a `request` smaller, in watching an `answer`, in what is noted `after`.")
LEARNED_WINDOWS: Final = Metric("ullage_learned_windows", "Windows that hold because traffic taught them.",
                                kind="gauge", across="livemax")
STORE_UP: Final = Metric("ullage_store_up", "1 if the store answers.", kind="gauge", across="livemin",
                         doc="0 for memory in its place, and if the store refuses operations.")
STORE_BREAKER: Final = Metric("ullage_store_breaker_state", "0 closed, 1 half open, 2 open.", kind="gauge",
                              across="livemax")
STORE_ERRORS: Final = Metric("ullage_store_errors_total", "Errors of the store.", by=("kind",))
ARCHIVED: Final = Metric("ullage_archive_items_total", "Originals of what left views, by what became of them.",
                         by=("outcome",), initial=("kept", "too_big", "dropped", "failed"),
                          doc="`kept`, `too_big`, `dropped` (too much waited already) or `failed`.")
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
                                 "Summarisers, each for one client, that are not called because they failed.",
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

_Key = tuple[Metric, Value]
"""A metric and the value or values of its own labels."""


class _Row(NamedTuple):
    """One metric of reports: the value that adds nothing to it, and its key if that is the same for all reports."""

    metric: Metric
    nothing: object
    key: _Key | None


_BLANK: Final = Report("", "")


def _rows_of(attribute: str) -> tuple[_Row, ...]:
    """Return the rows that depend on *attribute*."""
    rows = []
    for metric, when in _ROWS:
        if when == attribute:
            nothing, key = getattr(_BLANK, when, None), None
            if metric.always:
                nothing = object()  # equal to no value
            if metric.own is not None:
                key = metric, metric.own
            rows.append(_Row(metric, nothing, key))
    return tuple(rows)


_USUAL: Final = ("api", "tokens_before", "tokens_sent", "overhead_seconds")
"""The attributes that nearly every report has. The others are compared with their defaults all at once."""

_RARE: Final = tuple(dict.fromkeys(when for _, when in _ROWS if when not in (*_USUAL, DURATION)))

_READ_RARE: Final = attrgetter(*_RARE)
_RARE_BLANK: Final = _READ_RARE(_BLANK)
_USUAL_ROWS: Final = tuple((attrgetter(name), _rows_of(name)) for name in _USUAL)
_RARE_ROWS: Final = tuple((attrgetter(name), _rows_of(name)) for name in _RARE)
_DURATION_ROWS: Final = _rows_of(DURATION)

_ROUTE: Final = ("api", "model", "upstream", "status", "outcome")
"""The labels that a report's metrics may have beside their own; together they name one kind of request."""
_READ_ROUTE: Final = attrgetter(*_ROUTE)

Add = Callable[[float], None]


class Telemetry:
    """Counts requests, summaries, and the states and errors of the process and its store.

    *directory* has the files in which worker processes store their figures. ``PROMETHEUS_MULTIPROC_DIR`` must have
    named it before this module was imported. ``None``: this process is the only one. ``loop_lag`` adds the seconds by
    which the event loop was late. Reports are appended to *reports*, each with its Unix time.
    """

    def __init__(
        self, version: str, directory: Path | None = None, reports: deque[tuple[float, Report]] | None = None
    ) -> None:
        # prometheus_client decides at its import if values go to files, and no public name shows its decision:
        # https://github.com/prometheus/client_python/blob/master/prometheus_client/values.py
        shared = bool(getattr(values.ValueClass, "_multiprocess", False))
        if shared != (directory is not None):
            raise ValueError("PROMETHEUS_MULTIPROC_DIR must be set before the import exactly when a directory is given")
        self._registry = CollectorRegistry()
        self._exposed = self._registry
        if directory is not None:
            # The collector reads every worker's files, this one's too: with its own metrics in the same registry they
            # would be counted twice. https://prometheus.github.io/client_python/multiprocess/
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed, path=str(directory))  # type: ignore[no-untyped-call]
        self._models: set[str] = set()
        self._reports = reports
        self._tenants: set[str] = set()
        self._projects: set[str] = set()
        self._refused: dict[str, int] = {}
        self._tallies: dict[tuple[str, str, str, int, str], _Tally] = {}
        self._flushing = threading.Lock()
        self._families = _Families(self._registry)
        self._families.gauges[BUILD_INFO.name].labels(version).set(1)
        self.loop_lag: Add = self._families.histograms[LOOP_LAG.name].observe

    def observe(self, report: Report, duration: float) -> None:
        """Count one finished request; *duration* in seconds."""
        tally = self._tallies.get(_READ_ROUTE(report)) or self._tally(report)
        tally.waiting.append((report, duration))
        if len(tally.waiting) >= MOST_WAITING and self._flushing.acquire(blocking=False):
            try:
                tally.count()
            finally:
                self._flushing.release()
        if self._reports is not None:
            self._reports.append((time.time(), report))

    def flush(self) -> None:
        """Count the reports that wait. Safe to call from any thread.

        With several workers this shows them to the others: call it every second, and at the end.
        """
        with self._flushing:
            for tally in list(self._tallies.values()):
                tally.count()

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

    def store_state(self, *, up: bool, breaker: Breaker) -> None:
        """Show the store's state. Call it on every change: an answer of ``/metrics`` reads the other workers' files."""
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
        self.flush()
        return generate_latest(self._exposed), CONTENT_TYPE_PLAIN_0_0_4

    def _tally(self, report: Report) -> _Tally:
        """Return the tally of requests like that of *report*; a new one for the first of them."""
        model = self._model(report.model)
        key = (report.api, model, report.upstream, report.status, report.outcome)
        tally = self._tallies.get(key)
        if tally is None:
            labels = dict(zip(_ROUTE, map(str, key), strict=True))
            tally = self._tallies[key] = _Tally(self._families, labels, self._projects)
        return tally

    def _model(self, name: str) -> str:
        return _bounded(self._models, name)


def _bounded(names: set[str], name: str) -> str:
    """Return *name* as the value of a label and add it to *names*; ``OTHER`` if there are ``MOST_MODELS`` names."""
    if name in names:
        return name
    if len(names) >= MOST_MODELS or len(name) > LONGEST_MODEL or not name.isprintable():
        return OTHER
    names.add(name)
    return name


class _Families:
    """Every metric of the tables, registered under its name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.histograms: dict[str, _Histogram] = {}
        self.present: dict[tuple[Metric, tuple[str, ...]], dict[Value, float]] = {}
        """The value of each gauge that is not 0, by its own labels."""
        metrics = {metric.name: metric for metric in (*(metric for metric, _ in _ROWS), *PROCESS)}
        for name, metric in metrics.items():
            labels = metric.labels + metric.by
            if metric.kind == "counter":
                self.counters[name] = Counter(name, metric.about, labels, registry=registry)
                self._begin(metric)
            elif metric.kind == "gauge":
                self.gauges[name] = Gauge(
                    name, metric.about, labels, registry=registry, multiprocess_mode=metric.across
                )
            else:
                self.histograms[name] = _Histogram(
                    name, metric.about, labels, registry=registry, buckets=metric.buckets
                )

    def _begin(self, metric: Metric) -> None:
        """Set the series of all known labels to 0, if the metric has no label that comes from a report.

        A counter that appears with its first event has no increase for ``rate()`` to see:
        https://prometheus.io/docs/practices/instrumentation/#avoid-missing-metrics
        """
        if not metric.labels:
            for own in metric.initial:
                self.series(metric, _own_labels(own))

    def series(self, metric: Metric, labels: tuple[str, ...]) -> Counter | _Histogram:
        """Return the series of a counter or histogram; it begins at 0 with the first call."""
        family = self.counters.get(metric.name) or self.histograms[metric.name]
        if not labels:
            return family
        return family.labels(*labels)

    def show(self, metric: Metric, labels: tuple[str, ...], own: Value, amount: float) -> None:
        """Set a gauge to *amount* under its *own* labels, and to 0 under all others with the same *labels*."""
        gauge = self.gauges[metric.name]
        present = self.present[metric, labels]
        for other in present.keys() - {own}:
            # With several workers the client library cannot remove a label from the files.
            gauge.labels(*labels, *_own_labels(other)).set(0)
        present.clear()
        present[own] = amount
        gauge.labels(*labels, *_own_labels(own)).set(amount)


def _own_labels(own: Value) -> tuple[str, ...]:
    if isinstance(own, tuple):
        return own
    return (own,)


class _Histogram(Histogram):
    """A histogram that also takes many observations at once, for which its base class has no method."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe *amounts*."""
        # As ``observe`` of the base class does for one amount, on the same private members.
        self._sum.inc(sum(amounts))
        buckets = list(map(partial(bisect_left, self._upper_bounds), amounts))
        for bucket in set(buckets):
            self._buckets[bucket].inc(buckets.count(bucket))


def _amounts(row: _Row, reports: Sequence[Report], values: Sequence[Any]) -> list[Any]:
    """Return the amounts that *reports* add to the metric of *row*; *values* are those of its attribute."""
    amount = row.metric.amount
    if amount is None:
        return [value for value in values if value != row.nothing]
    pairs = zip(reports, values, strict=True)
    amounts = [amount(report, value) for report, value in pairs if value != row.nothing]
    return [value for value in amounts if value is not None]


class _Tally:
    """The requests of one kind: ``waiting`` are the reports that are not counted yet, each with its seconds.

    ``_present`` has the values of each gauge, which all routes with the same labels share.
    """

    def __init__(self, families: _Families, labels: Mapping[str, str], projects: set[str]) -> None:
        self.waiting: list[tuple[Report, float]] = []
        self._series: dict[_Key, Counter | _Histogram] = {}
        self._families = families
        self._labels = labels
        self._projects = projects
        self._present = {
            metric: families.present.setdefault((metric, self._labels_of(metric)), {})
            for metric, _ in _ROWS
            if metric.kind == "gauge"
        }
        for metric, _ in _ROWS:
            if "" in self._labels_of(metric):
                continue  # nothing was sent for such requests, so a label is empty
            for own in metric.initial:
                self._series_of((metric, own))

    def count(self) -> None:
        """Add the waiting reports to the metrics. One thread at a time; the loop may append more meanwhile."""
        number = len(self.waiting)
        if not number:
            return
        # Each of these two is atomic under the interpreter's lock:
        # https://docs.python.org/3/faq/library.html#what-kinds-of-global-value-mutation-are-thread-safe
        batch = self.waiting[:number]
        del self.waiting[:number]
        reports = [report for report, _ in batch]
        self._add(_DURATION_ROWS, reports, [seconds for _, seconds in batch])
        for read, rows in _USUAL_ROWS:
            self._add(rows, reports, list(map(read, reports)))
        rare = [report for report in reports if _READ_RARE(report) != _RARE_BLANK]
        if rare:
            for read, rows in _RARE_ROWS:
                self._add(rows, rare, list(map(read, rare)))

    def _add(self, rows: tuple[_Row, ...], reports: Sequence[Report], values: Sequence[Any]) -> None:
        """Add the *values* of an attribute of *reports* to the metrics of *rows*."""
        for row in rows:
            amounts = _amounts(row, reports, values)
            if not amounts:
                continue
            if row.key is None:
                self._add_each(row.metric, amounts)
                continue
            series = self._series_of(row.key)
            if isinstance(series, _Histogram):
                series.observe_all(amounts)
            else:
                series.inc(sum(amounts))

    def _add_each(self, metric: Metric, amounts: Sequence[Mapping[Value, float]]) -> None:
        """Add each of *amounts* to *metric*, under the labels that it names."""
        for amount in amounts:
            if amount == self._present.get(metric):
                continue  # the gauge has this value already
            for own, added in amount.items():
                if metric.kind == "gauge":
                    self._families.show(metric, self._labels_of(metric), own, added)
                    continue
                if metric.by[:1] == ("project",) and isinstance(own, tuple):
                    # Clients choose these names: not even their keys are remembered without bound.
                    own = (_bounded(self._projects, own[0]), *own[1:])
                cast("Counter", self._series_of((metric, own))).inc(added)

    def _series_of(self, key: _Key) -> Counter | _Histogram:
        """Return the series of *key*. It is looked up once: ``labels()`` costs more than the count itself."""
        series = self._series.get(key)
        if series is None:
            metric, own = key
            labels = self._labels_of(metric) + _own_labels(own)
            series = self._series[key] = self._families.series(metric, labels)
        return series

    def _labels_of(self, metric: Metric) -> tuple[str, ...]:
        return tuple(self._labels[name] for name in metric.labels)

"""``ullage top``: the figures of a running proxy on a terminal, read from its metrics, its status and its page.

Figures are counted from the start of the proxy; rates and times are those between two readings.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy.cli.address import first_event, get
from proxy.cli.output import figures_table, plural, table_console
from proxy.core.advice import NEARLY_FULL
from proxy.core.apis.json_steps import as_object

METRICS: Final = "/metrics"
STATUS: Final = "/ullage/api/status"
EVENTS: Final = "/ullage/events"
"""The stream of the page: its first event has every live conversation."""

BUILD: Final = "ullage_build_info"
"""Every Ullage has this metric."""

REQUESTS: Final = "ullage_requests_total"
TOKENS: Final = "ullage_context_tokens_total"

KEY_REQUIRED: Final = (401, 403)
"""Statuses of routes that need the admin key."""

MOST_MODELS: Final = 15
"""Models that are shown, those with most requests."""

MOST_CONVERSATIONS: Final = 10
"""Conversations that are shown, those with the newest requests."""

CELLS: Final = 20
"""Columns of the bar of a full conversation: with it the table still fits 80."""

NARROW: Final = 72
"""Columns of a terminal below which tables have only the columns that matter most, and shorter bars."""

NARROW_CELLS: Final = 10
"""Columns of the bar on such a terminal."""

HALF_FULL: Final = 0.6
"""Share of the budget above which a bar is yellow; above ``NEARLY_FULL`` it is red."""

Labels = Mapping[str, str]


class CannotRead(Exception):
    """The proxy cannot be read; the text has the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of a proxy at one time, in monotonic seconds.

    ``status``, the live ``conversations`` and the other figures of the ``page`` are empty if the key does not open
    them.
    """

    at: float
    samples: Sequence[Sample]
    status: Mapping[str, Any] = field(default_factory=dict)
    conversations: Sequence[Mapping[str, Any]] = ()
    page: Mapping[str, Any] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series called *name* that have these *labels*."""
        return sum(sample.value for sample in self._series(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of the series called *name* by the value of *label*."""
        sums: dict[str, float] = {}
        for sample in self._series(name, labels):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def _series(self, name: str, labels: Labels) -> Iterator[Sample]:
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


def read(address: str, key: str) -> Reading:
    """Read the proxy at *address*; *key* is its admin key, or empty. Raises ``CannotRead``."""
    try:
        status, body = get(address, METRICS, key)
        state, document = get(address, STATUS, key)
        event = first_event(address, EVENTS, key)
    except ValueError as error:
        raise CannotRead(f"{address} is no http(s) URL: {error}") from error
    except OSError as error:
        raise CannotRead(f"{address} does not answer: {error.strerror or error}. Name another with --url.") from error
    except http.client.HTTPException as error:
        raise CannotRead(f"{address} does not answer in HTTP: {error}") from error
    if status in KEY_REQUIRED:
        raise CannotRead(f"{address} shows its metrics to the holder of server.admin_key: give --key-env NAME.")
    if status != http.client.OK:
        raise CannotRead(f"{address}{METRICS} answers {status}: telemetry.metrics is off, or this is no Ullage.")
    samples = _samples(body)
    if not any(sample.name == BUILD for sample in samples):
        raise CannotRead(f"{address}{METRICS} has no metrics of Ullage: this is no Ullage. Name another with --url.")
    facts: Mapping[str, Any] = {}
    if state == http.client.OK:
        facts = _json_object(document)
    update = _json_object(event)
    return Reading(time.monotonic(), samples, facts, update.get("rows", ()), update.get("snapshot", {}))


def _samples(text: bytes) -> list[Sample]:
    """Return the samples of *text*; none if it is no text of metrics."""
    try:
        return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    except ValueError:
        return []


def _json_object(text: bytes) -> Mapping[str, Any]:
    """Return the JSON object in *text*; an empty one if there is none: a gateway may answer in the proxy's place."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return as_object(value)


def watch(address: str, key: str, interval: float, *, once: bool) -> None:
    """Show the proxy at *address* every *interval* seconds until Ctrl-C; with *once* or without a terminal one time.

    Raises ``CannotRead`` if it cannot be read at first.
    """
    reading, before = read(address, key), None
    console = table_console()
    if once or not console.is_terminal:
        console.print(frame(address, reading, before, console.width))
        return
    output = frame(address, reading, before, console.width)
    with Live(output, console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(interval)
            try:
                before, reading = reading, read(address, key)
                output = frame(address, reading, before, console.width)
            except CannotRead as error:  # the proxy may be restarting: the next reading may succeed
                output = Text(str(error), style="red")
            live.update(output, refresh=True)


def frame(address: str, reading: Reading, before: Reading | None, width: int) -> RenderableType:
    """Return the whole output for *reading* on a terminal of *width* columns.

    Rates and times are those since the reading *before*, if any.
    """
    is_narrow = width < NARROW
    columns = MODEL_COLUMNS
    if is_narrow:
        columns = ("requests", "fill")
    models = _models(reading, before, columns)
    parts: list[RenderableType] = [*_head(address, reading, before), Text(), models]
    if reading.conversations:
        parts += [Text(), _conversations(reading.conversations, is_narrow=is_narrow)]
    return Group(*parts)


def _head(address: str, reading: Reading, before: Reading | None) -> Iterator[Text]:
    """Yield the lines about the whole proxy."""
    rate = Rate(reading, before)
    version = next(iter(reading.by_label(BUILD, "version")), "")
    workers = reading.status.get("workers", 1)
    title = f"ullage {version} at {address}"
    if workers != 1:
        title += f", {workers} workers"
    yield Text(title, style="bold")
    requests = plural(int(reading.total(REQUESTS)), "request") + rate.text(REQUESTS)
    outcomes = reading.by_label(REQUESTS, "outcome")
    parts = [f"{count:,.0f} {outcome}" for outcome, count in outcomes.items() if outcome != "verbatim" and count]
    in_flight = reading.total("ullage_in_flight")
    yield Text(", ".join([requests, f"{in_flight:.0f} under way", *parts]))
    yield _tokens_line(reading)
    yield from _savings_line(reading)
    yield Text(f"own time {rate.times('ullage_overhead_seconds')}, loop lag {rate.times('ullage_loop_lag_seconds')}")
    yield _store_line(reading)
    yield from _troubles(reading)


def _tokens_line(reading: Reading) -> Text:
    before = reading.total(TOKENS, region="before")
    after = reading.total(TOKENS, region="after")
    removed = reading.total("ullage_tokens_removed_total")
    compactions = plural(int(reading.total("ullage_compactions_total")), "compaction")
    share = ""
    if before:
        share = f" ({removed / before:.0%})"
    return Text(
        f"tokens {_tokens(before)} as sent, {_tokens(after)} upstream, {_tokens(removed)} removed{share}, {compactions}"
    )


def _savings_line(reading: Reading) -> Iterator[Text]:
    """Yield the line with the figures of the page; nothing if the key does not open it."""
    if not reading.page:
        return
    models = reading.page["models"].values()
    parts = []
    if total := sum(model["input"] for model in models):
        parts.append(f"provider cache {sum(model['cached'] for model in models) / total:.0%}")
    if reading.page["saved"] is not None:
        parts.append(f"at least ${reading.page['saved']:.2f} saved")
    full = sum(row.get("tokens", 0) > NEARLY_FULL * row.get("budget", 0) > 0 for row in reading.conversations)
    parts.append(f"{full} of {plural(len(reading.conversations), 'conversation')} nearly full")
    yield Text(", ".join(parts))


def _store_line(reading: Reading) -> Text:
    store = reading.status.get("store")
    running = reading.total("ullage_summaries_running")
    written = reading.total("ullage_summaries_total", outcome="written")
    line = Text("store ")
    if isinstance(store, dict) and "kind" in store:
        line.append(f"{store['kind']} ")
    if reading.total("ullage_store_up") > 0:
        line.append("up", style="green")
    else:
        line.append("down", style="bold red")
    line.append(f", summaries {written:,.0f} written, {running:.0f} running")
    return line


TROUBLES: Final[tuple[tuple[str, str, Labels], ...]] = (
    ("overflow errors returned", "ullage_overflow_errors_total", {"stage": "returned"}),
    ("upstream errors", "ullage_upstream_errors_total", {}),
    ("internal errors", "ullage_internal_errors_total", {}),
    ("prompts cut by servers", "ullage_silent_truncations_total", {}),
    ("refused connections", "ullage_refused_connections_total", {}),
    ("log lines dropped", "ullage_log_lines_dropped", {}),
)
"""Figures that should be zero: title, metric, and the labels of the series that are added."""


def _troubles(reading: Reading) -> Iterator[Text]:
    """Yield a line with the troubles since the start; nothing if there were none."""
    counts = [(title, reading.total(name, **labels)) for title, name, labels in TROUBLES]
    texts = [f"{count:,.0f} {title}" for title, count in counts if count]
    if texts:
        yield Text(", ".join(texts), style="yellow")


MODEL_COLUMNS: Final[Sequence[str]] = ("window", "requests", "/s", "as sent", "upstream", "fill", "compacted")
"""Figures of a model."""

CONVERSATION_COLUMNS: Final[Sequence[str]] = ("requests", "compacted", "tokens", "budget", "fill")
"""Figures of a conversation."""


def _models(reading: Reading, before: Reading | None, columns: Sequence[str]) -> Table:
    """Return a row for each model, those with most requests first; ``fill`` is the mean of their views."""
    table = figures_table("model", *columns)
    rate = Rate(reading, before)
    requests = reading.by_label(REQUESTS, "model")
    sent = reading.by_label(TOKENS, "model", region="before")
    upstream = reading.by_label(TOKENS, "model", region="after")
    compactions = reading.by_label("ullage_compactions_total", "model")
    windows = reading.by_label("ullage_window_tokens", "model")
    for model in sorted(requests, key=lambda name: -requests[name])[:MOST_MODELS]:
        figures = {
            "window": _tokens(windows.get(model)),
            "requests": _figure(requests[model]),
            "/s": rate.figure(REQUESTS, model=model),
            "as sent": _tokens(sent.get(model)),
            "upstream": _tokens(upstream.get(model)),
            "fill": _share(
                reading.total("ullage_context_fill_ratio_sum", model=model),
                reading.total("ullage_context_fill_ratio_count", model=model),
            ),
            "compacted": _figure(compactions.get(model)),
        }
        table.add_row(model or "(none)", *[figures[column] for column in columns])
    return table


def _conversations(rows: Sequence[Mapping[str, Any]], *, is_narrow: bool) -> Table:
    """Return a row for each conversation with its fill, those with the newest requests first."""
    columns, cells = CONVERSATION_COLUMNS, CELLS
    if is_narrow:
        columns, cells = ("fill",), NARROW_CELLS
    table = figures_table("conversation", *columns)
    table.add_column("", no_wrap=True, min_width=cells)
    table.collapse_padding = True  # else the widest rows have 81 columns
    newest = sorted(rows, key=lambda row: -float(row.get("last", 0.0)))
    for row in newest[:MOST_CONVERSATIONS]:
        tokens, budget = row.get("tokens", 0), row.get("budget", 0)
        figures = {
            "requests": _figure(row.get("requests")),
            "compacted": _figure(row.get("compactions")),
            "tokens": _tokens(tokens),
            "budget": _tokens(budget),
            "fill": _share(tokens, budget),
        }
        table.add_row(row["name"], *[figures[column] for column in columns], _bar(tokens, budget, cells))
    return table


def _bar(tokens: float, budget: float, most: int) -> Text:
    """Return a bar of *most* cells, coloured by the share of the *budget* that *tokens* take; empty without one."""
    share = 0.0
    if budget:
        share = tokens / budget
    cells = min(most, round(most * share))
    color = "green"
    if share > NEARLY_FULL:
        color = "red"
    elif share > HALF_FULL:
        color = "yellow"
    return Text("█" * cells, style=color) + Text("░" * (most - cells), style="dim")


def _figure(value: float | None) -> str:
    """Return a count; a dash for zero and for an unknown figure."""
    if not value:
        return "-"
    return f"{value:,.0f}"


def _tokens(count: float | None) -> str:
    """Return a figure of at most six characters, such as ``17.1M``."""
    if not count or count < 100_000:
        return _figure(count)
    if count < 1e6:
        return f"{count / 1e3:.0f}k"
    if count < 1e9:
        return f"{count / 1e6:.1f}M"
    return f"{count / 1e9:.1f}G"


def _share(part: float, whole: float | None) -> str:
    """Return *part* of *whole* in per cent; a dash if there is no whole."""
    if not whole:
        return "-"
    return f"{part / whole:.0%}"


@dataclass(frozen=True, slots=True)
class Rate:
    """The changes between two readings; none are known without the reading ``before``."""

    reading: Reading
    before: Reading | None

    def figure(self, name: str, **labels: str) -> str:
        """Return the growth of the counter *name* in a second; a dash without an earlier reading."""
        if self.before is None:
            return "-"
        # Counters of a restarted proxy begin at zero, and a rate is never negative:
        # https://prometheus.io/docs/prometheus/latest/querying/functions/#rate
        grown = max(0.0, self.reading.total(name, **labels) - self.before.total(name, **labels))
        return f"{grown / max(1e-3, self.reading.at - self.before.at):.1f}"

    def text(self, name: str) -> str:
        """Return the growth of the counter *name* in brackets; empty without an earlier reading."""
        if self.before is None:
            return ""
        return f" ({self.figure(name)}/s)"

    def times(self, name: str) -> str:
        """Return median and 99th percentile of the histogram *name* since the last reading, or since the start.

        The figures are those since the start without an earlier reading, and if nothing was observed since then.
        """
        buckets = self._buckets(name)
        if not buckets or not buckets[-1][1]:
            return "-"
        median, high = (quantile(share, buckets) * 1000 for share in (0.5, 0.99))
        return f"p50 {median:.1f} ms, p99 {high:.1f} ms"

    def _buckets(self, name: str) -> list[tuple[float, float]]:
        counts = self.reading.by_label(f"{name}_bucket", "le")
        if self.before is not None:
            earlier = self.before.by_label(f"{name}_bucket", "le")
            new = {edge: count - earlier.get(edge, 0.0) for edge, count in counts.items()}
            if new.get("+Inf", 0.0) > 0:
                counts = new
        return sorted((float(edge), count) for edge, count in counts.items())


def quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Return the value below which *share* of all observations are, from cumulative *buckets* of (edge, count).

    Inside a bucket it is interpolated, as Prometheus does: https://prometheus.io/docs/practices/histograms/
    """
    rank = share * buckets[-1][1]
    edge_before, count_before = 0.0, 0.0
    for edge, count in buckets:
        if count >= rank and count > count_before:
            if edge == float("inf"):
                return edge_before
            return edge_before + (edge - edge_before) * (rank - count_before) / (count - count_before)
        edge_before, count_before = edge, count
    return edge_before

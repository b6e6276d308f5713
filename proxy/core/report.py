"""The report of one request, frozen, and one table of its fields.

The log line, the response headers, the metrics and ``docs/metrics.md`` are derived from ``FIELDS``: a new field is an
attribute of ``Report`` and one row there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress
from operator import attrgetter, ne
from typing import Any, Final, Literal

import msgspec

OutcomeName = Literal["verbatim", "compacted", "degraded", "refused"]

ADDED_STAGES: Final = frozenset({"memories", "recall"})
"""Stages that only add to a request: with no other it is not smaller, and not ``compacted``."""

SERVED = "served"
"""The reason of a request that Ullage answered by itself, in place of a server that cannot."""

INTERNAL_ERROR = "internal_error"
"""The reason of a request whose own bytes were sent, because a fault of our own prevented a smaller view."""

BUDGET_UNREACHABLE = "budget_unreachable"
"""The reason of a request whose history is larger than its task's size allows, and could not be made smaller."""


class Usage(msgspec.Struct, frozen=True):
    """Token figures as the upstream reported them; None for a figure that it did not report."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


class Report(msgspec.Struct, frozen=True):
    """Facts about one request: counts and names only, never a prompt, a key or a summary.

    ``FIELDS`` says what each of them means. All token figures are in tokens of the model's encoding.
    """

    request_id: str
    api: str
    model: str = ""
    upstream: str = ""
    stream: bool = False
    outcome: OutcomeName = "verbatim"
    reason: str = ""
    window: int | None = None
    budget: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    bounded: bool = False
    stages: tuple[str, ...] = ()
    regions: Mapping[str, int] = {}
    borrowed: Mapping[str, int] = {}
    source: str = ""
    project: str = ""
    task_size: str = ""
    conversation: str = ""
    agent: str = ""
    files_read: int | None = None
    epoch: int = 0
    event: bool = False
    observed: bool = False
    retries: int = 0
    overflows: int = 0
    fallback: str = ""
    client_compaction: str = ""
    overhead_seconds: float = 0.0
    large_result: float = 0.0
    first_fill: float | None = None
    repeated_prefix: float | None = None
    newest_tokens: int = 0
    waste: Mapping[str, int] = {}
    status: int = 0
    usage: Usage = NO_USAGE
    summary_tokens: int = 0
    recalls: int = 0
    recall_tokens: int = 0
    conversation_budget: Mapping[str, int | None] = {}

    def with_(self, **changes: Any) -> Report:
        """Return the same report with other values for *changes*."""
        return msgspec.structs.replace(self, **changes)

    @property
    def pressure(self) -> float | None:
        """View tokens over budget; None if either is unknown."""
        if self.tokens_after is None or not self.budget:
            return None
        return self.tokens_after / self.budget

    @property
    def applied(self) -> bool:
        """True if the decided view went upstream: not in mode observe, and not if the request was refused."""
        return not self.observed and self.outcome != "refused"

    @property
    def tokens_sent(self) -> int | None:
        """The tokens that went upstream; None if they are unknown, or if the request was refused."""
        if self.outcome == "refused":
            return None
        if self.observed:
            return self.tokens_before
        return self.tokens_after

    @property
    def tokens_removed(self) -> int:
        """The tokens by which the view is smaller than what the client sent."""
        if self.tokens_before is None or self.tokens_after is None:
            return 0
        return max(0, self.tokens_before - self.tokens_after)


SummaryOutcome = Literal["written", "adopted", "failed", "skipped"]


class SummaryReport(msgspec.Struct, frozen=True):
    """The outcome of one summary job. ``tenant`` is a short keyed name, ``reason`` a fixed word; never a text.

    Token figures are those that the model reported, else our own count.
    """

    outcome: SummaryOutcome
    reason: str
    tenant: str
    model: str
    upstream: str
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


Kind = Literal["counter", "gauge", "histogram"]
Value = str | tuple[str, ...]
Amount = float | Mapping[Any, float] | None

OVERHEAD_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
DURATION_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
UPSTREAM_ERRORS: Final = ("unreachable", "timeout", "stream_error", "truncated", "rate_limited", "server", "client")
"""Kinds of errors of upstreams, as the metric counts them."""

FILL_BUCKETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of a window."""

DURATION: Final = "duration"
"""The one row that is no part of a report: the seconds are known only when the answer has gone."""

NO_LABELS: Final[tuple[str, ...]] = ()
"""The values of a metric's own labels if it has none."""


class Metric(msgspec.Struct, frozen=True, eq=False):
    """A metric for Prometheus: its name, one sentence about it, its labels, and what a report adds to it.

    Labels: ``labels`` are attributes of a report, ``by`` are further labels. ``own`` is the value of these; if it is
    None, ``amount`` returns a mapping from values to numbers.

    Amount: a report adds to the metric if its attribute ``when`` (the row's own, if empty) is not at its default, or
    ``always``. ``amount`` takes the report and that attribute; it returns a number, a mapping, or None to add nothing.
    Without ``amount`` the attribute itself is added.

    ``initial`` are values of ``by`` whose series begin at 0, because Prometheus' ``rate`` does not see the step to a
    series' first figure. They begin with the process, or with the first request of their ``labels``. ``across`` states
    how the gauges of several worker processes become one figure. ``doc`` is documentation beside ``about``.
    """

    name: str
    about: str
    labels: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    kind: Kind = "counter"
    own: Value | None = NO_LABELS
    when: str = ""
    always: bool = False
    amount: Callable[[Report, Any], Amount] | None = None
    initial: tuple[Value, ...] = ()
    doc: str = ""
    buckets: tuple[float, ...] = ()
    across: Literal["livesum", "livemin", "livemax", "livemostrecent"] = "livesum"


class Field(msgspec.Struct, frozen=True, eq=False):
    """One row: an attribute of a report, its key in the log line, its response header, its metrics, and its meaning.

    ``logged`` converts the value for the log; ``foreign`` marks text from outside, which is escaped first. The header
    is omitted if the value is at its default, unless it is ``always`` sent; ``shown`` converts the value to its text.
    """

    name: str
    log: str
    about: str
    header: str = ""
    metrics: tuple[Metric, ...] = ()
    logged: Callable[[Any], object] | None = None
    foreign: bool = False
    shown: Callable[[Report, Any], str] | None = None
    always: bool = False


def _shown_pressure(report: Report, pressure: float) -> str:
    if not report.bounded or report.tokens_after is None or not report.budget:
        return f"{max(pressure, 0.01):.2f}"
    # A bound never rounds down.
    return f"<{max(-(-100 * report.tokens_after // report.budget) / 100, 0.01):.2f}"


def _context_tokens(region: str) -> Metric:
    about = "Input tokens, as the client sent them (before) and as they went upstream (after)."
    name, labels, by = "ullage_context_tokens_total", ("model",), ("region",)
    return Metric(name, about, labels, by, own=region, initial=(region,))


def _upstream_error(report: Report) -> Amount:
    """Return one error of the upstream by its kind; None if it made none."""
    if report.reason.startswith("upstream_"):
        return {report.reason.removeprefix("upstream_"): 1}
    if report.status < 400 or report.outcome == "refused" or report.reason == "client_left":
        return None
    if report.status == 429:
        return {"rate_limited": 1}
    if report.status >= 500:
        return {"server": 1}
    return {"client": 1}


def _overflows(report: Report, overflows: int) -> Amount:
    retried = min(overflows, report.retries)
    stages = {"retried": retried, "returned": overflows - retried}
    return {stage: count for stage, count in stages.items() if count}


def _label_metrics(row: str) -> tuple[Metric, ...]:
    """Return the metrics of both labels of a client; a report that has both counts in the row ``project`` only."""

    def requests(report: Report, _: str) -> Amount:
        if row == "task_size" and report.project:
            return None
        return {(report.project, report.task_size): 1}

    def tokens(report: Report, _: str) -> Amount:
        if report.outcome == "refused" or (row == "task_size" and report.project):
            return None
        return {(report.project, report.task_size): report.tokens_sent or 0}

    both = ("project", "task_size")
    return (
        Metric(
            "ullage_project_requests_total",
            "Requests that named a project or size.",
            by=both,
            own=None,
            amount=requests,
        ),
        Metric("ullage_project_tokens_total", "Input tokens of those requests.", by=both, own=None, amount=tokens),
    )


# The values of rows are lambdas, one line each: beside its row a condition is read with what it is about.
# fmt: off
FIELDS: Final[tuple[Field, ...]] = (
    Field("request_id", "request_id", "The name of this request in the log."),
    Field("api", "api", "`chat`, `messages`, `responses` or `gemini`."),
    Field("model", "model", "The model that the client requested.", foreign=True),
    Field("upstream", "upstream", "The configured upstream that it went to."),
    Field("conversation", "conversation", "A short name of the conversation, which reveals nothing of its content.",
          "x-ullage-conversation"),
    Field("agent", "agent",
          "The client by its headers: as `ullage connect` calls it, else the first word of its user agent.",
          foreign=True),
    Field("files_read", "files_read",
          "How many different files the view shows as read; null if calls were not looked at: far below the high mark "
          "only `telemetry.budget_log` wants that."),
    Field("epoch", "epoch", "How often the client itself has compacted this session, if it says so (Codex)."),
    Field("status", "status", "The HTTP status that the client got; 499 if it left before its answer.", metrics=(
        Metric("ullage_requests_total", "Finished requests.", ("api", "model", "upstream", "status", "outcome"),
               when="api", amount=lambda *_: 1),
        Metric("ullage_upstream_errors_total", "Errors of upstreams.", ("upstream",), ("class",), own=None,
               initial=UPSTREAM_ERRORS,
               doc="`unreachable`, `timeout`, `stream_error`, `truncated`, `rate_limited`, `server` or `client`.",
               when="api", amount=lambda r, _: _upstream_error(r) if r.reason or r.status >= 400 else None),
    )),
    Field("outcome", "outcome",
          "`verbatim` (nothing was taken out), `compacted`, `degraded` or `refused`; the header adds the reason behind "
          "a semicolon.",
          "x-ullage-outcome", always=True,
          shown=lambda r, outcome: f"{outcome};{r.reason}" if r.reason else outcome),
    Field("reason", "reason", "A fixed word that says why, if there is more to say than the outcome.", foreign=True,
          metrics=(Metric(
              "ullage_silent_truncations_total", "Prompts that a server cut without a word.", ("model",),
              initial=(NO_LABELS,),
              amount=lambda _, reason: 1 if reason == "silently_truncated" else None),)),
    Field("stream", "stream", "True if the client requested a stream."),
    Field("stages", "stages", "The stages of compression that made the view, in their order.", "x-ullage-stages",
          shown=lambda _, stages: ",".join(stages),
          metrics=(Metric(
              "ullage_stages_total", "Compression stages used.", by=("stage",), own=None,
              doc="Each once per request.",
              amount=lambda r, stages: {stage: stages.count(stage) for stage in stages} if r.applied else None),)),
    Field("tokens_before", "tokens_before", "Tokens of the input as the client sent it.", metrics=(
        _context_tokens("before"),
    )),
    Field("tokens_after", "tokens_after",
          "Tokens of the view; `<` in the header marks an upper bound, if the size in bytes spared the count.",
          "x-ullage-tokens", shown=lambda r, tokens: f"<{tokens}" if r.bounded else str(tokens)),
    Field("tokens_sent", "",
          "Tokens that went upstream: the view's, or in mode observe the client's own; none if it was refused.",
          metrics=(
              _context_tokens("after"),
              Metric("ullage_context_fill_ratio", "Input sent upstream over the model's window.", ("model",),
                     kind="histogram", buckets=FILL_BUCKETS, initial=(NO_LABELS,),
                     amount=lambda r, tokens: tokens / r.window if r.window else None),
          )),
    Field("tokens_removed", "", "How many tokens the view is smaller than what the client sent.",
          "x-ullage-tokens-removed", metrics=(Metric(
              "ullage_tokens_removed_total", "Input tokens that did not go upstream.", ("model",), initial=(NO_LABELS,),
              when="tokens_before",
              amount=lambda r, before: None if before == r.tokens_after or not r.applied else r.tokens_removed),)),
    Field("bounded", "bounded", "Whether the size in bytes spared the count, so that token figures are upper bounds."),
    Field("window", "window", "The model's context window.", "x-ullage-window"),
    Field("source", "window_source",
          "Who says how large the window is: `configured`, `server`, `learned`, `table`, `assumed` or `request`.",
          metrics=(Metric(
              "ullage_window_tokens", "A model's window; 0 once another source says how large it is.",
              ("upstream", "model"), ("source",), own=None, kind="gauge", when="tokens_sent", across="livemostrecent",
              doc="A window that a request states is not shown.",
              amount=lambda r, _: {r.source: r.window} if r.window and r.source != "request" else None),)),
    Field("regions", "regions",
          "The view's tokens by region: `system`, `tools`, `format`, `memory`, `skills`, `knowledge`, `related`, "
          "`summary`, `user`, `assistant`, `tool`; and `reserve`, the room for the answer.", metrics=(Metric(
        "ullage_region_tokens_total",
        "Input tokens that went upstream, by region, and the room for answers (reserve).", ("model",), ("region",),
        own=None, doc="Of counted requests only.",
        amount=lambda r, regions: None if r.outcome == "refused" or r.tokens_after is None else regions),)),
    Field("borrowed", "borrowed", "Tokens by which parts exceed their own share of `compression.allocation`.", metrics=(
        Metric("ullage_share_borrowed_tokens_total", "Tokens by which parts exceeded their share.", by=("part",),
               own=None),
    )),
    Field("project", "project", "The client's label `x-ullage-project`.", foreign=True,
          metrics=_label_metrics("project")),
    Field("task_size", "task_size", "The client's label `x-ullage-task-size`.",
          metrics=_label_metrics("task_size")),
    Field("conversation_budget", "",
          "The tokens that the conversation may use in all (`total`), has used and has left, once most are used.",
          "x-ullage-budget", shown=lambda _, budget: f"{budget['consumed']}/{budget['total']}"),
    Field("budget", "", "Tokens that the input may use: the window without the room for the answer and a margin."),
    Field("pressure", "pressure", "Tokens of the view over the budget.", "x-ullage-pressure", shown=_shown_pressure,
          logged=lambda pressure: None if pressure is None else round(pressure, 3)),
    Field("event", "compaction", "Whether this request is the first with a new compaction.", metrics=(Metric(
        "ullage_compactions_total", "Compactions sent for the first time.", ("model",), initial=(NO_LABELS,),
        doc="Later requests of the conversation reuse them.",
        amount=lambda r, _: 1 if r.applied else None),)),
    Field("client_compaction", "client_compaction", "Whose own compaction the request is, if it is one.",
          metrics=(Metric(
              "ullage_client_compactions_total", "Requests by which clients compacted themselves.", by=("client",),
              own=None,
              doc="`other` if only its intent and its form tell.", amount=lambda _, client: {client: 1}),)),
    Field("observed", "observed", "Whether mode observe sent the client's own bytes; the rest says what it would do.",
          metrics=(Metric(
              "ullage_observed_total", "Requests that mode observe let pass.", by=("would",), own=None,
              initial=("compact", "refuse"),
              doc="Would have been `compact`ed or `refuse`d.",
              amount=lambda r, _: {r.reason[6:]: 1} if r.reason.startswith("would_") else None),)),
    Field("retries", "retries", "How often the request was sent again.", "x-ullage-retries", metrics=(
        Metric("ullage_retries_total", "Requests sent again.", ("upstream",), initial=(NO_LABELS,)),
    )),
    Field("overflows", "overflows", "How often an upstream reported that the request is too long.", metrics=(
        Metric("ullage_overflow_errors_total", "Overflows that upstreams reported.", by=("stage",), own=None,
               initial=("retried", "returned"),
               doc="`retried` and made good, or `returned` to the client.",
               amount=_overflows),
    )),
    Field("fallback", "fallback", "The model that was asked instead.", "x-ullage-fallback", metrics=(Metric(
        "ullage_fallbacks_total", "Requests that went to a fallback model.", ("model",), ("fallback",), own=None,
        amount=lambda _, fallback: {fallback: 1}),)),
    Field("usage.input_tokens", "input_tokens", "Input tokens that the upstream reported, cached ones among them."),
    Field("usage.output_tokens", "output_tokens", "Output tokens that the upstream reported."),
    Field("usage.cached_tokens", "cached_tokens", "Input tokens that the upstream reported as read from its cache."),
    Field("overhead_seconds", "overhead_ms", "Time spent in the proxy itself; milliseconds in the log.",
          logged=lambda seconds: round(seconds * 1000, 3), metrics=(Metric(
              "ullage_overhead_seconds", "Time spent in the proxy itself.", ("api",), kind="histogram",
              buckets=OVERHEAD_BUCKETS, always=True),)),
    Field(DURATION, "duration_ms", "Time from the request's head to the answer's last byte; milliseconds in the log.",
          logged=lambda seconds: round(seconds * 1000, 1), metrics=(Metric(
              "ullage_request_seconds", "From a request's head to its answer's last byte.", ("api",), kind="histogram",
              buckets=DURATION_BUCKETS),)),
    Field("summary_tokens", "summary_tokens", "Tokens that a model took to write the summaries in the view.",
          "x-ullage-summary-tokens"),
    Field("recalls", "recalls", "How often the model was called again because it looked up what had left its view.",
          metrics=(Metric(
              "ullage_recalls_total", "Generations that followed a look at what had left the view.", ("model",)),)),
    Field("recall_tokens", "recall_tokens", "Tokens of all generations of an answer with recalls.",
          "x-ullage-recall-tokens", metrics=(Metric(
              "ullage_recall_tokens_total", "Tokens of all generations of answers with recalls.", ("model",),
              when="recalls", amount=lambda r, _: r.recall_tokens),)),
    Field("large_result", "",
          "The share of the room left that one fresh tool result takes, if that is worth a warning of its own."),
    Field("first_fill", "", "The share of the window that the first request of a conversation takes.",
          metrics=(Metric(
              "ullage_first_fill_ratio", "How full the window is when a conversation begins.", ("model",),
              kind="histogram", buckets=FILL_BUCKETS,
              doc="Of counted requests; those that fit by their bytes alone begin far below."),)),
    Field("repeated_prefix", "", "The share of the view that the request before began with, if its client repeats it.",
          metrics=(Metric(
              "ullage_repeated_prefix_ratio", "Share of the view that the request before began with.", ("model",),
              kind="histogram", buckets=FILL_BUCKETS,
              doc="What a provider's cache can serve, worked out and not measured, of counted requests that are not "
                  "a conversation's first; after a compaction system text and tools are left of it."),)),
    Field("newest_tokens", "", "Tokens of the items behind the model's last words, which no request has had before."),
    Field("waste", "", "Tokens that the client could do without, by kind.", metrics=(Metric(
        "ullage_waste_tokens_total", "Tokens that the client could do without.", ("model",), by=("kind",), own=None,
        initial=("fresh_result", "fresh_results", "repeated_message", "repeated_result", "skill", "listing"),
        doc="Fresh tool results that take more than 30 % of the room left, alone (`fresh_result`) and together "
            "(`fresh_results`); at each compaction messages and results that repeat earlier ones (`repeated_message`, "
            "`repeated_result`), skills that were sent before (`skill`), and listings of 500 tokens and more "
            "(`listing`)."),)),
)
# fmt: on
"""Every field of a report, in the order of the log line."""

_SHOWN: Final = tuple(field for field in FIELDS if field.header)
_VALUES: Final = attrgetter(*(field.name for field in _SHOWN))


def _omitted_value(field: Field, default: object) -> object:
    """Return the value at which the header of *field* is omitted; no value equals None if it is ``always`` sent."""
    if field.always:
        return None
    return default


_OMITTED: Final = tuple(map(_omitted_value, _SHOWN, _VALUES(Report("", ""))))


def response_headers(report: Report) -> list[tuple[str, str]]:
    """Return the ``x-ullage-*`` response headers that are known before the first byte goes to the client."""
    values = _VALUES(report)
    headers = []
    # Most fields are at their defaults: comparing them in C takes a fifth of the time of a loop.
    for field, value in compress(zip(_SHOWN, values, strict=True), map(ne, values, _OMITTED)):
        if field.shown is None:
            headers.append((field.header, str(value)))
        else:
            headers.append((field.header, field.shown(report, value)))
    return headers

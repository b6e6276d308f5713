"""What was done to one request, frozen. The log line, the response headers and the metrics all come from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Outcome = Literal["verbatim", "compacted", "degraded", "refused"]


SERVED = "served"
"""The reason of a request that Ullage answered by itself, in place of a server that cannot."""

INTERNAL_ERROR = "internal_error"
"""The reason of a request that went upstream untouched, since a fault of ours kept it from being made smaller."""


class Usage(msgspec.Struct, frozen=True):
    """Token figures as the upstream reported them; ``None`` where it said nothing."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


class Report(msgspec.Struct, frozen=True):
    """Facts about one request. Holds counts and names only: never a prompt, a key or a summary.

    All token figures are in tokens of the model's encoding. ``bounded`` says that the byte bound spared the
    count, so ``tokens_before``, ``tokens_after`` and ``pressure`` are upper bounds. ``source`` says who knows the
    window; ``regions`` are the view's tokens by region, ``borrowed`` those by which parts exceed their own share of
    an allocation. ``project`` and ``task_size`` are the client's labels, ``fallback`` the model that
    was asked instead of ``model``. ``client_compaction`` says whose own compaction the request is, if it is one.
    ``large_result`` is the share of the room left that one fresh tool result takes, where that is worth a warning.
    ``summary_tokens`` are those that went into the summaries by a model that stand in the view. ``recalls`` says how
    often the model was asked again because it looked up what left its view, ``recall_tokens`` what all of its
    generations took then.
    """

    request_id: str
    api: str
    model: str = ""
    upstream: str = ""
    stream: bool = False
    outcome: Outcome = "verbatim"
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
    epoch: int = 0
    event: bool = False
    observed: bool = False
    retries: int = 0
    overflows: int = 0
    fallback: str = ""
    client_compaction: str = ""
    overhead_seconds: float = 0.0
    large_result: float = 0.0
    status: int = 0
    usage: Usage = NO_USAGE
    summary_tokens: int = 0
    recalls: int = 0
    recall_tokens: int = 0

    def but(self, **changes: Any) -> Report:
        """The same report with some facts *changed*."""
        return msgspec.structs.replace(self, **changes)

    @property
    def pressure(self) -> float | None:
        """View tokens over budget; ``None`` when either is unknown."""
        if self.tokens_after is None or not self.budget:
            return None
        return self.tokens_after / self.budget

    @property
    def tokens_removed(self) -> int:
        """How many tokens the view is smaller than what the client sent."""
        if self.tokens_before is None or self.tokens_after is None:
            return 0
        return max(0, self.tokens_before - self.tokens_after)


SummaryOutcome = Literal["written", "adopted", "failed", "skipped"]


class SummaryReport(msgspec.Struct, frozen=True):
    """What became of one summary job. ``tenant`` is a short keyed name, ``reason`` a fixed word; never a text.

    Token figures are those the model reported, or our count where it said nothing.
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


def response_headers(report: Report) -> list[tuple[str, str]]:
    """The ``x-ullage-*`` response headers that are known before the first byte goes to the client."""
    bound = "<" if report.bounded else ""
    outcome = f"{report.outcome};{report.reason}" if report.reason else report.outcome
    headers = [("x-ullage-outcome", outcome)]
    if report.tokens_after is not None:
        headers.append(("x-ullage-tokens", f"{bound}{report.tokens_after}"))
    if report.window is not None:
        headers.append(("x-ullage-window", str(report.window)))
    if report.pressure is not None and report.tokens_after is not None and report.budget:
        # A bound never rounds down.
        shown = -(-100 * report.tokens_after // report.budget) / 100 if report.bounded else report.pressure
        headers.append(("x-ullage-pressure", f"{bound}{max(shown, 0.01):.2f}"))
    if report.stages:
        headers.append(("x-ullage-stages", ",".join(report.stages)))
    if report.tokens_removed:
        headers.append(("x-ullage-tokens-removed", str(report.tokens_removed)))
    if report.summary_tokens:
        headers.append(("x-ullage-summary-tokens", str(report.summary_tokens)))
    more = {
        "x-ullage-recall-tokens": report.recall_tokens,
        "x-ullage-retries": report.retries,
        "x-ullage-fallback": report.fallback,
        "x-ullage-conversation": report.conversation,
    }
    return headers + [(name, str(value)) for name, value in more.items() if value]

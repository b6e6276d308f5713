"""What is told of a view or of a refusal: figures in the provider's tokens, by region, never text."""

from __future__ import annotations

import base64
from dataclasses import replace

from proxy.core.budget.regions import regions, scaled_up
from proxy.core.budget.shares import borrowed
from proxy.core.decisions import CountedView, Policy
from proxy.core.report import Report

LARGE = 0.30
"""A fresh tool result that takes more of the room left than this is worth a warning."""


def report_of(policy: Policy, view: CountedView, report: Report) -> Report:
    """*report* with the figures of *view*, in the provider's tokens."""
    measured, budget = view.measured, view.budget
    ratio, allocation, counts = measured.token_ratio, policy.rules.allocation, measured.counts
    # As small as they were made: the rest of the fixed part stays as the client sent it.
    beside = replace(counts.beside, tools=counts.beside.tools - (counts.fixed - budget.fixed))
    by_region = regions(
        view.roles,
        beside,
        fixed=budget.fixed - counts.roles.system + view.roles.system,
        summary=view.summary,
        reserve=view.edits.lowered_output or budget.reserve,
    )
    root = measured.root_hash(view.layout) if view.layout else b""
    record = view.edits.record
    before = int(counts.total * ratio) if record else view.expected_tokens
    return report.but(
        regions=scaled_up(by_region, ratio),
        borrowed=scaled_up(borrowed(by_region, allocation, budget.window), ratio) if allocation else {},
        budget=int(max(0, budget.beside(view.edits.lowered_output or budget.reserve)) * ratio),
        tokens_before=before,
        tokens_after=view.expected_tokens,
        conversation=base64.urlsafe_b64encode(root[:12]).decode(),
        large_result=_large_result(view),
        reason="nothing_to_fold" if view.edits.nothing_to_fold else report.reason,
        outcome="verbatim" if view.edits.is_verbatim else "compacted",
        stages=view.edits.stages,
        event=view.edits.compacted_now,
        summary_tokens=record.summary_spent if record else 0,
    )


def _large_result(view: CountedView) -> float:
    """The share of the room left that the largest of the newest tool results takes; zero if that needs no warning.

    What no request has seen before can still be asked for in a narrower way.
    """
    newest, largest = 0, 0
    for item in reversed(view.measured.parsed.items):
        if not item.answers:
            break
        newest, largest = newest + item.tokens, max(largest, item.tokens)
    left = view.budget.budget - view.measured.counts.total + newest
    share = largest / left if left > 0 else 0.0
    return round(share, 2) if share > LARGE else 0.0

"""What is told of a view or of a refusal: figures in the provider's tokens, by region, never text."""

from __future__ import annotations

import base64

from proxy.core.budget.regions import regions, scaled_up
from proxy.core.budget.shares import borrowed
from proxy.core.compression.view import View
from proxy.core.conversation.outline import TOOLS
from proxy.core.errors import OUTPUT, ContextTooLong
from proxy.core.report import Report
from proxy.walk.plans import Policy, Subject

LARGE = 0.30
"""A fresh tool result that takes more of the room left than this is worth a warning."""


def report_of(
    policy: Policy, subject: Subject, tokens: int, root: bytes, view: View, output: int | None = None
) -> Report:
    """What is told of a *view* of *subject* that weighs *tokens* of our count in all."""
    figures, factor, allocation = subject.figures, subject.factor, policy.rules.allocation
    sizes, fixed = subject.reading.sizes, subject.reading.fixed
    by_region = regions(
        view.kept,
        # As small as they were made: the rest of the fixed part stays as the client sent it.
        tools=sum(sizes.get(key, 0) for key in TOOLS) - (fixed - figures.fixed),
        fixed=figures.fixed - subject.reading.totals.system + view.kept.system,
        summary=view.summary,
        reserve=output or figures.reserve,
    )
    return subject.report.but(
        regions=scaled_up(by_region, factor),
        borrowed=scaled_up(borrowed(by_region, allocation, figures.window), factor) if allocation else {},
        budget=int(max(0, figures.inside(output or figures.reserve)) * factor),
        tokens_before=int(subject.total * factor),
        tokens_after=int(tokens * factor),
        conversation=base64.urlsafe_b64encode(root[:12]).decode(),
        large_result=_large_result(subject),
    )


def refusal_of(subject: Subject, tokens: int, held: int) -> ContextTooLong:
    """Why *subject*, whose smallest view weighs *tokens* of our count beside an answer of *held*, goes nowhere."""
    figures, factor = subject.figures, subject.factor
    tools = sum(subject.reading.sizes.get(key, 0) for key in TOOLS)
    regions = {"tools": tools - (subject.reading.fixed - figures.fixed)}  # as small as they could be made
    regions["system messages"] = sum(subject.reading.items[i].tokens for i in subject.layout.systems)
    regions["newest messages"] = tokens - figures.fixed
    if subject.requested is not None:
        regions[OUTPUT] = held
    largest = max(regions, key=lambda name: regions[name])
    return ContextTooLong(
        tokens=int(tokens * factor),
        limit=subject.report.window or int(figures.window * factor),
        reserve=int((figures.window - figures.inside(held)) * factor),
        largest=largest,
        largest_tokens=int(regions[largest] * factor),
    )


def _large_result(subject: Subject) -> float:
    """The share of the room left that the largest of the newest tool results takes; zero where that needs no warning.

    What no request has seen before can still be asked for in a narrower way.
    """
    newest, largest = 0, 0
    for item in reversed(subject.reading.items):
        if not item.answers:
            break
        newest, largest = newest + item.tokens, max(largest, item.tokens)
    left = subject.figures.budget - subject.reading.fixed - subject.reading.history + newest
    share = largest / left if left > 0 else 0.0
    return round(share, 2) if share > LARGE else 0.0

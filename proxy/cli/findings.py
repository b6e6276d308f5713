"""Repeated paragraphs and skills, and large fresh results in a request, for ``ullage fit`` and ``ullage replay``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table

from proxy.cli.output import figures_table
from proxy.core.advice import answered_call, short_target
from proxy.core.compaction.view import call_target
from proxy.core.decisions import MeasuredRequest
from proxy.core.tool_table import ToolMap
from proxy.core.waste import EXCERPT, RepeatedParagraph, fresh_results, repeated_paragraphs, repeated_skills

MOST_SHOWN: Final = 5
"""Paragraphs and results of one request or conversation that are listed."""


@dataclass(frozen=True, slots=True)
class FreshResult:
    """A tool result in the first request that has it, the ``request``-th of its conversation.

    ``call`` names tool and target. ``tokens`` are the provider's. ``share`` is their share of the budget that the
    earlier items leave; 0 if they leave none.
    """

    call: str
    tokens: int
    share: float
    request: int = 1


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a conversation: repeated paragraphs of its last request, and its largest fresh results.

    ``skill_tokens`` are those of skills that its last request repeats. ``first_tokens`` are the tokens of its first
    request by region, ``first_fill`` their share of the window. Tokens are the provider's.
    """

    paragraphs: tuple[RepeatedParagraph, ...] = ()
    results: tuple[FreshResult, ...] = ()
    first_tokens: Mapping[str, int] = field(default_factory=dict)
    first_fill: float | None = None
    skill_tokens: int = 0


NO_FINDINGS: Final = Findings()


def findings_tables(findings: Sequence[Findings]) -> Iterator[Table]:
    """Yield tables of the paragraphs that waste most, of repeated skills, and of large fresh results, if not empty."""
    for title, columns, rows in findings_rows(findings):
        table = figures_table(title, *columns)
        for row in rows:
            table.add_row(*row)
        yield table


def findings_rows(findings: Sequence[Findings]) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield the title of the first column, the other titles, and the rows of each table."""
    paragraphs = [row for conversation in findings for row in conversation.paragraphs]
    paragraphs.sort(key=lambda row: -row.wasted)
    if paragraphs:
        rows = [_paragraph_row(row) for row in paragraphs[:MOST_SHOWN]]
        yield "repeated paragraph", ("times", "tokens too many"), rows
    skills = sum(conversation.skill_tokens for conversation in findings)
    if skills:
        yield "sent again", ("tokens too many",), [("skills", f"{skills:,}")]
    results = largest([row for conversation in findings for row in conversation.results])
    if results:
        yield "largest fresh result", ("tokens", "of the room left"), [_result_row(result) for result in results]


def _paragraph_row(paragraph: RepeatedParagraph) -> tuple[str, ...]:
    return paragraph.excerpt, f"{paragraph.times:,}", f"{paragraph.wasted:,}"


def _result_row(result: FreshResult) -> tuple[str, ...]:
    share = "-"
    if result.share:
        share = f"{result.share:.0%}"
    return result.call, f"{result.tokens:,}", share


def find_paragraphs(measured: MeasuredRequest) -> tuple[RepeatedParagraph, ...]:
    """Return paragraphs that occur more than once in system texts and items, those that waste most tokens first."""
    ratio = measured.known.token_ratio
    repeated = repeated_paragraphs(_texts(measured), measured.count)
    return tuple(paragraph._replace(wasted=int(paragraph.wasted * ratio)) for paragraph in repeated[:MOST_SHOWN])


def find_skills(measured: MeasuredRequest) -> int:
    """Return the tokens of skills that repeat one in the system text or in an earlier item."""
    tokens = repeated_skills(measured.parsed.items, measured.counts.beside.injected)
    return int(tokens * measured.known.token_ratio)


def _texts(measured: MeasuredRequest) -> Iterator[str]:
    """Yield the system texts, and the text of each item."""
    parsed, read = measured.parsed, measured.api_format.read_item_text
    yield from parsed.envelope.texts.values()
    for index in range(len(parsed.items)):
        yield read(parsed.item(index)).text


def find_results(measured: MeasuredRequest, tools: ToolMap, number: int = 1) -> list[FreshResult]:
    """Return the fresh tool results of the *number*-th request of its conversation; *tools* is the table of tools."""
    items, ratio = measured.parsed.items, measured.known.token_ratio
    fresh = fresh_results(items, measured.counts.total, measured.budget.input)
    return [
        FreshResult(_label_of(measured, index, tools), int(tokens * ratio), round(fresh.share(tokens), 3), number)
        for index, tokens in fresh.tokens
    ]


def largest(results: list[FreshResult]) -> tuple[FreshResult, ...]:
    """Return the largest of *results*."""
    return tuple(sorted(results, key=lambda result: -result.tokens)[:MOST_SHOWN])


def _label_of(measured: MeasuredRequest, index: int, tools: ToolMap) -> str:
    """Return tool and target of the first call that the item *index* answers."""
    call = answered_call(measured, index)
    if call is None:
        return "(a result without its call)"
    return call_label(*call, tools)


def call_label(name: str, arguments: str, tools: ToolMap) -> str:
    """Return a tool's *name* and the target of the call, as advice names it, else the first argument that is a text."""
    target = call_target(name, arguments, tools) or _first_text(arguments)
    if not target:
        return name
    return f"{name} {short_target(target, EXCERPT)}"


def _first_text(arguments: str) -> str:
    """Return the first of the JSON *arguments* that is a text; empty if there is none."""
    try:
        values: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    return next((value for value in values.values() if isinstance(value, str)), "")

"""``ullage fit``: plans one request without an upstream, and shows where its tokens are."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console
from rich.table import Table

from proxy.cli.findings import (
    NO_FINDINGS,
    Findings,
    find_paragraphs,
    find_results,
    find_skills,
    findings_tables,
    largest,
)
from proxy.cli.output import figures_table, window_source
from proxy.core.apis.envelope import TOOLS
from proxy.core.apis.json_steps import read_integer
from proxy.core.apis.shape import shape_of
from proxy.core.compaction.record import CompactionRecord, stages_of_edits
from proxy.core.conversation import Count, Item, ItemText
from proxy.core.decisions import CountedView, MeasuredRequest, Policy, Reject
from proxy.core.errors import InvalidRequest, UllageError
from proxy.core.models import Catalogue, Route
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.core.tokens.budget import REGIONS, regions, to_provider_tokens
from proxy.core.tokens.media import FILES, IMAGES, SOUND
from proxy.engine.reading import CountedBody, Reader
from proxy.offline import offline_engine, offline_tokenizers
from proxy.settings import Settings, injected_rules
from proxy.upstream_wiring import open_catalogue
from proxy.wiring import policy_of

TENANT: Final = bytes(32)
"""The only caller: the user of the command."""

ROLES: Final = ("system", "user", "assistant", "tool")

KINDS: Final = (
    "text", "reasoning", "tool call", "tool result", "image", "audio", "video", "file", "media",
    "tool definition", "format", "frame",
)  # fmt: skip
"""Kinds of content. ``frame`` is roles, names, ids and separators; ``media`` is media of several kinds in one item."""

UNTOUCHED: Final = "No stage was needed: the client's own bytes go upstream."


class CannotFit(Exception):
    """The request cannot be planned as it is; the text has the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The decision about a request: its view, and the client's body and the view's body as counted.

    ``error`` is the refusal if no view fits.
    """

    view: CountedView
    report: Report
    error: UllageError | None
    measured: MeasuredRequest
    client_body: CountedBody
    view_body: CountedBody
    policy: Policy


@dataclass(frozen=True, slots=True)
class StageEffect:
    """The effect of one stage: tokens before and after it, and the number of items (or tools) that it changed."""

    stage: str
    before: int
    after: int
    touched: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The tokens of a request by part, in the provider's tokens; pairs are (as the client sent it, upstream)."""

    facts: tuple[tuple[str, str], ...]
    regions: Mapping[str, tuple[int, int]]
    roles: Mapping[str, tuple[int, int]]
    kinds: Mapping[str, tuple[int, int]]
    steps: tuple[StageEffect, ...]
    findings: Findings = NO_FINDINGS


class _OverriddenCatalogue(Catalogue):
    """The *configured* catalogue with *model* instead of any requested one, and *window* instead of its own."""

    def __init__(self, configured: Catalogue, model: str | None, window: int | None) -> None:
        super().__init__((), {}, "")
        self._configured = configured
        self._model = model
        self._window = window

    def resolve(self, model: str, size: int = 0) -> Route:
        """Return the route of *model*, with the overrides applied."""
        route = self._configured.resolve(self._model or model, size)
        if self._window is None:
            return route
        return replace(route, window=self._window, source="configured", window_origin="")


async def fit_request(settings: Settings, body: bytes, *, model: str | None = None, window: int | None) -> Fitted:
    """Plan the request *body*; *model* and *window* override the request's own model and its window.

    Needs no server and stores nothing. Raises ``UllageError`` if the body is no request, and ``CannotFit`` if it would
    not be planned.
    """
    # ``count_always`` below: a request that fits by its bytes would not be counted, and there would be nothing to show.
    request = Request(api_of(body), body, TENANT, "fit")
    catalogue = _OverriddenCatalogue(open_catalogue(settings), model, window)
    async with offline_engine(settings, catalogue) as engine:
        decision = await engine.first_plan(request, count_always=True)
        report = engine.report(decision)
    view = decision.view
    if isinstance(view, CountedView):
        error = None
        if isinstance(decision, Reject):
            error = decision.error
        return await _counted(view, report, error, settings)
    if settings.compression.mode == "off":
        raise CannotFit("would be relayed: compression.mode is off. Set it to on.")
    name = model or report.model or "(none)"
    raise CannotFit(f"the window of the model {name} is not known. Give --window N, or --model NAME for a known one.")


async def _counted(view: CountedView, report: Report, error: UllageError | None, settings: Settings) -> Fitted:
    """Count the client's body and the view's again, item by item."""
    measured = view.measured
    api_format, route = measured.api_format, measured.known.route
    reader = Reader(offline_tokenizers(), {}, {}, {}, {}, injected=injected_rules(settings.injected))

    async def count(body: bytes) -> CountedBody:
        located = await reader.located(api_format, TENANT, body)
        return await reader.read(located, route.encoding, route.model)

    client_body, view_body = await count(measured.parsed.body), await count(view.body)
    return Fitted(view, report, error, measured, client_body, view_body, policy_of(settings))


def api_of(body: bytes) -> str:
    """Return the API that *body* is a request of, by its shape. Raises ``InvalidRequest`` if it is no request."""
    try:
        value = json.loads(body, parse_int=read_integer)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}. Give the body of one request.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("is no JSON object. Give the body of one request.")
    api = shape_of(value)
    if not api:
        raise InvalidRequest("has no list of messages. Give the body of one request.")
    return api


def breakdown(fitted: Fitted) -> Breakdown:
    """Return the tokens of a request by part, before and after, and the effect of each stage."""
    before, after, ratio = fitted.client_body, fitted.view_body, fitted.measured.known.token_ratio
    counts, reserve = before.counts, fitted.measured.budget.reserve
    regions_before = regions(counts.roles, counts.beside, fixed=counts.fixed, summary=0, reserve=reserve)
    roles = [to_provider_tokens(_roles(body), ratio) for body in (before, after)]
    kinds = [to_provider_tokens(_kinds(fitted, body), ratio) for body in (before, after)]
    return Breakdown(
        tuple(_facts(fitted)),
        _pairs(REGIONS, to_provider_tokens(regions_before, ratio), fitted.report.regions),
        _pairs(ROLES, *roles),
        _pairs(KINDS, *kinds),
        tuple(_stage_effects(fitted)),
        Findings(
            find_paragraphs(fitted.measured),
            largest(find_results(fitted.measured, fitted.policy.tools)),
            skill_tokens=find_skills(fitted.measured),
        ),
    )


def _pairs(names: Iterable[str], before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return both figures for each of *names* that has one."""
    pairs = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
    return {name: pair for name, pair in pairs.items() if any(pair)}


def _roles(body: CountedBody) -> dict[str, int]:
    totals = body.counts.roles
    system = totals.system + body.counts.beside.system
    return {"system": system, "user": totals.user, "assistant": totals.assistant, "tool": totals.tool}


def _kinds(fitted: Fitted, body: CountedBody) -> dict[str, int]:
    """Return the tokens of *body* by kind of content, by our own count."""
    api_format, encoding = fitted.measured.api_format, fitted.measured.known.route.encoding
    count = functools.partial(offline_tokenizers().count, encoding)
    totals: Counter[str] = Counter()
    for (start, end), item in zip(body.scan.spans, body.items, strict=True):
        totals.update(_item_kinds(api_format.read_item_text(body.body[start:end]), item, count))
    counts, members = body.counts, body.counts.beside
    member_total = sum(counts.members.values())
    totals["tool definition"] = members.tools
    totals["text"] += members.system
    totals["format"] = member_total - members.tools - members.system
    totals["frame"] += counts.fixed - counts.roles.system - member_total
    return dict(totals)


def _item_kinds(text: ItemText, item: Item, count: Count) -> dict[str, int]:
    """Return the tokens of one *item* by kind of content, by our own count."""
    text_kind, media_kind = "text", "media"
    if item.role == "tool":
        text_kind = "tool result"
    media = set(map(_media_kind, text.media))
    if len(media) == 1:
        media_kind = media.pop()
    kinds = {
        text_kind: count(text.text),
        "reasoning": count(text.reasoning),
        "tool call": sum(count(name) + count(arguments) for name, arguments in text.calls),
        media_kind: item.media,
    }
    # The item's tokens are the sum of its parts, but here the parts are counted as one text: the rest is frame.
    kinds["frame"] = max(0, item.tokens - sum(kinds.values()))
    return kinds


def _media_kind(part_type: str) -> str:
    """Return the kind of media of a content part, by its ``type`` in any API."""
    if part_type in IMAGES:
        return "image"
    if part_type in SOUND:
        return "audio"
    if part_type.startswith("video"):
        return "video"
    if part_type in FILES:
        return "file"
    return "media"


def _facts(fitted: Fitted) -> Iterator[tuple[str, str]]:
    """Yield the lines about model, window and budget, each with its title."""
    measured, report = fitted.measured, fitted.report
    budget, ratio, route = measured.budget, measured.known.token_ratio, measured.known.route

    def tokens(ours: int) -> str:
        return f"{int(ours * ratio):,}"

    yield "outcome", report.outcome
    encoding = route.encoding
    if ratio != 1.0:
        encoding += f" x {ratio:g}"
    yield "model", f"{route.model or '(none)'}  {encoding}"
    yield "window", f"{report.window or 0:,}  ({window_source(route)})"
    reserve = tokens(budget.reserve)
    if not measured.requested_output:
        reserve += "  (the default: the request sets no limit)"
    yield "reserve", reserve
    yield "budget", f"{report.budget or 0:,}"
    yield "room", f"{tokens(max(0, budget.input - budget.fixed))}  (budget less system text, tools and format)"
    marks = {"high": budget.high, "soft": budget.soft, "low": budget.low}
    levels = [f"{name} {tokens(level(fitted.policy.rules.marks, budget.baseline))}" for name, level in marks.items()]
    yield "marks", ", ".join(levels)
    before, after = report.tokens_before or 0, report.tokens_after or 0
    yield "tokens", f"{before:,} as sent, {after:,} upstream"
    if report.budget:
        yield "pressure", f"{before / report.budget:.2f} as sent, {after / report.budget:.2f} upstream"
    if report.borrowed:
        yield "borrowed", ", ".join(f"{part} {amount:,}" for part, amount in report.borrowed.items())


def _stage_effects(fitted: Fitted) -> Iterator[StageEffect]:
    """Yield the effect of each stage, in the provider's tokens, in the order of the report."""
    if fitted.report.outcome == "verbatim":
        return
    body, ratio, record = fitted.client_body, fitted.measured.known.token_ratio, fitted.view.edits.record
    saved, touched = _savings(fitted)
    tokens = body.counts.total
    folded = tokens - fitted.view.tokens - sum(saved.values())  # the rest, which no other stage saved
    for stage in fitted.report.stages:
        savings, items = saved.get(stage, 0), touched.get(stage, 0)
        if stage in ("fold", "drop") and record is not None:
            savings = folded
            items = sum(item.role != "system" for item in body.items[: record.compaction.cut])
        yield StageEffect(stage, int(tokens * ratio), int((tokens - savings) * ratio), items)
        tokens -= savings


def _savings(fitted: Fitted) -> tuple[Counter[str], Counter[str]]:
    """Return tokens saved (by our own count) and items or tools changed, by stage, for all stages but fold and drop."""
    body, edits, added = fitted.client_body, fitted.view.edits, fitted.measured.addition.tokens
    saved: Counter[str] = Counter({"tools": body.counts.fixed + added - fitted.measured.budget.fixed})
    if edits.addition:
        saved["recall"] = -added
    touched: Counter[str] = Counter({"tools": _tool_count(body), "output": 1, "recall": 1})
    for stage, tokens in _edited_items(fitted, edits.record):
        saved[stage] += tokens
        touched[stage] += 1
    return saved, touched


def _edited_items(fitted: Fitted, record: CompactionRecord | None) -> Iterator[tuple[str, int]]:
    """Yield for each shortened item the stage that shortened it, and the tokens saved by our own count."""
    if record is None:
        return
    count = functools.partial(offline_tokenizers().count, fitted.measured.known.route.encoding)
    stages = stages_of_edits(record.compaction)
    for index, edit in record.edits.items():
        stage = stages.get(index, "clip")
        if stage not in fitted.report.stages:
            continue  # an earlier compaction shortened it
        smaller = fitted.measured.api_format.read_item(edit, count)
        yield stage, fitted.client_body.items[index].tokens - smaller.tokens


def _tool_count(body: CountedBody) -> int:
    for name in TOOLS:
        if name in body.counts.members:
            return len(json.loads(body.envelope.value(name)))
    return 0


def render(result: Breakdown, console: Console) -> None:
    """Print a breakdown as tables."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, text in result.facts:
        facts.add_row(name, text)
    console.print(facts)
    for title, rows in (("region", result.regions), ("role", result.roles), ("kind", result.kinds)):
        table = figures_table(title, "as sent", "upstream")
        for name, (before, after) in rows.items():
            table.add_row(name, f"{before:,}", f"{after:,}")
        console.print()
        console.print(table)
    console.print()
    if result.steps:
        table = figures_table("stage", "before", "after", "touched")
        for step in result.steps:
            table.add_row(step.stage, f"{step.before:,}", f"{step.after:,}", f"{step.touched:,}")
        console.print(table)
    else:
        console.print(UNTOUCHED)
    for table in findings_tables([result.findings]):
        console.print()
        console.print(table)

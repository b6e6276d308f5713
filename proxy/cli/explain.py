"""What would go upstream for one request, with no upstream, and where its tokens are: for people."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from proxy.core.apis.base import Count
from proxy.core.apis.envelope import TOOLS
from proxy.core.apis.json_steps import whole
from proxy.core.compaction.record import CompactionRecord
from proxy.core.conversation import Item, ItemText
from proxy.core.decisions import API_FORMATS, CountedView, MeasuredRequest, Reject, UncountedView
from proxy.core.errors import InvalidRequest, UllageError
from proxy.core.models import Catalogue, Route
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.core.tokens.budget import Marks
from proxy.core.tokens.counting import REGIONS, regions, to_provider_tokens
from proxy.engine.reading import CountedBody, Reader
from proxy.settings import Settings
from proxy.store import open_store
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream_wiring import open_catalogue
from proxy.wiring import Offline, open_engine

TENANT: Final = bytes(32)
"""Whoever runs the command is the only caller there is."""

ROLES: Final = ("system", "user", "assistant", "tool")

MEDIA: Final[Mapping[str, str]] = MappingProxyType(
    {
        "image_url": "image",
        "input_image": "image",
        "image": "image",
        "input_audio": "audio",
        "file": "file",
        "input_file": "file",
        "document": "file",
        "video_url": "video",
    }
)
"""Kinds of parts by the type that requests give them."""

KINDS: Final = (
    "text", "reasoning", "tool call", "tool result", "image", "audio", "video", "file", "media",
    "tool definition", "format", "frame",
)  # fmt: skip
"""Every kind: ``frame`` are roles, names, ids and separators, ``media`` parts of several types in one message."""


class CannotFit(Exception):
    """The request cannot be fitted as it was given; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was decided, and both ends of it as read: the client's request and the view."""

    view: CountedView
    report: Report
    error: UllageError | None
    measured: MeasuredRequest
    sent: CountedBody
    fits: CountedBody
    marks: Marks
    tokenizers: Tokenizers


@dataclass(frozen=True, slots=True)
class Step:
    """One stage: tokens before and after it, and how many items (or tools) it touched."""

    stage: str
    before: int
    after: int
    touched: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Everything that is told of one request, in the provider's tokens; pairs are (as sent, as it goes upstream)."""

    facts: tuple[tuple[str, str], ...]
    regions: Mapping[str, tuple[int, int]]
    roles: Mapping[str, tuple[int, int]]
    kinds: Mapping[str, tuple[int, int]]
    steps: tuple[Step, ...]


class _Given(Catalogue):
    """The catalogue *known*, but every request is for *model*, if one is given, with a *window*, if one is given."""

    def __init__(self, known: Catalogue, model: str | None, window: int | None) -> None:
        super().__init__((), {}, "")
        self._real = known
        self._model = model
        self._window = window

    def resolve(self, model: str, size: int = 0) -> Route:
        """The route of what was given instead of *model*."""
        route = self._real.resolve(self._model or model, size)
        if self._window is None:
            return route
        return replace(route, window=self._window, source="configured", window_origin="")


async def fit_request(
    settings: Settings, body: bytes, *, model: str | None = None, window: int | None = None
) -> Fitted:
    """What *settings* make of *body*, for *model* instead of its own and in another *window* if they are given.

    Nothing is asked of any server and nothing is stored. Raises ``UllageError`` if the body is no request, and
    ``CannotFit`` if it cannot be fitted as it was given.
    """
    api = api_of(body)
    if api not in API_FORMATS:
        raise CannotFit(
            f"is a request of the {api} API, which is not managed yet: give one of {', '.join(API_FORMATS)}."
        )
    failed: list[str] = []
    tasks = Tasks(lambda name, error: failed.append(f"{name}: {error}"))
    tokenizers = Tokenizers()
    given = _Given(open_catalogue(settings), model, window)
    nowhere = Path(tempfile.gettempdir())  # the store in memory writes nothing
    store = await open_store(
        "memory", directory=nowhere, key=bytes(32), spawn=tasks.spawn, warn=lambda event, _: failed.append(event)
    )
    try:
        engine = open_engine(settings, given, tokenizers, store, Offline())
        decision = await engine.first_plan(Request(api, body, TENANT, "fit"), count_always=True)
    finally:
        await store.close()
        await tasks.finish(1.0)
    view, report = decision.view, engine.report(decision)
    if isinstance(view, UncountedView):
        named = model or report.model or "of no name"
        if settings.compression.mode == "off":
            raise CannotFit("would be relayed: compression.mode is off. Set it to on.")
        raise CannotFit(
            f"nobody knows the window of the model {named}. Give --window N, or --model NAME for a known one."
        )
    return await _read_back(
        view, report, settings, tokenizers, decision.error if isinstance(decision, Reject) else None
    )


async def _read_back(
    view: CountedView, report: Report, settings: Settings, tokenizers: Tokenizers, error: UllageError | None
) -> Fitted:
    measured = view.measured
    api_format, route = measured.api_format, measured.route
    reader = Reader(tokenizers, {}, {}, {}, {})

    async def read(body: bytes) -> CountedBody:
        located = await reader.located(api_format, TENANT, body)
        return await reader.read(api_format, route.encoding, TENANT, located, route.model)

    wanted = settings.compression
    sent, fits = await read(measured.parsed.body), await read(view.body)
    marks = Marks(wanted.high_mark, wanted.soft_mark, wanted.effective_low_mark)
    return Fitted(view, report, error, measured, sent, fits, marks, tokenizers)


def api_of(body: bytes) -> str:
    """The API that *body* is a request of, by its shape. Raises ``InvalidRequest`` where it is no JSON object."""
    try:
        value = json.loads(body, parse_int=whole)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}. Give the body of one request.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("is no JSON object. Give the body of one request.")
    if "input" in value and "messages" not in value:
        return "responses"
    if not isinstance(value.get("messages"), list):
        raise InvalidRequest("has no list of messages. Give the body of one request.")
    return "messages" if "system" in value or "anthropic_version" in value or _speaks_blocks(value) else "chat"


def _speaks_blocks(value: Mapping[str, Any]) -> bool:
    """Whether tools or content blocks are written as Anthropic's are."""
    tools = value.get("tools")
    if any(isinstance(tool, dict) and "input_schema" in tool for tool in (tools if isinstance(tools, list) else ())):
        return True
    contents = [message.get("content") for message in value["messages"] if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in ("tool_use", "tool_result", "thinking") for part in parts)


def breakdown(found: Fitted) -> Breakdown:
    """Where the tokens of a fitted request are, before and after, and what each stage did."""
    raw, view, factor = found.sent, found.fits, found.measured.token_ratio
    sent = to_provider_tokens(_regions(raw, found.measured.budget.reserve), factor)
    return Breakdown(
        tuple(_facts(found)),
        _pairs(REGIONS, sent, found.report.regions),
        _pairs(ROLES, to_provider_tokens(_roles(raw), factor), to_provider_tokens(_roles(view), factor)),
        _pairs(KINDS, to_provider_tokens(_kinds(found, raw), factor), to_provider_tokens(_kinds(found, view), factor)),
        tuple(_steps(found)),
    )


def _pairs(names: Iterable[str], was: Mapping[str, int], now: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    found = {name: (was.get(name, 0), now.get(name, 0)) for name in names}
    return {name: pair for name, pair in found.items() if any(pair)}


def _regions(reading: CountedBody, reserve: int) -> dict[str, int]:
    return regions(reading.roles, reading.members, fixed=reading.fixed, summary=0, reserve=reserve)


def _roles(reading: CountedBody) -> dict[str, int]:
    totals = reading.roles
    return {"system": reading.system, "user": totals.user, "assistant": totals.assistant, "tool": totals.tool}


def _kinds(found: Fitted, reading: CountedBody) -> dict[str, int]:
    """Tokens of *reading* by kind, in our own count."""
    api_format, encoding = found.measured.api_format, found.measured.route.encoding
    sums: Counter[str] = Counter()
    for (start, end), item in zip(reading.scan.spans, reading.items, strict=True):
        entry = api_format.read_item_text(reading.body[start:end])
        sums.update(_kinds_of(entry, item, lambda text: found.tokenizers.count(encoding, text)))
    members = reading.members
    sums["tool definition"] = members.tools
    sums["text"] += members.system
    sums["format"] = sum(reading.member_tokens.values()) - members.tools - members.system
    sums["frame"] += reading.fixed - reading.roles.system - sum(reading.member_tokens.values())
    return dict(sums)


def _kinds_of(entry: ItemText, item: Item, count: Count) -> dict[str, int]:
    media = {MEDIA.get(name, "media") for name in entry.media}
    found = {
        "tool result" if item.role == "tool" else "text": count(entry.text),
        "reasoning": count(entry.reasoning),
        "tool call": sum(count(name) + count(arguments) for name, arguments in entry.calls),
        media.pop() if len(media) == 1 else "media": item.media,
    }
    # Parts are counted each on its own, and here as one text: what that makes of a difference is frame as well.
    return {**found, "frame": max(0, item.tokens - sum(found.values()))}


def _facts(found: Fitted) -> Iterator[tuple[str, str]]:
    measured = found.measured
    figures, factor, report = measured.budget, measured.token_ratio, found.report

    def tokens(ours: int) -> str:
        return f"{int(ours * factor):,}"

    route = measured.route
    origin = f"{route.source}: {route.window_origin}" if route.window_origin else route.source
    yield "outcome", report.outcome
    yield "model", f"{route.model or '(none)'}  {route.encoding}{'' if factor == 1.0 else f' x {factor:g}'}"
    yield "window", f"{report.window or 0:,}  ({origin})"
    yield "reserve", f"{tokens(figures.reserve)}{'' if measured.requested_output else '  (none asked for)'}"
    yield "budget", f"{report.budget or 0:,}"
    yield "room", f"{tokens(max(0, figures.input - figures.fixed))}  (budget less system text, tools and format)"
    marks = {"high": figures.high, "soft": figures.soft, "low": figures.low}
    levels = [f"{name} {tokens(level(found.marks, figures.baseline))}" for name, level in marks.items()]
    yield "marks", ", ".join(levels)
    before, after = report.tokens_before or 0, report.tokens_after or 0
    yield "tokens", f"{before:,} as sent, {after:,} upstream"
    if report.budget:
        yield "pressure", f"{before / report.budget:.2f} as sent, {after / report.budget:.2f} upstream"
    if report.borrowed:
        yield "borrowed", ", ".join(f"{part} {amount:,}" for part, amount in report.borrowed.items())


def _steps(found: Fitted) -> Iterator[Step]:
    """What each stage took away, in the provider's tokens; what no other stage accounts for was folded."""
    reading, factor = found.sent, found.measured.token_ratio
    if found.report.outcome == "verbatim":
        return
    before = reading.fixed + reading.history
    edits = found.view.edits
    added = found.measured.addition.tokens
    saved = {
        "tools": reading.fixed + added - found.measured.budget.fixed,
        "recall": -added if edits.addition else 0,
    }
    touched = {"tools": _tools_in(reading), "output": 1, "recall": 1}
    record = edits.record
    for stage, tokens in _edited(found, record):
        saved[stage] = saved.get(stage, 0) + tokens
        touched[stage] = touched.get(stage, 0) + 1
    left = before - found.view.tokens - sum(saved.values())
    for stage in found.report.stages:
        if stage in ("fold", "drop") and record is not None:
            folded = sum(item.role != "system" for item in reading.items[: record.compaction.cut])
            gone, items = left, folded
        else:
            gone, items = saved.get(stage, 0), touched.get(stage, 0)
        yield Step(stage, int(before * factor), int((before - gone) * factor), items)
        before -= gone


def _edited(found: Fitted, record: CompactionRecord | None) -> Iterator[tuple[str, int]]:
    """Yield for each item that was made smaller the stage that did it, and the tokens saved by our own count."""
    if record is None:
        return
    count = functools.partial(found.tokenizers.count, found.measured.route.encoding)
    stages = _stages_of(record)
    for index, edit in record.edits.items():
        stage = stages.get(index, "clip")
        if stage not in found.report.stages:
            continue  # an earlier compaction's: its items are as this one found them
        yield stage, found.sent.items[index].tokens - found.measured.api_format.read_item(edit, count).tokens


def _stages_of(record: CompactionRecord) -> dict[int, str]:
    """The stage that made each edited item smaller, by index."""
    found = {swap.index: "prune" if swap.reason == "old" else "dedup" for swap in record.compaction.placeholders}
    return {**found, **{index: "truncate" for index, _ in record.compaction.truncations}}


def _tools_in(reading: CountedBody) -> int:
    name = next((key for key in TOOLS if key in reading.member_tokens), None)
    return len(json.loads(reading.envelope.value(name))) if name else 0


def render(shown: Breakdown, console: Console) -> None:
    """Print *shown* as tables."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, text in shown.facts:
        facts.add_row(name, text)
    console.print(facts)
    for title, rows in (("region", shown.regions), ("role", shown.roles), ("kind", shown.kinds)):
        table = _table(title, "as sent", "upstream")
        for name, (before, after) in rows.items():
            table.add_row(name, f"{before:,}", f"{after:,}")
        console.print()
        console.print(table)
    console.print()
    if not shown.steps:
        console.print("No stage was needed: the client's own bytes go upstream.")
        return
    table = _table("stage", "before", "after", "touched")
    for step in shown.steps:
        table.add_row(step.stage, f"{step.before:,}", f"{step.after:,}", f"{step.touched:,}")
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table

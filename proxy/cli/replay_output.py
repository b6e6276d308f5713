"""The output of ``ullage replay``: progress, the total, tables, JSON, and a picture."""

from __future__ import annotations

import asyncio
import importlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxy.cli.findings import MOST_SHOWN, findings_tables
from proxy.cli.output import figures_table, fitting_columns, plural, table_console
from proxy.cli.replay import NearlyFull, Replay, replay_sessions, request_lengths, totals
from proxy.cli.session_files import Session
from proxy.settings import Settings

MAX_PANELS: Final = 12
"""Conversations in one picture: those with the most tokens."""

LONG_JOB: Final = 100
"""Requests from which progress is printed where no terminal shows a bar."""


def replay_all(settings: Settings, sessions: Sequence[Session], model: str) -> list[Replay]:
    """Replay *sessions*; show the progress on standard error: a bar on a terminal, else a line for each tenth."""
    total = sum(len(request_lengths(session.messages)) for session in sessions)
    with _progress(total) as advance:
        return asyncio.run(replay_sessions(settings, sessions, model, advance))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of requests done since its last call; *total* is the number of all."""
    if not sys.stderr.isatty():
        yield _Tenths(total).advance
        return
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        job = progress.add_task("", total=total)
        yield lambda count: progress.advance(job, count)


class _Tenths:
    """Prints a line to standard error for each tenth of a long job."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def advance(self, count: int) -> None:
        """Add *count* requests that are done."""
        tenths = 10 * self._done // max(1, self._total)
        self._done += count
        if self._total >= LONG_JOB and 10 * self._done // self._total > tenths:
            print(f"{self._done:,} of {self._total:,} requests done", file=sys.stderr, flush=True)  # noqa: T201


def summary_lines(replays: Sequence[Replay]) -> list[str]:
    """Return the total of *replays* in sentences."""
    total = totals(replays)
    conversations = plural(total.conversations, "conversation")
    fewer = 1 - total.tokens_after / max(1, total.tokens_before)
    lines = [
        f"{conversations}, {plural(total.requests, 'request')}: {total.answered:,} answered, "
        f"{total.fitted_before:,} fitted as sent",
        f"{plural(total.compactions, 'compaction')}; {total.repeated:.1%} of what goes upstream repeats "
        "the request before",
        f"{total.tokens_before:,} tokens as sent, {total.tokens_after:,} upstream ({fewer:.0%} fewer)",
    ]
    if total.skipped:
        conversations = plural(sum(replay.skipped > 0 for replay in replays), "conversation")
        lines.insert(1, f"{plural(total.skipped, 'request')} of {conversations} could not be planned: see the reasons")
    if total.cost is not None:
        lines.append(f"{dollars(total.cost_before)} as sent, {dollars(total.cost)} upstream")
    fills = [replay.findings.first_fill for replay in replays if replay.findings.first_fill is not None]
    if fills:
        median = statistics.median(fills)
        lines.append(f"first requests fill {median:.0%} of the window at the median, {max(fills):.0%} at most")
    return lines


def broken_sentence(broken: Mapping[str, int]) -> str:
    """Return a sentence about the number of *broken* lines by file, the most damaged files first."""
    largest = sorted(broken.items(), key=lambda pair: -pair[1])[:MOST_SHOWN]
    named = ", ".join(f"{name} ({lines:,})" for name, lines in largest)
    if len(broken) > len(largest):
        named += f" and {len(broken) - len(largest):,} more"
    lines, verb = sum(broken.values()), "are no JSON and were"
    if lines == 1:
        verb = "is no JSON and was"
    return f"{plural(lines, 'line')} of {plural(len(broken), 'file')} {verb} left out: {named}."


def by_size(replays: Sequence[Replay]) -> list[Replay]:
    """Return *replays*, those whose client sent most tokens first."""
    return sorted(replays, key=lambda replay: -totals([replay]).tokens_before)


def show_replays(replays: Sequence[Replay], top: int) -> None:
    """Print the total, a row for each of the *top* largest conversations, the findings, and the problems."""
    console = table_console()
    for line in summary_lines(replays):
        console.print(line)
    largest = by_size(replays)[:top]
    console.print()
    console.print(_conversations(largest, console.width))
    if len(largest) < len(replays):
        console.print(f"and {len(replays) - len(largest):,} smaller ones: --top {len(replays)} or --json shows them")
    for table in findings_tables([replay.findings for replay in replays]):
        console.print()
        console.print(table)
    _show_advice(replays, console)
    for replay in replays:
        if replay.problem:
            console.print(f"{replay.name}: {replay.problem}")


def _show_advice(replays: Sequence[Replay], console: Console) -> None:
    """Print the advice on the fullest conversations; a remedy once, after all conversations with it."""
    lines: dict[str, list[str]] = {}
    for name, full in _fullest(replays):
        lines.setdefault(full.advice.remedy, []).append(_advice_line(name, full))
    for remedy, conversations in lines.items():
        console.print()
        for line in conversations:
            console.print(line)
        console.print(f"What to do: {remedy}.")


def advice_lines(replays: Sequence[Replay]) -> list[str]:
    """Return the advice on the fullest conversations, as the log and the page give it."""
    return [f"{_advice_line(name, full)} What to do: {full.advice.remedy}." for name, full in _fullest(replays)]


def _advice_line(name: str, full: NearlyFull) -> str:
    return f"{name}, request {full.request} at {full.pressure:.0%}: {full.advice.sentence()}."


def _fullest(replays: Sequence[Replay]) -> list[tuple[str, NearlyFull]]:
    """Return names and advice of the fullest conversations, ``MOST_SHOWN`` at most."""
    nearly_full = [(replay.name, replay.nearly_full) for replay in replays if replay.nearly_full is not None]
    nearly_full.sort(key=lambda pair: -pair[1].pressure)
    return nearly_full[:MOST_SHOWN]


COLUMNS: Final = ("conversation", "requests", "fitted", "compacted", "as sent", "upstream", "cost")

EXPENDABLE: Final = ("fitted", "requests", "compacted", "cost", "as sent")
"""Columns that are left out on a narrow terminal, in this order."""


def conversation_row(replay: Replay) -> tuple[str, ...]:
    """Return the cells of one conversation, under ``COLUMNS``."""
    total = totals([replay])
    figures = (total.requests, total.fitted_before, total.compactions, total.tokens_before, total.tokens_after)
    return replay.name, *(f"{figure:,}" for figure in figures), dollars(total.cost)


def _conversations(replays: Sequence[Replay], width: int) -> Table:
    """Return a table with a row for each of *replays*, with the columns that fit *width*."""
    rows = [conversation_row(replay) for replay in replays]
    shown = fitting_columns([COLUMNS, *rows], width, [COLUMNS.index(title) for title in EXPENDABLE])
    table = figures_table(*[COLUMNS[place] for place in shown])
    for row in rows:
        table.add_row(*[row[place] for place in shown])
    return table


def replays_as_json(replays: Sequence[Replay]) -> dict[str, object]:
    """Return the total and every conversation, the largest first, as JSON values; costs are in US dollars."""
    return {"total": totals(replays)._asdict(), "conversations": list(map(_as_json, by_size(replays)))}


def _as_json(replay: Replay) -> Mapping[str, object]:
    findings = replay.findings
    return {
        "name": replay.name,
        "model": replay.model,
        "window": replay.window,
        "problem": replay.problem,
        **{name: value for name, value in totals([replay])._asdict().items() if name != "conversations"},
        "first_fill": findings.first_fill,
        "first_tokens": dict(findings.first_tokens),
        "repeated_paragraphs": [row._asdict() for row in findings.paragraphs],
        "repeated_skill_tokens": findings.skill_tokens,
        "fresh_results": [asdict(result) for result in findings.results],
        "nearly_full": _advice_as_json(replay),
    }


def _advice_as_json(replay: Replay) -> Mapping[str, object] | None:
    full = replay.nearly_full
    if full is None:
        return None
    advice = {"advice": full.advice.sentence(), "remedy": full.advice.remedy}
    return {"request": full.request, "pressure": full.pressure, **advice}


def dollars(amount: float | None) -> str:
    """Return *amount* in US dollars and cents, below ten cents with two significant digits; a dash if not known."""
    if amount is None:
        return "-"
    if 0 < amount < 0.1:
        return f"${amount:.{1 - math.floor(math.log10(amount))}f}"
    return f"${amount:,.2f}"


def draw_replays(replays: Sequence[Replay], file: Path) -> None:
    """Write a PNG of the pressure of each conversation, request by request, with compactions marked.

    Raises ``ImportError`` without matplotlib, and ``OSError`` if the file cannot be written.
    """
    drawn = [replay for replay in by_size(replays) if replay.requests][:MAX_PANELS]
    columns = min(2, max(1, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / 2))
    figure = _figure(columns, rows)
    for position, replay in enumerate(drawn, 1):
        _draw_panel(figure.add_subplot(rows, columns, position), replay)
    figure.tight_layout()
    figure.savefig(file, format="png", dpi=100)


def _figure(columns: int, rows: int) -> Any:
    # Imported here only: it is an extra, takes a second to import, and nothing else needs it.
    module = importlib.import_module("matplotlib.figure")
    return module.Figure(figsize=(7.0 * columns, 3.2 * rows))


def _draw_panel(axes: Any, replay: Replay) -> None:
    numbers = range(1, len(replay.requests) + 1)
    before = [request.pressure_before or 0.0 for request in replay.requests]
    after = [request.pressure or math.nan for request in replay.requests]
    compacted = [number for number, request in zip(numbers, replay.requests, strict=True) if request.compacted]
    axes.plot(numbers, before, color="0.75", linewidth=1, label="as sent by the client")
    axes.plot(numbers, after, color="tab:blue", linewidth=1.5, label="as sent upstream")
    axes.plot(compacted, [after[number - 1] for number in compacted], "v", color="tab:orange", label="compaction")
    axes.axhline(1.0, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, max(1.15, min(2.0, max(before, default=0.0) * 1.05)))
    title = replay.name
    if replay.window:
        title += f"  (window {replay.window:,})"
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("request", fontsize=8)
    axes.set_ylabel("share of the budget", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="upper left")

"""The output of ``ullage replay``: a progress bar, a table, and a picture."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxy.cli.output import table_console
from proxy.cli.replay import Replay, replay
from proxy.cli.session_files import Session
from proxy.settings import Settings

TITLES: Final = (
    "conversation", "model", "window", "requests", "answered", "fitted before", "compactions", "tokens before", "after",
    "repeated", "cost before", "after",
)  # fmt: skip
TEXT_COLUMNS: Final = 2
"""The first columns hold text, the others figures."""

MAX_PANELS: Final = 12
"""Conversations in one picture: those with the most tokens."""


def replay_all(settings: Settings, sessions: Sequence[Session], model: str) -> list[Replay]:
    """Replay *sessions*, with a progress bar if standard error is a terminal."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_piped = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_piped) as progress:
        job = progress.add_task("", total=len(sessions))
        return asyncio.run(replay(settings, sessions, model, lambda: progress.advance(job)))


def show_replays(replays: Sequence[Replay]) -> None:
    """Print a row for each conversation, a row for all of them, and the problems."""
    table = Table(box=None, header_style="bold", pad_edge=False, show_footer=len(replays) > 1)
    for index, (title, total) in enumerate(zip(TITLES, _totals(replays), strict=True)):
        is_figure = index >= TEXT_COLUMNS
        table.add_column(
            title,
            total,
            justify="right" if is_figure else "left",
            overflow="fold",
            no_wrap=index > 0,
            footer_style="bold",
        )
    for each in replays:
        table.add_row(*_row(each))
    console = table_console()
    console.print(table)
    for each in replays:
        if each.problem:
            console.print(f"{each.name}: {each.problem}")


def _row(each: Replay) -> list[str]:
    window = f"{each.window:,}" if each.window else "-"
    return [each.name, each.model, window, *_figures([each]), _dollars(each.cost_before), _dollars(each.cost)]


def _totals(replays: Sequence[Replay]) -> list[str]:
    before = _dollars(_sum_known(each.cost_before for each in replays))
    after = _dollars(_sum_known(each.cost for each in replays))
    return [f"{len(replays)} conversations", "", "", *_figures(replays), before, after]


def _sum_known(amounts: Iterable[float | None]) -> float | None:
    """Return the sum of the amounts that are known; None if none is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def _figures(replays: Sequence[Replay]) -> list[str]:
    sent = sum(each.after for each in replays)
    repeated = sum(request.repeated for each in replays for request in each.requests)
    counts = (
        sum(len(each.requests) for each in replays),
        sum(each.answered for each in replays),
        sum(each.answered_before for each in replays),
        sum(each.compactions for each in replays),
        sum(each.before for each in replays),
        sent,
    )
    return [*(f"{count:,}" for count in counts), f"{repeated / max(1, sent):.1%}"]


def _dollars(amount: float | None) -> str:
    if amount is None:
        return "-"
    if amount < 1:
        return f"${amount:,.4f}"
    return f"${amount:,.2f}"


class CannotPlot(Exception):
    """The library that draws is not installed; the text says what to do."""


def draw_replays(replays: Sequence[Replay], file: Path) -> None:
    """Write a PNG of the pressure of each conversation, request by request, with compactions marked.

    Raises ``CannotPlot`` without matplotlib, and ``OSError`` if the file cannot be written.
    """
    drawn = sorted((each for each in replays if each.requests), key=lambda each: -each.before)[:MAX_PANELS]
    columns = min(2, max(1, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / 2))
    figure = _figure(columns, rows)
    for position, each in enumerate(drawn, 1):
        _draw_panel(figure.add_subplot(rows, columns, position), each)
    figure.tight_layout()
    figure.savefig(file, format="png", dpi=100)


def _figure(columns: int, rows: int) -> Any:
    try:
        # Only here: it takes a second to import, and nothing else needs it.
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise CannotPlot("drawing needs matplotlib: pip install 'ullage[plot]'") from error
    return module.Figure(figsize=(7.0 * columns, 3.2 * rows))


def _draw_panel(axes: Any, each: Replay) -> None:
    numbers = range(1, len(each.requests) + 1)
    before = [request.pressure_before or 0.0 for request in each.requests]
    after = [request.pressure or math.nan for request in each.requests]
    compacted = [number for number, request in zip(numbers, each.requests, strict=True) if request.compacted]
    axes.plot(numbers, before, color="0.75", linewidth=1, label="as sent by the client")
    axes.plot(numbers, after, color="tab:blue", linewidth=1.5, label="as sent upstream")
    axes.plot(compacted, [after[number - 1] for number in compacted], "v", color="tab:orange", label="compaction")
    axes.axhline(1.0, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, max(1.15, min(2.0, max(before, default=0.0) * 1.05)))
    axes.set_title(f"{each.name}  (window {each.window:,})" if each.window else each.name, fontsize=9)
    axes.set_xlabel("request", fontsize=8)
    axes.set_ylabel("share of the budget", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="upper left")

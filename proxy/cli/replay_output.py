"""A replay on a terminal: the bar while it runs, and the table at its end."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxy.cli.replay import Replayed, replay
from proxy.cli.session_files import Session
from proxy.settings import Settings

RIGHT = ("window", "requests", "answered", "fitted before", "events", "tokens before", "after", "repeated")


def replay_all(settings: Settings, sessions: Sequence[Session], model: str) -> list[Replayed]:
    """The replays of *sessions*, with a bar on the terminal meanwhile."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        job = progress.add_task("", total=len(sessions))
        return asyncio.run(replay(settings, sessions, model, lambda: progress.advance(job)))


def show_replays(found: Sequence[Replayed]) -> None:
    """Print a row for each conversation, and one for all of them."""
    table = Table(box=None, header_style="bold", pad_edge=False, show_footer=len(found) > 1)
    rows = [_row(each) for each in found]
    totals = _totals(found)
    for at, title in enumerate(("conversation", "model", *RIGHT, "cost before", "after")):
        numbers = at > 1
        table.add_column(
            title,
            totals[at],
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=at > 0,
            footer_style="bold",
        )
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: there nothing is folded.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
    for each in found:
        if each.trouble:
            console.print(f"{each.name}: {each.trouble}")


def _row(each: Replayed) -> list[str]:
    window = "-" if each.window is None else f"{each.window:,}"
    costs = [_dollars(each.cost_before), _dollars(each.cost)]
    return [each.name, each.model, window, *_figures([each]), *costs]


def _totals(found: Sequence[Replayed]) -> list[str]:
    before = [each.cost_before for each in found if each.cost_before is not None]
    after = [each.cost for each in found if each.cost is not None]
    costs = [_dollars(sum(before) if before else None), _dollars(sum(after) if after else None)]
    return [f"{len(found)} conversations", "", "", *_figures(found), *costs]


def _figures(found: Sequence[Replayed]) -> list[str]:
    sent = sum(each.after for each in found)
    repeated = sum(turn.repeated for each in found for turn in each.turns)
    whole = (
        sum(len(each.turns) for each in found),
        sum(each.answered for each in found),
        sum(each.answered_before for each in found),
        sum(each.events for each in found),
        sum(each.before for each in found),
        sent,
    )
    return [*(f"{figure:,}" for figure in whole), f"{repeated / max(1, sent):.1%}"]


def _dollars(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"${amount:,.4f}" if amount < 1 else f"${amount:,.2f}"


MOST = 12
"""Conversations in one picture: those with the most tokens."""


class CannotPlot(Exception):
    """The library that draws is not installed; the text says what to do."""


def draw_replays(found: Sequence[Replayed], file: Path) -> None:
    """Write a PNG of how full each conversation's budget was, request by request, with compactions marked.

    Raises ``CannotPlot`` without matplotlib, ``OSError`` where the file cannot be written.
    """
    shown = sorted((each for each in found if each.turns), key=lambda each: -each.before)[:MOST]
    figure = _figure(shown)
    rows = max(1, -(-len(shown) // 2))
    for at, each in enumerate(shown, 1):
        _panel(figure.add_subplot(rows, min(2, len(shown)), at), each)
    figure.tight_layout()
    figure.savefig(file, format="png", dpi=100)


def _figure(shown: Sequence[Replayed]) -> Any:
    try:
        # Only here: it takes a second to import, and is not needed for anything else.
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise CannotPlot("drawing needs matplotlib: pip install 'ullage[plot]'") from error
    height = 3.2 * max(1, -(-len(shown) // 2))
    return module.Figure(figsize=(7.0 * min(2, max(1, len(shown))), height))


def _panel(axes: Any, each: Replayed) -> None:
    requests = range(1, len(each.turns) + 1)
    raw = [turn.before / turn.budget if turn.budget else 0.0 for turn in each.turns]
    axes.plot(requests, raw, color="0.75", linewidth=1, label="as sent by the client")
    views = [float("nan") if turn.pressure is None else turn.pressure for turn in each.turns]
    axes.plot(requests, views, color="tab:blue", linewidth=1.5, label="as sent upstream")
    events = [(at, view) for at, view, turn in zip(requests, views, each.turns, strict=True) if turn.event]
    axes.plot([at for at, _ in events], [view for _, view in events], "v", color="tab:orange", label="compaction")
    axes.axhline(1.0, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, max(1.15, min(2.0, max(raw, default=0.0) * 1.05)))
    axes.set_title(f"{each.name}  (window {each.window:,})" if each.window else each.name, fontsize=9)
    axes.set_xlabel("request", fontsize=8)
    axes.set_ylabel("share of the budget", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="upper left")

"""A replay on a terminal: the bar while it runs, and the table at its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxy.commands.replay import Replayed, replay
from proxy.core.session_files import Session
from proxy.settings import Settings

RIGHT = ("window", "requests", "answered", "fitted before", "events", "tokens before", "after", "repeated")


def replay_all(settings: Settings, sessions: Sequence[Session], model: str) -> list[Replayed]:
    """The replays of *sessions*, with a bar on the terminal meanwhile."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        job = progress.add_task("", total=len(sessions))
        return asyncio.run(replay(settings, sessions, model, lambda: progress.advance(job)))


def show(found: Sequence[Replayed]) -> None:
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

"""Output that commands share: the console, tables of figures, and the words for a count and a window's source."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from proxy.core.models import Route

PIPE_WIDTH: Final = 10_000
"""A pipe has no width: with this one no table is folded in it."""

NARROWEST: Final = 12
"""Fewest cells of a folded column, as long as less important columns can be left out."""

BETWEEN: Final = 2
"""Spaces between two columns."""


def table_console() -> Console:
    """Return a console for standard output, in which rich's tags are plain text."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=PIPE_WIDTH)


def figures_table(title: str, *columns: str) -> Table:
    """Return a table with a column of texts, which is folded on a narrow terminal, and *columns* of figures."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def fitting_columns(
    rows: Sequence[Sequence[str]], width: int, expendable: Sequence[int], folded: Container[int] = (0,)
) -> list[int]:
    """Return the places of the columns of *rows* (titles first) that a terminal of *width* shows whole.

    Columns of *expendable* are left out in their order until the others fit. A *folded* column is narrowed instead.
    """
    shown = list(range(len(rows[0])))
    widths = [max(len(row[place]) for row in rows) for place in shown]
    for place in shown:
        if place in folded:
            widths[place] = min(widths[place], NARROWEST)
    for place in expendable:
        if sum(widths[each] + BETWEEN for each in shown) - BETWEEN <= width:
            break
        shown.remove(place)
    return shown


def plural(count: int, noun: str) -> str:
    """Return *count* with its *noun*, which takes an s unless there is one."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def window_source(route: Route) -> str:
    """Return the source of the route's window, with the server's route and member if a server states it."""
    if route.window_origin:
        return f"{route.source}: {route.window_origin}"
    return route.source

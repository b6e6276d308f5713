"""Output that commands share: the console, a table of figures, and the words for the source of a window."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from proxy.core.models import Route

PIPE_WIDTH = 10_000
"""A pipe has no width: with this one no table is folded in it."""


def table_console(*, markup: bool = False) -> Console:
    """Return a console for standard output; *markup* interprets rich's tags."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=markup)
    return Console(highlight=False, markup=markup, width=PIPE_WIDTH)


def figures_table(title: str, *columns: str) -> Table:
    """Return a table with a column of texts, which gives way on a narrow terminal, and *columns* of figures."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def window_source(route: Route) -> str:
    """Return the source of the route's window, with the server's route and member if a server states it."""
    if route.window_origin:
        return f"{route.source}: {route.window_origin}"
    return route.source

"""Output that commands share: the console, and the words for the source of a window."""

from __future__ import annotations

import sys

from rich.console import Console

from proxy.core.models import Route

PIPE_WIDTH = 10_000
"""A pipe has no width: with this one no table is folded in it."""


def table_console(*, markup: bool = False) -> Console:
    """Return a console for standard output; *markup* interprets rich's tags."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=markup)
    return Console(highlight=False, markup=markup, width=PIPE_WIDTH)


def window_source(route: Route) -> str:
    """Return the source of the route's window, with the server's route and member if a server states it."""
    if route.window_origin:
        return f"{route.source}: {route.window_origin}"
    return route.source

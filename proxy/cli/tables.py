"""What commands show people: tables for a terminal, unfolded lines for a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.cli.doctor import Diagnosis


def show_models(rows: list[dict[str, object]]) -> None:
    """Print what is known of models, a row each: those that ``ullage models --json`` gives."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "upstream"):
        table.add_column(title, overflow="fold")
    for title in ("window", "input", "output"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("encoding", no_wrap=True)
    table.add_column("factor", justify="right", no_wrap=True)
    table.add_column("window from", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    for title in ("output from", "encoding from", "factor from"):
        table.add_column(title)
    for row in rows:
        age = row["age_seconds"]
        cells = {**row, "model": _model(row), "age_seconds": None if age is None else f"{age:g} s"}
        cells.pop("sent_as", None)
        cells.pop("variant", None)
        table.add_row(*map(_cell, cells.values()))
    # A pipe has no width: there nothing is folded.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)


def _model(row: Mapping[str, object]) -> str:
    own = f" ({row['sent_as']})" if row.get("sent_as") else ""
    variant = f" with {row['variant']}" if row.get("variant") else ""
    return f"{row['model']}{own}{variant}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_findings(found: Diagnosis) -> None:
    """Print what was found out about a server, with what to do about it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    signs = {"ok": "[green]ok[/]", "info": "[blue]--[/]", "warning": "[yellow]!![/]", "error": "[bold red]XX[/]"}
    for finding in found.findings:
        sign = signs[finding.level]
        table.add_row(sign, finding.topic, _plain(finding.text))
        if finding.remedy:
            table.add_row("", "", f"[dim]{_plain(finding.remedy)}[/]")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(f"{_plain(found.model or '(no model)')} at {_plain(found.base_url)}", markup=True)
    console.print(table)
    console.print(f"{found.sent:,} tokens were sent, by our count.")


def _plain(text: str) -> str:
    """*text* so that rich shows its brackets."""
    from rich.markup import escape

    return escape(text)

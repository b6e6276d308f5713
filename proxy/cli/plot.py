"""Pressure over time as a picture; needs the extra ``plot``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxy.cli.replay import Replayed

MOST = 12
"""Conversations in one picture: those with the most tokens."""


class CannotPlot(Exception):
    """The library that draws is not installed; the text says what to do."""


def draw(found: Sequence[Replayed], file: Path) -> None:
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

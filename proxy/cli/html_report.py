"""Reports of ``ullage replay`` and ``ullage fit`` as one HTML file, which needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from proxy.cli.explain import UNTOUCHED, Breakdown
from proxy.cli.findings import Findings, findings_rows
from proxy.cli.output import plural
from proxy.cli.replay import PlannedRequest, Replay
from proxy.cli.replay_output import COLUMNS, advice_lines, by_size, conversation_row, summary_lines

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --before: #888; --after: #1f6feb; --mark: #d1570a; --full: #cf222e }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; min-width: 6rem }
.scroll { overflow-x: auto } .scroll + .scroll { margin-top: 1.5rem }
figure { margin: 1rem 0 }
svg { width: 100%; height: auto; max-width: 48rem }
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.before { fill: none; stroke: var(--before) } .after { fill: none; stroke: var(--after); stroke-width: 2 }
.full { stroke: var(--full); stroke-dasharray: 4 4 } .mark { fill: var(--mark) }
.bar-before { fill: var(--before) } .bar-after { fill: var(--after) }
"""

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""No script and no request: even a text that was not escaped could do nothing.

https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
"""

WIDTH: Final = 720
HEIGHT: Final = 200
"""Size of a chart in its own units."""

HIGHEST_SHARE: Final = 2.0
"""Highest share of the budget that a chart shows: the client's own requests may be many times too long."""

BAR_HEIGHT: Final = 18
"""Height of a bar, and of the text beside it."""

MOST_CHARTS: Final = 50
"""Conversations with a chart, the largest ones: a folder may have thousands."""


def replay_page(replays: Sequence[Replay]) -> str:
    """Return the page of *replays*: the total, every conversation, the findings, and a chart for the largest ones."""
    ordered = by_size(replays)
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(replays))
    sections = [f"<ul>{lines}</ul>", table(COLUMNS, map(conversation_row, ordered))]
    sections += findings_sections([replay.findings for replay in replays])
    sections += [_conversation(replay) for replay in ordered[:MOST_CHARTS]]
    return document("Replay of past conversations", sections)


def fit_page(name: str, result: Breakdown) -> str:
    """Return the page of one request, called *name*: its tokens by part, and the effect of each stage."""
    sections = [table(("", ""), result.facts)]
    for title, pairs in (("region", result.regions), ("role", result.roles), ("kind", result.kinds)):
        rows = [(part, before, after) for part, (before, after) in pairs.items()]
        sections.append(f"<h2>By {title}</h2>{bars(rows)}")
    steps = [(step.stage, f"{step.before:,}", f"{step.after:,}", f"{step.touched:,}") for step in result.steps]
    if steps:
        sections.append(f"<h2>Stages</h2>{table(('stage', 'before', 'after', 'touched'), steps)}")
    else:
        sections.append(f"<p>{escape(UNTOUCHED)}</p>")
    sections += findings_sections([result.findings])
    return document(f"Where the tokens of {name} are", sections)


def findings_sections(findings: Sequence[Findings]) -> list[str]:
    """Return the tables of *findings* as HTML."""
    return [table((title, *columns), rows) for title, columns, rows in findings_rows(findings)]


def document(title: str, sections: Iterable[str]) -> str:
    """Return a whole page of *sections*, which are HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(sections)
    content = f"<h1>{escape(title)}</h1>\n{body}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{content}\n</body></html>\n'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def bars(rows: Sequence[tuple[str, int, int]]) -> str:
    """Return a chart with two bars for each row of (name, tokens as sent, tokens upstream)."""
    most = max((max(before, after) for _, before, after in rows), default=0)
    pieces = []
    for index, (name, before, after) in enumerate(rows):
        y = index * (2 * BAR_HEIGHT + 6)
        pieces.append(f'<text x="0" y="{y + BAR_HEIGHT}">{escape(name)}</text>')
        for kind, tokens, top in (("before", before, y), ("after", after, y + BAR_HEIGHT)):
            width = (WIDTH - 220) * tokens // max(1, most)
            pieces.append(f'<rect class="bar-{kind}" x="120" y="{top + 3}" width="{width}" height="{BAR_HEIGHT - 5}"/>')
            pieces.append(f'<text x="{126 + width}" y="{top + 14}">{tokens:,}</text>')
    height = len(rows) * (2 * BAR_HEIGHT + 6)
    return _figure(pieces, height, "Tokens: grey as sent, blue upstream")


def _conversation(replay: Replay) -> str:
    """Return the heading and the chart of one conversation."""
    model = escape(replay.model)
    if replay.window:
        model += f", window {replay.window:,}"
    heading = f"<h2>{escape(replay.name)}</h2><p>{model}</p>"
    if replay.problem:
        heading += f"<p>{escape(replay.problem)}</p>"
    heading += "".join(f"<p>{escape(line)}</p>" for line in advice_lines([replay]))
    if not replay.requests:
        return heading
    return heading + chart(replay.requests)


def chart(requests: Sequence[PlannedRequest]) -> str:
    """Return a chart of the share of the budget that each request took, as sent and upstream."""
    before = [request.pressure_before or 0.0 for request in requests]
    after = [request.pressure or 0.0 for request in requests]
    top = max(1.15, min(HIGHEST_SHARE, max(before)))
    points_before, points_after = _points(before, top), _points(after, top)
    marks = [point for point, request in zip(points_after, requests, strict=True) if request.compacted]
    budget = HEIGHT - HEIGHT / top
    pieces = [
        f'<line class="full" x1="0" x2="{WIDTH}" y1="{budget:.1f}" y2="{budget:.1f}"/>',
        f'<text x="4" y="{budget - 4:.1f}">the budget</text>',
        f'<polyline class="before" points="{" ".join(points_before)}"/>',
        f'<polyline class="after" points="{" ".join(points_after)}"/>',
        *(f'<circle class="mark" cx="{x}" cy="{y}" r="4"/>' for x, y in (mark.split(",") for mark in marks)),
    ]
    drawn = f"{plural(len(requests), 'request')}, {plural(len(marks), 'compaction')}"
    label = f"{drawn} (dots): grey as sent, blue upstream"
    return _figure(pieces, HEIGHT, label)


def _figure(pieces: Iterable[str], height: int, label: str) -> str:
    """Return a picture of *pieces*, which are SVG, with *label* below it."""
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(pieces)}</svg>'
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"


def _points(shares: Sequence[float], top: float) -> list[str]:
    """Return the points of a line, each as ``x,y``; values above *top* are drawn at the upper edge."""
    step = WIDTH / max(1, len(shares) - 1)
    return [f"{at * step:.1f},{HEIGHT - HEIGHT * min(share, top) / top:.1f}" for at, share in enumerate(shares)]

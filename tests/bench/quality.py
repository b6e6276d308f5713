"""What compaction keeps, without asking a model: ``python -m tests.bench.quality [--sessions FOLDER]``.

Every session of at least 4,000 tokens is cut at four fifths; its history is fitted into a budget of a quarter and of
half its tokens, by Ullage and by the usual simple ways. Then the real continuation tells what should have been kept:
the names, paths and figures that the assistant used next. ``--ablate`` also leaves out one stage at a time.

The sessions are those of ``tests.bench.sessions``, which anybody can generate, or each line of the ``*.jsonl`` files in
a folder: ``{"id": NAME, "messages": [...]}``, messages as Chat Completions has them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.progress import track
from rich.table import Table

from proxy.core.decisions import Policy
from tests.bench import metrics
from tests.bench.sessions import generated
from tests.support.engine_fixtures import POLICY, Replica

Message = dict[str, Any]
Compactor = Callable[[list[Message], int], list[Message] | None]

SHARES = (0.25, 0.5)
LEAST_TOKENS, LEAST_SEQUENCE = 4_000, 8_000
STEPS = 20
"""Consecutive requests of a conversation that are compared for their repeated prefix."""

RESERVE = 8 / 7
"""A window an eighth of which is kept for the answer leaves the asked budget."""

COLUMNS = {
    "refused": "refused",
    "fits": "fits",
    "fill": "fill",
    "first_task": "task",
    "last_user": "newest",
    "instructions": "instr.",
    "later": "later",
    "later_path": "paths",
    "later_name": "names",
    "later_figure": "figures",
    "words": "words",
    "evidence": "evidence",
    "invented": "invented",
    "prefix": "prefix",
    "breaks": "breaks",
}
"""Figures by the name in ``metrics``, and the heading of their column."""


@dataclass(frozen=True)
class Case:
    """One conversation: the history to compact, what really came next, and the whole of it."""

    name: str
    history: list[Message]
    future: list[Message]
    messages: list[Message]


def read(folder: Path) -> Iterator[tuple[str, list[Message]]]:
    """The name and the messages of each session in the files of *folder*."""
    for file in sorted(folder.glob("*.jsonl")):
        for at, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            if line.strip():
                session = json.loads(line)
                yield str(session.get("id", f"{file.stem}-{at}")), session["messages"]


class Bench:
    """The cases, and what is measured of each way of making them smaller."""

    def __init__(self, sessions: Iterable[tuple[str, list[Message]]], only: str = "") -> None:
        self.cases = [case for case in _cases(sessions) if only in case.name]

    def budget(self, case: Case, share: float) -> int:
        """Tokens that the history of *case* may use."""
        return int(share * metrics.size(case.history))

    def roomy(self, case: Case, share: float) -> bool:
        """Whether what no compaction may touch, and the newest round, take at most half the budget."""
        history = case.history
        users = [at for at, message in enumerate(history) if message["role"] == "user"]
        newest = next((at for at in range(len(history) - 1, -1, -1) if _opens(history, at)), 0)
        kept = {*users[:1], *users[-1:], *range(newest, len(history))}
        kept |= {at for at, message in enumerate(history) if metrics.is_system(message)}
        return metrics.size([history[at] for at in kept]) * 2 <= self.budget(case, share)

    def score(self, case: Case, share: float, compact: Compactor, *, sequence: bool = True) -> dict[str, Any]:
        """Every figure of one case; only ``refused`` if there is no smaller view."""
        budget = self.budget(case, share)
        view = compact(case.history, budget)
        if view is None:
            return {"refused": 1.0}
        found: dict[str, Any] = {"refused": 0.0, **metrics.score(case.history, view, case.future, budget)}
        if sequence and metrics.size(case.messages) >= LEAST_SEQUENCE:
            room = int(share * metrics.size(case.messages))
            views = [
                request if metrics.size(request) <= room else compact(request, room)
                for request in metrics.requests_of(case.messages, STEPS)
            ]
            whole = [view for view in views if view is not None]
            if len(whole) > 1:
                found |= metrics.repeated_prefix(whole)
        return found

    def missed(self, case: Case, share: float, compact: Compactor) -> list[tuple[str, str, str]]:
        """What was needed later and is gone: kind, name, and who had said it how often how far from the end."""
        view = compact(case.history, self.budget(case, share))
        held = metrics.Held(view or [])
        found = []
        for name in metrics.needed_later(case.history, case.future):
            if held.has(name):
                continue
            seen: Counter[str] = Counter()
            newest = 0.0
            for at, message in enumerate(case.history):
                said, called = name in metrics.content(message), any(name in text for _, text in metrics.calls(message))
                seen[message["role"]] += said
                seen["call"] += called
                newest = (at + 1) / len(case.history) if said or called else newest
            where = ", ".join(f"{role} {times}" for role, times in seen.items() if times)
            found.append((metrics.kind_of(name), name, f"{where}; newest at {newest:.2f}"))
        return found


def _cases(sessions: Iterable[tuple[str, list[Message]]]) -> Iterator[Case]:
    for name, messages in sessions:
        if metrics.size(messages) < LEAST_TOKENS:
            continue
        history, future = metrics.split(messages)
        end = max((n for n in range(1, len(history) + 1) if _is_place(history[:n], history[n:])), default=0)
        if end:
            yield Case(name, history[:end], future, messages)


def _is_place(before: Sequence[Message], after: Sequence[Message]) -> bool:
    speaks = after[0]["role"] == "assistant" if after else True
    return before[-1]["role"] not in ("assistant", "system", "developer") and speaks


def _opens(messages: Sequence[Message], at: int) -> bool:
    """Whether a round begins at this message."""
    return messages[at]["role"] == "assistant" and (at == 0 or messages[at - 1]["role"] != "assistant")


def ullage(policy: Policy = POLICY) -> Compactor:
    """Ullage's own engine as a compactor; a window's replica lives as long as the conversation does not change."""
    desks: dict[tuple[str, int], Replica] = {}

    def compact(messages: list[Message], budget: int) -> list[Message] | None:
        window = int(budget * RESERVE)
        name = (json.dumps(messages[:2], sort_keys=True), window)
        if name not in desks:
            desks.clear()
            desks[name] = Replica(policy=policy)
        body = json.dumps({"model": "gpt-4o", "messages": messages}, ensure_ascii=False)
        plan = asyncio.run(desks[name].plan(body.encode("utf-8", "surrogatepass"), window))
        return None if plan.error else json.loads(plan.body)["messages"]

    return compact


def ways(*, ablate: bool) -> dict[str, Compactor]:
    """What is compared, by name."""
    if not ablate:
        return {**metrics.SIMPLE, "ullage": ullage()}
    rules = POLICY.rules
    found = {"ullage": ullage()}
    for field in dataclasses.fields(rules.enabled_stages):
        if getattr(rules.enabled_stages, field.name) is True:
            fewer = replace(rules, enabled_stages=replace(rules.enabled_stages, **{field.name: False}))
            found[f"without {field.name}"] = ullage(structs.replace(POLICY, rules=fewer))
    for name in ("pins", "digest", "steps"):
        fewer = replace(rules, shares=structs.replace(rules.shares, **{name: 0.0}))
        found[f"without {name}"] = ullage(structs.replace(POLICY, rules=fewer))
    return found


def row(name: str, scores: Sequence[dict[str, Any]]) -> list[str]:
    """Means over conversations, as text; empty where no conversation has the figure."""
    cells = [name, str(len(scores))]
    for key in COLUMNS:
        values = [score[key] for score in scores if score.get(key) is not None]
        cells.append(f"{fmean(values):.3f}" if values else "")
    return cells


def report(
    bench: Bench, shares: Sequence[float], compactors: dict[str, Compactor], *, sequence: bool
) -> Iterator[tuple[str, list[str]]]:
    """The heading and cells of each row: over all conversations, and over those whose window has room to compact."""
    work = [(share, name) for share in shares for name in compactors]
    found: dict[tuple[float, str], list[tuple[bool, dict[str, Any]]]] = {}
    for share, name in track(work, "measuring", console=Console(stderr=True)):
        compact = compactors[name]
        found[share, name] = [
            (bench.roomy(case, share), bench.score(case, share, compact, sequence=sequence)) for case in bench.cases
        ]
    for share in shares:
        for roomy in (False, True):
            title = f"budget {share:.0%} of each history, " + ("where it has room to compact" if roomy else "all")
            for name in compactors:
                yield title, row(name, [score for fits, score in found[share, name] if fits or not roomy])


def show(rows: Sequence[tuple[str, list[str]]], *, markdown: bool) -> None:
    """Print the tables."""
    headings = ["compactor", "n", *COLUMNS.values()]
    for title in dict.fromkeys(title for title, _ in rows):
        cells = [cells for name, cells in rows if name == title]
        if markdown:
            lines = [headings, ["---"] * len(headings), *cells]
            print(f"\n**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
            continue
        grid = Table(title=title)
        for at, heading in enumerate(headings):
            grid.add_column(heading, justify="right" if at else "left", no_wrap=True)
        for line in cells:
            grid.add_row(*line)
        Console(width=220).print(grid)


def main() -> None:
    """Print the tables, or with ``--misses`` what was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument("--sessions", type=Path, help="a folder of sessions; else seeded ones are generated")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="budgets as shares of each history")
    parser.add_argument("--only", default="", help="conversations whose name holds this")
    parser.add_argument("--ablate", action="store_true", help="leave out one stage at a time")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--misses", action="store_true", help="list what was needed later and is gone")
    parser.add_argument("--each", action="store_true", help="a row for each conversation")
    given = parser.parse_args()
    bench = Bench(read(given.sessions) if given.sessions else generated(), given.only)
    shares = [float(share) for share in given.shares.split(",")]
    if given.misses:
        for share in shares:
            for case in bench.cases:
                for kind, name, where in bench.missed(case, share, ullage()):
                    print(f"{share} {case.name} {kind}: {name!r} ({where})")
    elif given.each:
        show(
            [
                (f"budget {share:.0%}", row(case.name + (" *" if bench.roomy(case, share) else ""), [score]))
                for share in shares
                for case in bench.cases
                for score in [bench.score(case, share, ullage())]
            ],
            markdown=given.markdown,
        )
    else:
        compared = ways(ablate=given.ablate)
        show(list(report(bench, shares, compared, sequence=not given.ablate)), markdown=given.markdown)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()

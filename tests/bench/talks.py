"""What a view keeps of long talks without tools: ``python -m tests.bench.talks [--kinds A,B] [--tokens N]``.

Talks are generated from ``tests/data/talks.yaml``: months of two people in four languages, talks of which each turn
tells something, and plans with an assistant. The same seed gives the same talk. Each is cut at 60, 70, 80 and 90 % and
fitted to about a quarter of what is there, by Ullage and by keeping the newest messages of equal budget. *Evidence* is
the share of the phrases of the facts that a question could be about; *orders* that of the user's sentences that seem to
ask for something. Seeds that nobody tuned a rule to are the ones to score with: ``--seeds 101,102``.

The size of the window decides much: twelve rounds have to fit between two compactions, and in a window of 3,000 tokens
these are half of it. ``--tokens`` is the length of each talk; windows are a quarter of what was cut.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.bench import metrics
from tests.bench.quality import Compactor, ullage

Message = dict[str, Any]

DATA = Path(__file__).parents[1] / "data" / "talks.yaml"

CUTS = (0.6, 0.7, 0.8, 0.9)
SHARES = (0.22, 0.25, 0.29)
STEPS = 24
"""Consecutive requests that are compared for their repeated prefix."""

SEEDS = (1, 2)
TOKENS = 12_000

TWO_FACTS = 1 / 3
"""Share of the turns that tell something in which two facts stand."""

ASKED_ABOUT = 1 / 2
"""Share of the turns that tell something in a talk of which all do: a question is about those."""

TALK_BEFORE, TALK_AFTER = 0.6, 0.35
"""Share of the turns that begin, and that end, with small talk."""

COLUMNS = ("evidence", "words", "orders", "fill", "prefix", "breaks")

_PIECE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
_SPACED = re.compile(r"[A-Za-z\uac00-\ud7a3]")


@dataclass(frozen=True)
class Kind:
    """What one kind of talk is made of."""

    people: tuple[str, str]
    tells: Sequence[float]
    facts: Sequence[str]
    slots: dict[str, list[str]]
    small_talk: Sequence[str] = ()
    offers: Sequence[str] = ()
    filling: Sequence[str] = ()


@dataclass(frozen=True)
class Talk:
    """A generated talk; the facts that a question could be about, by the index of the message that tells them."""

    messages: list[Message] = field(default_factory=list)
    evidence: list[tuple[int, str]] = field(default_factory=list)


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of talk by name."""
    return {name: Kind(**parts) for name, parts in yaml.safe_load(DATA.read_text(encoding="utf-8")).items()}


def talk(name: str, seed: int, tokens: int = TOKENS) -> Talk:
    """A talk of kind *name* of at least *tokens*, which ends with a message of the model."""
    kind, pick = kinds()[name], random.Random(f"{name} {seed}")
    tells, is_labelled = pick.choice(kind.tells), pick.random() < 0.5
    turn = _answered_turn if kind.offers else _told_turn
    found, total = Talk(), 0
    while total < tokens or len(found.messages) % 2:
        at = len(found.messages)
        text, asked_about = turn(kind, pick, at % 2, tells)
        if is_labelled and not kind.offers:
            text = f"{kind.people[at % 2]}: {text}"
        message = {"role": ("user", "assistant")[at % 2], "content": text}
        found.messages.append(message)
        found.evidence.extend([(at, fact) for fact in asked_about])
        total += metrics.size([message])
    return found


def _told_turn(kind: Kind, pick: random.Random, side: int, tells: float) -> tuple[str, list[str]]:
    """One turn of a talk of two people, and the facts of it that a question could be about."""
    facts: list[str] = []
    if pick.random() < tells:
        facts = [_filled(kind, pick.choice(kind.facts), pick, side) for _ in range(1 + (pick.random() < TWO_FACTS))]
    parts = list(facts)
    if pick.random() < TALK_BEFORE:
        parts.insert(0, _filled(kind, pick.choice(kind.small_talk), pick, side))
    if not parts or pick.random() < TALK_AFTER:
        parts.append(_filled(kind, pick.choice(kind.small_talk), pick, side))
    asked_about = facts
    if tells == 1 and pick.random() >= ASKED_ABOUT:
        asked_about = []
    return _joined(parts), asked_about[:1]


def _answered_turn(kind: Kind, pick: random.Random, side: int, tells: float) -> tuple[str, list[str]]:
    """One turn of plans with an assistant: what the user asks for, which is the evidence, or the answer."""
    del tells
    if side == 0:
        asked = _filled(kind, pick.choice(kind.facts), pick, side)
        return asked, [asked]
    parts = [pick.choice(kind.filling) for _ in range(pick.randrange(1, 6))]
    parts.insert(pick.randrange(len(parts) + 1), _filled(kind, pick.choice(kind.offers), pick, side))
    return _joined(parts), []


def _filled(kind: Kind, template: str, pick: random.Random, side: int) -> str:
    slots: dict[str, Any] = {name: pick.choice(values) for name, values in kind.slots.items()}
    slots |= {"num": pick.randrange(11, 2900), "minutes": pick.randrange(10, 59), "year": pick.randrange(1948, 2024)}
    slots |= {"month": pick.randrange(1, 12), "date": pick.randrange(1, 28), "other": kind.people[1 - side]}
    slots["time"] = f"1:{pick.randrange(30, 59)}:{pick.randrange(10, 59)}"
    text = template.format(**slots)
    return text[0].upper() + text[1:]


def _joined(parts: Sequence[str]) -> str:
    """The *parts* of a turn; Chinese and Japanese put no space between sentences."""
    return (" " if _SPACED.search(parts[0]) else "").join(parts)


# What is measured.


def phrases(text: str) -> set[tuple[str, ...]]:
    """Each four consecutive words of *text*; of Chinese, Japanese and Korean each four characters."""
    pieces = _PIECE.findall(text.lower())
    return {tuple(pieces[at : at + 4]) for at in range(max(1, len(pieces) - 3))}


def share_there(view: set[tuple[str, ...]], text: str) -> float:
    """The share of the phrases of *text* that are among those of a *view*."""
    wanted = phrases(text)
    return len(wanted & view) / len(wanted)


def histories(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the requests at which a talk is cut."""
    total = metrics.size(messages)
    for share in CUTS:
        taken, end = 0, 0
        while taken < share * total:
            taken += metrics.size(messages[end : end + 1])
            end += 1
        yield list(messages[: end - (end + 1) % 2])  # it ends with a message of the user


def scores(chat: Talk, compact: Compactor, shares: Sequence[float]) -> Iterator[dict[str, float | None]]:
    """Yield the figures of each view of *chat*."""
    for share in shares:
        for history in histories(chat.messages):
            budget = int(share * metrics.size(history))
            view = compact(history, budget)
            if view is not None:
                yield {"fill": metrics.size(view) / budget, **_kept(chat, history, view)}


def _kept(chat: Talk, history: list[Message], view: list[Message]) -> dict[str, float | None]:
    there = phrases("\n".join(map(metrics.plain, view)))
    future, held = chat.messages[len(history) :], metrics.Held(view)
    told = [fact for at, fact in chat.evidence if at < len(history)]
    return {
        "evidence": metrics.mean(share_there(there, fact) for fact in told),
        "words": metrics.mean(float(word in held.words) for word in metrics.words_needed_later(history, future)),
        "orders": metrics.mean(share_there(there, asked) for asked in metrics.instructions(history)),
    }


def prefix(chat: Talk, compact: Compactor, share: float) -> dict[str, float]:
    """The repeated prefix of the last requests of *chat*, and how often it breaks."""
    room = int(share * metrics.size(chat.messages))
    requests = metrics.requests_of(chat.messages, STEPS)
    views = [request if metrics.size(request) <= room else compact(request, room) for request in requests]
    return metrics.repeated_prefix([view for view in views if view is not None])


def row(chats: Sequence[Talk], compact: Compactor, shares: Sequence[float]) -> tuple[int, list[str]]:
    """The number of views, and the mean of each figure as text."""
    found = [score for chat in chats for score in scores(chat, compact, shares)]
    kept = [prefix(chat, compact, shares[len(shares) // 2]) for chat in chats]
    cells = []
    for name in COLUMNS:
        values = [each[name] for each in (*found, *kept) if each.get(name) is not None]
        cells.append(f"{fmean(values):.3f}" if values else "")
    return len(found), cells


def report(names: Sequence[str], seeds: Sequence[int], tokens: int, shares: Sequence[float]) -> Iterator[list[str]]:
    """Yield the cells of each row."""
    ways: dict[str, Callable[[], Compactor]] = {"newest": lambda: metrics.drop_oldest, "ullage": ullage}
    for name in names:
        chats = [talk(name, seed, tokens) for seed in seeds]
        for way, compactor in ways.items():
            views, cells = row(chats, compactor(), shares)
            yield [name, way, str(views), *cells]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.talks", description=__doc__)
    parser.add_argument("--kinds", default=",".join(kinds()), help="kinds of talks")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="a talk of each kind for each seed")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of each talk")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="budgets as shares of what was cut")
    given = parser.parse_args()
    seeds, shares = [int(each) for each in given.seeds.split(",")], [float(each) for each in given.shares.split(",")]
    grid = Table(title=f"talks of {given.tokens} tokens")
    for heading in ("kind", "way", "views", *COLUMNS):
        grid.add_column(heading, no_wrap=True)
    for cells in report(given.kinds.split(","), seeds, given.tokens, shares):
        grid.add_row(*cells)
    Console(width=140).print(grid)


if __name__ == "__main__":
    main()

"""What a fleet needs for a rate of requests: ``python -m tests.bench.scaling [--rate N] [--conversations N]``.

Each conversation has a number of turns, which grow evenly. Most of a request's cost depends on whether the process that
gets it has read the conversation before: what is new is counted, what was seen is not. So the simulation sends turns to
processes, by turns or each conversation to one of them, and adds up the measured cost of each. The costs are those of
``docs/benchmarks.md``; ``docs/scaling.md`` shows what this prints.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

SMALL_MS = 0.24
"""CPU of a request of 50 KB far below its window, which is not counted."""

SEEN_MS = 2.59
"""CPU of a request of 400 KB whose conversation this process has seen, 8 KB longer each time; once compacted, 1.49."""

NEW_MS = 1.22
"""CPU of reading and counting 1,000 tokens that this process has not seen: 122 ms for 100,000."""

UNCOUNTED_TOKENS = 12_500
"""Tokens of a request of 50 KB: below, its bytes show that it fits."""

UTILISATION = 0.6
"""The share of a core that is planned with: requests do not come evenly."""

NOTED_BYTES, COMPACTION_BYTES = 500, 10_000
"""Bytes in the store of a conversation that was never compacted, and of each compaction in a window of 32K."""

IN_FLIGHT_MB = 1.0
"""Megabytes that a request is taken to hold until its answer ends: its body of 400 KB, what was read of it, buffers."""

IN_FLIGHT_LIMIT = 512
"""``server.limits.in_flight``, if it is left as it is."""


@dataclass(frozen=True)
class Load:
    """A fleet's load: requests a second, and conversations of so many turns that end with so many tokens."""

    rate: int = 10_000
    conversations: int = 1_000_000
    turns: int = 40
    tokens: int = 100_000
    answer_seconds: float = 10.0
    compactions: int = 3


def turn_costs(load: Load, processes: int, *, sticky: bool, chance: random.Random) -> Iterator[float]:
    """CPU milliseconds of each turn of one conversation."""
    seen_by: dict[int, float] = {}
    process = chance.randrange(processes)
    for turn in range(1, load.turns + 1):
        if not sticky:
            process = chance.randrange(processes)
        tokens = load.tokens * turn / load.turns
        if tokens <= UNCOUNTED_TOKENS:
            yield SMALL_MS
            continue
        # A client's newest messages are new to every process; the cost of a request that was seen includes them.
        known = seen_by.get(process, 0.0)
        yield SEEN_MS + NEW_MS * max(0.0, tokens - known - load.tokens / load.turns) / 1000
        seen_by[process] = tokens


def mean_cost(load: Load, processes: int, *, sticky: bool, samples: int = 400) -> float:
    """CPU milliseconds of a request on average, over *samples* conversations; the same each time."""
    chance = random.Random(7)
    costs = [cost for _ in range(samples) for cost in turn_costs(load, processes, sticky=sticky, chance=chance)]
    return sum(costs) / len(costs)


def processes_needed(load: Load, *, sticky: bool) -> int:
    """The least number of processes, of one core each, that carry *load*; more of them see less of a conversation."""
    count = 1
    while True:
        wanted = math.ceil(load.rate * mean_cost(load, count, sticky=sticky) / 1000 / UTILISATION)
        if wanted <= count:
            return count
        count = wanted


def rows(load: Load) -> list[tuple[str, str]]:
    """What *load* needs, a line each."""
    sticky, spread = (processes_needed(load, sticky=each) for each in (True, False))
    in_flight = int(load.rate * load.answer_seconds)
    stored = load.conversations * (NOTED_BYTES + load.compactions * COMPACTION_BYTES)
    return [
        ("CPU of a request, a conversation always with one process", f"{mean_cost(load, sticky, sticky=True):.1f} ms"),
        ("CPU of a request, requests by turns", f"{mean_cost(load, spread, sticky=False):.1f} ms"),
        ("processes of one core, a conversation always with one process", f"{sticky:,}"),
        ("processes of one core, requests by turns", f"{spread:,}"),
        ("requests under way at once", f"{in_flight:,}"),
        (f"processes that admit them, at {IN_FLIGHT_LIMIT} each", f"{math.ceil(in_flight / IN_FLIGHT_LIMIT):,}"),
        ("memory that they hold", f"{in_flight * IN_FLIGHT_MB / 1000:,.0f} GB"),
        ("file descriptors", f"{2 * in_flight:,}"),
        ("bytes in the store", f"{stored / 1e9:,.1f} GB"),
        ("operations of the store a second, at most", f"{2 * load.rate:,}"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in vars(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for what, figure in rows(Load(**vars(parser.parse_args()))):
        print(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()

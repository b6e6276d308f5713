"""How much of what is sent a provider's prompt cache has already: ``python -m tests.bench.prefix``.

Replays a sixty-round agent loop through a real proxy at two windows and prints the share of repeated prefix, the
compactions and the mean fill; and the same for a client whose window never ends.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.e2e.talk import Talk
from tests.harness import Proxy
from tests.material import AGENT_TOOLS, agent_round, agent_session
from tests.stub import Rules, Stub

ROUNDS = 60
ENDLESS = 10**9
LOADS: Mapping[int, int] = {8_192: 450, 32_768: 1_600}
"""Window to tokens of one tool result: sixty rounds are about four windows."""


async def replay(window: int, result_tokens: int, *, through_proxy: bool) -> list[str]:
    """One row of figures."""
    rules = Rules(window=window if through_proxy else ENDLESS)
    async with Stub(rules) as stub:
        if through_proxy:
            async with Proxy(stub.url, window) as proxy:
                talk = await _drive(proxy.url, stub, result_tokens)
        else:
            talk = await _drive(stub.url, stub, result_tokens)
    events = sum(_breaks(before.slices, after.slices) for before, after in pairwise(talk.views))
    label = f"{window}" if through_proxy else f"{window} (never compacted)"
    fill = f"{talk.ledger.fill:.2f}" if through_proxy else ""
    return [label, f"{talk.ledger.share:.3f}", str(events), fill, str(talk.ledger.sent), str(talk.overflows)]


async def _drive(url: str, stub: Stub, result_tokens: int) -> Talk:
    messages: list[dict[str, Any]] = agent_session(0, 0)
    async with Talk(url, stub, messages, {"tools": AGENT_TOOLS}) as talk:
        for at in range(ROUNDS):
            spoken, *results = agent_round(at + 1, result_tokens)
            await talk.ask(*((spoken, *results) if at else ()))
            talk.messages.pop()
    return talk


def _breaks(before: list[bytes], after: list[bytes]) -> bool:
    """Whether *after* is anything but *before* with more behind it."""
    return after[: len(before)] != before


async def rows() -> list[list[str]]:
    """A row for each window, and one for a client that never compacts."""
    found = [await replay(window, size, through_proxy=True) for window, size in LOADS.items()]
    return found + [await replay(window, size, through_proxy=False) for window, size in LOADS.items()]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m tests.bench.prefix", description=__doc__).parse_args()
    grid = Table(title=f"Agent loop of {ROUNDS} rounds")
    for column in ("window", "repeated prefix", "compactions", "mean fill", "tokens sent", "overflows"):
        grid.add_column(column, justify="right")
    for row in asyncio.run(rows()):
        grid.add_row(*row)
    Console(width=120).print(grid)


if __name__ == "__main__":
    main()

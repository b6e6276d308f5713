"""How much of what is sent a provider's prompt cache has already: ``python -m tests.bench.prefix``.

Replays a sixty-round agent loop through a real proxy at two windows and prints the share of repeated prefix, the
compactions and the mean fill; and the same for a client whose window never ends.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.stub import Rules, Stub
from tests.support.chat_client import ChatClient
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session

ROUNDS = 60
ENDLESS = 10**9
WINDOWS = (8_192, 32_768)
RESULT = 700
"""Tokens of one tool result: sixty rounds are about six of the small windows, or one and a half of the large."""


async def replay(window: int | None, result_tokens: int) -> list[str]:
    """One row of figures; without a *window* there is no proxy and nothing ends."""
    async with Stub(Rules(window=window or ENDLESS)) as stub:
        if window:
            async with Proxy(stub.url, window) as proxy:
                talk = await _drive(proxy.url, stub, result_tokens)
        else:
            talk = await _drive(stub.url, stub, result_tokens)
    events = sum(_breaks(before.slices, after.slices) for before, after in pairwise(talk.views))
    figures = [f"{talk.ledger.share:.3f}", str(events), f"{talk.ledger.fill:.2f}"]
    return [str(window or "none"), *figures, str(talk.ledger.sent), str(talk.overflows)]


async def _drive(url: str, stub: Stub, result_tokens: int) -> ChatClient:
    messages: list[dict[str, Any]] = agent_session(0, 0)
    async with ChatClient(url, stub, messages, {"tools": AGENT_TOOLS}) as talk:
        for at in range(ROUNDS):
            spoken, *results = agent_round(at + 1, result_tokens)
            await talk.ask(*((spoken, *results) if at else ()))
            talk.messages.pop()
    return talk


def _breaks(before: list[bytes], after: list[bytes]) -> bool:
    """Whether *after* is anything but *before* with more behind it."""
    return after[: len(before)] != before


async def rows(result_tokens: int) -> list[list[str]]:
    """A row for each window, and one for a client that never compacts."""
    found = [await replay(window, result_tokens) for window in WINDOWS]
    return [*found, await replay(None, result_tokens)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.prefix", description=__doc__)
    parser.add_argument("--result-tokens", type=int, default=RESULT, help="size of one tool result")
    given = parser.parse_args()
    grid = Table(title=f"Agent loop of {ROUNDS} rounds")
    for column in ("window", "repeated prefix", "compactions", "mean fill", "tokens sent", "overflows"):
        grid.add_column(column, justify="right")
    for row in asyncio.run(rows(given.result_tokens)):
        grid.add_row(*row)
    Console(width=120).print(grid)


if __name__ == "__main__":
    main()

"""What counting costs, and how exact it is: ``python -m tests.bench.counting [--messages N] [--provider]``.

Times the reading of large requests (new ones, and ones whose beginning was seen), and how long the event loop stands
still meanwhile; compares the count of many messages with tiktoken's own. With ``--provider``, drives sessions through a
real proxy at an upstream whose tokenizer makes 1.5 times our tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from proxy.core.apis import chat
from proxy.engine.reading import CountedBody, Reader
from proxy.tokenizers import VOCABULARIES, Tokenizers
from tests.bench.counting_messages import cjk, code, messages, noise, original, reference
from tests.e2e.test_counting import WINDOW, drive
from tests.stub import Rules, Stub
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TOOLS, agent_session

ENCODING, MODEL = "o200k_base", "gpt-4o"
TENANT = b"t" * 32
MB = 1_000_000


class Loop:
    """Watches the event loop: ``stood`` is the longest it did not turn, in milliseconds."""

    def __init__(self) -> None:
        self.stood = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Loop:
        self._task = asyncio.ensure_future(self._watch())
        await asyncio.sleep(0.01)
        self.stood = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # a last turn, so that a standstill up to here is seen
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.stood = max(self.stood, (now - before) * 1e3)
            before = now


def reader(tokenizers: Tokenizers) -> Reader:
    """A reader that has seen nothing."""
    return Reader(tokenizers, {}, {}, {}, {})


def body(told: list[dict[str, Any]]) -> bytes:
    """A request body of these messages."""
    return json.dumps({"model": MODEL, "messages": told, "tools": AGENT_TOOLS}, ensure_ascii=False).encode()


async def read(own: Reader, data: bytes) -> CountedBody:
    """One reading."""
    return await own.read(own.locate(chat, TENANT, data), ENCODING, MODEL)


async def time_one(tokenizers: Tokenizers, data: bytes, before: bytes, rounds: int) -> tuple[float, float, int]:
    """Milliseconds to read *data* where *before* was read (if any), how long the loop stood still, and its tokens."""
    spent, stood, tokens = [], [], 0
    for _ in range(rounds):
        own = reader(tokenizers)
        if before:
            await read(own, before)
        gc.collect()
        async with Loop() as loop:
            started = time.perf_counter()
            found = await read(own, data)
            spent.append((time.perf_counter() - started) * 1e3)
        stood.append(loop.stood)
        tokens = found.fixed + found.history
    return statistics.median(spent), statistics.median(stood), tokens


async def timings(rounds: int) -> list[tuple[str, ...]]:
    """A row for each kind of request: bytes, tokens, milliseconds, and those the loop stood still."""
    tokenizers = Tokenizers()
    tokenizers.counter(ENCODING)
    told = agent_session(136, 700)
    seen, whole = body(told[:-2]), body(told)
    kinds: dict[str, tuple[bytes, bytes]] = {
        "agent session, all but two messages seen": (whole, seen),
        "the same, never seen": (whole, b""),
        "1.5 MB of Chinese, Japanese, Korean": (one(cjk(1, MB // 2)), b""),
        "1.5 MB of base64": (one(noise(1, 3 * MB // 2)), b""),
        "1.5 MB of code": (one(code(1, 3 * MB // 2)), b""),
        "1 MB of one letter": (one("a" * MB), b""),
        "1 MB of spaces": (one(" " * MB), b""),
        "1 MB of <|endoftext|>": (one("<|endoftext|>" * (MB // 13)), b""),
    }
    rows = []
    for name, (data, before) in kinds.items():
        spent, stood, tokens = await time_one(tokenizers, data, before, rounds)
        rows.append((name, f"{len(data):,}", f"{tokens:,}", f"{spent:.1f}", f"{stood:.1f}"))
    return rows


def one(text: str) -> bytes:
    """A request that holds *text* in one message."""
    return body([{"role": "user", "content": text}])


def accuracy(count: int) -> list[tuple[str, ...]]:
    """A row for each encoding: messages, how many are counted exactly, the largest difference, all tokens."""
    tokenizers, told, rows = Tokenizers(), messages(count), []
    for name in VOCABULARIES:
        own: Callable[[str], int] = tokenizers.counter(name)
        exact = original(name)
        pairs = [(chat.read_item(encode(message), own).tokens, reference(exact, message)) for message in told]
        equal = sum(ours == theirs for ours, theirs in pairs)
        worst = max(abs(ours - theirs) for ours, theirs in pairs)
        total = sum(theirs for _, theirs in pairs)
        rows.append((name, f"{len(told):,}", f"{equal:,}", str(worst), f"{total:,}"))
    return rows


def encode(message: dict[str, Any]) -> bytes:
    """The message as a client writes it; lone surrogates escaped."""
    return json.dumps(message).encode()


async def provider(factor: float) -> tuple[str, ...]:
    """A row for a provider that counts *factor* times our tokens; raises where an error reaches the client."""
    async with Stub(Rules(window=WINDOW, factor=factor)) as stub, Proxy(stub.url, WINDOW) as proxy:
        ledger, errors, _ = await drive(proxy.url, stub, sessions=3, rounds=45)
        p95 = errors[int(0.95 * (len(errors) - 1))]
        return (str(factor), str(ledger.requests), "0", str(len(stub.chats("overflow"))), f"{100 * p95:.2f} %")


def show(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print *rows* as a table."""
    grid = Table(title=title)
    for at, column in enumerate(columns):
        grid.add_column(column, justify="right" if at else "left")
    for row in rows:
        grid.add_row(*row)
    Console(width=110).print(grid)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.counting", description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000, help="messages whose count is compared with tiktoken's")
    parser.add_argument("--rounds", type=int, default=5, help="readings of each request; medians are shown")
    parser.add_argument("--provider", action="store_true", help="also drive sessions at providers that count otherwise")
    given = parser.parse_args()
    rows = asyncio.run(timings(given.rounds))
    show("Reading a request, milliseconds", ("request", "bytes", "tokens", "all", "loop stands still"), rows)
    columns = ("encoding", "messages", "equal to tiktoken", "largest difference", "tokens")
    show("Exactness", columns, accuracy(given.messages))
    if given.provider:
        rows = [asyncio.run(provider(factor)) for factor in (1.0, 1.5, 0.8)]
        columns = ("provider's tokens to ours", "requests", "errors", "overflows recovered", "P95 of |count/usage - 1|")
        show("Another tokenizer", columns, rows)


if __name__ == "__main__":
    main()

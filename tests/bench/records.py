"""What conversations take in the store: ``python -m tests.bench.records [--tokens N] [FILE ...]``.

Each file's recorded conversations, one after the other, make one long one. It is compacted as it grows, over a real
Valkey, with a summary as long as one may be in every block, notes and the archive; then every key is measured with
``MEMORY USAGE``. No model is asked and nothing is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from proxy.engine.ports import Summary, SummaryRequest
from proxy.features.history.archive import Archive, ArchiveLimits
from proxy.features.history.notes import HistoryRecorder
from proxy.store import Store, open_store
from proxy.summaries.codec import dump
from proxy.tasks import Tasks
from tests.store.conftest import Valkey
from tests.support.engine_fixtures import TENANT, Replica, chat_body, count_tokens
from tests.support.recorded_conversations import FOLDER

WINDOWS = (8_192, 32_768)
KINDS = {"e": "event", "s": "summary", "n": "notes", "c": "name", "l": "list", "a": "archive"}


class Writer:
    """Summaries as long as they may be, made of what the conversation says, kept as a model's are."""

    inline = False

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ready(self, request: SummaryRequest) -> Summary | None:
        """One for just this prefix."""
        said = [entry.text for entry in request.read_entries(0, request.prefix.length) if entry.role == "assistant"]
        text = _cut("\n".join(said[::-1]), request.cap, count_tokens)
        if not text:
            return None
        kept = dump(text, request.prefix.length, 1000, "gpt-4o-mini", 1_800_000_000)
        await self._store.summaries.save(TENANT, request.root_hash, b"p" * 8, request.prefix.prefix_hash, kept)
        return Summary(text, request.prefix.length, 1000, "gpt-4o-mini")

    write = ready

    def is_due(self, *_: object) -> bool:
        """Never: they are there."""
        return False

    def prepare(self, request: SummaryRequest) -> None:
        """Nothing to prepare."""

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Nobody counts."""

    def limited(self, tenant: bytes) -> None:
        """Nobody limits."""


@dataclass
class Taken:
    """What one conversation took, by kind: the bytes of each key."""

    name: str
    window: int
    tokens: int = 0
    events: int = 0
    keys: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def total(self, *, archive: bool = False) -> int:
        """Bytes of all keys together."""
        return sum(sum(sizes) for kind, sizes in self.keys.items() if archive or kind != "archive")


async def measured(path: Path, window: int, tokens: int) -> Taken:
    """What the conversation in *path*, up to so many *tokens*, takes in a *window*."""
    with tempfile.TemporaryDirectory(prefix="u-") as folder:
        server, tasks = Valkey(Path(folder)), Tasks(_failed)
        server.start()
        store = await open_store(
            server.url, directory=Path(folder), key=b"k" * 32, spawn=tasks.spawn, warn=lambda event, facts: None
        )
        try:
            return await _grown(path, window, tokens, store, tasks, server)
        finally:
            await store.close()
            server.kill()


async def _grown(path: Path, window: int, tokens: int, store: Store, tasks: Tasks, server: Valkey) -> Taken:
    taken = Taken(path.stem, window)
    archive = Archive(
        store.archive,
        ArchiveLimits(604_800.0, 262_144, 2**26),
        {},
        tasks.spawn,
        lambda outcome, number: None,
        time.monotonic,
    )
    recorder = HistoryRecorder(store.conversations, {}, lambda: 1_800_000_000.0, archive)
    replica = Replica(store.records, summaries=Writer(store))  # type: ignore[arg-type]  # it does not look at what it is asked
    for messages in places(path):
        body = chat_body(messages)
        plan = await replica.plan(body, window)
        recorder.answered(plan.view, plan.report, 200)
        taken.events += plan.report.event
        taken.tokens = plan.report.tokens_before or 0
        await asyncio.sleep(0)
        if taken.tokens > tokens:
            break
    await archive.finish(30)
    await asyncio.sleep(0.2)
    for key in await _keys(server):
        kind = KINDS.get(key.rpartition("}")[2][1:2]) if key.startswith("ullage1:{") else None
        if kind is not None:
            taken.keys[kind].append(int(server.say(f"MEMORY USAGE {key} SAMPLES 0").strip().lstrip(":")))
    return taken


async def _keys(server: Valkey) -> list[str]:
    found, cursor = set(), "0"
    while True:
        answer = server.say(f"SCAN {cursor} COUNT 200").split("\r\n")
        cursor = answer[2]
        found |= {line for line in answer if line.startswith("ullage1:")}
        if cursor == "0":
            return sorted(found)


def places(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The requests of one long conversation: all of *path* in a row, under its first system text."""
    messages: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        said = json.loads(line)["messages"]
        messages += [message for message in said if message["role"] not in ("system", "developer") or not messages]
    for index, message in enumerate(messages[:-1]):
        if message["role"] != "assistant" and messages[index + 1]["role"] == "assistant":
            yield messages[: index + 1]


def _cut(text: str, tokens: int, size: Callable[[str], int]) -> str:
    while size(text) > tokens:
        text = text[: int(len(text) * tokens / size(text) * 0.98)]
    return text


def _failed(name: str, error: BaseException) -> None:
    raise error


def table_of(found: Sequence[Taken]) -> Table:
    """The figures: the mean of each kind's keys and how many there are, and all together."""
    table = Table("conversation", "window", "tokens", "events", *KINDS.values(), "all", "with archive")
    for each in found:
        cells = []
        for kind in KINDS.values():
            sizes = each.keys.get(kind, [])
            cells.append(f"{sum(sizes) // len(sizes):,} x {len(sizes)}" if sizes else "")
        figures = [f"{each.window:,}", f"{each.tokens:,}", str(each.events)]
        table.add_row(each.name, *figures, *cells, f"{each.total():,}", f"{each.total(archive=True):,}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=150_000)
    options = parser.parse_args()
    files = options.files or sorted(FOLDER.glob("*.jsonl"))
    found = [asyncio.run(measured(path, window, options.tokens)) for path in files for window in WINDOWS]
    Console(width=200).print(table_of(found))


if __name__ == "__main__":
    main()

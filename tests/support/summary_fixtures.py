"""Summary jobs of real parts over a strict upstream and a store in memory that replicas can share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from proxy.core.conversation import ItemText
from proxy.core.models import Route
from proxy.core.report import SummaryReport
from proxy.core.request import Origin, Request
from proxy.engine.ports import CachedPrompt, SummaryPrefix, SummaryRequest
from proxy.store import Breaker, Patience, SummaryTable
from proxy.store.encryption import Sealer
from proxy.store.operations import MemoryBackend
from proxy.store.tables import TableAccess, ThrottledWarnings
from proxy.summaries import JobCaches, Jobs, SpendingLimits, SummaryConfig, Writer, ignore_note, load_prompts
from proxy.tasks import Tasks
from proxy.upstream import Target, Upstreams
from tests.stub import Stub
from tests.support.engine_fixtures import count_tokens, tokenizers
from tests.support.sample_conversations import log

TENANT, ROOT, SINCE = b"t" * 32, b"r" * 16, b"s" * 16
ROUTE = Route("stub", "gpt-4o-mini", 8192, None, "o200k_base", "configured")


def entries_of(rounds: int, size: int = 200) -> list[ItemText]:
    """A task and so many rounds, each with a note."""
    entries = [
        ItemText("system", "Never touch vendor/."),
        ItemText("user", "Look through the ledgers, one after the other."),
    ]
    for at in range(1, rounds + 1):
        entries.append(ItemText("assistant", "Next.", (("read_file", f'{{"path": "src/ledger_{at}.py"}}'),)))
        entries.append(ItemText("tool", f"{log(at, size)}\nNote {at}: the shard of ledger_{at} is {9400 + at}."))
    return entries


def summary_request_of(
    entries: Sequence[ItemText], *, window: int = 8192, cap: int = 384, tenant: bytes = TENANT
) -> SummaryRequest:
    """A summary of all *entries*, with a prefix after every second one."""
    sums = [0]
    for entry in entries:
        sums.append(
            sums[-1] + count_tokens(entry.text) + sum(count_tokens(text) for call in entry.calls for text in call) + 4
        )
    cuts = tuple(SummaryPrefix(at, at.to_bytes(16, "big"), sums[at]) for at in range(2, len(entries) + 1, 2))
    origin = Origin("/v1/chat/completions", (("Authorization", "Bearer sk-abc"),))
    request = Request("chat", b"", tenant, "r", origin=origin)
    warm = CachedPrompt('{"model":"gpt-4o-mini","messages":[]}', b'{"role":"user","content":"Note 1: it is so."}', 500)
    return SummaryRequest(
        request, ROUTE, ROOT, SINCE, cuts, 0, cap, cap, b"h" * 8, window, 1.0,
        lambda start, stop: entries[start:stop], lambda length: warm,
    )  # fmt: skip


class SummaryReplica:
    """One replica. Of *terms*, ``seconds`` is how long a call may take, else as long as a request waits."""

    def __init__(
        self, stub: Stub, table: SummaryTable, *, aligned: bool = False, sent: int = 10**7, **terms: Any
    ) -> None:
        self.reports: list[SummaryReport] = []
        self.failed: list[tuple[str, BaseException]] = []
        self.tasks = Tasks(lambda name, error: self.failed.append((name, error)))
        self.upstream = Upstreams([Target("stub", stub.url)])
        seconds = terms.pop("seconds", terms.get("timeout", 5.0))
        self.writer = Writer(
            self.upstream, tokenizers(), load_prompts(), "ullage/1 (summary)", seconds, aligned=aligned
        )
        self.now = 1000.0
        limits = SpendingLimits(table, 0.1, {}, lambda: self.now, time.time)
        limits.add_sent(TENANT, sent)
        self.jobs = Jobs(
            table, self.writer, limits, SummaryConfig(**{"timeout": 5.0, **terms}), JobCaches({}, {}, {}, {}, {}, {}),
            resolve=lambda model: replace(ROUTE, model=model),
            breaker=lambda: Breaker(lambda: self.now, lambda: 0.5, Patience(3, None, 60.0, 600.0, 300.0)),
            label=lambda tenant: tenant[:2].hex(),
            spawn=self.tasks.spawn,
            on_report=self.reports.append,
            clock=lambda: self.now,
            on_note=ignore_note,
        )  # fmt: skip

    async def close(self) -> None:
        await self.jobs.finish(5.0)
        await self.tasks.finish(1.0)
        await self.upstream.close()
        assert self.failed == []


def summary_table(backend: MemoryBackend) -> SummaryTable:
    """The summaries in *backend*, which several replicas may share."""
    tasks, warnings = Tasks(lambda name, error: None), ThrottledWarnings(lambda event, facts: None, time.monotonic)
    return SummaryTable(TableAccess(backend, Sealer(b"m" * 32), spawn=tasks.spawn, warnings=warnings))


async def written() -> None:
    """Return once what was to be written in the background is in the store."""
    await asyncio.sleep(0)

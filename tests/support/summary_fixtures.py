"""Summary jobs of real parts over a strict upstream, and the smallest table of summaries that replicas can share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from proxy.core.conversation import ItemText
from proxy.core.models import Route
from proxy.core.report import SummaryReport
from proxy.core.request import Origin, Request
from proxy.engine.ports import CachedPrompt, Prefix, SummaryRequest
from proxy.store import Breaker, Patience
from proxy.summaries import JobCaches, Jobs, SpendingLimits, SummaryConfig, Writer, load_prompts
from proxy.tasks import Tasks
from proxy.upstream import Target, Upstreams
from tests.stub import Stub
from tests.support.engine_fixtures import count_tokens, tokenizers
from tests.support.sample_conversations import log

TENANT, ROOT, SINCE = b"t" * 32, b"r" * 16, b"s" * 16
ROUTE = Route("stub", "gpt-4o-mini", 8192, None, "o200k_base", "configured")


def entries_of(rounds: int, size: int = 200) -> list[ItemText]:
    """A task and so many rounds, each with a note."""
    found = [
        ItemText("system", "Never touch vendor/."),
        ItemText("user", "Look through the ledgers, one after the other."),
    ]
    for at in range(1, rounds + 1):
        found.append(ItemText("assistant", "Next.", (("read_file", f'{{"path": "src/ledger_{at}.py"}}'),)))
        found.append(ItemText("tool", f"{log(at, size)}\nNote {at}: the shard of ledger_{at} is {9400 + at}."))
    return found


def summary_request_of(
    entries: Sequence[ItemText], *, window: int = 8192, cap: int = 384, tenant: bytes = TENANT
) -> SummaryRequest:
    """All of *entries* as a passage whose cuts are after every second item."""
    sums = [0]
    for entry in entries:
        sums.append(
            sums[-1] + count_tokens(entry.text) + sum(count_tokens(text) for call in entry.calls for text in call) + 4
        )
    cuts = tuple(Prefix(at, at.to_bytes(16, "big"), sums[at]) for at in range(2, len(entries) + 1, 2))
    origin = Origin("/v1/chat/completions", (("Authorization", "Bearer sk-abc"),))
    request = Request("chat", b"", tenant, "r", origin=origin)
    warm = CachedPrompt('{"model":"gpt-4o-mini","messages":[]}', b'{"role":"user","content":"Note 1: it is so."}', 500)
    return SummaryRequest(
        request, ROUTE, ROOT, SINCE, cuts, 0, cap, cap, b"h" * 8, window, 1.0,
        lambda start, stop: entries[start:stop], lambda length: warm,
    )  # fmt: skip


class SummaryReplica:
    """One replica. Of *terms*, ``seconds`` is how long a call may take, else as long as a request waits."""

    def __init__(self, stub: Stub, shelf: Any, *, aligned: bool = False, sent: int = 10**7, **terms: Any) -> None:
        self.reports: list[SummaryReport] = []
        self.failed: list[tuple[str, BaseException]] = []
        self.tasks = Tasks(lambda name, error: self.failed.append((name, error)))
        self.upstream = Upstreams([Target("stub", stub.url)])
        seconds = terms.pop("seconds", terms.get("timeout", 5.0))
        self.writer = Writer(
            self.upstream, tokenizers(), load_prompts(), "ullage/1 (summary)", seconds, aligned=aligned
        )
        self.now = 1000.0
        ledger = SpendingLimits(shelf, 0.1, {}, lambda: self.now, time.time)
        ledger.add_sent(TENANT, sent)
        self.jobs = Jobs(
            shelf, self.writer, ledger, SummaryConfig(**{"timeout": 5.0, **terms}), JobCaches({}, {}, {}, {}, {}, {}),
            resolve=lambda model: replace(ROUTE, model=model),
            breaker=lambda: Breaker(lambda: self.now, lambda: 0.5, Patience(3, None, 60.0, 600.0, 300.0)),
            label=lambda tenant: tenant[:2].hex(),
            spawn=self.tasks.spawn,
            on_report=self.reports.append,
            clock=lambda: self.now,
        )  # fmt: skip

    async def close(self) -> None:
        await self.jobs.finish(5.0)
        await self.tasks.finish(1.0)
        await self.upstream.close()
        assert self.failed == []


Name = tuple[bytes, bytes, bytes]


class DictLease:
    """A lease on a dictionary."""

    def __init__(self, leases: dict[Name, DictLease], name: Name) -> None:
        self._leases = leases
        self._name = name

    async def renew(self, seconds: float) -> bool:
        return self._leases.get(self._name) is self

    async def release(self) -> None:
        if self._leases.get(self._name) is self:
            del self._leases[self._name]


class DictSummaryTable:
    """A ``SummaryTable`` over dictionaries; nothing runs out by itself."""

    def __init__(self) -> None:
        self.texts: dict[tuple[bytes, Name], bytes] = {}
        self.leases: dict[Name, DictLease] = {}
        self.refusals: set[Name] = set()
        self.counts: Counter[tuple[bytes, str]] = Counter()
        self.paused: set[bytes] = set()

    async def newest(
        self, tenant: bytes, root: bytes, policy: bytes, chains: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        names = [(tenant, (root, policy, chain)) for chain in chains]
        return next(((i, self.texts[name]) for i, name in enumerate(names) if name in self.texts), None)

    async def save(self, tenant: bytes, root: bytes, policy: bytes, chain: bytes, value: bytes) -> bytes:
        return self.texts.setdefault((tenant, (root, policy, chain)), value)

    async def lease(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> DictLease | None:
        name = (root, policy, chain)
        if name in self.leases:
            return None
        right = self.leases[name] = DictLease(self.leases, name)
        return right

    async def is_refused(self, root: bytes, policy: bytes, chain: bytes) -> bool:
        return (root, policy, chain) in self.refusals

    def refuse(self, root: bytes, policy: bytes, chain: bytes, seconds: float) -> None:
        self.refusals.add((root, policy, chain))

    async def spending(self, tenant: bytes, now: float) -> tuple[int, int, bool]:
        return self.counts[tenant, "in"], self.counts[tenant, "out"], tenant in self.paused

    def count(self, tenant: bytes, kind: str, tokens: int, now: float) -> None:
        self.counts[tenant, kind] += tokens

    def pause(self, tenant: bytes, seconds: float) -> None:
        self.paused.add(tenant)

"""Summaries ready before they are needed: one job for each stretch of a conversation, on one replica of all.

The store's lease saves money, never correctness: a summary is an immutable value, and the first one kept holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from proxy.core.models import Route
from proxy.core.report import SummaryOutcome, SummaryReport
from proxy.core.request import Request
from proxy.engine.ports import Clock, Summary, SummaryRequest
from proxy.store import Breaker, Lease, SummaryTable
from proxy.summaries.codec import SummaryNote, SummaryState, dump, load, note_for
from proxy.summaries.limits import SpendingLimits, SummaryConfig
from proxy.summaries.model_call import Summariser
from proxy.summaries.writer import Draft, NotWritten, Writer

RENEW = 1 / 3
"""How often a lease's holder renews it, in lifetimes of the lease."""

AGAIN = 5.0
"""Seconds until a job that could not begin is thought of again."""

REFUSED, LONGEST_REFUSED = 60.0, 3600.0
"""Seconds for which nothing is tried where a summary failed: doubled with each failure, up to the second."""

WAIT_ELSEWHERE = 8.0
"""Seconds a waiting event looks out for what another replica is writing."""

SHOWN = 100
"""Tenants, and breakers, that are shown to people at once."""

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
Key = tuple[str, bytes]

OnReport = Callable[[SummaryReport], None]

OnNote = Callable[[bytes, bytes, SummaryNote], None]
"""Takes a tenant, the root hash of a conversation and a note on one of its summaries."""


def ignore_note(tenant: bytes, root_hash: bytes, note: SummaryNote) -> None:
    """Take a note and drop it."""


@dataclass(frozen=True, slots=True)
class JobCaches:
    """What a process remembers: bounded mappings of summaries, of when a stretch may be looked at again, of the prefix
    that was once too dear to sum up and what it costs, of failures in a row, of breakers by summariser and tenant,
    and of when a request that waited for a summary has waited long enough.
    """

    summaries: MutableMapping[tuple[bytes, bytes], Summary]
    not_before: MutableMapping[Key, float]
    too_expensive: MutableMapping[Key, tuple[int, int]]
    failures: MutableMapping[Key, int]
    breakers: MutableMapping[tuple[str, bytes], Breaker]
    waiting_until: MutableMapping[str, float]


class Jobs:
    """Implements ``ports.Summaries``. *resolve* gives a model's route, *label* a tenant's short keyed name."""

    def __init__(
        self,
        shelf: SummaryTable,
        writer: Writer,
        ledger: SpendingLimits,
        terms: SummaryConfig,
        memory: JobCaches,
        *,
        resolve: Callable[[str], Route],
        breaker: Callable[[], Breaker],
        label: Callable[[bytes], str],
        spawn: Spawn,
        observe: OnReport,
        clock: Clock,
        tell: OnNote = ignore_note,
    ) -> None:
        self._shelf = shelf
        self._writer = writer
        self._ledger = ledger
        self._terms = terms
        self._memory = memory
        self._resolve = resolve
        self._breaker = breaker
        self._label = label
        self._spawn = spawn
        self._observe = observe
        self._clock = clock
        self._tell = tell
        self._running: dict[Key, asyncio.Task[Summary | None]] = {}
        self._closing = False

    @property
    def inline(self) -> bool:
        """Whether an event waits for its summary."""
        return self._terms.mode == "inline"

    @property
    def running(self) -> int:
        """How many jobs are under way."""
        return len(self._running)

    @property
    def open_breakers(self) -> int:
        """How many summarisers, each for one tenant, are not asked at present because they failed."""
        return sum(breaker.state != "closed" for breaker in self._memory.breakers.values())

    def status(self) -> dict[str, object]:
        """How summaries fare in this process, by tenant's short name: tokens of the last hour, pauses, breakers."""
        breakers = [
            {"tenant": self._label(tenant), "summariser": name, "state": breaker.state}
            for (name, tenant), breaker in self._memory.breakers.items()
            if breaker.state != "closed"
        ]
        clients = [{"tenant": self._label(tenant), **figures} for tenant, figures in self._ledger.status(SHOWN)]
        return {"mode": self._terms.mode, "running": self.running, "clients": clients, "breakers": breakers[:SHOWN]}

    async def ready(self, wanted: SummaryRequest) -> Summary | None:
        """The summary of *wanted*, or the newest one of a shorter prefix; asks the store at most once."""
        return await self._newest(wanted, self._policy(wanted, self._terms.choose_summariser(wanted, self._resolve)))

    async def write(self, wanted: SummaryRequest) -> Summary | None:
        """As ``ready``, but a missing summary is written first, within the timeout that a request has in all."""
        found = await self.ready(wanted)
        if found is not None and found.length == wanted.prefix.length:
            return found
        # A view that does not fit yet is made once more, and each time it may want a summary of another prefix.
        began = self._clock()
        left = self._memory.waiting_until.setdefault(wanted.request.request_id, began + self._terms.timeout) - began
        if left <= 0:
            return found
        task = self._running.get(self._key(wanted)) or self._start(wanted, wait=True)
        if task is None:
            return found
        # The job goes on when nobody waits any more: what it gives serves the next event.
        await asyncio.wait({task}, timeout=left)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return found
        written = task.result()
        return written if written is not None and written.length <= wanted.prefix.length else found

    def is_due(self, request: Request, route: Route, since: bytes) -> bool:
        """Whether a job for this stretch of the conversation may be worth starting; costs nothing."""
        if self.inline or self._closing or request.origin is None or len(self._running) >= self._terms.max_jobs:
            return False
        key = (route.name, since)
        if key in self._running or self._clock() < self._memory.not_before.get(key, 0.0):
            return False
        _, needed = self._memory.too_expensive.get(key, (0, 0))
        return self._ledger.can_afford(request.tenant, needed)

    def prepare(self, wanted: SummaryRequest) -> None:
        """Start a job in the background, unless there is one, or a summary, here or on another replica."""
        if self.is_due(wanted.request, wanted.route, wanted.last_compaction):
            self._start(wanted, wait=False)

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Note that *tenant* sent a prompt of so many tokens."""
        self._ledger.add_sent(tenant, tokens)

    def limited(self, tenant: bytes) -> None:
        """Note that *tenant* was told to slow down."""
        self._ledger.pause(tenant)

    async def finish(self, seconds: float) -> None:
        """Start no job any more, give running ones *seconds*, then end them; each gives its lease back."""
        self._closing = True
        running = list(self._running.values())
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def _start(self, wanted: SummaryRequest, *, wait: bool) -> asyncio.Task[Summary | None] | None:
        if self._closing or len(self._running) >= self._terms.max_jobs or wanted.request.origin is None:
            return None
        key = self._key(wanted)
        task = self._running[key] = self._spawn(self._job(wanted, wait=wait), "summary")
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def _job(self, wanted: SummaryRequest, *, wait: bool) -> Summary | None:
        """One job, reported once, whatever becomes of it."""
        summariser, key, began = self._terms.choose_summariser(wanted, self._resolve), self._key(wanted), self._clock()
        draft: Draft | None = None
        summary: Summary | None = None
        outcome: SummaryOutcome = "skipped"
        reason, rest = "", AGAIN
        calls, taken = 0, (0, 0)
        try:
            summary, draft = await self._attempt(wanted, summariser, wait=wait)
            outcome, rest = ("adopted" if draft is None else "written"), float("inf")
            self._memory.failures.pop(key, None)
        except NotWritten as error:
            reason, calls, taken = error.reason, error.calls, error.taken
            if error.tried:
                outcome, rest = "failed", self._refuse(wanted, summariser)
            elif reason == "elsewhere":
                rest = self._terms.lease_seconds
            elif reason == "budget":
                first, _ = self._memory.too_expensive.get(key, (wanted.prefix.length, 0))
                rest, self._memory.too_expensive[key] = 0.0, (first, error.needed)
        except Exception:
            # A fault of our own is reported by whoever keeps the task. It would be there, and be paid for, again.
            self._memory.not_before[key] = float("inf")
            raise
        if draft is not None:
            calls, taken = draft.calls, (draft.input_tokens, draft.output_tokens)
        self._memory.not_before[key] = self._clock() + rest
        self._report(wanted, summariser, outcome, reason, calls, taken, self._clock() - began)
        return summary

    def _report(
        self,
        wanted: SummaryRequest,
        summariser: Summariser,
        outcome: SummaryOutcome,
        reason: str,
        calls: int,
        taken: tuple[int, int],
        seconds: float,
    ) -> None:
        report = SummaryReport(
            outcome=outcome,
            reason=reason,
            tenant=self._label(wanted.request.tenant),
            model=summariser.model,
            upstream=summariser.upstream,
            calls=calls,
            input_tokens=taken[0],
            output_tokens=taken[1],
            seconds=seconds,
        )
        self._observe(report)

    async def _attempt(
        self, wanted: SummaryRequest, summariser: Summariser, *, wait: bool
    ) -> tuple[Summary | None, Draft | None]:
        """A summary, and how it came about unless another replica wrote it. Raises ``NotWritten``."""
        if reason := self._may_not(wanted, summariser):
            raise NotWritten(reason, tried=False)
        policy = self._policy(wanted, summariser)
        lease = await self._shelf.lease(wanted.root_hash, policy, wanted.last_compaction, self._terms.lease_seconds)
        if lease is None:
            found = await self._elsewhere(wanted, policy) if wait else None
            if found is None:
                raise NotWritten("elsewhere", tried=False)
            return found, None
        renewal = self._spawn(self._hold(lease), "summary lease")
        try:
            return await self._under_lease(wanted, summariser, policy, wait=wait)
        finally:
            renewal.cancel()
            await lease.release()

    async def _under_lease(
        self, wanted: SummaryRequest, summariser: Summariser, policy: bytes, *, wait: bool
    ) -> tuple[Summary | None, Draft | None]:
        """Write a summary unless there is one that reaches far enough. Raises ``NotWritten``."""
        base = await self._newest(wanted, policy)
        enough = wanted.prefix.length if wait else wanted.folded + 1
        if base is not None and base.length >= enough:
            return base, None
        if await self._shelf.is_refused(wanted.root_hash, policy, wanted.last_compaction):
            raise NotWritten("refused_before", tried=False)
        # What was too dear before is tried as it was then: a longer prefix would only cost more.
        length, _ = (0, 0) if wait else self._memory.too_expensive.get(self._key(wanted), (0, 0))
        wanted = wanted.up_to(length) if length > wanted.folded else wanted
        self._note(wanted, summariser, "pending")
        try:
            draft = await self._draft(wanted, summariser, base)
        except NotWritten as error:
            self._note(wanted, summariser, "failed" if error.tried else "skipped", error.reason)
            raise
        summary = await self._keep(wanted, summariser, policy, base, draft)
        self._note(wanted, summariser, "ready", left=draft.output_tokens)
        return summary, draft

    async def _draft(self, wanted: SummaryRequest, summariser: Summariser, base: Summary | None) -> Draft:
        """A text within the tenant's means, by a summariser that is worth asking."""
        tenant = wanted.request.tenant
        breaker = self._breaker_of(summariser, tenant)
        reserved = 0

        async def allow(tokens: int) -> str:
            nonlocal reserved
            reason = await self._ledger.refusal_reason(tenant, tokens)
            if reason and not (wanted.requested and reason == "budget"):
                return reason
            if not breaker.admit():
                return "breaker"
            reserved = tokens
            self._ledger.add_spent(tenant, tokens)
            return ""

        taken = 0
        try:
            draft = await self._writer.write(wanted, summariser, base, allow)
        except NotWritten as error:
            taken = sum(error.taken)
            if error.limited:
                self._ledger.pause(tenant)
            if error.tried:
                breaker.failed()
            raise
        else:
            breaker.succeeded()
            taken = draft.input_tokens + draft.output_tokens
            return draft
        finally:
            self._ledger.add_spent(tenant, taken - reserved)

    async def _keep(
        self, wanted: SummaryRequest, summariser: Summariser, policy: bytes, base: Summary | None, draft: Draft
    ) -> Summary:
        """What holds from now on: *draft*, or what another replica kept before."""
        cut, chain = wanted.prefix.length, wanted.prefix.prefix_hash
        spent = draft.input_tokens + draft.output_tokens + (base.tokens_spent if base else 0)
        value = dump(draft.text, cut, spent, summariser.model, int(time.time()))
        held = await self._shelf.save(wanted.request.tenant, wanted.root_hash, policy, chain, value)
        summary = load(held, cut) or Summary(draft.text, cut, spent, summariser.model)
        self._memory.summaries[policy, chain] = summary
        return summary

    async def _newest(self, wanted: SummaryRequest, policy: bytes) -> Summary | None:
        """The summary of the longest prefix that has one: from memory, unless the store has a longer one."""
        cuts = wanted.prefixes[::-1]
        known = next(
            (i for i, cut in enumerate(cuts) if (policy, cut.prefix_hash) in self._memory.summaries), len(cuts)
        )
        if known:
            asked = [cut.prefix_hash for cut in cuts[:known]]
            found = await self._shelf.newest(wanted.request.tenant, wanted.root_hash, policy, asked)
            if found is not None:
                cut = cuts[found[0]]
                summary = load(found[1], cut.length)
                if summary is not None:
                    self._memory.summaries[policy, cut.prefix_hash] = summary
                    return summary
        return self._memory.summaries.get((policy, cuts[known].prefix_hash)) if known < len(cuts) else None

    async def _elsewhere(self, wanted: SummaryRequest, policy: bytes) -> Summary | None:
        """What another replica is writing, as soon as it is there; ``None`` after a while."""
        until, pause = self._clock() + min(WAIT_ELSEWHERE, self._terms.timeout), 0.05
        while self._clock() < until:
            await asyncio.sleep(pause * (0.75 + 0.5 * random.random()))  # noqa: S311 - spreads replicas apart
            pause = min(0.4, pause * 1.6)
            found = await self._newest(wanted, policy)
            if found is not None and found.length == wanted.prefix.length:
                return found
        return None

    async def _hold(self, lease: Lease) -> None:
        held = True
        while held:
            await asyncio.sleep(self._terms.lease_seconds * RENEW)
            held = await lease.renew(self._terms.lease_seconds)

    def _may_not(self, wanted: SummaryRequest, summariser: Summariser) -> str:
        """Why nothing may be asked on behalf of this request, as a fixed word; empty where it may."""
        if self._ledger.is_paused(wanted.request.tenant):
            return "paused"
        return "subscription" if self._terms.forbids(wanted, summariser) else ""

    def _refuse(self, wanted: SummaryRequest, summariser: Summariser) -> float:
        """Let nobody try this stretch again for a while; the seconds."""
        key, seconds = self._key(wanted), self._patience(wanted)
        self._memory.failures[key] = self._memory.failures.get(key, 0) + 1
        self._shelf.refuse(wanted.root_hash, self._policy(wanted, summariser), wanted.last_compaction, seconds)
        return seconds

    def _patience(self, wanted: SummaryRequest) -> float:
        """For how many seconds nobody tries again where one more has failed."""
        failures = self._memory.failures.get(self._key(wanted), 0)
        return min(LONGEST_REFUSED, REFUSED * 2.0 ** min(failures, 10))

    def _note(
        self, wanted: SummaryRequest, summariser: Summariser, state: SummaryState, reason: str = "", *, left: int = 0
    ) -> None:
        """Tell what has become of the summary of *wanted*, for people."""
        now, patience = int(time.time()), int(self._patience(wanted))
        policy = self._policy(wanted, summariser)
        note = note_for(wanted, summariser, policy, state, now, reason=reason, left=left, patience=patience)
        self._tell(wanted.request.tenant, wanted.root_hash, note)

    def _breaker_of(self, summariser: Summariser, tenant: bytes) -> Breaker:
        breaker = self._memory.breakers.get((summariser.name, tenant))
        if breaker is None:
            breaker = self._memory.breakers[summariser.name, tenant] = self._breaker()
        return breaker

    def _policy(self, wanted: SummaryRequest, summariser: Summariser) -> bytes:
        """What makes texts interchangeable: the prompts, who writes, the cap, and in the aligned mode what precedes."""
        facts = [self._writer.version, summariser.name.encode(), b"%d" % wanted.quantised_cap]
        if self._writer.aligned and summariser.is_request_model:
            facts.append(wanted.fixed_digest)
        return hashlib.sha256(b"\0".join(facts)).digest()[:8]

    @staticmethod
    def _key(wanted: SummaryRequest) -> Key:
        return wanted.route.name, wanted.last_compaction

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
from proxy.summaries.calling import Summariser
from proxy.summaries.contracts import Breaker, Lease, Observe, Shelf, SummaryState, Tell, untold
from proxy.summaries.kept import dump, load, note_on
from proxy.summaries.spend import Ledger
from proxy.summaries.terms import Terms
from proxy.summaries.writing import Draft, Unwritten, Writer

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


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process remembers: bounded mappings of summaries, of when a stretch may be looked at again, of the prefix
    that was once too dear to sum up and what it costs, of failures in a row, of breakers by summariser and tenant,
    and of when a request that waited for a summary has waited long enough.
    """

    summaries: MutableMapping[tuple[bytes, bytes], Summary]
    rests: MutableMapping[Key, float]
    dear: MutableMapping[Key, tuple[int, int]]
    failures: MutableMapping[Key, int]
    breakers: MutableMapping[tuple[str, bytes], Breaker]
    waits: MutableMapping[str, float]


class Jobs:
    """Implements ``ports.Summaries``. *resolve* gives a model's route, *label* a tenant's short keyed name."""

    def __init__(
        self,
        shelf: Shelf,
        writer: Writer,
        ledger: Ledger,
        terms: Terms,
        memory: Memory,
        *,
        resolve: Callable[[str], Route],
        breaker: Callable[[], Breaker],
        label: Callable[[bytes], str],
        spawn: Spawn,
        observe: Observe,
        clock: Clock,
        tell: Tell = untold,
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
        clients = [{"tenant": self._label(tenant), **figures} for tenant, figures in self._ledger.figures(SHOWN)]
        return {"mode": self._terms.mode, "running": self.running, "clients": clients, "breakers": breakers[:SHOWN]}

    async def ready(self, passage: SummaryRequest) -> Summary | None:
        """The summary of *passage*, or the newest one of a shorter prefix; asks the store at most once."""
        return await self._newest(passage, self._policy(passage, self._terms.summariser(passage, self._resolve)))

    async def write(self, passage: SummaryRequest) -> Summary | None:
        """As ``ready``, but a missing summary is written first, within the timeout that a request has in all."""
        found = await self.ready(passage)
        if found is not None and found.length == passage.prefix.length:
            return found
        # A view that does not fit yet is made once more, and each time it may want a summary of another prefix.
        began = self._clock()
        left = self._memory.waits.setdefault(passage.request.request_id, began + self._terms.timeout) - began
        if left <= 0:
            return found
        task = self._running.get(self._key(passage)) or self._start(passage, wait=True)
        if task is None:
            return found
        # The job goes on when nobody waits any more: what it gives serves the next event.
        await asyncio.wait({task}, timeout=left)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return found
        written = task.result()
        return written if written is not None and written.length <= passage.prefix.length else found

    def is_due(self, request: Request, route: Route, since: bytes) -> bool:
        """Whether a job for this stretch of the conversation may be worth starting; costs nothing."""
        if self.inline or self._closing or request.origin is None or len(self._running) >= self._terms.most:
            return False
        key = (route.name, since)
        if key in self._running or self._clock() < self._memory.rests.get(key, 0.0):
            return False
        _, needed = self._memory.dear.get(key, (0, 0))
        return self._ledger.affords(request.tenant, needed)

    def prepare(self, passage: SummaryRequest) -> None:
        """Start a job in the background, unless there is one, or a summary, here or on another replica."""
        if self.is_due(passage.request, passage.route, passage.last_compaction):
            self._start(passage, wait=False)

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Note that *tenant* sent a prompt of so many tokens."""
        self._ledger.sent(tenant, tokens)

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

    def _start(self, passage: SummaryRequest, *, wait: bool) -> asyncio.Task[Summary | None] | None:
        if self._closing or len(self._running) >= self._terms.most or passage.request.origin is None:
            return None
        key = self._key(passage)
        task = self._running[key] = self._spawn(self._job(passage, wait=wait), "summary")
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def _job(self, passage: SummaryRequest, *, wait: bool) -> Summary | None:
        """One job, reported once, whatever becomes of it."""
        summariser, key, began = self._terms.summariser(passage, self._resolve), self._key(passage), self._clock()
        draft: Draft | None = None
        summary: Summary | None = None
        outcome: SummaryOutcome = "skipped"
        reason, rest = "", AGAIN
        calls, taken = 0, (0, 0)
        try:
            summary, draft = await self._attempt(passage, summariser, wait=wait)
            outcome, rest = ("adopted" if draft is None else "written"), float("inf")
            self._memory.failures.pop(key, None)
        except Unwritten as error:
            reason, calls, taken = error.reason, error.calls, error.taken
            if error.tried:
                outcome, rest = "failed", self._refuse(passage, summariser)
            elif reason == "elsewhere":
                rest = self._terms.lease
            elif reason == "budget":
                first, _ = self._memory.dear.get(key, (passage.prefix.length, 0))
                rest, self._memory.dear[key] = 0.0, (first, error.needed)
        except Exception:
            # A fault of our own is reported by whoever keeps the task. It would be there, and be paid for, again.
            self._memory.rests[key] = float("inf")
            raise
        if draft is not None:
            calls, taken = draft.calls, (draft.input_tokens, draft.output_tokens)
        self._memory.rests[key] = self._clock() + rest
        self._report(passage, summariser, outcome, reason, calls, taken, self._clock() - began)
        return summary

    def _report(
        self,
        passage: SummaryRequest,
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
            tenant=self._label(passage.request.tenant),
            model=summariser.model,
            upstream=summariser.upstream,
            calls=calls,
            input_tokens=taken[0],
            output_tokens=taken[1],
            seconds=seconds,
        )
        self._observe(report)

    async def _attempt(
        self, passage: SummaryRequest, summariser: Summariser, *, wait: bool
    ) -> tuple[Summary | None, Draft | None]:
        """A summary, and how it came about unless another replica wrote it. Raises ``Unwritten``."""
        if reason := self._may_not(passage, summariser):
            raise Unwritten(reason, tried=False)
        policy = self._policy(passage, summariser)
        lease = await self._shelf.lease(passage.root_hash, policy, passage.last_compaction, self._terms.lease)
        if lease is None:
            found = await self._elsewhere(passage, policy) if wait else None
            if found is None:
                raise Unwritten("elsewhere", tried=False)
            return found, None
        renewal = self._spawn(self._hold(lease), "summary lease")
        try:
            return await self._under_lease(passage, summariser, policy, wait=wait)
        finally:
            renewal.cancel()
            await lease.release()

    async def _under_lease(
        self, passage: SummaryRequest, summariser: Summariser, policy: bytes, *, wait: bool
    ) -> tuple[Summary | None, Draft | None]:
        """Write a summary unless there is one that reaches far enough. Raises ``Unwritten``."""
        base = await self._newest(passage, policy)
        wanted = passage.prefix.length if wait else passage.folded + 1
        if base is not None and base.length >= wanted:
            return base, None
        if await self._shelf.is_refused(passage.root_hash, policy, passage.last_compaction):
            raise Unwritten("refused_before", tried=False)
        # What was too dear before is tried as it was then: a longer prefix would only cost more.
        length, _ = (0, 0) if wait else self._memory.dear.get(self._key(passage), (0, 0))
        passage = passage.up_to(length) if length > passage.folded else passage
        self._note(passage, summariser, "pending")
        try:
            draft = await self._draft(passage, summariser, base)
        except Unwritten as error:
            self._note(passage, summariser, "failed" if error.tried else "skipped", error.reason)
            raise
        summary = await self._keep(passage, summariser, policy, base, draft)
        self._note(passage, summariser, "ready", left=draft.output_tokens)
        return summary, draft

    async def _draft(self, passage: SummaryRequest, summariser: Summariser, base: Summary | None) -> Draft:
        """A text within the tenant's means, by a summariser that is worth asking."""
        tenant = passage.request.tenant
        breaker = self._breaker_of(summariser, tenant)
        reserved = 0

        async def allow(tokens: int) -> str:
            nonlocal reserved
            reason = await self._ledger.why_not(tenant, tokens)
            if reason and not (passage.requested and reason == "budget"):
                return reason
            if not breaker.admit():
                return "breaker"
            reserved = tokens
            self._ledger.spent(tenant, tokens)
            return ""

        taken = 0
        try:
            draft = await self._writer.write(passage, summariser, base, allow)
        except Unwritten as error:
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
            self._ledger.spent(tenant, taken - reserved)

    async def _keep(
        self, passage: SummaryRequest, summariser: Summariser, policy: bytes, base: Summary | None, draft: Draft
    ) -> Summary:
        """What holds from now on: *draft*, or what another replica kept before."""
        cut, chain = passage.prefix.length, passage.prefix.prefix_hash
        spent = draft.input_tokens + draft.output_tokens + (base.tokens_spent if base else 0)
        value = dump(draft.text, cut, spent, summariser.model, int(time.time()))
        held = await self._shelf.save(passage.request.tenant, passage.root_hash, policy, chain, value)
        summary = load(held, cut) or Summary(draft.text, cut, spent, summariser.model)
        self._memory.summaries[policy, chain] = summary
        return summary

    async def _newest(self, passage: SummaryRequest, policy: bytes) -> Summary | None:
        """The summary of the longest prefix that has one: from memory, unless the store has a longer one."""
        cuts = passage.prefixes[::-1]
        known = next(
            (i for i, cut in enumerate(cuts) if (policy, cut.prefix_hash) in self._memory.summaries), len(cuts)
        )
        if known:
            asked = [cut.prefix_hash for cut in cuts[:known]]
            found = await self._shelf.newest(passage.request.tenant, passage.root_hash, policy, asked)
            if found is not None:
                cut = cuts[found[0]]
                summary = load(found[1], cut.length)
                if summary is not None:
                    self._memory.summaries[policy, cut.prefix_hash] = summary
                    return summary
        return self._memory.summaries.get((policy, cuts[known].prefix_hash)) if known < len(cuts) else None

    async def _elsewhere(self, passage: SummaryRequest, policy: bytes) -> Summary | None:
        """What another replica is writing, as soon as it is there; ``None`` after a while."""
        until, pause = self._clock() + min(WAIT_ELSEWHERE, self._terms.timeout), 0.05
        while self._clock() < until:
            await asyncio.sleep(pause * (0.75 + 0.5 * random.random()))  # noqa: S311 - spreads replicas apart
            pause = min(0.4, pause * 1.6)
            found = await self._newest(passage, policy)
            if found is not None and found.length == passage.prefix.length:
                return found
        return None

    async def _hold(self, lease: Lease) -> None:
        held = True
        while held:
            await asyncio.sleep(self._terms.lease * RENEW)
            held = await lease.renew(self._terms.lease)

    def _may_not(self, passage: SummaryRequest, summariser: Summariser) -> str:
        """Why nothing may be asked on behalf of this request, as a fixed word; empty where it may."""
        if self._ledger.is_paused(passage.request.tenant):
            return "paused"
        return "subscription" if self._terms.forbid(passage, summariser) else ""

    def _refuse(self, passage: SummaryRequest, summariser: Summariser) -> float:
        """Let nobody try this stretch again for a while; the seconds."""
        key, seconds = self._key(passage), self._patience(passage)
        self._memory.failures[key] = self._memory.failures.get(key, 0) + 1
        self._shelf.refuse(passage.root_hash, self._policy(passage, summariser), passage.last_compaction, seconds)
        return seconds

    def _patience(self, passage: SummaryRequest) -> float:
        """For how many seconds nobody tries again where one more has failed."""
        failures = self._memory.failures.get(self._key(passage), 0)
        return min(LONGEST_REFUSED, REFUSED * 2.0 ** min(failures, 10))

    def _note(
        self, passage: SummaryRequest, summariser: Summariser, state: SummaryState, reason: str = "", *, left: int = 0
    ) -> None:
        """Tell what has become of the summary of *passage*, for people."""
        now, patience = int(time.time()), int(self._patience(passage))
        policy = self._policy(passage, summariser)
        note = note_on(passage, summariser, policy, state, now, reason=reason, left=left, patience=patience)
        self._tell(passage.request.tenant, passage.root_hash, note)

    def _breaker_of(self, summariser: Summariser, tenant: bytes) -> Breaker:
        breaker = self._memory.breakers.get((summariser.name, tenant))
        if breaker is None:
            breaker = self._memory.breakers[summariser.name, tenant] = self._breaker()
        return breaker

    def _policy(self, passage: SummaryRequest, summariser: Summariser) -> bytes:
        """What makes texts interchangeable: the prompts, who writes, the cap, and in the aligned mode what precedes."""
        facts = [self._writer.version, summariser.name.encode(), b"%d" % passage.quantised_cap]
        if self._writer.aligned and summariser.own:
            facts.append(passage.fixed_digest)
        return hashlib.sha256(b"\0".join(facts)).digest()[:8]

    @staticmethod
    def _key(passage: SummaryRequest) -> Key:
        return passage.route.name, passage.last_compaction

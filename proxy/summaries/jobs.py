"""Writes summaries before they are needed: one job for each stretch of a conversation, on one of all replicas.

Theory of operation
===================

A stretch begins at a conversation's newest compaction. Above the soft mark the engine calls ``prepare``, and a job
writes the summary that the next compaction will need. A compaction that comes before it is ready uses the newest
summary there is (``ready``); in the mode ``inline`` it waits for its own (``write``).

A job holds a lease in the store, so that only one replica pays for a summary. Nothing else depends on the lease: a
summary is an immutable value, and the first one stored is valid.

The states of one stretch in this process, which ``is_due`` reads from ``_running`` and ``JobCaches.not_before``:

    state    event                                           next state
    -------  ----------------------------------------------  ---------------------------------------------------------
    idle     a request above the soft mark                   running, if the client may spend what is needed
    running  the summary was written, or there was one       done
    running  an exception in our own code                    done: another job would pay for the same fault
    running  another replica has the lease                   resting, for as long as a lease lasts
    running  the client has not sent enough tokens for it    idle; a job is due once it has (``too_expensive``)
    running  the model gave no usable text                   resting, for ``REFUSAL_SECONDS``, twice as long with each
                                                             failure in a row; the store keeps other replicas away
    running  anything else (paused, breaker, subscription)   resting, for ``RETRY_SECONDS``
    resting  the time is over                                idle
    done     the next compaction                             a new stretch begins, which is idle

A compaction that waits starts a job in any state but running. One that its caller requested may also cost more than the
client's share. However many summaries one request waits for, it waits for one ``timeout`` (``waiting_until``).

The owner of a conversation can read a note for each summary (``_note``): ``pending`` while the model is called, then
``ready``, ``failed`` if the call gave no usable text, or ``skipped`` if no call was made.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, MutableMapping
from typing import Final

import msgspec
from msgspec.structs import replace

from proxy.core.models import Route
from proxy.core.report import SummaryOutcome, SummaryReport
from proxy.core.request import Request
from proxy.engine.ports import Cache, Clock, Summary, SummaryRequest
from proxy.store import Breaker, Lease, SummaryTable
from proxy.summaries.codec import SummaryNote, SummaryState, dump, load, note_for
from proxy.summaries.limits import Reservation, SpendingLimits, SummaryConfig
from proxy.summaries.model_call import Summariser
from proxy.summaries.writer import Draft, NotWritten, Writer
from proxy.tasks import Spawn

RENEW: Final = 1 / 3
"""Time between two renewals of a lease, as a share of its lifetime."""

LEAST_TOKENS: Final = 4
"""Tokens that any item takes in a transcript at least: its role, a colon, a line break and a word."""

RETRY_SECONDS: Final = 5.0
"""Seconds until a stretch is tried again whose job could not begin."""

REFUSAL_SECONDS, MOST_REFUSAL_SECONDS = 60.0, 3600.0
"""Seconds until a stretch is tried again after a failure, doubled with each failure in a row; and their maximum."""

WAIT_ELSEWHERE: Final = 8.0
"""Seconds that a compaction waits for a summary which another replica is writing."""

SHOWN: Final = 100
"""Most tenants, and most breakers, that the status page shows."""

Stretch = tuple[str, bytes]
"""The route, and the prefix hash of the newest compaction."""

OnReport = Callable[[SummaryReport], None]

OnNote = Callable[[bytes, bytes, SummaryNote], None]
"""Takes a tenant, the root hash of a conversation and a note on one of its summaries."""


def ignore_note(tenant: bytes, root_hash: bytes, note: SummaryNote) -> None:
    """Ignore a note."""


class JobCaches(msgspec.Struct, frozen=True):
    """The bounded mappings in which one process remembers summaries. Times are monotonic seconds.

    ``summaries`` are by text policy and prefix hash. For each stretch, ``not_before`` is the time from which a job may
    begin, ``too_expensive`` the length and the tokens of a prefix that could not be paid for, ``failures`` the number
    of failures in a row. ``breakers`` are by summariser and tenant. ``waiting_until`` is the time at which a request
    that waits for summaries goes on without them.
    """

    summaries: Cache[tuple[bytes, bytes], Summary]
    not_before: MutableMapping[Stretch, float]
    too_expensive: MutableMapping[Stretch, tuple[int, int]]
    failures: MutableMapping[Stretch, int]
    breakers: MutableMapping[tuple[str, bytes], Breaker]
    waiting_until: MutableMapping[str, float]


class _Job(msgspec.Struct, frozen=True):
    """A summary to be written. ``waits``: a compaction waits for it. ``policy``: see ``_policy``."""

    request: SummaryRequest
    summariser: Summariser
    policy: bytes
    waits: bool

    @property
    def tenant(self) -> bytes:
        return self.request.client_request.tenant

    @property
    def stretch(self) -> Stretch:
        return _stretch_of(self.request)


class Jobs:
    """Implements ``ports.Summaries``. *resolve* returns a model's route, *label* a tenant's short keyed name."""

    def __init__(
        self,
        table: SummaryTable,
        writer: Writer,
        limits: SpendingLimits,
        config: SummaryConfig,
        caches: JobCaches,
        *,
        resolve: Callable[[str], Route],
        breaker: Callable[[], Breaker],
        label: Callable[[bytes], str],
        spawn: Spawn,
        on_report: OnReport,
        clock: Clock,
        on_note: OnNote,
    ) -> None:
        self._table = table
        self._writer = writer
        self._limits = limits
        self._config = config
        self._caches = caches
        self._resolve = resolve
        self._breaker = breaker
        self._label = label
        self._spawn = spawn
        self._on_report = on_report
        self._clock = clock
        self._on_note = on_note
        self._running: dict[Stretch, asyncio.Task[Summary | None]] = {}
        self._closing = False

    @property
    def inline(self) -> bool:
        """True if a compaction waits for its summary."""
        return self._config.mode == "inline"

    @property
    def running(self) -> int:
        """The number of running jobs."""
        return len(self._running)

    @property
    def open_breakers(self) -> int:
        """The number of summarisers, each for one tenant, that are not called at present because they failed."""
        return sum(breaker.state != "closed" for breaker in self._caches.breakers.values())

    def status(self) -> dict[str, object]:
        """Return the state of summaries in this process: tokens of the last hour, pauses and breakers by tenant."""
        breakers = [
            {"tenant": self._label(tenant), "summariser": name, "state": breaker.state}
            for (name, tenant), breaker in self._caches.breakers.items()
            if breaker.state != "closed"
        ]
        clients = [{"tenant": self._label(tenant), **figures} for tenant, figures in self._limits.status(SHOWN)]
        return {
            "mode": self._config.mode,
            "running": self.running,
            "clients": clients,
            "breakers": breakers[:SHOWN],
        }

    async def ready(self, request: SummaryRequest) -> Summary | None:
        """Return the requested summary, or the newest one of a shorter prefix, after one look-up at most."""
        return await self._newest(self._job(request, waits=False))

    async def write(self, request: SummaryRequest) -> Summary | None:
        """As ``ready``, but write a missing summary first, within the timeout of all summaries of a request."""
        ready = await self.ready(request)
        if ready is not None and ready.length == request.prefix.length:
            return ready
        # A view that does not fit is built again, and may need a summary of another prefix each time. So the time limit
        # is that of the request, not of one summary.
        now = self._clock()
        until = self._caches.waiting_until.setdefault(request.client_request.request_id, now + self._config.timeout)
        if until <= now:
            return ready
        task = self._running.get(_stretch_of(request)) or self._start(request, waits=True)
        if task is None:
            return ready
        # ``wait`` does not cancel a job that takes longer: its summary serves the next compaction.
        await asyncio.wait({task}, timeout=until - now)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return ready
        written = task.result()
        if written is None or written.length > request.prefix.length:
            return ready
        return written

    def is_due(self, request: Request, route: Route, last_compaction: bytes) -> bool:
        """True if a job since that compaction may be worth starting; reads only this process's memory."""
        if self.inline or self._closing or request.origin is None or len(self._running) >= self._config.max_jobs:
            return False
        stretch = (route.name, last_compaction)
        if stretch in self._running or self._clock() < self._caches.not_before.get(stretch, 0.0):
            return False
        _, needed = self._caches.too_expensive.get(stretch, (0, 0))
        return self._limits.can_afford(request.tenant, needed)

    def prepare(self, request: SummaryRequest) -> None:
        """Start a job in the background, unless a job or a summary exists, here or on another replica."""
        if self.is_due(request.client_request, request.route, request.last_compaction):
            self._start(request, waits=False)

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Add the *tokens* of a prompt that *tenant* sent."""
        self._limits.add_sent(tenant, tokens)

    def limited(self, tenant: bytes) -> None:
        """Pause summaries for *tenant*, which an upstream rate-limited."""
        self._limits.pause(tenant)

    async def finish(self, seconds: float) -> None:
        """Start no more jobs. Give running ones *seconds*, then cancel them; each releases its lease."""
        self._closing = True
        running = list(self._running.values())
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            # A lease that is not released keeps other replicas from writing this summary until it expires.
            await asyncio.wait(late)

    def _start(self, request: SummaryRequest, *, waits: bool) -> asyncio.Task[Summary | None] | None:
        if self._closing or len(self._running) >= self._config.max_jobs or request.client_request.origin is None:
            return None
        stretch = _stretch_of(request)
        task = self._running[stretch] = self._spawn(self._run(request, waits=waits), "summary")
        task.add_done_callback(lambda _: self._running.pop(stretch, None))
        return task

    async def _run(self, request: SummaryRequest, *, waits: bool) -> Summary | None:
        """Run one job and report it once. Return None if no summary came of it."""
        began = self._clock()
        job = self._job(request, waits=waits)
        try:
            summary, draft = await self._attempt(job)
        except NotWritten as error:
            self._caches.not_before[job.stretch] = self._clock() + self._rest_after(job, error)
            outcome: SummaryOutcome = "skipped"
            if error.called_model:
                outcome = "failed"
            self._report(job, outcome, began, error.reason, error.calls, error.tokens_used)
            return None
        except Exception:
            # An exception in our own code, which ``Tasks`` reports. Another job would pay for the same fault again.
            self._caches.not_before[job.stretch] = math.inf
            raise
        self._caches.not_before[job.stretch] = math.inf
        self._caches.failures.pop(job.stretch, None)
        if draft is None:
            self._report(job, "adopted", began)
        else:
            self._report(job, "written", began, "", draft.calls, draft.tokens_used)
        return summary

    def _rest_after(self, job: _Job, error: NotWritten) -> float:
        """Return the seconds until the next job for this stretch may begin."""
        if error.called_model:
            return self._refuse(job)
        if error.reason == "elsewhere":
            return self._config.lease_seconds
        if error.reason == "budget":
            length, _ = self._caches.too_expensive.get(job.stretch, (job.request.prefix.length, 0))
            self._caches.too_expensive[job.stretch] = (length, error.tokens_needed)
            return 0.0
        return RETRY_SECONDS

    def _report(
        self,
        job: _Job,
        outcome: SummaryOutcome,
        began: float,
        reason: str = "",
        calls: int = 0,
        tokens_used: tuple[int, int] = (0, 0),
    ) -> None:
        report = SummaryReport(
            outcome=outcome,
            reason=reason,
            tenant=self._label(job.tenant),
            model=job.summariser.model,
            upstream=job.summariser.upstream,
            calls=calls,
            input_tokens=tokens_used[0],
            output_tokens=tokens_used[1],
            seconds=self._clock() - began,
        )
        self._on_report(report)

    async def _attempt(self, job: _Job) -> tuple[Summary, Draft | None]:
        """Return the summary, with its draft if this job wrote it. Raises ``NotWritten``."""
        if self._limits.is_paused(job.tenant):
            raise NotWritten("paused", called_model=False)
        if self._config.forbids(job.request, job.summariser):
            raise NotWritten("subscription", called_model=False)
        request, seconds = job.request, self._config.lease_seconds
        lease = await self._table.lease(request.root_hash, job.policy, request.last_compaction, seconds)
        if lease is None:
            return await self._wait_for_replica(job), None
        renewal = self._spawn(self._renew(lease), "summary lease")
        try:
            return await self._write_under_lease(job)
        finally:
            renewal.cancel()
            await lease.release()

    async def _write_under_lease(self, job: _Job) -> tuple[Summary, Draft | None]:
        """Write a summary unless there is one that is long enough. Raises ``NotWritten``."""
        request = job.request
        base = await self._newest(job)
        long_enough = request.folded + 1
        if job.waits:
            long_enough = request.prefix.length
        if base is not None and base.length >= long_enough:
            return base, None
        if await self._table.is_refused(request.root_hash, job.policy, request.last_compaction):
            raise NotWritten("refused_before", called_model=False)
        if not job.waits:
            job = self._affordable(job)
        self._note(job, "pending")
        try:
            draft = await self._draft(job, base)
        except NotWritten as error:
            state: SummaryState = "skipped"
            if error.called_model:
                state = "failed"
            self._note(job, state, error.reason)
            raise
        summary = await self._save(job, base, draft)
        self._note(job, "ready", tokens_out=draft.tokens_used[1])
        return summary, draft

    def _affordable(self, job: _Job) -> _Job:
        """Return *job* for the prefix that was too expensive before, if there is one: a longer one would cost more."""
        length, _ = self._caches.too_expensive.get(job.stretch, (0, 0))
        if length <= job.request.folded:
            return job
        return replace(job, request=job.request.up_to(length))

    async def _draft(self, job: _Job, base: Summary | None) -> Draft:
        """Return a text within the tenant's limits. Raises ``NotWritten``."""
        breaker = self._breaker_of(job)
        reservation = Reservation(self._limits, breaker, job.request)
        used, items = 0, job.request.prefix.length
        if base is not None:
            items -= base.length
        # Reading and counting thousands of small items takes a second, and most clients may not spend that much.
        least = items * LEAST_TOKENS
        if reason := await reservation.refusal_reason(least):
            raise NotWritten(reason, called_model=False, tokens_needed=least)
        try:
            draft = await self._writer.write(job.request, job.summariser, base, reservation.check)
            used = sum(draft.tokens_used)
        except NotWritten as error:
            used = sum(error.tokens_used)
            if error.limited:
                self._limits.pause(job.tenant)
            if error.called_model:
                breaker.failed()
            raise
        finally:
            reservation.correct(used)
        breaker.succeeded()
        return draft

    async def _save(self, job: _Job, base: Summary | None, draft: Draft) -> Summary:
        """Store *draft*; return the summary that is valid from now on, which another replica may have stored before."""
        prefix, model = job.request.prefix, job.summariser.model
        spent = sum(draft.tokens_used)
        if base is not None:
            spent += base.tokens_spent
        value = dump(draft.text, prefix.length, spent, model, int(time.time()))
        stored = await self._table.save(job.tenant, job.request.root_hash, job.policy, prefix.prefix_hash, value)
        summary = load(stored, prefix.length) or Summary(draft.text, prefix.length, spent, model)
        self._caches.summaries[job.policy, prefix.prefix_hash] = summary
        return summary

    async def _newest(self, job: _Job) -> Summary | None:
        """Return the summary of the longest prefix that has one: from memory, unless the store has a longer one."""
        longer = []
        cached: Summary | None = None
        for prefix in reversed(job.request.prefixes):
            cached = self._caches.summaries.get((job.policy, prefix.prefix_hash))
            if cached is not None:
                break
            longer.append(prefix)
        if not longer:
            return cached
        hashes = [prefix.prefix_hash for prefix in longer]
        stored = await self._table.newest(job.tenant, job.request.root_hash, job.policy, hashes)
        if stored is None:
            return cached
        index, value = stored
        summary = load(value, longer[index].length)
        if summary is None:
            return cached
        self._caches.summaries[job.policy, hashes[index]] = summary
        return summary

    async def _wait_for_replica(self, job: _Job) -> Summary:
        """Return the summary that another replica is writing. Raises ``NotWritten`` if it does not come in time."""
        until, pause = self._clock() + min(WAIT_ELSEWHERE, self._config.timeout), 0.05
        while job.waits and self._clock() < until:
            await asyncio.sleep(pause * (0.75 + 0.5 * random.random()))  # noqa: S311 - spreads replicas apart
            pause = min(0.4, pause * 1.6)
            summary = await self._newest(job)
            if summary is not None and summary.length == job.request.prefix.length:
                return summary
        raise NotWritten("elsewhere", called_model=False)

    async def _renew(self, lease: Lease) -> None:
        """Renew *lease* until it is lost."""
        is_ours = True
        while is_ours:
            await asyncio.sleep(self._config.lease_seconds * RENEW)
            is_ours = await lease.renew(self._config.lease_seconds)

    def _refuse(self, job: _Job) -> float:
        """Mark in the store that no replica should try this stretch for some time; return the seconds."""
        seconds = self._refusal_seconds(job)
        self._caches.failures[job.stretch] = self._caches.failures.get(job.stretch, 0) + 1
        self._table.refuse(job.request.root_hash, job.policy, job.request.last_compaction, seconds)
        return seconds

    def _refusal_seconds(self, job: _Job) -> float:
        failures = self._caches.failures.get(job.stretch, 0)
        return min(MOST_REFUSAL_SECONDS, REFUSAL_SECONDS * 2.0 ** min(failures, 10))

    def _note(self, job: _Job, state: SummaryState, reason: str = "", *, tokens_out: int = 0) -> None:
        """Note the state of a summary, for the owners of the conversation."""
        note = note_for(
            job.request,
            job.summariser,
            job.policy,
            state,
            int(time.time()),
            reason=reason,
            tokens_out=tokens_out,
            refused_for=int(self._refusal_seconds(job)),
        )
        self._on_note(job.tenant, job.request.root_hash, note)

    def _breaker_of(self, job: _Job) -> Breaker:
        name = (job.summariser.name, job.tenant)
        breaker = self._caches.breakers.get(name)
        if breaker is None:
            breaker = self._caches.breakers[name] = self._breaker()
        return breaker

    def _job(self, request: SummaryRequest, *, waits: bool) -> _Job:
        summariser = self._config.choose_summariser(request, self._resolve)
        return _Job(request, summariser, self._policy(request, summariser), waits)

    def _policy(self, request: SummaryRequest, summariser: Summariser) -> bytes:
        """Return a digest (8 bytes) of all that decides a text: prompts, model, cap; if aligned, the fixed part."""
        facts = [self._writer.version, summariser.name.encode(), b"%d" % request.quantised_cap]
        if self._writer.aligned and summariser.is_request_model:
            facts.append(request.fixed_digest)
        return hashlib.sha256(b"\0".join(facts)).digest()[:8]


def _stretch_of(request: SummaryRequest) -> Stretch:
    return request.route.name, request.last_compaction

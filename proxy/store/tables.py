"""The compaction records that the engine reads and writes, and the access that every table of the store shares.

No error reaches the engine: a failure is counted, and the engine gets a miss. The log has one line for each change of
state, and one a minute for repeated errors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from cachebox import LRUCache
from cachetools import TTLCache

from proxy.core.errors import StoreUnavailable
from proxy.store import deadlines
from proxy.store.backend import REFUSALS, Backend
from proxy.store.breaker import State
from proxy.store.encryption import MAX_PLAIN, Sealer
from proxy.store.key_names import COMPACTION_REQUEST, key_name, learned_route_name, record_name, record_names
from proxy.store.operations import Claim, Operation, Put, Read, Refresh, Release, Remove, Swap, Unavailable
from proxy.tasks import Spawn, Warn

LIFETIME: Final = 7 * 24 * 3600.0
"""Seconds that a record lives after it was last in use."""

_RECHECKED: Final = 600.0
"""Seconds after which a record is read again although nothing was written."""

ROUTE_LIFETIME: Final = 24 * 3600.0
"""Seconds that a learned route lives: a provider may change its limits."""

PAUSES: Final = (0.05, 0.2)
"""Seconds between the attempts of an operation that no request waits for."""

_SLOW: Final = ("slow", "pool")
"""Kinds of failures after which another attempt may succeed: the server or our own connections were busy."""

MAX_HASHES: Final = 512
"""Prefix hashes that one look-up reads at most."""

WARN_EVERY: Final = 60.0
"""Seconds between two lines of the log about the same kind of error."""

_RENEW_AFTER, _RENEWED = 3600.0, 8192
"""Seconds until a record in use is renewed again, and how many records a process remembers to have renewed."""

_REQUESTS_FOR, _REQUESTS = 5.0, 4096
"""Seconds that an operator's request is remembered between ``newest`` and ``pop_request``, and how many are."""

_NO_REQUEST: Final = (-math.inf, b"")
"""The default for a conversation without an operator's request: one that has always been expired."""

T = TypeVar("T")
D = TypeVar("D")


class ThrottledWarnings:
    """Counts errors by kind; logs changes of state at once, repeated errors once a minute, and no key or value."""

    def __init__(self, warn: Warn, clock: Callable[[], float]) -> None:
        self._warn = warn
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._states: dict[str, object] = {"store": True}
        self.counts: Counter[str] = Counter()

    def log(self, event: str, /, **facts: object) -> None:
        """Log *event* now."""
        self._warn(event, facts)

    def change(self, subject: str, state: object, event: str, /, **facts: object) -> None:
        """Log *event* if *subject* was in another *state* before."""
        if self._states.get(subject) != state:
            self._states[subject] = state
            self._warn(event, facts)

    def count(self, kind: str, event: str = "", **facts: object) -> None:
        """Count one error of *kind*; log *event* unless it was logged within the last minute."""
        self.counts[kind] += 1
        now = self._clock()
        if event and now - self._logged_at.get(event, -WARN_EVERY) >= WARN_EVERY:
            self._logged_at[event] = now
            self._warn(event, {"kind": kind, **facts})

    def snapshot(self) -> Mapping[str, int]:
        """The number of errors of each kind so far."""
        return dict(self.counts)


class TableAccess:
    """What all tables share: the backend, the sealer, retries, counts of failures, and warnings.

    ``ready`` is False until the backend may be used. ``sealer`` is replaced when the master key becomes known.
    """

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        *,
        spawn: Spawn,
        warnings: ThrottledWarnings,
    ) -> None:
        self.backend = backend
        self.sealer = sealer
        self.ready = True
        self.requested_until = -math.inf
        """The monotonic time at which the last operator's request that this process stored expires."""

        self._spawn = spawn
        self._warnings = warnings
        self._renewed: TTLCache[str, bool] = TTLCache(_RENEWED, _RENEW_AFTER)
        self._reported: tuple[bool, State, str] | None = None
        """What ``report_state`` saw last; None at first, since the start may have logged that the store is down."""

        self.hits = 0
        """Values that were read and opened."""

    async def run(self, operation: Operation[T], pauses: Sequence[float] = ()) -> T:
        """Run *operation*. Raises ``Unavailable``.

        It is repeated after each of *pauses* (seconds) if the store was only slow, which no request may wait for.
        """
        if not self.ready:
            raise Unavailable("down")
        try:
            return await self.backend.run(operation)
        except Unavailable as error:
            if not pauses or error.kind not in _SLOW:
                raise
        finally:
            self.report_state()
        await asyncio.sleep(pauses[0])
        return await self.run(operation, pauses[1:])

    async def run_or(
        self,
        default: D,
        operation: Operation[T],
        pauses: Sequence[float] = (),
        on_failure: Callable[[], object] | None = None,
    ) -> T | D:
        """Run *operation* as ``run`` does. Return *default* if the store does not answer.

        Such a failure is counted, and *on_failure* is called after it.
        """
        try:
            return await self.run(operation, pauses)
        except Unavailable as error:
            self.count_failure(error)
        if on_failure is not None:
            on_failure()
        return default

    async def run_or_raise(self, operation: Operation[T], pauses: Sequence[float] = ()) -> T:
        """Run *operation* as ``run`` does. Raises ``StoreUnavailable`` if the store does not answer, and counts it."""
        try:
            return await self.run(operation, pauses)
        except Unavailable as error:
            self.count_failure(error)
            raise StoreUnavailable from error

    def run_in_background(
        self,
        operation: Operation[Any],
        name: str,
        pauses: Sequence[float] = (),
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        """Run *operation* as ``run_or`` does, as a task called *name*."""
        self._spawn(self.run_or(None, operation, pauses, on_failure), name)

    def log_other_version(self, records: str, version: int) -> None:
        """Log once for each *version* that *records* of another version of the proxy are neither read nor changed."""
        advice = "run that version, or one that is newer, in all replicas: this one neither reads nor changes them"
        self._warnings.change(f"version of {records}", version, "store.other_version", kind=records, advice=advice)

    async def read_first(self, tenant: bytes, names: Sequence[str]) -> tuple[int, bytes] | None:
        """The value under the first of *names* (all of one conversation) that has one, as ``(index, value)``.

        Return None if there is none or the store does not answer.
        """
        if not names:
            return None
        values = await self.run_or(None, Read(names))
        return self.first_of(tenant, names, values)

    def first_of(
        self, tenant: bytes, names: Sequence[str], values: Sequence[bytes | None] | None
    ) -> tuple[int, bytes] | None:
        """The first of the sealed *values* under *names* that opens, as ``(index, value)``; others are removed.

        Return None if there is none, or no *values* because the store did not answer.
        """
        for index, (name, value) in enumerate(zip(names, values or (), strict=False)):
            if value is None:
                continue
            plain = self.sealer.open(tenant, name, value)
            if plain is None:
                # Left in place it would be read, and counted as an error, by every later request.
                self._count_unreadable(value)
                self.run_in_background(Remove(name), "store removal")
                continue
            self.hits += 1
            self._keep_alive(tenant, name, value, plain)
            return index, plain
        return None

    async def write(self, tenant: bytes, name: str, value: bytes, *, replace: bool = False) -> bytes:
        """Store *value* under *name* unless there is one, or *replace*; return the one that is valid from now on."""
        if len(value) > MAX_PLAIN:
            self._warnings.count("too_big", "store.record_too_big", bytes=len(value))
            return value
        try:
            async with asyncio.timeout(deadlines.REQUEST):
                return await self._claim(tenant, name, value, replace=replace)
        except Unavailable as error:
            self.count_failure(error)
        except TimeoutError:
            self.count_failure(Unavailable("slow"))
        return value

    async def _claim(self, tenant: bytes, name: str, value: bytes, *, replace: bool) -> bytes:
        """Store *value* and return it, or the readable value that is there. Raises ``Unavailable``.

        A value that cannot be read is removed once, so that two programs that share a server never end in a loop.
        """
        claim = Claim(name, self.sealer.seal(tenant, name, value), LIFETIME)
        self._renewed[name] = True
        if replace:
            # Not a put: of replicas that replace a record at once, all have to go on with the one stored first.
            await self.run(Remove(name))
        try:
            present = await self.run(claim)
        except Unavailable as error:
            if error.kind != "wrongtype":
                raise
            # Another program wrote a value of another type under our name.
            self._warnings.count("wrongtype", "store.foreign_value")
        else:
            if present is None:
                return value
            theirs = self.sealer.open(tenant, name, present)
            if theirs is not None:
                return theirs
            self._count_unreadable(present)
        await self.run(Remove(name))
        theirs = self.sealer.open(tenant, name, await self.run(claim))
        if theirs is None:
            return value
        return theirs

    def _keep_alive(self, tenant: bytes, name: str, value: bytes, plain: bytes) -> None:
        """Renew the expiry of a value in use. Seal it anew if a former key sealed it, which can be removed then."""
        if not self.sealer.is_former(value):
            self._renew(name)
        elif name not in self._renewed:
            # At most once an hour: while the key is being changed, a replica that still seals with the former one seals
            # the value back.
            self._renewed[name] = True
            sealed = self.sealer.seal(tenant, name, plain)
            self.run_in_background(Swap(name, value, sealed, LIFETIME), "store rotation")

    def _renew(self, name: str) -> None:
        if name not in self._renewed:
            self._renewed[name] = True
            self.run_in_background(Refresh(name, LIFETIME), "store renewal")

    def report_state(self) -> None:
        """Log that the store is up, down or refuses operations, if that changed."""
        reported = self.ready, self.backend.breaker, self.backend.refusal
        if reported == self._reported:
            return
        self._reported = reported
        _, state, refusal = reported
        if state == "open" or not self.ready:
            self._warnings.change("store", False, "store.down", state=state)
        elif state == "half-open":
            return
        elif refusal:
            event = "store.refused"
            if refusal == "oom":
                event = "store.full"
            self._warnings.change("store", refusal, event, kind=refusal, advice=REFUSALS[refusal])
        else:
            self._warnings.change("store", True, "store.up", state=state)

    def count_failure(self, error: Unavailable) -> None:
        """Count the failure of an operation."""
        self._warnings.count(error.kind)
        self.report_state()

    def _count_unreadable(self, value: bytes) -> None:
        if self.sealer.is_foreign(value):
            self._warnings.count("unknown_key", "store.unknown_key", advice="see store.other_keys")
        else:
            self._warnings.count("integrity", "store.integrity")


class RecordTable:
    """The engine's ``Records``: compaction records, operators' requests and learned routes."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access
        self._requests: LRUCache[str, tuple[float, bytes]] = LRUCache(_REQUESTS)
        """Operators' requests that were read, each with the second until which it is remembered."""

    def prefix_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's prefix hashes."""
        return self._access.sealer.prefix_key(tenant)

    def item_key(self) -> bytes:
        """The secret (32 bytes) that proves which items in a request are ours."""
        return self._access.sealer.item_key()

    def reachable(self) -> bool:
        """True if records can be read now."""
        return self._access.ready and self._access.backend.breaker == "closed"

    def version(self) -> tuple[int, ...] | None:
        """A value that changes when another process or an operator may have stored something.

        It also changes every ten minutes, so that records in use are read, which renews them. None if it is not known
        without a request to the store.
        """
        now, backend = time.monotonic(), self._access.backend
        version: tuple[int, ...] | None = ()
        if backend.shared:
            version = backend.version()
        if version is None or now < self._access.requested_until:
            return None
        return int(now // _RECHECKED), *version

    async def newest(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The record under the first of *prefix_hashes* (512 are read) that has one, as ``(index, record)``."""
        names = record_names(root_hash, route, prefix_hashes[:MAX_HASHES])
        if not names:
            return None
        # An operator's request is read with the records: that costs no operation of its own.
        request = key_name(root_hash, COMPACTION_REQUEST)
        values = await self._access.run_or((), Read([*names, request]))
        if values and values[-1] is not None:
            self._requests[request] = time.monotonic() + _REQUESTS_FOR, values[-1]
        return self._access.first_of(tenant, names, values)

    async def save(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hash: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        """Store *record* unless the boundary has one, or *replace*; return the one that is valid from now on."""
        return await self._access.write(tenant, record_name(root_hash, route, prefix_hash), record, replace=replace)

    async def pop_request(self, tenant: bytes, root_hash: bytes) -> str:
        """Remove an operator's request to compact this conversation, if ``newest`` read one, and return its extent.

        The extent is ``now``, or a share of the room; empty if there is no request. Only one caller gets it.
        """
        if not self._requests:
            return ""
        name = key_name(root_hash, COMPACTION_REQUEST)
        until, value = self._requests.pop(name, _NO_REQUEST)
        if until <= time.monotonic():
            return ""
        extent = self._access.sealer.open(tenant, name, value)
        if extent is None:
            return ""
        if not await self._access.run_or(False, Release(name, value)):
            return ""  # another replica was first, or the store does not answer
        return extent.decode("ascii", "replace")

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        """The last value saved about *route* for *tenant*; None if there is none or the store does not answer."""
        name = self._route_name(tenant, route)
        (value,) = await self._access.run_or((None,), Read([name]))
        return self._access.sealer.open(tenant, name, value)

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        """Save *value* about *route* for *tenant* in the background; the last one saved is valid."""
        name = self._route_name(tenant, route)
        sealed = self._access.sealer.seal(tenant, name, value)
        self._access.run_in_background(Put(name, sealed, ROUTE_LIFETIME), "learned route")

    def _route_name(self, tenant: bytes, route: str) -> str:
        # "lesson" is the first version's word for a learned route: names in use never change.
        return learned_route_name(self._access.sealer.digest(tenant, b"lesson\0" + route.encode()))

"""``Store``: the event records the engine asks for, sealed, over whichever backend is configured.

Nothing here raises to the engine. What fails is counted, reported once per change of state, and answered as a miss.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cachetools import TTLCache

from proxy.store import keys, waits
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.failures import REFUSALS
from proxy.store.notices import Notices
from proxy.store.sealed import MAX_PLAIN, Sealer

LIFETIME = 7 * 24 * 3600.0
LESSON_LIFETIME = 24 * 3600.0  # what overflows and usage taught; a provider may change its mind
PAUSES = (0.05, 0.2)
"""Seconds between the tries of what can wait."""
MAX_PLACES = 512
_RENEW = 3600.0
_RENEWED = 8192
_MARKS, _MARK = 4096, 5.0
T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]


class Records:
    """Implements ``Recorder`` over *backend*; ``ready`` says whether the backend may be asked at all."""

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        *,
        spawn: Spawn,
        notices: Notices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sealer = sealer
        self.ready = True
        self._backend = backend
        self._spawn = spawn
        self._notices = notices
        self._clock = clock
        self._renewed: TTLCache[str, bool] = TTLCache(_RENEWED, _RENEW, timer=clock)
        self._marks: TTLCache[str, bytes] = TTLCache(_MARKS, _MARK, timer=clock)
        self.hits = self.misses = self.operations = 0
        self.seconds = self.latency = 0.0

    def prefix_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's chains."""
        return self.sealer.prefix_key(tenant)

    def item_key(self) -> bytes:
        """The secret (32 bytes) that tells what we gave clients to carry."""
        return self.sealer.item_key()

    async def newest(self, tenant: bytes, root: bytes, route: str, chains: Sequence[bytes]) -> tuple[int, bytes] | None:
        """The record under the first of *chains* (the first 512 are looked at) that has one, with its index."""
        names = [keys.event(root, route, chain) for chain in chains[:MAX_PLACES]]
        return await self.find(tenant, names, keys.mark(root))

    async def pop_request(self, tenant: bytes, root: bytes) -> str:
        """How far conversation *root* is to be compacted, as ``newest`` saw: ``now`` or a share; empty if not at all.

        Only one caller is given the request.
        """
        name = keys.mark(root)
        value = self._marks.pop(name, None)
        extent = None if value is None else self.sealer.open(tenant, name, value)
        if value is None or extent is None:
            return ""
        try:
            released = await self.timed(self._backend.release(name, value))
        except Unavailable as error:
            self.failed(error)
            return ""
        return extent.decode("ascii", "replace") if released else ""

    async def find(self, tenant: bytes, names: Sequence[str], mark: str = "") -> tuple[int, bytes] | None:
        """The record under the first of *names* (of one conversation) that has one, with its index.

        Where there is something under *mark*, which costs no operation of its own, ``pop_request`` will find it.
        """
        if not names:
            return None
        try:
            values = await self.timed(self._backend.read([*names, mark] if mark else names))
        except Unavailable as error:
            self.misses += 1
            self.failed(error)
            return None
        if mark and values[-1] is not None:
            self._marks[mark] = values[-1]
        found = self._first(tenant, names, values[: len(names)])
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._keep_up(tenant, names[found[0]], values[found[0]] or b"", found[1])
        return found

    async def save(
        self, tenant: bytes, root: bytes, route: str, chain: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        """Store *record* unless the place has one already, or *replace*; returns the one that holds from now on."""
        return await self.settle(tenant, keys.event(root, route, chain), record, replace=replace)

    async def settle(self, tenant: bytes, name: str, record: bytes, *, replace: bool = False) -> bytes:
        """Store *record* as *name* unless there is one, or *replace*; returns the one that holds from now on."""
        if len(record) > MAX_PLAIN:
            self._notices.count("too_big", "store.record_too_big", bytes=len(record))
            return record
        sealer = self.sealer
        sealed = sealer.seal(tenant, name, record)
        try:
            async with asyncio.timeout(waits.REQUEST):
                if replace:
                    await self.timed(self._backend.remove(name))
                held = await self._claim(name, sealed)
                if held is None:
                    return record
                winner = sealer.open(tenant, name, held)
                if winner is None:
                    self._spoiled(held)
                    await self.timed(self._backend.remove(name))
                    held = await self._claim(name, sealed)
                    winner = None if held is None else sealer.open(tenant, name, held)
        except Unavailable as error:
            self.failed(error)
            return record
        except TimeoutError:
            self.failed(Unavailable("slow"))
            return record
        if winner is None:
            return record
        self._renew(name)
        return winner

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        """What was last remembered about *route* for *tenant*; ``None`` where there is nothing or nobody to ask."""
        name = self._lesson(tenant, route)
        try:
            held = (await self.timed(self._backend.read([name])))[0]
        except Unavailable as error:
            self.failed(error)
            return None
        return None if held is None else self.sealer.open(tenant, name, held)

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        """Keep *value* about *route* for *tenant* in the background; the last one that was remembered holds."""
        name = self._lesson(tenant, route)
        sealed = self.sealer.seal(tenant, name, value)
        self.behind(self._put(name, sealed), "store lesson")

    async def _put(self, name: str, sealed: bytes) -> None:
        await self.timed(self._backend.remove(name))
        await self.timed(self._backend.claim(name, sealed, LESSON_LIFETIME))

    def _lesson(self, tenant: bytes, route: str) -> str:
        return keys.lesson(hmac.digest(self.prefix_key(tenant), b"lesson\0" + route.encode(), "sha256")[:16])

    async def _claim(self, name: str, sealed: bytes) -> bytes | None:
        self._renewed[name] = True
        try:
            return await self.timed(self._backend.claim(name, sealed, LIFETIME))
        except Unavailable as error:
            if error.kind != "wrongtype":
                raise
            # Something else under our name: cleared once, and if it comes back at once it is left alone.
            self._notices.count("wrongtype", "store.foreign_value")
            await self.timed(self._backend.remove(name))
            return await self.timed(self._backend.claim(name, sealed, LIFETIME))

    def _first(self, tenant: bytes, names: Sequence[str], values: Sequence[bytes | None]) -> tuple[int, bytes] | None:
        for index, value in enumerate(values):
            if value is None:
                continue
            plain = self.sealer.open(tenant, names[index], value)
            if plain is not None:
                return index, plain
            self._spoiled(value)
            self.behind(self._backend.remove(names[index]), "store removal")
        return None

    def _keep_up(self, tenant: bytes, name: str, value: bytes, plain: bytes) -> None:
        """Let a record that is in use live on, sealed with the present key: a former one may be gone some day."""
        if not self.sealer.is_former(value):
            self._renew(name)
        elif name not in self._renewed:  # once in a while: a replica that still seals with the former key does the same
            self._renewed[name] = True
            sealed = self.sealer.seal(tenant, name, plain)
            self.behind(self.timed(self._backend.swap(name, value, sealed, LIFETIME)), "store rotation")

    def _renew(self, name: str) -> None:
        if name not in self._renewed:
            self._renewed[name] = True
            self.behind(self._backend.refresh(name, LIFETIME), "store renewal")

    def behind(self, operation: Coroutine[Any, Any, object], name: str) -> None:
        """Do *operation* in the background; that it failed is counted."""
        self._spawn(self._quietly(operation), name)

    async def _quietly(self, operation: Coroutine[Any, Any, object]) -> None:
        try:
            await operation
        except Unavailable as error:
            self.failed(error)

    async def timed(self, operation: Coroutine[Any, Any, T]) -> T:
        """The result of *operation*, counted and timed. Raises ``Unavailable``."""
        if not self.ready:
            operation.close()
            raise Unavailable("down")
        began = self._clock()
        try:
            return await operation
        finally:
            took = self._clock() - began
            self.operations += 1
            self.seconds += took
            self.latency += (took - self.latency) * (1.0 if self.operations == 1 else 0.05)
            self.note_state()

    async def patiently(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As ``timed``, for what no request waits for: a store that was only slow is asked again, a few times.

        Raises ``Unavailable``.
        """
        for pause in PAUSES:
            try:
                return await self.timed(ask())
            except Unavailable as error:
                if error.kind not in ("slow", "pool"):
                    raise
            await asyncio.sleep(pause)
        return await self.timed(ask())

    def note_state(self) -> None:
        """Report that the store is up, down, or refuses what it is asked, if that changed."""
        state, refusal = self._backend.breaker, self._backend.refusal
        if state == "open" or not self.ready:
            self._notices.change("store", False, "store.down", state=state)
        elif state == "half-open":
            return
        elif refusal:
            event = "store.full" if refusal == "oom" else "store.refused"
            self._notices.change("store", refusal, event, kind=refusal, advice=REFUSALS[refusal])
        else:
            self._notices.change("store", True, "store.up", state=state)

    def failed(self, error: Unavailable) -> None:
        """Count what an operation failed of."""
        self._notices.count(error.kind)
        self.note_state()

    def _spoiled(self, value: bytes) -> None:
        if self.sealer.is_foreign(value):
            self._notices.count("unknown_key", "store.unknown_key", advice="see store.other_keys")
        else:
            self._notices.count("integrity", "store.integrity")

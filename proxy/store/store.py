"""Opens the configured store, of whatever kind, and keeps it usable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from proxy.store.archive_table import ArchiveTable
from proxy.store.backend import EmbeddedUnavailable, StoreMisconfigured, StoreUnsupported, Unavailable
from proxy.store.conversation_table import ConversationTable
from proxy.store.embedded import EmbeddedServer
from proxy.store.encryption import (
    Sealer,
    ensure_master_key,
    find_master_key,
    new_master_key,
    share_master_key,
    share_naming_secret,
)
from proxy.store.memory import MemoryBackend
from proxy.store.redis import RedisBackend
from proxy.store.redis_errors import REFUSALS, try_again, try_writing
from proxy.store.state import StoreState, ThrottledWarnings, Warn
from proxy.store.summary_table import SummaryTable
from proxy.store.tables import RecordTable, TableAccess
from proxy.tasks import Spawn

SHORTEST_KEY = 16
"""Bytes of a master key at least: a key of AES-128."""

_LOOK, _REREAD = 1.0, 60.0
"""Seconds between two looks at a store that does not work, and at one that does."""


class Store:
    """An open store, made by ``open_store``: its tables, its state for operators, and its end.

    ``records`` is what the engine reads and writes, ``summaries`` what summaries need, ``conversations`` what owners
    are shown, ``archive`` holds originals. *instead*: it replaces the configured store, which cannot be used.
    """

    def __init__(
        self, kind: str, url: str, access: TableAccess, warnings: ThrottledWarnings, *, instead: bool = False
    ) -> None:
        self.records = RecordTable(access)
        self.summaries = SummaryTable(access)
        self.conversations = ConversationTable(access)
        self.archive = ArchiveTable(access)
        self._kind = kind
        self._url = url
        self._access = access
        self._warnings = warnings
        self._instead = instead
        self._embedded: EmbeddedServer | None = None
        self._monitoring: asyncio.Task[None] | None = None

    def state(self) -> StoreState:
        """The state of the store right now."""
        access, backend = self._access, self._access.backend
        refusal = backend.refusal
        return StoreState(
            kind=self._kind,
            url_redacted=redacted(self._url),
            up=self.records.reachable() and not refusal and not self._instead,
            breaker=backend.breaker,
            refusal=refusal,
            instead=self._instead,
            owner=self._embedded.owner if self._embedded is not None else None,
            errors=self._warnings.snapshot(),
            hits=access.hits,
            misses=access.misses,
            operations=access.operations,
            seconds=access.seconds,
            latency=access.latency,
        )

    def attach(self, monitoring: asyncio.Task[None], embedded: EmbeddedServer | None) -> None:
        """Own the task that monitors the store, and the private server, until ``close``."""
        self._monitoring = monitoring
        self._embedded = embedded

    async def close(self) -> None:
        """Close connections; stop the private server unless another process uses it."""
        if self._monitoring is not None:
            self._monitoring.cancel()
            await asyncio.wait({self._monitoring})
            self._monitoring = None
        await self._access.backend.close()
        if self._embedded is not None:
            await self._embedded.close()


class StoreMonitor:
    """Brings a server that was down at start into use, and keeps all replicas on one master key.

    *ring* are the configured master keys, the one that seals first; empty if the key is kept in the store.
    """

    def __init__(
        self, servers: RedisBackend, access: TableAccess, warnings: ThrottledWarnings, ring: Sequence[bytes]
    ) -> None:
        self._servers = servers
        self._access = access
        self._warnings = warnings
        self._ring = tuple(ring)
        self._master = ring[0] if ring else new_master_key()
        self._agreed = False
        access.ready = False

    async def first(self) -> None:
        """Try once, at start. Raises ``StoreUnsupported`` if the server is too old; nothing if it is down."""
        try:
            await self._servers.connect()
            await self._share_key()
        except Unavailable as error:
            self._report_down(error)
            return
        self._access.ready = True
        await self._try_writing()

    async def run(self) -> None:
        """Monitor the store until cancelled."""
        rested = 0.0
        while True:
            await asyncio.sleep(_LOOK)
            rested += _LOOK
            if rested >= _REREAD or not self._settled:
                rested = 0.0
                await self._check()

    @property
    def _settled(self) -> bool:
        return self._access.ready and self._servers.breaker == "closed" and not self._servers.refusal

    async def _check(self) -> None:
        try:
            if not self._settled:
                await self._servers.connect()
                await self._servers.probe()
                await try_again(self._servers, self._servers.refusals)
            await self._share_key()
            self._access.ready = True
            await self._try_writing()
        except Unavailable as error:
            self._report_down(error)
        except StoreUnsupported as error:
            self._warnings.count("unsupported", "store.unsupported", cause=str(error))
        self._access.report_state()

    async def _try_writing(self) -> None:
        try:
            await try_writing(self._servers)
        except Unavailable as error:
            self._access.count_failure(error)

    def _report_down(self, error: Unavailable) -> None:
        if self._access.ready:
            return
        self._warnings.count(error.kind)
        advice = {"advice": REFUSALS[error.kind]} if error.kind in REFUSALS else {}
        self._warnings.change("store", False, "store.down", cause=error.kind, **advice)

    async def _share_key(self) -> None:
        """Agree with the other replicas on the secrets. Raises ``Unavailable``."""
        if self._ring:
            await self._share_naming_secret()
        else:
            await self._share_master_key()
        self._agreed = True

    async def _share_naming_secret(self) -> None:
        names = await share_naming_secret(self._servers, self._ring)
        if names == self._access.sealer.names:
            return
        if self._agreed:
            self._warnings.say("store.names_changed", advice="somebody replaced or emptied the store's secrets")
        self._access.sealer = Sealer(self._ring[0], self._ring[1:], names)

    async def _share_master_key(self) -> None:
        shared, was_missing = await share_master_key(self._servers, self._master)
        if was_missing and self._agreed:
            self._warnings.say("store.key_restored")
        if not self._agreed:
            advice = "whoever can read the store can read summaries; set store.key"
            self._warnings.say("store.key_in_store", advice=advice)
        elif shared != self._master:
            self._warnings.say("store.key_changed", advice="somebody replaced the master key in the store")
        if shared != self._master or not self._agreed:
            self._access.sealer = Sealer(shared)
        self._master = shared


async def open_store(
    url: str,
    *,
    directory: Path,
    key: bytes | None,
    spawn: Spawn,
    warn: Warn,
    others: Sequence[bytes] = (),
    instead: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """Open the store at *url*: ``embedded``, ``memory``, or a server's URL.

    A server that is down is used once it is up.
    *key* is the master key, at least 16 bytes. Without one it is in *directory* (``embedded``) or in the store. Values
    that were sealed with one of *others*, or with the key in *directory*, open too. *instead*: ``memory`` replaces the
    configured store, so that it never counts as up. *warn* logs an event with facts: never a key, value or password.
    Raises ``StoreMisconfigured`` and ``StoreUnsupported``, both worded for the operator.
    """
    warnings = ThrottledWarnings(warn, clock)
    _refuse_short_keys(key, others)
    ring = tuple(dict.fromkeys((key, *others))) if key is not None else ()
    embedded: EmbeddedServer | None = None
    if url == "embedded":
        try:
            embedded, ring = await _start_embedded(directory, key, others, spawn, warn)
        except (EmbeddedUnavailable, OSError, ValueError) as error:
            warnings.say("store.memory_instead", cause=str(error))
            url, instead = "memory", True
    if url == "memory":
        access = TableAccess(MemoryBackend(), Sealer(key or new_master_key()), spawn=spawn, warnings=warnings)
        return Store("memory", url, access, warnings, instead=instead)
    return await _open_servers(url, embedded, ring, spawn, warnings)


def _refuse_short_keys(key: bytes | None, others: Sequence[bytes]) -> None:
    named = [("other_keys", other) for other in others]
    if key is not None:
        named.insert(0, ("key", key))
    for name, each in named:
        if len(each) < SHORTEST_KEY:
            raise StoreMisconfigured(f"store.{name} is {len(each)} bytes long; it must be at least {SHORTEST_KEY}.")


async def _start_embedded(
    directory: Path, key: bytes | None, others: Sequence[bytes], spawn: Spawn, warn: Warn
) -> tuple[EmbeddedServer, tuple[bytes, ...]]:
    """Start the private server; return it with its master keys, the one that seals first.

    Without *key* the one in *directory* seals; with it, that one still opens what it sealed before.
    """
    embedded = await EmbeddedServer.start(directory, spawn, warn)
    try:
        ring = _embedded_ring(directory, key, others)
    except (OSError, ValueError):
        await embedded.close()
        raise
    return embedded, ring


def _embedded_ring(directory: Path, key: bytes | None, others: Sequence[bytes]) -> tuple[bytes, ...]:
    if key is None:
        return tuple(dict.fromkeys((ensure_master_key(directory), *others)))
    former = find_master_key(directory)
    keys = (key, *others) if former is None else (key, *others, former)
    return tuple(dict.fromkeys(keys))


async def _open_servers(
    url: str, embedded: EmbeddedServer | None, ring: Sequence[bytes], spawn: Spawn, warnings: ThrottledWarnings
) -> Store:
    kind = "embedded" if embedded is not None else url.partition("://")[0]
    async with AsyncExitStack() as opened:
        if embedded is not None:
            opened.push_async_callback(embedded.close)
        servers = RedisBackend(embedded.url if embedded is not None else url, spawn=spawn)
        opened.push_async_callback(servers.close)
        sealer = Sealer(ring[0], ring[1:]) if ring else Sealer(new_master_key())
        access = TableAccess(servers, sealer, spawn=spawn, warnings=warnings)
        store = Store(kind, url, access, warnings)
        monitor = StoreMonitor(servers, access, warnings, ring)
        await monitor.first()
        store.attach(spawn(monitor.run(), "store monitor"), embedded)
        opened.pop_all()  # the store closes them from now on
    return store


def redacted(url: str) -> str:
    """*url* without credentials and options, for the log."""
    scheme, separator, rest = url.partition("://")
    bare, _, options = rest.partition("?")
    if "@" in options:
        return f"{scheme}://***"  # a question mark in a password hides where the options begin
    _, at, hosts = bare.rpartition("@")
    return f"{scheme}{separator}***@{hosts}" if at else f"{scheme}{separator}{bare}"

"""Opens the configured store, monitors it, and describes its state to operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.store.archive_table import ArchiveTable
from proxy.store.backend import REFUSALS, EmbeddedUnavailable, StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import State
from proxy.store.conversation_table import ConversationTable
from proxy.store.encryption import (
    Sealer,
    ensure_master_key,
    find_master_key,
    new_master_key,
    share_master_key,
    share_naming_secret,
)
from proxy.store.memories_table import MemoriesTable
from proxy.store.operations import MemoryBackend, Unavailable
from proxy.store.sqlite import SqliteBackend
from proxy.store.sqlite_file import refuse_network_file_system, refuse_unwritable
from proxy.store.summary_table import SummaryTable
from proxy.store.tables import RecordTable, TableAccess, ThrottledWarnings
from proxy.tasks import Spawn, Warn

if TYPE_CHECKING:
    from proxy.store.redis import RedisBackend

SHORTEST_KEY = 16
"""Bytes of a master key at least: a key of AES-128."""

EMBEDDED_ADVICE = "let this process write to store.path, or set store.url to memory; until then a restart forgets"
"""The remedy for a directory that cannot be used."""

_CHECK_BROKEN, _CHECK_WORKING = 1.0, 60.0
"""Seconds between two checks of a store that does not work, and of one that does."""

INSTEAD = ", in place of the configured store, which cannot be used"
"""Words behind the description of memory that replaces a store."""


class StoreState(msgspec.Struct, frozen=True):
    """The state of the store, for health, metrics and the status page.

    ``kind`` is ``embedded``, ``memory`` or the scheme of the server's URL.
    ``refusal`` is a kind of ``backend.REFUSALS`` if the store answers but refuses operations, else empty.
    ``instead``: memory replaces the configured store. ``errors`` counts by kind, ``hits`` the values that were read.
    """

    kind: str
    url_redacted: str
    up: bool
    breaker: State
    refusal: str
    instead: bool
    errors: Mapping[str, int]
    hits: int


def describe_store(state: StoreState, path: Path) -> str:
    """The store in one line, for the start; *path* is the embedded one's directory."""
    location = {"embedded": str(path), "memory": "this process only"}.get(state.kind, state.url_redacted)
    return f"{state.kind}  ({location}{_trouble(state)})"


def store_status(state: StoreState) -> dict[str, object]:
    """The store as JSON, for the status page."""
    return {
        "kind": state.kind,
        "up": state.up,
        "breaker": state.breaker,
        "refusal": state.refusal or None,
        "errors": dict(state.errors),
    }


def _trouble(state: StoreState) -> str:
    if state.up:
        return ""
    if state.instead:
        return INSTEAD
    if state.refusal:
        return f", refuses operations ({state.refusal}): {REFUSALS[state.refusal]}"
    return ", not reachable: serving without it"


class Store:
    """An open store; ``open_store`` builds it.

    ``records`` has compaction records and learned routes, ``summaries`` the summaries, ``conversations`` what owners
    can query, ``archive`` originals of items, ``memories`` those of projects. *url* is ``embedded``, ``memory`` or a
    server's. *instead*: memory replaces the configured store, which cannot be used. *monitoring* is the task that
    monitors the store.
    """

    def __init__(
        self,
        url: str,
        access: TableAccess,
        warnings: ThrottledWarnings,
        *,
        instead: bool = False,
        monitoring: asyncio.Task[None] | None = None,
    ) -> None:
        self.records = RecordTable(access)
        self.summaries = SummaryTable(access)
        self.conversations = ConversationTable(access)
        self.archive = ArchiveTable(access)
        self.memories = MemoriesTable(access)
        self._url = url
        self._access = access
        self._warnings = warnings
        self._instead = instead
        self._monitoring = monitoring

    def state(self) -> StoreState:
        """The state of the store right now."""
        access, backend = self._access, self._access.backend
        refusal = backend.refusal
        return StoreState(
            kind=self._url.partition("://")[0],
            url_redacted=redacted(self._url),
            up=self.records.reachable() and not refusal and not self._instead,
            breaker=backend.breaker,
            refusal=refusal,
            instead=self._instead,
            errors=self._warnings.snapshot(),
            hits=access.hits,
        )

    async def close(self) -> None:
        """Close connections and files."""
        if self._monitoring is not None:
            self._monitoring.cancel()
            await asyncio.wait({self._monitoring})
            self._monitoring = None
        await self._access.backend.close()


class StoreMonitor:
    """Connects to a server or file that was down at start, and makes all replicas use one master key.

    *ring* are the configured master keys, the one that seals first; empty if the key is in the store.
    """

    def __init__(
        self,
        servers: RedisBackend | SqliteBackend,
        access: TableAccess,
        warnings: ThrottledWarnings,
        ring: Sequence[bytes],
    ) -> None:
        self._servers = servers
        self._access = access
        self._warnings = warnings
        self._ring = tuple(ring)
        self._master = new_master_key()
        if ring:
            self._master = ring[0]
        self._has_shared = False
        access.ready = False

    async def start(self) -> None:
        """Connect once, at start. Raises ``StoreUnsupported`` if the server is too old; nothing if it is down."""
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
        since_check = 0.0
        while True:
            await asyncio.sleep(_CHECK_BROKEN)
            since_check += _CHECK_BROKEN
            if since_check >= _CHECK_WORKING or not self._works:
                since_check = 0.0
                await self._check()

    @property
    def _works(self) -> bool:
        return self._access.ready and self._servers.breaker == "closed" and not self._servers.refusal

    async def _check(self) -> None:
        try:
            if not self._works:
                await self._servers.connect()
                await self._servers.probe()
                await self._servers.try_again()
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
            await self._servers.try_writing()
        except Unavailable as error:
            self._access.count_failure(error)

    def _report_down(self, error: Unavailable) -> None:
        if self._access.ready:
            return
        self._warnings.count(error.kind)
        facts = {"cause": error.kind}
        if error.kind in REFUSALS:
            facts["advice"] = REFUSALS[error.kind]
        self._warnings.change("store", False, "store.down", **facts)

    async def _share_key(self) -> None:
        """Agree with the other replicas on the secrets. Raises ``Unavailable``."""
        if self._ring:
            await self._share_naming_secret()
        else:
            await self._share_master_key()
        self._has_shared = True

    async def _share_naming_secret(self) -> None:
        names = await share_naming_secret(self._servers, self._ring)
        if names == self._access.sealer.names:
            return
        if self._has_shared:
            self._warnings.log("store.names_changed", advice="the store's secrets were replaced or removed")
        self._access.sealer = Sealer(self._ring[0], self._ring[1:], names)

    async def _share_master_key(self) -> None:
        shared, was_missing = await share_master_key(self._servers, self._master)
        if was_missing and self._has_shared:
            self._warnings.log("store.key_restored")
        if not self._has_shared:
            advice = "everybody who can read the store can read summaries; set store.key"
            self._warnings.log("store.key_in_store", advice=advice)
        elif shared != self._master:
            self._warnings.log("store.key_changed", advice="the master key in the store was replaced")
        if shared != self._master or not self._has_shared:
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
    sealed with one of *others*, or with the key in *directory*, open too. *instead*: ``memory`` replaces the configured
    store, so that it never counts as up. *warn* logs an event with facts: never a key, value or password.

    Raises ``StoreMisconfigured`` and ``StoreUnsupported``, both worded for the operator.
    """
    warnings = ThrottledWarnings(warn, clock)
    _refuse_short_keys(key, others)
    ring: tuple[bytes, ...] = ()
    if key is not None:
        ring = tuple(dict.fromkeys((key, *others)))
    if url == "embedded":
        try:
            return await _open_embedded(directory, key, others, spawn, warnings)
        except (EmbeddedUnavailable, OSError, ValueError) as error:
            warnings.log("store.memory_instead", cause=str(error), advice=EMBEDDED_ADVICE)
            url, instead = "memory", True
    if url == "memory":
        sealer = Sealer(key or new_master_key())
        access = TableAccess(MemoryBackend(), sealer, spawn=spawn, warnings=warnings)
        return Store(url, access, warnings, instead=instead)
    # redis takes 40 ms and 6 MB to import, which a process without such a server saves.
    from proxy.store.redis import RedisBackend

    servers = RedisBackend(url, spawn=spawn)
    return await _monitored(url, servers, ring, spawn, warnings)


def _refuse_short_keys(key: bytes | None, others: Sequence[bytes]) -> None:
    secrets = [("other_keys", other) for other in others]
    if key is not None:
        secrets.insert(0, ("key", key))
    for setting, secret in secrets:
        if len(secret) < SHORTEST_KEY:
            raise StoreMisconfigured(
                f"store.{setting} is {len(secret)} bytes long; it must be at least {SHORTEST_KEY}."
            )


async def _open_embedded(
    directory: Path, key: bytes | None, others: Sequence[bytes], spawn: Spawn, warnings: ThrottledWarnings
) -> Store:
    """Open the store in *directory*. Raises ``EmbeddedUnavailable``, ``OSError`` and ``ValueError``.

    Without *key* the key in *directory* seals. With it, the key in *directory* still opens the values that it sealed.
    """
    refuse_network_file_system(directory)
    file = SqliteBackend(directory, warn=lambda event, facts: warnings.log(event, **facts))
    try:
        await file.open()
        ring = _embedded_ring(directory, key, others)
    except (EmbeddedUnavailable, OSError, ValueError):
        await file.close()
        raise
    return await _monitored("embedded", file, ring, spawn, warnings)


def embedded_problem(directory: Path) -> str:
    """Return why this user could not have an embedded store in *directory*; empty if nothing is known to prevent it.

    Creates nothing.
    """
    try:
        refuse_network_file_system(directory)
        refuse_unwritable(directory)
        find_master_key(directory)
    except (EmbeddedUnavailable, OSError, ValueError) as error:
        return str(error)
    return ""


def _embedded_ring(directory: Path, key: bytes | None, others: Sequence[bytes]) -> tuple[bytes, ...]:
    if key is None:
        return tuple(dict.fromkeys((ensure_master_key(directory), *others)))
    keys = [key, *others]
    former = find_master_key(directory)
    if former is not None:
        keys.append(former)
    return tuple(dict.fromkeys(keys))


async def _monitored(
    url: str, backend: RedisBackend | SqliteBackend, ring: Sequence[bytes], spawn: Spawn, warnings: ThrottledWarnings
) -> Store:
    """A store on *backend*, with the task that monitors it. Raises ``StoreUnsupported``, with *backend* closed."""
    first, *others = ring or [new_master_key()]
    access = TableAccess(backend, Sealer(first, others), spawn=spawn, warnings=warnings)
    monitor = StoreMonitor(backend, access, warnings, ring)
    try:
        await monitor.start()
    except BaseException:  # also after a cancellation: its connections and threads must end
        await backend.close()
        raise
    return Store(url, access, warnings, monitoring=spawn(monitor.run(), "store monitor"))


def redacted(url: str) -> str:
    """*url* without credentials and options, for the log."""
    scheme, separator, rest = url.partition("://")
    bare, _, options = rest.partition("?")
    if "@" in options:
        return f"{scheme}://***"  # a question mark in a password hides where the options begin
    _, at, hosts = bare.rpartition("@")
    if at:
        return f"{scheme}{separator}***@{hosts}"
    return f"{scheme}{separator}{bare}"

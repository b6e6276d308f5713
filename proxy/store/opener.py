"""Opens the configured store and keeps it open: the one place that knows every kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from proxy.store import master
from proxy.store.backend import Backend
from proxy.store.embedded import Embedded
from proxy.store.errors import EmbeddedUnavailable, StoreMisconfigured, StoreUnsupported, Unavailable
from proxy.store.failures import REFUSALS
from proxy.store.memory import Memory
from proxy.store.notices import Notices, Warn
from proxy.store.originals import Originals
from proxy.store.records import Records
from proxy.store.redis import Servers
from proxy.store.refusals import try_again, try_writing
from proxy.store.register import Register
from proxy.store.sealed import Sealer
from proxy.store.shelf import Shelf
from proxy.store.state import StoreState

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]

SHORTEST_KEY = 16
_LOOK, _REREAD = 1.0, 60.0


class Store:
    """An open store: the ``Recorder`` of the engine, its state for operators, and its end. Made by ``open_store``.

    *instead*: it stands in for the configured store, which cannot be used.

    ``shelf`` is what summaries need of it, ``register`` what is told of conversations, ``originals``
    the archive.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        backend: Backend,
        sealer: Sealer,
        spawn: Spawn,
        notices: Notices,
        *,
        instead: bool = False,
    ) -> None:
        self._kind = kind
        self._url = url
        self._backend = backend
        self._spawn = spawn
        self._notices = notices
        self._records = Records(backend, sealer, spawn=spawn, notices=notices)
        self.shelf = Shelf(backend, self._records)
        self.register = Register(backend, self._records)
        self.originals = Originals(backend, self._records)
        self._instead = instead
        self._embedded: Embedded | None = None
        self._watch: asyncio.Task[Any] | None = None

    def prefix_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's chains."""
        return self._records.prefix_key(tenant)

    def item_key(self) -> bytes:
        """The secret (32 bytes) that tells what we gave clients to carry."""
        return self._records.item_key()

    def reachable(self) -> bool:
        """Whether records can be had at all right now."""
        return self._records.ready and self._backend.breaker == "closed"

    async def newest(self, tenant: bytes, root: bytes, route: str, chains: Sequence[bytes]) -> tuple[int, bytes] | None:
        """The record under the first of *chains* that has one, as ``(index into chains, record)``; never raises."""
        return await self._records.newest(tenant, root, route, chains)

    async def save(
        self, tenant: bytes, root: bytes, route: str, chain: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        """Store *record* unless the place has one already, or *replace*; returns the one that holds; never raises."""
        return await self._records.save(tenant, root, route, chain, record, replace=replace)

    async def pop_request(self, tenant: bytes, root: bytes) -> str:
        """How far conversation *root* is to be compacted, as ``newest`` saw, or an empty text; only once."""
        return await self._records.pop_request(tenant, root)

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        """What was last remembered about *route* for *tenant*, if anything; never raises."""
        return await self._records.read_route(tenant, route)

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        """Keep *value* about *route* for *tenant*, in the background."""
        self._records.save_route(tenant, route, value)

    def state(self) -> StoreState:
        """How the store is, right now."""
        records, breaker = self._records, self._backend.breaker
        refusal = self._backend.refusal
        return StoreState(
            kind=self._kind,
            url_redacted=redacted(self._url),
            up=self.reachable() and not refusal and not self._instead,
            breaker=breaker,
            refusal=refusal,
            instead=self._instead,
            owner=self._embedded.owner if self._embedded is not None else None,
            errors=self._notices.snapshot(),
            hits=records.hits,
            misses=records.misses,
            operations=records.operations,
            seconds=records.seconds,
            latency=records.latency,
        )

    async def close(self) -> None:
        """Close connections; stop the private server unless somebody else uses it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        await self._backend.close()
        if self._embedded is not None:
            await self._embedded.close()

    def keep(self, keeper: Keeper, embedded: Embedded | None) -> None:
        """Tend the store in the background from now on."""
        self._embedded = embedded
        self._watch = self._spawn(keeper.run(), "store keeper")

    @property
    def records(self) -> Records:
        """The records, for whoever tends the store."""
        return self._records


class Keeper:
    """Brings a server that was down at start into use when it comes, and keeps replicas on one master key."""

    def __init__(self, servers: Servers, records: Records, notices: Notices, given: Sequence[bytes]) -> None:
        self._servers = servers
        self._records = records
        self._notices = notices
        self._given = tuple(given)
        self._master = given[0] if given else master.fresh()
        self._agreed = False
        records.ready = False

    async def first(self) -> None:
        """Try once, at start. Raises ``StoreUnsupported`` when the server is too old; nothing when it is down."""
        try:
            await self._servers.introduce()
            await self._share_key()
        except Unavailable as error:
            self._down(error)
            return
        self._records.ready = True
        await self._try_writing()

    async def run(self) -> None:
        """Look after the store until cancelled."""
        rested = 0.0
        while True:
            await asyncio.sleep(_LOOK)
            rested += _LOOK
            if rested >= _REREAD or not self._settled:
                rested = 0.0
                await self._tend()

    @property
    def _settled(self) -> bool:
        return self._records.ready and self._servers.breaker == "closed" and not self._servers.refusal

    async def _tend(self) -> None:
        try:
            if not self._settled:
                await self._servers.introduce()
                await self._servers.probe()
                await try_again(self._servers, self._servers.refusals)
            await self._share_key()
            self._records.ready = True
            await self._try_writing()
        except Unavailable as error:
            self._down(error)
        except StoreUnsupported as error:
            self._notices.count("unsupported", "store.unsupported", cause=str(error))
        self._records.note_state()

    async def _try_writing(self) -> None:
        try:
            await try_writing(self._servers)
        except Unavailable as error:
            self._records.failed(error)

    def _down(self, error: Unavailable) -> None:
        if not self._records.ready:
            self._notices.count(error.kind)
            advice = {"advice": REFUSALS[error.kind]} if error.kind in REFUSALS else {}
            self._notices.change("store", False, "store.down", cause=error.kind, **advice)

    async def _share_key(self) -> None:
        if self._given:
            names = await master.naming(self._servers, self._given)
            if names != self._records.sealer.names:
                if self._agreed:
                    self._notices.say("store.names_changed", advice="somebody replaced or emptied the store's secrets")
                self._records.sealer = Sealer(self._given[0], self._given[1:], names)
            self._agreed = True
            return
        held, put = await master.agree(self._servers, self._master)
        if put and self._agreed:
            self._notices.say("store.key_restored")
        if not self._agreed:
            self._notices.say(
                "store.key_in_store", advice="whoever can read the store can read summaries; set store.key"
            )
        elif held != self._master:
            self._notices.say("store.key_changed", advice="somebody replaced the master key in the store")
        if held != self._master or not self._agreed:
            self._records.sealer = Sealer(held)
        self._master = held
        self._agreed = True


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
    """The store at *url* (``embedded``, ``memory``, or a server's URL), open; one that is down is used when it comes.

    *key* is the master key, at least 16 bytes; without one it is kept in *directory* (``embedded``) or in the store.
    What was sealed with *others* opens too, and so does what the key in *directory* sealed before there was another.
    *instead*: ``memory`` was not configured but stands in for what was, so that it never counts as up.
    *spawn* starts named background tasks, *warn* takes ``(event, facts)`` for the log: never a key, value or password.
    Raises ``StoreMisconfigured`` and ``StoreUnsupported``, both worded for the operator.
    """
    notices = Notices(warn, clock)
    _refuse_short_keys(key, others)
    ring = tuple(dict.fromkeys((key, *others))) if key is not None else ()
    embedded: Embedded | None = None
    if url == "embedded":
        try:
            embedded, ring = await _start_embedded(directory, key, others, spawn, warn)
        except (EmbeddedUnavailable, OSError, ValueError) as error:
            notices.say("store.memory_instead", cause=str(error))
            url, instead = "memory", True
    if url == "memory":
        return Store("memory", url, Memory(), Sealer(key or master.fresh()), spawn, notices, instead=instead)
    return await _open_servers(url, embedded, ring, spawn, notices)


def _refuse_short_keys(key: bytes | None, others: Sequence[bytes]) -> None:
    named = [("other_keys", other) for other in others]
    if key is not None:
        named.insert(0, ("key", key))
    for name, each in named:
        if len(each) < SHORTEST_KEY:
            raise StoreMisconfigured(f"store.{name} is {len(each)} bytes long; it must be at least {SHORTEST_KEY}.")


async def _start_embedded(
    directory: Path, key: bytes | None, others: Sequence[bytes], spawn: Spawn, warn: Warn
) -> tuple[Embedded, tuple[bytes, ...]]:
    """Start the private server; return it with the keys that open its values, the one that seals first.

    Without a *key* the one in *directory* seals; with one it still opens what it sealed before.
    """
    embedded = await Embedded.start(directory, spawn, warn)
    try:
        own = master.from_directory(directory) if key is None else master.existing(directory)
    except (OSError, ValueError):
        await embedded.close()
        raise
    keys = (own, *others) if key is None else (key, *others, own)
    return embedded, tuple(dict.fromkeys(each for each in keys if each is not None))


async def _open_servers(
    url: str, embedded: Embedded | None, ring: Sequence[bytes], spawn: Spawn, notices: Notices
) -> Store:
    kind = "embedded" if embedded is not None else url.partition("://")[0]
    async with AsyncExitStack() as opened:
        if embedded is not None:
            opened.push_async_callback(embedded.close)
        servers = Servers(embedded.url if embedded is not None else url, spawn=spawn)
        opened.push_async_callback(servers.close)
        sealer = Sealer(ring[0], ring[1:]) if ring else Sealer(master.fresh())
        store = Store(kind, url, servers, sealer, spawn, notices)
        keeper = Keeper(servers, store.records, notices, ring)
        await keeper.first()
        store.keep(keeper, embedded)
        opened.pop_all()  # from here on the store closes them
    return store


def redacted(url: str) -> str:
    """*url* without credentials and options, fit for a log."""
    scheme, separator, rest = url.partition("://")
    bare, _, options = rest.partition("?")
    if "@" in options:
        return f"{scheme}://***"  # a question mark inside a password: nothing after it can be told apart
    _, at, hosts = bare.rpartition("@")
    return f"{scheme}{separator}***@{hosts}" if at else f"{scheme}{separator}{bare}"

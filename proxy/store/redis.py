"""The store on Redis and Valkey servers: one deadline per operation, no retries, a bounded pool, a breaker per node.

Only a process that uses a server imports this module, and with it redis.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from cachetools import LRUCache
from redis import exceptions as errors
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from proxy.store import deadlines
from proxy.store.backend import BREAKING, SharedBackend, StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import Breaker, State
from proxy.store.operations import Operation, Unavailable
from proxy.tasks import Spawn

T = TypeVar("T")

POOL: Final = 32
"""Operations at once, per process. More of them open more connections in a burst and are no faster, because one event
loop serves them all: 200 simultaneous writes take 36 ms with 64 and 26 ms with 32.
"""

OLDEST: Final = (7, 0)
"""The first version of Redis with NX and GET in one SET: https://redis.io/docs/latest/commands/set/"""

_NODES: Final = 256
"""Most nodes with a breaker."""

_CONNECTION_OPTIONS: Final[dict[str, Any]] = {
    "socket_timeout": deadlines.SOCKET,
    "socket_connect_timeout": deadlines.SOCKET,
    "health_check_interval": 0,
    "decode_responses": False,
    "protocol": 2,  # RESP3 adds a handshake and push messages that nothing here uses
    "driver_info": None,  # two more round trips on every new connection, to tell the server the client's name
}
"""Options that no URL may change. With the library's own timeouts, which are seconds long, a server that hangs would
delay requests.
"""


# The kinds of a server's errors, for metrics, the log and the breaker.

_PROTOCOL_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)
"""Errors that the library raises if a server does not speak the protocol."""

_KINDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (errors.MaxConnectionsError, "pool"),
    (errors.OutOfMemoryError, "oom"),
    (errors.AuthenticationError, "auth"),
    (errors.AuthorizationError, "auth"),
    (errors.NoPermissionError, "permission"),
    (errors.BusyLoadingError, "loading"),
    (errors.ReadOnlyError, "readonly"),
    (errors.MasterDownError, "loading"),
    (errors.ClusterError, "cluster"),
    (errors.RedisClusterException, "cluster"),
    (errors.SlotNotCoveredError, "cluster"),
    (errors.TimeoutError, "slow"),
    (TimeoutError, "slow"),
    (errors.ConnectionError, "down"),
    (OSError, "down"),
    (errors.InvalidResponse, "protocol"),
    *((cause, "protocol") for cause in _PROTOCOL_ERRORS),
)
"""The kind of each error; the first that matches names it."""

_PREFIXES: Final = {"WRONGTYPE": "wrongtype", "MISCONF": "disk", "NOREPLICAS": "replicas"}
"""Error prefixes for which the library has no class: https://redis.io/docs/latest/develop/reference/errors/"""

FAULTS: Final = (errors.RedisError, errors.RedisClusterException, OSError, TimeoutError, *_PROTOCOL_ERRORS)
"""Errors that an operation may raise. Those of a cluster that cannot be reached are no ``RedisError``."""


class RedisBackend(SharedBackend):
    """The ``Backend`` behind a URL: one server, the master that a Sentinel names, or a cluster.

    *spawn* starts a named background task.
    Raises ``StoreMisconfigured`` for a URL that cannot be used; does not connect.
    """

    def __init__(self, url: str, *, spawn: Spawn) -> None:
        super().__init__(time.monotonic)
        self._sentinel: Sentinel | None = None
        try:
            self._client = self._build(url)
        except (ValueError, TypeError, errors.RedisError, errors.RedisClusterException) as error:
            raise StoreMisconfigured(f"store.url cannot be used: {_harmless(error)}.") from None
        self._spawn = spawn
        self._breakers: LRUCache[str, Breaker] = LRUCache(_NODES)
        # The pool raises an error if all of its connections are in use; operations wait for this semaphore instead.
        self._slots = asyncio.Semaphore(POOL)
        self._running: set[asyncio.Task[Any]] = set()

    def version(self) -> None:
        """None: the server would have to be asked, which costs as much as the look-up that a version could save."""
        return

    @property
    def breaker(self) -> State:
        """``open``, ``half-open`` or ``closed``: the worst over all nodes."""
        states = {breaker.state for breaker in self._breakers.values()}
        if "open" in states:
            return "open"
        if "half-open" in states:
            return "half-open"
        return "closed"

    async def connect(self) -> None:
        """Connect within ``deadlines.CONNECT`` seconds and check the server's version.

        Raises ``Unavailable`` if there is no answer, ``StoreUnsupported`` if the server is too old.
        """
        try:
            async with asyncio.timeout(deadlines.CONNECT):
                await self._client.initialize()
                info = await self._server_info()
        except errors.NoPermissionError:
            return  # this user may not run INFO: the server counts as new enough
        except FAULTS as error:
            raise Unavailable(kind_of(error)) from error
        version = str(info.get("redis_version", ""))
        if version and _version(version) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise StoreUnsupported(
                f"The server behind store.url is version {version}; Redis {oldest} or newer, or any Valkey, is needed "
                "(older ones have no SET with NX and GET together)."
            )

    async def probe(self) -> None:
        """Probe every node whose breaker allows it, so that no request has to."""
        for node, breaker in list(self._breakers.items()):
            if breaker.state == "closed":
                continue
            if self._has_left(node):
                del self._breakers[node]
            elif breaker.admit():
                try:
                    async with asyncio.timeout(deadlines.OPERATION):
                        await _perform(breaker, partial(self._ping, node))
                except TimeoutError:
                    continue  # ``_perform`` has counted it

    async def close(self) -> None:
        """Wait until running operations have ended, then close every connection."""
        if self._running:
            await asyncio.wait(self._running, timeout=2 * deadlines.OPERATION)
        for client in (self._client, self._sentinel):
            if client is not None:
                try:
                    async with asyncio.timeout(deadlines.SOCKET):
                        await client.aclose()
                except FAULTS:
                    continue  # the server is gone, and its connections with it

    async def _attempt(self, operation: Operation[T], node: str, seconds: float) -> T:
        """Run *operation*, once a connection is free and if it answers within *seconds*. Raises ``Unavailable``."""
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable("pool") from None
        breaker = self._breaker_of(node)
        if not breaker.admit():
            self._slots.release()
            raise Unavailable("open")
        # A task of its own: if its caller is cancelled it still reads its reply, so no connection goes back to the
        # pool with a reply that the next operation would take for its own.
        task = self._spawn(_perform(breaker, partial(operation.on_server, self._client)), "store operation")
        self._running.add(task)
        task.add_done_callback(self._done)
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            # The operation goes on for its full time, so that the breaker learns if the server answers at all.
            asyncio.get_running_loop().call_later(deadlines.OPERATION - seconds, task.cancel)
            raise Unavailable("slow")
        reply: T | Unavailable = task.result()
        if isinstance(reply, Unavailable):
            raise reply
        return reply

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._slots.release()

    def _breaker_of(self, node: str) -> Breaker:
        breaker = self._breakers.get(node)
        if breaker is None:
            breaker = self._breakers[node] = Breaker(self._clock, random.random)
        return breaker

    def _node_of(self, key: str) -> str:
        if not isinstance(self._client, RedisCluster):
            return ""
        try:
            node = self._client.get_node_from_key(key)
        except (errors.RedisError, errors.RedisClusterException):
            return ""  # the slot map is not known yet
        if node is None:
            return ""
        return node.name

    def _has_left(self, node: str) -> bool:
        return isinstance(self._client, RedisCluster) and self._client.get_node(node_name=node) is None

    async def _ping(self, node: str) -> object:
        if isinstance(self._client, RedisCluster):
            return await self._client.ping(target_nodes=self._client.get_node(node_name=node))
        return await self._client.ping()

    async def _server_info(self) -> dict[str, Any]:
        if isinstance(self._client, RedisCluster):
            info = await self._client.info("server", target_nodes=self._client.get_default_node())
        else:
            info = await self._client.info("server")
        return dict(info)

    def _build(self, url: str) -> Redis | RedisCluster:
        scheme, _, rest = url.partition("://")
        match scheme:
            case "redis" | "rediss" | "unix":
                return _single(url)
            case "redis+sentinel" | "rediss+sentinel":
                self._sentinel, client = _through_sentinel(scheme.removesuffix("+sentinel"), rest)
                return client
            case "redis+cluster" | "rediss+cluster":
                return _cluster(scheme.removesuffix("+cluster"), rest)
        raise ValueError(
            "its scheme is none of embedded, memory, redis://, rediss://, unix://, redis+sentinel://, redis+cluster://"
        )


async def _perform(breaker: Breaker, call: Callable[[], Awaitable[T]]) -> T | Unavailable:
    """The reply to *call*, or ``Unavailable`` with the reason; *breaker* counts it."""
    try:
        reply = await call()
    except asyncio.CancelledError:
        # A deadline passed: ``_attempt`` and ``probe`` cancel what got no answer in time.
        breaker.failed()
        raise
    except FAULTS as error:
        kind = kind_of(error)
        if kind in BREAKING:
            breaker.failed()
        elif kind != "pool" or breaker.state == "half-open":
            # Any other error is an answer. A lack of connections is none, but a half-open breaker waits for a report.
            breaker.succeeded()
        return Unavailable(kind)
    breaker.succeeded()
    return reply


def kind_of(error: BaseException) -> str:
    """The kind of *error*, for metrics and the log."""
    if isinstance(error, errors.ResponseError):
        prefix, _, _ = str(error).partition(" ")
        if prefix in _PREFIXES:
            return _PREFIXES[prefix]
    for cause, kind in _KINDS:
        if isinstance(error, cause):
            return kind
    return "error"


def _version(text: str) -> tuple[int, ...]:
    """Return major and minor version; 0 for a part that is no number."""
    digits = [re.sub(r"\D", "", part) for part in text.split(".")[:2]]
    return tuple(int(part or 0) for part in digits)


def _no_retry() -> Retry:
    """Return the library's policy for no retries: the deadlines leave no time for one."""
    return Retry(NoBackoff(), 0)


def _options(url: str) -> dict[str, Any]:
    return {**parse_url(url), "retry_on_timeout": False, "retry": _no_retry(), **_CONNECTION_OPTIONS}


def _single(url: str) -> Redis:
    pool = ConnectionPool(**{**_options(url), "max_connections": POOL})
    # Opens nothing, but raises now instead of at the first request if an option is unknown.
    pool.connection_class(**pool.connection_kwargs)
    return Redis.from_pool(pool)


def _hosts(rest: str) -> tuple[str, list[tuple[str, int | None]], str]:
    """Split ``user:secret@a:1,b:2/tail``: return the part before the hosts, the hosts, and the part after them."""
    authority, slash, tail = rest.partition("/")
    credentials, at, names = authority.rpartition("@")
    hosts = [urlsplit(f"//{name}") for name in names.split(",") if name]
    if not hosts or not all(host.hostname for host in hosts):
        raise ValueError("it names no host")
    return credentials + at, [(str(host.hostname), host.port) for host in hosts], slash + tail


def _through_sentinel(scheme: str, rest: str) -> tuple[Sentinel, Redis]:
    credentials, hosts, tail = _hosts(rest)
    path, _, query = tail.partition("?")
    service, _, database = path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no Sentinel service: redis+sentinel://host:port,host:port/service")
    unknown = {name: values[0] for name, values in parse_qs(query).items()}
    login: dict[str, str] = {}
    for name in ("username", "password"):
        value = unknown.pop(f"sentinel_{name}", None)
        if value is not None:
            login[name] = value
    if unknown:
        raise ValueError(f"it has options that are not known: {', '.join(sorted(unknown))}")
    options = _options(f"{scheme}://{credentials}localhost/{database}")
    encrypted = options.pop("connection_class", None) is SSLConnection
    options.pop("host")
    sentinel = Sentinel(  # type: ignore[no-untyped-call]  # the library left it unannotated
        [(host, port or 26379) for host, port in hosts],
        sentinel_kwargs={**_CONNECTION_OPTIONS, **login, "retry": _no_retry(), "ssl": encrypted},
    )
    client = sentinel.master_for(unquote(service), ssl=encrypted, max_connections=POOL, **options)
    return sentinel, client


def _cluster(scheme: str, rest: str) -> RedisCluster:
    credentials, hosts, tail = _hosts(rest)
    options = _options(f"{scheme}://{credentials}localhost{tail}")
    encrypted = options.pop("connection_class", None) is SSLConnection
    for unknown_to_clusters in ("host", "retry_on_timeout"):
        options.pop(unknown_to_clusters)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port or 6379) for host, port in hosts],
        max_connections=POOL,
        require_full_coverage=False,  # conversations on reachable nodes are served while another node is down
        ssl=encrypted,
        **options,
    )


def _harmless(error: BaseException) -> str:
    """Return the text of *error* if it is ours: the library's may quote a password from the URL."""
    is_ours = isinstance(error, ValueError) and str(error).startswith("it")
    if not is_ours:
        return "it is not a valid URL"
    return str(error)

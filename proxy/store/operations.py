"""The operations of the store, and the backend that runs them in the memory of this process.

Each operation is a value, with what it does to a table of entries and on a server. The code that runs, times, repeats
or refuses an operation need not know which one it is.

Entries are in the memory of this process or in a SQLite file, and an operation has them to itself. Hashes and scored
members are packed into one entry as MessagePack: they have 64 and 200 members at most.

A server does the same by one command or one Lua script, and runs nothing else meanwhile. Scripts are sent with EVAL
each time, and not by their digest with EVALSHA, because a server forgets its scripts at a restart or failover:
https://redis.io/docs/latest/develop/programmability/eval-intro/
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, TypeVar, cast

import msgspec

from proxy.store.breaker import State

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

    Client = Redis | RedisCluster

T = TypeVar("T")

_EXTEND: Final = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"

_RELEASE: Final = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('unlink', KEYS[1]) or 0"
"""Without a script a lease could expire between the comparison and the removal, which would then remove another
replica's: https://redis.io/docs/latest/commands/set/#patterns
"""

_SWAP: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
return 1
"""

_ADD: Final = "redis.call('incrby', KEYS[1], ARGV[1]) return redis.call('pexpire', KEYS[1], ARGV[2])"

_SET_FIELD: Final = """
redis.call('hset', KEYS[1], ARGV[1], ARGV[2])
if redis.call('hlen', KEYS[1]) > tonumber(ARGV[3]) then
  local fields = redis.call('hkeys', KEYS[1])
  table.sort(fields)
  redis.call('hdel', KEYS[1], fields[1])
end
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[4]) then redis.call('pexpire', KEYS[1], ARGV[4]) end
return 1
"""

_SCORE_MEMBER: Final = """
redis.call('zadd', KEYS[1], ARGV[2], ARGV[1])
redis.call('zremrangebyrank', KEYS[1], 0, -1 - tonumber(ARGV[3]))
return redis.call('pexpire', KEYS[1], ARGV[4])
"""


class Unavailable(Exception):
    """An operation got no usable reply; ``kind`` is a short, fixed name under which it is counted."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Entries(Protocol):
    """A table of values under keys. An entry that has expired counts as missing."""

    def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, in order; None for each that is missing."""

    def put(self, key: str, value: bytes, seconds: float | None) -> None:
        """Store *value* for *seconds* (None: for ever), in the place of an earlier one."""

    def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now; does nothing if it is missing."""

    def remove(self, key: str) -> None:
        """Delete *key*."""

    def seconds_left(self, key: str) -> float:
        """Seconds until *key* expires; zero or less if it is missing or never does."""


class Operation(msgspec.Struct, Generic[T], frozen=True):
    """One operation, whose result has the type ``T``; ``writes`` is False if it changes nothing."""

    writes: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """The key that it works on."""
        raise NotImplementedError

    def on_entries(self, entries: Entries) -> T:
        """Run it on *entries*. Raises ``ValueError`` if the value there has another type."""
        raise NotImplementedError

    async def on_server(self, client: Client) -> T:
        """Run it on a server. Raises ``redis``'s errors, and ``TypeError`` for a reply that no such server gives."""
        raise NotImplementedError


class Read(Operation[Sequence[bytes | None]], frozen=True):
    """Read the values under *keys* (of one conversation), in order; None for each that is missing."""

    writes: ClassVar[bool] = False
    keys: Sequence[str]

    @property
    def key(self) -> str:
        return self.keys[0]

    def on_entries(self, entries: Entries) -> Sequence[bytes | None]:
        return entries.read(self.keys)

    async def on_server(self, client: Client) -> Sequence[bytes | None]:
        reply = await client.mget(list(self.keys))
        values = [_value(value) for value in _checked(reply, list)]
        if len(values) != len(self.keys):
            raise TypeError("another number of values than keys")
        return values


class Claim(Operation[bytes | None], frozen=True):
    """Store *value* for *seconds* (None: for ever) unless *key* exists.

    The result is the value that is there, or None if *value* was stored.
    """

    key: str
    value: bytes
    seconds: float | None

    def on_entries(self, entries: Entries) -> bytes | None:
        (present,) = entries.read([self.key])
        if present is None:
            entries.put(self.key, self.value, self.seconds)
        return present

    async def on_server(self, client: Client) -> bytes | None:
        lifetime: int | None = None
        if self.seconds is not None:
            lifetime = _milliseconds(self.seconds)
        return _value(await client.set(self.key, self.value, nx=True, get=True, px=lifetime))


class Put(Operation[None], frozen=True):
    """Store *value* for *seconds* under *key*, in the place of any other value."""

    key: str
    value: bytes
    seconds: float

    def on_entries(self, entries: Entries) -> None:
        entries.put(self.key, self.value, self.seconds)

    async def on_server(self, client: Client) -> None:
        await client.set(self.key, self.value, px=_milliseconds(self.seconds))


class Refresh(Operation[None], frozen=True):
    """Have *key* expire *seconds* from now; does nothing if it is missing."""

    key: str
    seconds: float

    def on_entries(self, entries: Entries) -> None:
        entries.refresh(self.key, self.seconds)

    async def on_server(self, client: Client) -> None:
        await client.pexpire(self.key, _milliseconds(self.seconds))


class Remove(Operation[None], frozen=True):
    """Delete *key*, of whatever type."""

    key: str

    def on_entries(self, entries: Entries) -> None:
        entries.remove(self.key)

    async def on_server(self, client: Client) -> None:
        await client.unlink(self.key)


class Extend(Operation[bool], frozen=True):
    """Have *key* expire *seconds* from now if it holds *value*. The result is False if it does not."""

    key: str
    value: bytes
    seconds: float

    def on_entries(self, entries: Entries) -> bool:
        has_value = entries.read([self.key]) == [self.value]
        if has_value:
            entries.refresh(self.key, self.seconds)
        return has_value

    async def on_server(self, client: Client) -> bool:
        return bool(await _run_script(client, _EXTEND, self.key, self.value, _milliseconds(self.seconds)))


class Release(Operation[bool], frozen=True):
    """Delete *key* if it holds *value*. The result is False if it did not."""

    key: str
    value: bytes

    def on_entries(self, entries: Entries) -> bool:
        has_value = entries.read([self.key]) == [self.value]
        if has_value:
            entries.remove(self.key)
        return has_value

    async def on_server(self, client: Client) -> bool:
        return bool(await _run_script(client, _RELEASE, self.key, self.value))


class Swap(Operation[bool], frozen=True):
    """Store *value* for *seconds* under *key* if it holds *old*. The result is False if it did not.

    There is no moment in which *key* is missing, and a value written meanwhile stays.
    """

    key: str
    old: bytes
    value: bytes
    seconds: float

    def on_entries(self, entries: Entries) -> bool:
        has_value = entries.read([self.key]) == [self.old]
        if has_value:
            entries.put(self.key, self.value, self.seconds)
        return has_value

    async def on_server(self, client: Client) -> bool:
        return bool(await _run_script(client, _SWAP, self.key, self.old, self.value, _milliseconds(self.seconds)))


class Add(Operation[None], frozen=True):
    """Add *amount* to the integer under *key*, which expires *seconds* from now."""

    key: str
    amount: int
    seconds: float

    def on_entries(self, entries: Entries) -> None:
        (present,) = entries.read([self.key])
        total = int(present or 0) + self.amount
        entries.put(self.key, b"%d" % total, self.seconds)

    async def on_server(self, client: Client) -> None:
        await _run_script(client, _ADD, self.key, self.amount, _milliseconds(self.seconds))


def sum_of(value: bytes | None) -> int:
    """Return the sum that ``Add`` has stored as *value*; 0 if it is missing or no number."""
    if value is None or not value.lstrip(b"-").isdigit():
        return 0
    return int(value)


class SetField(Operation[None], frozen=True):
    """Set *field* of the hash under *key*, which expires *seconds* from now at the earliest.

    Of more than *most* fields the one whose name sorts first is removed.
    """

    key: str
    field: str
    value: bytes
    most: int
    seconds: float

    def on_entries(self, entries: Entries) -> None:
        fields = {**_unpacked(entries, self.key, dict[bytes, bytes]), self.field.encode(): self.value}
        if len(fields) > self.most:
            del fields[min(fields)]
        entries.put(self.key, msgspec.msgpack.encode(fields), max(self.seconds, entries.seconds_left(self.key)))

    async def on_server(self, client: Client) -> None:
        arguments = (self.field, self.value, self.most, _milliseconds(self.seconds))
        await _run_script(client, _SET_FIELD, self.key, *arguments)


class ReadFields(Operation[Mapping[bytes, bytes]], frozen=True):
    """Read all fields of the hash under *key*; empty if there is none."""

    writes: ClassVar[bool] = False
    key: str

    def on_entries(self, entries: Entries) -> Mapping[bytes, bytes]:
        return _unpacked(entries, self.key, dict[bytes, bytes])

    async def on_server(self, client: Client) -> Mapping[bytes, bytes]:
        return _checked(await cast("Awaitable[object]", client.hgetall(self.key)), dict)


class ScoreMember(Operation[None], frozen=True):
    """Set the score of *member* under *key*, which expires *seconds* from now; only the *most* highest stay."""

    key: str
    member: bytes
    score: float
    most: int
    seconds: float

    def on_entries(self, entries: Entries) -> None:
        scores = list(_unpacked(entries, self.key, dict[bytes, float]).items())[: self.most]
        highest = [pair for pair in scores if pair[0] != self.member]
        # They are stored in order, and the newest is nearly always the highest: to sort 200 takes as long as the write.
        lower = (at for at, pair in enumerate(highest) if (pair[1], pair[0]) < (self.score, self.member))
        highest.insert(next(lower, len(highest)), (self.member, self.score))
        entries.put(self.key, msgspec.msgpack.encode(dict(highest[: self.most])), self.seconds)

    async def on_server(self, client: Client) -> None:
        arguments = (self.member, self.score, self.most, _milliseconds(self.seconds))
        await _run_script(client, _SCORE_MEMBER, self.key, *arguments)


class TopMembers(Operation[Sequence[tuple[bytes, float]]], frozen=True):
    """Read the *most* members under *key* with the highest scores, the highest first."""

    writes: ClassVar[bool] = False
    key: str
    most: int

    def on_entries(self, entries: Entries) -> Sequence[tuple[bytes, float]]:
        return list(_unpacked(entries, self.key, dict[bytes, float]).items())[: self.most]

    async def on_server(self, client: Client) -> Sequence[tuple[bytes, float]]:
        reply = await client.zrange(self.key, 0, self.most - 1, desc=True, withscores=True)
        return [(bytes(member), float(score)) for member, score in _checked(reply, list)]


def _unpacked(entries: Entries, key: str, kind: type[T]) -> T:
    """Return the hash or the scored members under *key*; empty if there are none."""
    (value,) = entries.read([key])
    if value is None:
        return kind()
    return msgspec.msgpack.decode(value, type=kind)


async def _run_script(client: Client, script: str, key: str, *arguments: str | bytes | float) -> object:
    reply: object = await client.eval(script, 1, key, *arguments)
    return reply


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _checked(reply: object, kind: type[T]) -> T:
    if isinstance(reply, kind):
        return reply
    raise TypeError(f"a reply of type {type(reply).__name__}")


def _value(reply: object) -> bytes | None:
    if reply is None:
        return None
    return _checked(reply, bytes)


# The memory of this process.

MAX_BYTES: Final = 64 * 1024 * 1024
"""Bytes of all entries at most."""

_ENTRY: Final = 200
"""Bytes that an entry takes beside its value, about: its key, its expiry, its place in the dictionary."""


class MemoryBackend:
    """A ``Backend`` of at most *max_bytes*, which ends with the process; the least recently used key goes first.

    It never raises ``Unavailable``.
    """

    shared: bool = False
    breaker: State = "closed"
    refusal: str = ""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, tuple[bytes, float | None]] = OrderedDict()
        """Values with the monotonic second at which each expires; the least recently used is the first."""

        self._bytes = 0

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation* at once."""
        return operation.on_entries(self)

    def version(self) -> None:
        """None: no other process writes here."""
        return

    async def close(self) -> None:
        """Delete everything."""
        self._entries.clear()
        self._bytes = 0

    def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values under *keys*, in order; None for each that is missing."""
        values: list[bytes | None] = []
        for key in keys:
            value, until = self._entries.get(key, (None, None))
            if until is not None and until <= self._clock():
                self.remove(key)
                value = None
            elif value is not None:
                self._entries.move_to_end(key)
            values.append(value)
        return values

    def put(self, key: str, value: bytes, seconds: float | None) -> None:
        """Store *value* for *seconds* (None: for ever), in the place of an earlier one."""
        self.remove(key)
        until = None
        if seconds is not None:
            until = self._clock() + seconds
        self._entries[key] = (value, until)
        self._bytes += _ENTRY + len(value)
        while self._bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def refresh(self, key: str, seconds: float) -> None:
        """Have *key* expire *seconds* from now; does nothing if it is missing."""
        (value,) = self.read([key])
        if value is not None:
            self._entries[key] = (value, self._clock() + seconds)

    def remove(self, key: str) -> None:
        """Delete *key*."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _ENTRY + len(entry[0])

    def seconds_left(self, key: str) -> float:
        """Seconds until *key* expires; zero or less if it is missing or never does."""
        _, until = self._entries.get(key, (b"", None))
        return (until or 0.0) - self._clock()

"""The contract of every place that stores bytes: the memory of a process, a file, a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.store.backend import Backend
from proxy.store.operations import (
    Add,
    Claim,
    Extend,
    MemoryBackend,
    Put,
    Read,
    ReadFields,
    Refresh,
    Release,
    Remove,
    ScoreMember,
    SetField,
    Swap,
    TopMembers,
)
from proxy.store.redis import RedisBackend
from proxy.store.sqlite import SqliteBackend
from proxy.tasks import Tasks, ignore_failure
from tests.store.conftest import Valkey

SOON, LATER = 0.3, 1.0
"""Seconds of a short life; the latter where something is done before its end."""


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """Each backend, open and empty."""
    opened: Backend = MemoryBackend()
    tasks = Tasks(ignore_failure)
    if request.param == "sqlite":
        opened = SqliteBackend(tmp_path / "data", warn=lambda event, facts: None)
        await opened.connect()
    if request.param == "redis":
        valkey: Valkey = request.getfixturevalue("valkey")
        opened = RedisBackend(valkey.url, spawn=tasks.spawn)
    yield opened
    await opened.close()
    await tasks.finish(1)


async def test_a_claim_is_won_once(backend: Backend) -> None:
    """The first claim stores its value; each later one gets that value and changes nothing."""
    assert await backend.run(Claim("k", b"one", 60)) is None
    assert await backend.run(Claim("k", b"two", 60)) == b"one"
    assert await backend.run(Read(["k"])) == [b"one"]


async def test_of_many_claims_at_once_one_wins(backend: Backend) -> None:
    """Claims that come together agree on one value."""
    found = await asyncio.gather(*(backend.run(Claim("k", b"%d" % n, 60)) for n in range(30)))
    assert found.count(None) == 1
    (winner,) = await backend.run(Read(["k"]))
    assert set(found) == {None, winner}


@pytest.mark.slow
async def test_a_put_replaces_what_is_there(backend: Backend) -> None:
    """A value that is put takes the place of an earlier one, and its lifetime."""
    await backend.run(Claim("k", b"old", None))
    await backend.run(Put("k", b"new", SOON))
    assert await backend.run(Read(["k"])) == [b"new"]
    await asyncio.sleep(LATER)
    assert await backend.run(Read(["k"])) == [None]


async def test_reads_are_in_order(backend: Backend) -> None:
    """Values come in the order of their keys, None for each that is missing, and twice if a key is named twice."""
    await backend.run(Claim("a", b"1", 60))
    await backend.run(Claim("b", b"", None))
    assert await backend.run(Read(["x", "b", "a", "y", "a"])) == [None, b"", b"1", None, b"1"]


async def test_many_keys_are_read_at_once(backend: Backend) -> None:
    """A look-up of 513 keys finds the one that is there."""
    await backend.run(Claim("k512", b"here", 60))
    values = await backend.run(Read([f"k{n}" for n in range(513)]))
    assert values[512] == b"here"
    assert values.count(None) == 512


async def test_any_bytes_come_back(backend: Backend) -> None:
    """A value of a megabyte with every byte is what was stored."""
    value = bytes(range(256)) * 4096
    await backend.run(Claim("k", value, 60))
    assert await backend.run(Read(["k"])) == [value]


async def test_values_expire(backend: Backend) -> None:
    """A value is gone after its time, may be claimed anew, and one without a time stays."""
    await backend.run(Claim("short", b"1", SOON))
    await backend.run(Claim("long", b"2", None))
    await asyncio.sleep(SOON + 0.1)
    assert await backend.run(Read(["short", "long"])) == [None, b"2"]
    assert await backend.run(Claim("short", b"3", 60)) is None


@pytest.mark.slow
async def test_a_refreshed_value_lives_on(backend: Backend) -> None:
    """A refresh counts from now; one of a missing key creates nothing."""
    await backend.run(Claim("k", b"1", LATER))
    await backend.run(Refresh("k", 60))
    await backend.run(Refresh("missing", 60))
    await asyncio.sleep(LATER + 0.1)
    assert await backend.run(Read(["k", "missing"])) == [b"1", None]


async def test_removal(backend: Backend) -> None:
    """A removed key is gone, of whatever type, and a missing one is no error."""
    await backend.run(Claim("k", b"1", 60))
    await backend.run(SetField("hash", "f", b"1", 5, 60))
    for key in ("k", "hash", "missing"):
        await backend.run(Remove(key))
    assert await backend.run(Read(["k"])) == [None]
    assert await backend.run(ReadFields("hash")) == {}


@pytest.mark.slow
async def test_a_lease_is_extended_and_released_by_its_holder_only(backend: Backend) -> None:
    """Both compare the value; with another one, or none, nothing happens."""
    await backend.run(Claim("k", b"mine", LATER))
    assert not await backend.run(Extend("k", b"theirs", 60))
    assert not await backend.run(Release("k", b"theirs"))
    assert not await backend.run(Extend("missing", b"mine", 60))
    assert not await backend.run(Release("missing", b"mine"))
    assert await backend.run(Extend("k", b"mine", 60))
    await asyncio.sleep(LATER + 0.1)
    assert await backend.run(Release("k", b"mine"))
    assert await backend.run(Read(["k"])) == [None]


@pytest.mark.slow
async def test_a_swap_compares_first(backend: Backend) -> None:
    """A value is replaced only if it is the one that is expected."""
    await backend.run(Claim("k", b"old", 60))
    assert not await backend.run(Swap("k", b"other", b"new", 60))
    assert not await backend.run(Swap("missing", b"", b"new", 60))
    assert await backend.run(Read(["k", "missing"])) == [b"old", None]
    assert await backend.run(Swap("k", b"old", b"new", LATER))
    assert await backend.run(Read(["k"])) == [b"new"]
    await asyncio.sleep(LATER + 0.1)
    assert await backend.run(Read(["k"])) == [None]


@pytest.mark.slow
async def test_sums(backend: Backend) -> None:
    """Amounts that are added at once are all counted; the sum expires after the last one."""
    await asyncio.gather(*(backend.run(Add("k", n, 60)) for n in range(20)))
    assert await backend.run(Read(["k"])) == [b"190"]
    await backend.run(Add("k", -200, LATER))
    assert await backend.run(Read(["k"])) == [b"-10"]
    await asyncio.sleep(LATER + 0.1)
    assert await backend.run(Read(["k"])) == [None]


async def test_fields(backend: Backend) -> None:
    """A hash has the fields that were set last; beyond the limit the one that sorts first goes."""
    assert await backend.run(ReadFields("h")) == {}
    for field in ("b", "c", "a"):
        await backend.run(SetField("h", field, field.encode(), 3, 60))
    await backend.run(SetField("h", "b", b"new", 3, 60))
    assert await backend.run(ReadFields("h")) == {b"a": b"a", b"b": b"new", b"c": b"c"}
    await backend.run(SetField("h", "d", b"d", 3, 60))
    assert set(await backend.run(ReadFields("h"))) == {b"b", b"c", b"d"}


async def test_a_hash_lives_as_long_as_its_longest_field(backend: Backend) -> None:
    """A field with a short life does not end the hash earlier."""
    await backend.run(SetField("h", "a", b"1", 3, 60))
    await backend.run(SetField("h", "b", b"2", 3, SOON))
    await backend.run(SetField("short", "b", b"2", 3, SOON))
    await asyncio.sleep(SOON + 0.1)
    assert await backend.run(ReadFields("h")) == {b"a": b"1", b"b": b"2"}
    assert await backend.run(ReadFields("short")) == {}


async def test_scores(backend: Backend) -> None:
    """Members come with the highest score first, and only so many stay."""
    assert await backend.run(TopMembers("z", 3)) == []
    for member, score in ((b"a", 1.5), (b"b", 3.0), (b"c", 2.0), (b"a", 4.0), (b"d", 0.5)):
        await backend.run(ScoreMember("z", member, score, 3, 60))
    assert await backend.run(TopMembers("z", 9)) == [(b"a", 4.0), (b"b", 3.0), (b"c", 2.0)]
    assert await backend.run(TopMembers("z", 1)) == [(b"a", 4.0)]


async def test_all_is_well(backend: Backend) -> None:
    """A backend that works has a closed breaker and refuses nothing."""
    await backend.run(Claim("k", b"1", 60))
    assert (backend.breaker, backend.refusal) == ("closed", "")
    assert backend.shared is (not isinstance(backend, MemoryBackend))


# The memory of a process.


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 900)), max_size=60))
async def test_it_never_holds_more_than_its_limit(writes: list[tuple[str, int]]) -> None:
    """After any writes, the stored bytes stay within the limit and are counted right."""
    memory = MemoryBackend(max_bytes=3000)
    for key, size in writes:
        await memory.run(Claim(key, bytes(size), 60))
        held = [value for value in await memory.run(Read("abcdefgh")) if value is not None]
        assert sum(len(value) + 200 for value in held) == memory._bytes <= 3000


async def test_the_least_recently_used_goes_first() -> None:
    """Reading a value keeps it while others are pushed out."""
    memory = MemoryBackend(max_bytes=1500)
    for key in "abc":
        await memory.run(Claim(key, bytes(200), 60))
    await memory.run(Read("a"))
    await memory.run(Claim("d", bytes(200), 60))
    found = await memory.run(Read("abcd"))
    assert [value is not None for value in found] == [True, False, True, True]


async def test_values_end_with_their_time_unless_refreshed() -> None:
    """A value is gone when its time is over, counted from its last refresh."""
    now = 0.0
    memory = MemoryBackend(clock=lambda: now)
    await memory.run(Claim("a", b"1", 10))
    await memory.run(Claim("b", b"2", 10))
    await memory.run(Claim("c", b"3", None))
    now = 9.0
    await memory.run(Refresh("b", 10))
    now = 11.0
    assert await memory.run(Read("abc")) == [None, b"2", b"3"]
    assert await memory.run(Claim("a", b"new", 10)) is None

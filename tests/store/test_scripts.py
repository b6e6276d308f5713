"""What servers do in one step, on a real one."""

from __future__ import annotations

from proxy.store.redis import Servers
from proxy.tasks import Tasks
from tests.store.conftest import Valkey


async def test_a_table_loses_the_field_that_sorts_first_and_keeps_its_longest_life(valkey: Valkey) -> None:
    """Of more fields than it may have the first goes; a note of short life shortens no longer one."""
    tasks = Tasks(lambda name, error: None)
    servers = Servers(valkey.url, spawn=tasks.spawn)
    for number in (3, 1, 2):
        await servers.note("t", f"{number}", b"%d" % number, 3, 100)
    await servers.note("t", "4", b"4", 3, 10)
    assert await servers.table("t") == {b"2": b"2", b"3": b"3", b"4": b"4"}
    assert int(valkey.say("PTTL t").strip().lstrip(":")) > 20_000
    await servers.note("t", "4", b"four", 3, 10)
    assert (await servers.table("t"))[b"4"] == b"four"
    await servers.close()


async def test_a_list_keeps_the_newest(valkey: Valkey) -> None:
    """Of more members than it may have the lowest scores go; a member's score is its last one."""
    tasks = Tasks(lambda name, error: None)
    servers = Servers(valkey.url, spawn=tasks.spawn)
    for score, member in enumerate((b"a", b"b", b"c", b"a", b"d")):
        await servers.rank("l", member, float(score), 3, 100)
    assert await servers.ranked("l", 9) == [(b"d", 4.0), (b"a", 3.0), (b"c", 2.0)]
    assert await servers.ranked("l", 1) == [(b"d", 4.0)]
    assert 0 < int(valkey.say("PTTL l").strip().lstrip(":")) <= 100_000
    await servers.close()


async def test_only_who_holds_a_value_gives_it_back(valkey: Valkey) -> None:
    """A value goes once, and whoever names another one is told so."""
    tasks = Tasks(lambda name, error: None)
    servers = Servers(valkey.url, spawn=tasks.spawn)
    await servers.claim("k", b"mine", 100)
    assert not await servers.release("k", b"yours")
    assert await servers.release("k", b"mine")
    assert not await servers.release("k", b"mine")
    await servers.close()

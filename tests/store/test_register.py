"""What is told of conversations: the same over every store, each tenant its own, and honest when it cannot be told."""

from __future__ import annotations

import pytest

from proxy.core.errors import StoreUnavailable
from proxy.store import Store, keys
from proxy.store.register import LISTED, NOTES, ROOTS
from tests.store.conftest import Opener, Valkey, eventually

TENANT, OTHER = b"t" * 32, b"o" * 32
ROOT, SECOND = b"r" * 16, b"s" * 16
NOW = 1_800_000_000.0
KEY = b"one master key for all of them!!"


@pytest.fixture(params=["memory", "unix"])
async def store(request: pytest.FixtureRequest, opener: Opener) -> Store:
    """An open, empty store of each kind."""
    if request.param == "memory":
        return await opener("memory")
    server: Valkey = request.getfixturevalue("valkey")
    return await opener(server.url, key=KEY)


async def settled(opener: Opener) -> None:
    """Return when nothing is written in the background any more; the keeper of a store never ends."""
    await eventually(lambda: len(opener.tasks) <= 1)


async def test_a_conversation_has_its_roots_newest_first(store: Store, opener: Opener) -> None:
    """Its tenant finds its roots by its name and the name in the list; another tenant finds neither."""
    register = store.register
    register.seen(TENANT, "one", ROOT, NOW, lasting=True)
    await settled(opener)
    register.seen(TENANT, "one", SECOND, NOW + 1, lasting=False)
    register.seen(TENANT, "two", ROOT, NOW + 2, lasting=False)
    await settled(opener)
    assert await register.roots(TENANT, "one") == [SECOND, ROOT]
    assert await register.roots(TENANT, "none") == []
    assert await register.roots(OTHER, "one") == []
    assert await register.conversations(TENANT) == [("two", NOW + 2), ("one", NOW + 1)]
    assert await register.conversations(OTHER) == []


async def test_what_is_kept_is_bounded(store: Store, opener: Opener) -> None:
    """Roots, notes and names beyond their bounds push out the oldest."""
    register = store.register
    for number in range(LISTED + 5):
        register.seen(TENANT, f"{number}", ROOT, NOW + number, lasting=True)
        if number % 20 == 0:
            await settled(opener)
    for number in range(ROOTS + 5):
        register.seen(TENANT, "one", number.to_bytes(16, "big"), NOW + 1000 + number, lasting=True)
    for number in range(NOTES + 5):
        register.note(TENANT, ROOT, f"{number:08d}:e", b"note", lasting=True)
        if number % 20 == 0:
            await settled(opener)
    await settled(opener)
    assert len(await register.conversations(TENANT)) == LISTED
    assert len(await register.roots(TENANT, "one")) == ROOTS
    notes = await register.notes(TENANT, ROOT)
    assert len(notes) == NOTES
    assert max(notes) == f"{NOTES + 4:08d}:e"


async def test_notes_are_sealed_to_their_place(valkey: Valkey, opener: Opener) -> None:
    """Notes read by another tenant, changed, or moved to another name or conversation are not there."""
    register = (await opener(valkey.url, key=KEY)).register
    register.note(TENANT, ROOT, "one", b"a secret place", lasting=True)
    register.note(TENANT, ROOT, "two", b"another", lasting=True)
    await settled(opener)
    assert await register.notes(TENANT, ROOT) == {"one": b"a secret place", "two": b"another"}
    assert await register.notes(OTHER, ROOT) == {}
    assert "secret" not in valkey.say(f"HGETALL {keys.notes(ROOT)}")
    swap = "local v = redis.call('hget', KEYS[1], 'one') redis.call('hset', KEYS[1], 'two', v)"
    valkey.say(f'EVAL "{swap}" 1 {keys.notes(ROOT)}')
    valkey.say(f"HSET {keys.notes(ROOT)} three forged")
    assert await register.notes(TENANT, ROOT) == {"one": b"a secret place"}
    valkey.say(f"RENAME {keys.notes(ROOT)} {keys.notes(SECOND)}")
    assert await register.notes(TENANT, SECOND) == {}


async def test_a_wish_is_seen_by_the_next_look_and_granted_once(store: Store, opener: Opener) -> None:
    """A wish comes along when records are looked for, is another tenant's to nobody, and is taken by one."""
    await store.register.mark(TENANT, ROOT, 60)
    assert await store.register.there(ROOT, [("mark", b"", b"")]) == [True]
    assert not await store.pop_request(TENANT, ROOT)
    await store.newest(TENANT, SECOND, "a,b", [b"c" * 16])
    assert not await store.pop_request(TENANT, SECOND)
    await store.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert await store.pop_request(TENANT, ROOT)
    assert not await store.pop_request(TENANT, ROOT)
    assert await store.register.there(ROOT, [("mark", b"", b"")]) == [False]
    await store.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert not await store.pop_request(TENANT, ROOT)
    await store.register.mark(TENANT, ROOT, 60)
    await store.newest(OTHER, ROOT, "a,b", [b"c" * 16])
    assert not await store.pop_request(OTHER, ROOT)


async def test_one_of_two_replicas_gets_a_wish(valkey: Valkey, opener: Opener) -> None:
    """Both saw it; one is told to compact."""
    one, two = [await opener(valkey.url, key=KEY) for _ in range(2)]
    await one.register.mark(TENANT, ROOT, 60, "0.2")
    for store in (one, two):
        await store.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert [await store.pop_request(TENANT, ROOT) for store in (one, two)] == ["0.2", ""]


async def test_what_is_there_of_a_place_is_told(store: Store, opener: Opener) -> None:
    """Events, summaries, leases and refusals are told apart by kind, scope and place."""
    policy, chain = b"p" * 8, b"c" * 16
    await store.save(TENANT, ROOT, "a,b", chain, b"record")
    await store.shelf.keep(TENANT, ROOT, policy, chain, b"text")
    assert await store.shelf.lease(ROOT, policy, chain, 60)
    wanted = [("event", "a,b", chain), ("event", "a,c", chain), ("summary", policy, chain), ("lease", policy, chain)]
    assert await store.register.there(ROOT, [*wanted, ("refused", policy, chain)]) == [True, False, True, True, False]
    assert await store.register.there(ROOT, []) == []


async def test_a_store_that_does_not_answer_is_no_empty_one(valkey: Valkey, opener: Opener) -> None:
    """Where nothing can be told, that is said; what is written meanwhile raises nothing."""
    register = (await opener(valkey.url, key=KEY)).register
    valkey.kill()
    for question in (register.roots(TENANT, "one"), register.conversations(TENANT), register.notes(TENANT, ROOT)):
        with pytest.raises(StoreUnavailable):
            await question
    with pytest.raises(StoreUnavailable):
        await register.mark(TENANT, ROOT, 60)
    register.seen(TENANT, "one", ROOT, NOW, lasting=True)
    register.note(TENANT, ROOT, "one", b"x", lasting=True)
    await settled(opener)
    assert not opener.failed

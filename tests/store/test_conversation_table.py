"""What is told of conversations: the same over every store, each tenant its own, and honest when it cannot be told."""

from __future__ import annotations

import pytest

from proxy.core.errors import StoreUnavailable
from proxy.store import Store, key_names
from proxy.store.conversation_table import LISTED, NOTES, ROOTS
from tests.store.conftest import Opener, Valkey, eventually

pytestmark = pytest.mark.usefixtures("patient")

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
    register = store.conversations
    register.save_conversation(TENANT, "one", ROOT, NOW, long_lived=True)
    await settled(opener)
    register.save_conversation(TENANT, "one", SECOND, NOW + 1, long_lived=False)
    register.save_conversation(TENANT, "two", ROOT, NOW + 2, long_lived=False)
    await settled(opener)
    assert await register.root_hashes(TENANT, "one") == [SECOND, ROOT]
    assert await register.root_hashes(TENANT, "none") == []
    assert await register.root_hashes(OTHER, "one") == []
    assert await register.conversations(TENANT) == [("two", NOW + 2), ("one", NOW + 1)]
    assert await register.conversations(OTHER) == []


async def test_what_is_kept_is_bounded(store: Store, opener: Opener) -> None:
    """Roots, notes and names beyond their bounds push out the oldest."""
    register = store.conversations
    for number in range(LISTED + 5):
        register.save_conversation(TENANT, f"{number}", ROOT, NOW + number, long_lived=True)
        if number % 20 == 0:
            await settled(opener)
    for number in range(ROOTS + 5):
        register.save_conversation(TENANT, "one", number.to_bytes(16, "big"), NOW + 1000 + number, long_lived=True)
    for number in range(NOTES + 5):
        register.save_note(TENANT, ROOT, f"{number:08d}:e", b"note", long_lived=True)
        if number % 20 == 0:
            await settled(opener)
    await settled(opener)
    assert len(await register.conversations(TENANT)) == LISTED
    assert len(await register.root_hashes(TENANT, "one")) == ROOTS
    notes = await register.notes(TENANT, ROOT)
    assert len(notes) == NOTES
    assert max(notes) == f"{NOTES + 4:08d}:e"


async def test_notes_are_sealed_to_their_place(valkey: Valkey, opener: Opener) -> None:
    """Notes read by another tenant, changed, or moved to another name or conversation are not there."""
    register = (await opener(valkey.url, key=KEY)).conversations
    register.save_note(TENANT, ROOT, "one", b"a secret place", long_lived=True)
    register.save_note(TENANT, ROOT, "two", b"another", long_lived=True)
    await settled(opener)
    assert await register.notes(TENANT, ROOT) == {"one": b"a secret place", "two": b"another"}
    assert await register.notes(OTHER, ROOT) == {}
    assert "secret" not in valkey.say(f"HGETALL {key_names.notes(ROOT)}")
    swap = "local v = redis.call('hget', KEYS[1], 'one') redis.call('hset', KEYS[1], 'two', v)"
    valkey.say(f'EVAL "{swap}" 1 {key_names.notes(ROOT)}')
    valkey.say(f"HSET {key_names.notes(ROOT)} three forged")
    assert await register.notes(TENANT, ROOT) == {"one": b"a secret place"}
    valkey.say(f"RENAME {key_names.notes(ROOT)} {key_names.notes(SECOND)}")
    assert await register.notes(TENANT, SECOND) == {}


async def test_a_wish_is_seen_by_the_next_look_and_granted_once(store: Store, opener: Opener) -> None:
    """A wish comes along when records are looked for, is another tenant's to nobody, and is taken by one."""
    await store.conversations.request_compaction(TENANT, ROOT, 60)
    assert await store.conversations.which_exist(ROOT, [("request", b"", b"")]) == [True]
    assert not await store.records.pop_request(TENANT, ROOT)
    await store.records.newest(TENANT, SECOND, "a,b", [b"c" * 16])
    assert not await store.records.pop_request(TENANT, SECOND)
    await store.records.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert await store.records.pop_request(TENANT, ROOT)
    assert not await store.records.pop_request(TENANT, ROOT)
    assert await store.conversations.which_exist(ROOT, [("request", b"", b"")]) == [False]
    await store.records.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert not await store.records.pop_request(TENANT, ROOT)
    await store.conversations.request_compaction(TENANT, ROOT, 60)
    await store.records.newest(OTHER, ROOT, "a,b", [b"c" * 16])
    assert not await store.records.pop_request(OTHER, ROOT)


async def test_one_of_two_replicas_gets_a_wish(valkey: Valkey, opener: Opener) -> None:
    """Both saw it; one is told to compact."""
    one, two = [await opener(valkey.url, key=KEY) for _ in range(2)]
    await one.conversations.request_compaction(TENANT, ROOT, 60, "0.2")
    for store in (one, two):
        await store.records.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert [await store.records.pop_request(TENANT, ROOT) for store in (one, two)] == ["0.2", ""]


async def test_what_is_there_of_a_place_is_told(store: Store, opener: Opener) -> None:
    """Events, summaries, leases and refusals are told apart by kind, scope and place."""
    policy, chain = b"p" * 8, b"c" * 16
    await store.records.save(TENANT, ROOT, "a,b", chain, b"record")
    await store.summaries.save(TENANT, ROOT, policy, chain, b"text")
    assert await store.summaries.lease(ROOT, policy, chain, 60)
    wanted = [("record", "a,b", chain), ("record", "a,c", chain), ("summary", policy, chain), ("lease", policy, chain)]
    assert await store.conversations.which_exist(ROOT, [*wanted, ("failure", policy, chain)]) == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert await store.conversations.which_exist(ROOT, []) == []


async def test_a_store_that_does_not_answer_is_no_empty_one(valkey: Valkey, opener: Opener) -> None:
    """Where nothing can be told, that is said; what is written meanwhile raises nothing."""
    register = (await opener(valkey.url, key=KEY)).conversations
    valkey.kill()
    for question in (register.root_hashes(TENANT, "one"), register.conversations(TENANT), register.notes(TENANT, ROOT)):
        with pytest.raises(StoreUnavailable):
            await question
    with pytest.raises(StoreUnavailable):
        await register.request_compaction(TENANT, ROOT, 60)
    register.save_conversation(TENANT, "one", ROOT, NOW, long_lived=True)
    register.save_note(TENANT, ROOT, "one", b"x", long_lived=True)
    await settled(opener)
    assert not opener.failed

"""Facts about conversations: the same in every store, each tenant's own, and an error if the store does not answer."""

from __future__ import annotations

import pytest

from proxy.core.errors import StoreUnavailable
from proxy.store import Store
from proxy.store.conversation_table import MOST_LISTED, MOST_NOTES, MOST_ROOTS
from proxy.store.key_names import NOTES, key_name
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
    table = store.conversations
    table.save_conversation(TENANT, "one", ROOT, NOW, long_lived=True)
    await settled(opener)
    table.save_conversation(TENANT, "one", SECOND, NOW + 1, long_lived=False)
    table.save_conversation(TENANT, "two", ROOT, NOW + 2, long_lived=False)
    await settled(opener)
    assert await table.root_hashes(TENANT, "one") == [SECOND, ROOT]
    assert await table.root_hashes(TENANT, "none") == []
    assert await table.root_hashes(OTHER, "one") == []
    assert await table.conversations(TENANT) == [("two", NOW + 2), ("one", NOW + 1)]
    assert await table.conversations(OTHER) == []


async def test_stored_facts_are_bounded(store: Store, opener: Opener) -> None:
    """Roots, notes and names beyond their bounds push out the oldest."""
    table = store.conversations
    for number in range(MOST_LISTED + 5):
        table.save_conversation(TENANT, f"{number}", ROOT, NOW + number, long_lived=True)
        if number % 20 == 0:
            await settled(opener)
    for number in range(MOST_ROOTS + 5):
        table.save_conversation(TENANT, "one", number.to_bytes(16, "big"), NOW + 1000 + number, long_lived=True)
    for number in range(MOST_NOTES + 5):
        table.save_note(TENANT, ROOT, f"{number:08d}:e", b"note", long_lived=True)
        if number % 20 == 0:
            await settled(opener)
    await settled(opener)
    assert len(await table.conversations(TENANT)) == MOST_LISTED
    assert len(await table.root_hashes(TENANT, "one")) == MOST_ROOTS
    notes = await table.notes(TENANT, ROOT)
    assert len(notes) == MOST_NOTES
    assert max(notes) == f"{MOST_NOTES + 4:08d}:e"


async def test_notes_are_sealed_to_their_names(valkey: Valkey, opener: Opener) -> None:
    """Notes read by another tenant, changed, or moved to another name or conversation are not there."""
    table = (await opener(valkey.url, key=KEY)).conversations
    table.save_note(TENANT, ROOT, "one", b"a secret place", long_lived=True)
    table.save_note(TENANT, ROOT, "two", b"another", long_lived=True)
    await settled(opener)
    assert await table.notes(TENANT, ROOT) == {"one": b"a secret place", "two": b"another"}
    assert await table.notes(OTHER, ROOT) == {}
    assert "secret" not in valkey.say(f"HGETALL {key_name(ROOT, NOTES)}")
    swap = "local v = redis.call('hget', KEYS[1], 'one') redis.call('hset', KEYS[1], 'two', v)"
    valkey.say(f'EVAL "{swap}" 1 {key_name(ROOT, NOTES)}')
    valkey.say(f"HSET {key_name(ROOT, NOTES)} three forged")
    assert await table.notes(TENANT, ROOT) == {"one": b"a secret place"}
    valkey.say(f"RENAME {key_name(ROOT, NOTES)} {key_name(SECOND, NOTES)}")
    assert await table.notes(TENANT, SECOND) == {}


async def test_a_request_is_read_by_the_next_look_up_and_granted_once(store: Store, opener: Opener) -> None:
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


async def test_one_of_two_replicas_gets_a_request(valkey: Valkey, opener: Opener) -> None:
    """Both saw it; one is told to compact."""
    one, two = [await opener(valkey.url, key=KEY) for _ in range(2)]
    await one.conversations.request_compaction(TENANT, ROOT, 60, "0.2")
    for store in (one, two):
        await store.records.newest(TENANT, ROOT, "a,b", [b"c" * 16])
    assert [await store.records.pop_request(TENANT, ROOT) for store in (one, two)] == ["0.2", ""]


async def test_existing_keys_of_a_prefix_are_listed(store: Store, opener: Opener) -> None:
    """Records, summaries, leases and failures differ by kind, scope and prefix hash."""
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
    """Without a server reads raise ``StoreUnavailable``, and writes raise nothing."""
    table = (await opener(valkey.url, key=KEY)).conversations
    valkey.kill()
    for question in (table.root_hashes(TENANT, "one"), table.conversations(TENANT), table.notes(TENANT, ROOT)):
        with pytest.raises(StoreUnavailable):
            await question
    with pytest.raises(StoreUnavailable):
        await table.request_compaction(TENANT, ROOT, 60)
    table.save_conversation(TENANT, "one", ROOT, NOW, long_lived=True)
    table.save_note(TENANT, ROOT, "one", b"x", long_lived=True)
    await settled(opener)
    assert not opener.failed

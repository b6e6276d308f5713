"""Memories in every store: sealed, each tenant's and project's own, and never lost to another replica's change."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.errors import StoreUnavailable
from proxy.store import Store
from proxy.store.memories_table import LIFETIME, StoredMemories
from tests.store.conftest import Opener, Valkey

TENANT, OTHER = b"t" * 32, b"o" * 32
KEY = b"one master key for all of them!!"
NONE = StoredMemories()


@pytest.fixture(params=["memory", "embedded", "unix"])
async def store(request: pytest.FixtureRequest, opener: Opener) -> Store:
    """An open, empty store of each kind."""
    if request.param != "unix":
        return await opener(request.param)
    server: Valkey = request.getfixturevalue("valkey")
    return await opener(server.url, key=KEY)


async def test_a_project_has_its_own(store: Store) -> None:
    """Nothing at first; what is stored is read by the same tenant for the same project."""
    table = store.memories
    assert await table.read(TENANT, "heron") == NONE
    assert await table.replace(TENANT, "heron", NONE, b"one")
    stored = await table.read(TENANT, "heron")
    assert stored.value == b"one"
    assert stored.sealed is not None
    assert b"one" not in stored.sealed
    for tenant, project in ((TENANT, "crane"), (TENANT, ""), (OTHER, "heron")):
        assert (await table.read(tenant, project)).value is None


async def test_of_two_changes_at_once_one_is_made_again(store: Store) -> None:
    """A value is replaced only if it is the one that was read."""
    table = store.memories
    assert [await table.replace(TENANT, "", NONE, value) for value in (b"one", b"two")] == [True, False]
    before = await table.read(TENANT, "")
    assert [await table.replace(TENANT, "", before, value) for value in (b"three", b"four")] == [True, False]
    assert (await table.read(TENANT, "")).value == b"three"


async def test_memories_in_use_are_renewed(valkey: Valkey, opener: Opener) -> None:
    """By the first read of a process."""
    first = await opener(valkey.url, key=KEY)
    assert await first.memories.replace(TENANT, "", NONE, b"one")
    name = first.memories._name(TENANT, "")
    valkey.say(f"PEXPIRE {name} 1000")
    assert (await first.memories.read(TENANT, "")).value == b"one"
    for _ in range(100):
        await asyncio.sleep(0.01)
        if int(valkey.say(f"PTTL {name}").strip().lstrip(":")) > LIFETIME * 999:
            return
    pytest.fail("it was not renewed")


async def test_without_the_store_nothing_is_said(valkey: Valkey, opener: Opener) -> None:
    """An empty answer would be wrong."""
    store = await opener(valkey.url, key=KEY)
    valkey.kill()
    with pytest.raises(StoreUnavailable):
        await store.memories.read(TENANT, "")
    with pytest.raises(StoreUnavailable):
        await store.memories.replace(TENANT, "", NONE, b"one")

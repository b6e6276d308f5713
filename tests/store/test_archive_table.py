"""The archive in every store: content-addressed, sealed, each tenant its own, gone in time."""

from __future__ import annotations

import pytest

from proxy.core.errors import StoreUnavailable
from proxy.store import Store
from proxy.store.encryption import MAX_PLAIN
from proxy.store.key_names import ARCHIVED, key_name
from tests.store.conftest import Opener, Valkey

TENANT, OTHER, ROOT = b"t" * 32, b"o" * 32, b"r" * 16
KEY = b"one master key for all of them!!"


@pytest.fixture(params=["memory", "unix"])
async def store(request: pytest.FixtureRequest, opener: Opener) -> Store:
    """An open, empty store of each kind."""
    if request.param == "memory":
        return await opener("memory")
    server: Valkey = request.getfixturevalue("valkey")
    return await opener(server.url, key=KEY)


async def test_an_original_is_its_own_tenants_under_its_own_name(store: Store) -> None:
    """Equal content has one name for one tenant in one conversation, and opens nowhere else."""
    archive = store.archive
    name = archive.name(TENANT, b"digest")
    assert name == archive.name(TENANT, b"digest") != archive.name(TENANT, b"another")
    assert name != archive.name(OTHER, b"digest")
    assert await archive.save(TENANT, ROOT, name, b"the original" * 10_000, 60)
    assert await archive.read(TENANT, ROOT, [name, b"x" * 16]) == [b"the original" * 10_000, None]
    assert await archive.read(OTHER, ROOT, [name]) == [None]
    assert await archive.read(TENANT, b"s" * 16, [name]) == [None]
    assert await archive.read(TENANT, ROOT, []) == []


async def test_saving_again_prolongs_the_lifetime(valkey: Valkey, opener: Opener) -> None:
    """A second time costs no second value; its life begins anew. In the store it is sealed and small."""
    archive = (await opener(valkey.url, key=KEY)).archive
    name = archive.name(TENANT, b"digest")
    assert await archive.save(TENANT, ROOT, name, b"a line of a log\n" * 5000, 10)
    key = key_name(ROOT, ARCHIVED, name)
    assert int(valkey.say(f"PTTL {key}").strip().lstrip(":")) <= 10_000
    assert await archive.save(TENANT, ROOT, name, b"a line of a log\n" * 5000, 1000)
    assert int(valkey.say(f"PTTL {key}").strip().lstrip(":")) > 900_000
    assert int(valkey.say(f"STRLEN {key}").strip().lstrip(":")) < 1000
    assert "a line of a log" not in valkey.say(f"GET {key}")


async def test_a_store_that_does_not_answer_takes_and_tells_nothing(valkey: Valkey, opener: Opener) -> None:
    """Keeping says that it failed, reading raises; neither leaves anything behind."""
    archive = (await opener(valkey.url, key=KEY)).archive
    valkey.kill()
    assert not await archive.save(TENANT, ROOT, b"n" * 16, b"x", 60)
    with pytest.raises(StoreUnavailable):
        await archive.read(TENANT, ROOT, [b"n" * 16])


async def test_an_original_over_the_limit_is_not_saved(store: Store) -> None:
    """An original over the limit of a record is refused."""
    assert not await store.archive.save(TENANT, ROOT, b"n" * 16, bytes(MAX_PLAIN + 1), 60)

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.store import keys, master
from proxy.store.errors import Unavailable
from proxy.store.memory import Memory
from proxy.store.sealed import derive, naming_secret


def test_everybody_who_starts_at_once_gets_one_key(tmp_path: Path) -> None:
    """Twenty that look for the key at the same moment all get the one that was made, and no draft is left."""
    with ThreadPoolExecutor(20) as pool:
        found = set(pool.map(lambda _: master.from_directory(tmp_path), range(20)))
    assert len(found) == 1
    assert os.listdir(tmp_path) == [master.FILE]


def test_a_key_that_is_no_key_is_refused(tmp_path: Path) -> None:
    """A file of another size is not taken for a key."""
    (tmp_path / master.FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        master.from_directory(tmp_path)


async def test_the_first_key_in_a_store_is_everybodys() -> None:
    """The first replica puts its key, the others adopt it."""
    store = Memory()
    assert await master.agree(store, b"1" * 32) == (b"1" * 32, True)
    assert await master.agree(store, b"2" * 32) == (b"1" * 32, False)


async def test_what_cannot_be_a_key_is_not_agreed_on() -> None:
    """Another size under the key's name is an error."""
    store = Memory()
    await store.claim(keys.MASTER, b"x", None)
    with pytest.raises(Unavailable, match="master_key"):
        await master.agree(store, b"1" * 32)


async def test_names_outlive_a_master_key() -> None:
    """Whoever has the new key and the old one finds the old one's names; later the new one alone does."""
    store = Memory()
    first = await master.naming(store, [b"1" * 32])
    assert first == naming_secret(b"1" * 32)
    assert await master.naming(store, [b"1" * 32, b"2" * 32]) == first, "the next key may be known ahead"
    assert await master.naming(store, [b"2" * 32, b"1" * 32]) == first
    assert await master.naming(store, [b"2" * 32]) == first
    assert await master.naming(store, [b"3" * 32, b"2" * 32]) == first
    assert await master.naming(store, [b"3" * 32]) == first


async def test_a_key_that_replaces_a_lost_one_names_anew() -> None:
    """Without the old key its names cannot be found; everybody with the new one agrees on others all the same."""
    store = Memory()
    first = await master.naming(store, [b"1" * 32])
    second = await master.naming(store, [b"2" * 32])
    assert second == naming_secret(b"2" * 32) != first
    assert await master.naming(store, [b"1" * 32]) == first


async def test_names_that_somebody_wrote_are_not_believed() -> None:
    """What does not open with the key is passed over, and left where it is."""
    store = Memory()
    (place,) = [keys.names(derive(b"1" * 32, b"fingerprint", b"")[:8])]
    await store.claim(place, b"forged", None)
    assert await master.naming(store, [b"1" * 32]) == naming_secret(b"1" * 32)


def test_looking_for_a_key_makes_none(tmp_path: Path) -> None:
    """Whether there is a key in a directory is told without creating one."""
    assert master.existing(tmp_path) is None
    assert os.listdir(tmp_path) == []

    made = master.from_directory(tmp_path)
    assert master.existing(tmp_path) == made

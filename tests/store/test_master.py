from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.store import keys, master
from proxy.store.errors import Unavailable
from proxy.store.memory import Memory


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

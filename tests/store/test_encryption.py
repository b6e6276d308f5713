from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from zstandard import ZstdCompressor

from proxy.store import encryption, key_names
from proxy.store.encryption import MAX_PLAIN, Sealer, derive, naming_secret, pack
from proxy.store.operations import Claim, MemoryBackend, Unavailable

MASTER, TENANT, NAME = b"m" * 32, b"t" * 32, "ullage1:{r}:e:x:y"


@given(st.binary(max_size=4000))
def test_what_is_sealed_opens_to_itself(plain: bytes) -> None:
    """The same tenant reads back under the same name exactly what was sealed."""
    sealer = Sealer(MASTER)
    assert sealer.open(TENANT, NAME, sealer.seal(TENANT, NAME, plain)) == plain


@pytest.mark.parametrize("size", [0, 2_047, 2_048, 2**20])
def test_values_open_whichever_way_they_were_compressed(size: int) -> None:
    """However a value of its size is compressed."""
    sealer, plain = Sealer(MASTER), os.urandom(size // 2) + bytes(size - size // 2)
    assert sealer.open(TENANT, NAME, sealer.seal(TENANT, NAME, plain)) == plain


def test_any_flipped_bit_is_a_miss() -> None:
    """No single changed bit anywhere in a value goes unnoticed."""
    sealer = Sealer(MASTER)
    value = sealer.seal(TENANT, NAME, b"a fact that must not change")
    for position in range(len(value) * 8):
        spoiled = bytearray(value)
        spoiled[position // 8] ^= 1 << position % 8
        assert sealer.open(TENANT, NAME, bytes(spoiled)) is None, position


@given(st.binary(max_size=200), st.data())
def test_a_truncated_or_extended_value_is_a_miss(plain: bytes, data: st.DataObject) -> None:
    """A value that lost or gained bytes is not an answer."""
    sealer = Sealer(MASTER)
    value = sealer.seal(TENANT, NAME, plain)
    assert sealer.open(TENANT, NAME, value[: data.draw(st.integers(0, len(value) - 1))]) is None
    assert sealer.open(TENANT, NAME, value + data.draw(st.binary(min_size=1, max_size=9))) is None


@given(st.binary(max_size=300))
def test_noise_is_a_miss(value: bytes) -> None:
    """Bytes nobody sealed open to nothing, and raise nothing."""
    assert Sealer(MASTER).open(TENANT, NAME, value) is None


def test_a_value_belongs_to_its_name_tenant_and_master() -> None:
    """A value moved to another name, read by another tenant or under another master key is a miss."""
    sealer = Sealer(MASTER)
    value = sealer.seal(TENANT, NAME, b"mine")
    assert sealer.open(TENANT, NAME + "z", value) is None
    assert sealer.open(b"u" * 32, NAME, value) is None
    assert Sealer(b"n" * 32).open(TENANT, NAME, value) is None
    # Also when the key ids of the two masters happen to be the same.
    twin = next(other for n in range(100_000) if not (other := Sealer(n.to_bytes(32, "big"))).is_foreign(value))
    assert twin.open(TENANT, NAME, value) is None


def _sealed_by_hand(packed: bytes) -> bytes:
    sealer, nonce = Sealer(MASTER), os.urandom(12)
    head = sealer.seal(TENANT, NAME, b"")[:2]
    key = derive(MASTER, b"seal", TENANT)
    return head + nonce + AESGCM(key).encrypt(nonce, packed, head + NAME.encode())


def test_a_decompression_bomb_is_a_miss() -> None:
    """A well-sealed value that inflates beyond the limit, or is no compressed data at all, is refused."""
    assert Sealer(MASTER).open(TENANT, NAME, _sealed_by_hand(zlib.compress(bytes(MAX_PLAIN + 1)))) is None
    assert Sealer(MASTER).open(TENANT, NAME, _sealed_by_hand(b"not compressed")) is None
    assert Sealer(MASTER).open(TENANT, NAME, _sealed_by_hand(zlib.compress(b"cut short")[:-3])) is None
    assert Sealer(MASTER).open(TENANT, NAME, _sealed_by_hand(zlib.compress(bytes(MAX_PLAIN)))) == bytes(MAX_PLAIN)


def test_a_record_over_the_limit_is_not_sealed() -> None:
    """A value over the limit is refused when it is sealed."""
    with pytest.raises(ValueError, match="over the limit"):
        Sealer(MASTER).seal(TENANT, NAME, bytes(MAX_PLAIN + 1))


def test_the_same_record_is_never_sealed_to_the_same_bytes() -> None:
    """A reader of the store cannot tell that two values are equal."""
    sealer = Sealer(MASTER)
    assert len({sealer.seal(TENANT, NAME, b"same") for _ in range(100)}) == 100


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=20, unique=True))
def test_chain_keys_differ_by_tenant_and_agree_between_replicas(tenants: list[bytes]) -> None:
    """Each tenant has its own 32-byte chain key, the same wherever the master key is the same."""
    here, there = Sealer(MASTER), Sealer(MASTER)
    found = [here.prefix_key(tenant) for tenant in tenants]
    assert found == [there.prefix_key(tenant) for tenant in tenants] == [here.prefix_key(tenant) for tenant in tenants]
    assert len(set(found)) == len(tenants)
    assert {len(key) for key in found} == {32}
    assert set(found).isdisjoint(Sealer(b"n" * 32).prefix_key(tenant) for tenant in tenants)


def test_a_former_key_opens_and_the_present_one_seals() -> None:
    """With the old key beside the new one both open; what is sealed from then on needs the new one."""
    old, new = Sealer(b"o" * 32), Sealer(b"n" * 32, [b"o" * 32])
    kept = old.seal(TENANT, NAME, b"kept")
    assert new.open(TENANT, NAME, kept) == b"kept"
    assert new.open(b"u" * 32, NAME, kept) is None
    fresh = new.seal(TENANT, NAME, b"fresh")
    assert Sealer(b"n" * 32).open(TENANT, NAME, fresh) == b"fresh"
    assert old.open(TENANT, NAME, fresh) is None
    assert not new.is_foreign(kept)
    assert old.is_foreign(fresh)
    assert not old.is_foreign(b"noise")


def test_names_need_not_change_with_the_key() -> None:
    """Chains and marks come from the naming secret alone; without one, from the master key."""
    old = Sealer(b"o" * 32)
    new = Sealer(b"n" * 32, [b"o" * 32], old.names)
    assert (new.prefix_key(TENANT), new.item_key()) == (old.prefix_key(TENANT), old.item_key())
    assert Sealer(b"n" * 32).prefix_key(TENANT) != old.prefix_key(TENANT)
    assert old.names != b"o" * 32


@given(st.binary(max_size=4000))
def test_originals_open_to_themselves(plain: bytes) -> None:
    """A value that was packed before it is sealed opens like a record, and is bound to its name like one."""
    sealer = Sealer(MASTER)
    value = sealer.seal_packed(TENANT, NAME, pack(plain))
    assert sealer.open(TENANT, NAME, value) == plain
    assert sealer.open(TENANT, NAME + "z", value) is None
    # The version is authenticated too: one kind is never read as the other.
    assert sealer.open(TENANT, NAME, b"\1" + value[1:]) is None


def test_an_original_that_unpacks_to_too_much_is_a_miss() -> None:
    """A writer with the key cannot make us unpack more than the limit, nor anything of unknown size."""
    sealer = Sealer(MASTER)
    bomb = ZstdCompressor().compress(bytes(MAX_PLAIN + 1))
    unsized = ZstdCompressor(write_content_size=False).compress(b"x" * 1000)
    for packed in (bomb, unsized, b"", b"noise", pack(b"x" * 5000)[:-3]):
        assert sealer.open(TENANT, NAME, sealer.seal_packed(TENANT, NAME, packed)) is None


def test_everybody_who_starts_at_once_gets_one_key(tmp_path: Path) -> None:
    """Twenty that look for the key at the same moment all get the one that was made, and no draft is left."""
    with ThreadPoolExecutor(20) as pool:
        found = set(pool.map(lambda _: encryption.ensure_master_key(tmp_path), range(20)))
    assert len(found) == 1
    assert os.listdir(tmp_path) == [encryption.KEY_FILE]


def test_a_key_that_is_no_key_is_refused(tmp_path: Path) -> None:
    """A file of another size is not taken for a key."""
    (tmp_path / encryption.KEY_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        encryption.ensure_master_key(tmp_path)


async def test_the_first_key_in_a_store_is_everybodys() -> None:
    """The first replica puts its key, the others adopt it."""
    store = MemoryBackend()
    assert await encryption.share_master_key(store, b"1" * 32) == (b"1" * 32, True)
    assert await encryption.share_master_key(store, b"2" * 32) == (b"1" * 32, False)


async def test_what_cannot_be_a_key_is_not_agreed_on() -> None:
    """Another size under the key's name is an error."""
    store = MemoryBackend()
    await store.run(Claim(key_names.MASTER, b"x", None))
    with pytest.raises(Unavailable, match="master_key"):
        await encryption.share_master_key(store, b"1" * 32)


async def test_names_outlive_a_master_key() -> None:
    """A holder of the new key and the old one reads the old one's names; later the new key alone is enough."""
    store = MemoryBackend()
    first = await encryption.share_naming_secret(store, [b"1" * 32])
    assert first == naming_secret(b"1" * 32)
    assert await encryption.share_naming_secret(store, [b"1" * 32, b"2" * 32]) == first, (
        "the next key may be known ahead"
    )
    assert await encryption.share_naming_secret(store, [b"2" * 32, b"1" * 32]) == first
    assert await encryption.share_naming_secret(store, [b"2" * 32]) == first
    assert await encryption.share_naming_secret(store, [b"3" * 32, b"2" * 32]) == first
    assert await encryption.share_naming_secret(store, [b"3" * 32]) == first


async def test_a_key_that_replaces_a_lost_one_names_anew() -> None:
    """Without the old key its names cannot be found; everybody with the new one agrees on others all the same."""
    store = MemoryBackend()
    first = await encryption.share_naming_secret(store, [b"1" * 32])
    second = await encryption.share_naming_secret(store, [b"2" * 32])
    assert second == naming_secret(b"2" * 32) != first
    assert await encryption.share_naming_secret(store, [b"1" * 32]) == first


async def test_names_that_somebody_wrote_are_not_believed() -> None:
    """A value that does not open with the key is ignored, and stays where it is."""
    store = MemoryBackend()
    (name,) = [key_names.naming_secret_name(derive(b"1" * 32, b"fingerprint", b"")[:8])]
    await store.run(Claim(name, b"forged", None))
    assert await encryption.share_naming_secret(store, [b"1" * 32]) == naming_secret(b"1" * 32)


def test_looking_for_a_key_makes_none(tmp_path: Path) -> None:
    """Looking for a key in a directory creates none."""
    assert encryption.find_master_key(tmp_path) is None
    assert os.listdir(tmp_path) == []

    made = encryption.ensure_master_key(tmp_path)
    assert encryption.find_master_key(tmp_path) == made

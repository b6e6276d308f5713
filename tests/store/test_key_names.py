from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from proxy.store.key_names import (
    ARCHIVED,
    COMPACTION_REQUEST,
    CONSUMED,
    CONVERSATIONS,
    FAILED_SUMMARY,
    LEASE,
    MASTER,
    MEMORIES,
    NOTES,
    ROOTS,
    STATE,
    SUMMARY,
    key_name,
    learned_route_name,
    naming_secret_name,
    record_name,
    record_names,
    spending_name,
    summary_pause_name,
    trial_name,
)

digests = st.binary(min_size=16, max_size=16)


@given(digests, st.text(max_size=80), digests)
def test_a_record_is_named_by_root_hash_route_and_prefix_hash(root_hash: bytes, route: str, prefix_hash: bytes) -> None:
    """Every name is printable ASCII of one fixed shape, with the root_hash alone as the cluster's hash tag."""
    assert re.fullmatch(
        r"ullage1:\{[\w-]{22}\}:e:[\w-]{11}:[\w-]{22}", record_name(root_hash, route, prefix_hash), re.ASCII
    )


@given(st.lists(st.tuples(digests, st.text(max_size=20), digests), min_size=2, max_size=2, unique=True))
def test_different_records_have_different_names(parts: list[tuple[bytes, str, bytes]]) -> None:
    """Two records share a name only if root_hash hash, route and prefix hash are the same."""
    first, second = (record_name(*each) for each in parts)
    assert first != second


@given(digests, st.text(max_size=20), st.lists(digests, max_size=4))
def test_many_records_are_named_as_each_is_alone(root_hash: bytes, route: str, hashes: list[bytes]) -> None:
    """Reading many records at once finds what was stored one by one."""
    assert record_names(root_hash, route, hashes) == [record_name(root_hash, route, each) for each in hashes]


def test_all_names_of_a_conversation_share_a_slot() -> None:
    """The hash tag between the braces depends on the root hash only."""
    names = [
        record_name(b"r" * 16, route, prefix_hash * 16) for route in ("a,m", "b,n") for prefix_hash in (b"c", b"d")
    ]
    assert len({re.search(r"\{(.*)\}", name)[1] for name in names if re.search(r"\{(.*)\}", name)}) == 1  # type: ignore[index]


def test_a_name_is_what_other_versions_wrote() -> None:
    """The name of a given value never changes, or a deployment would forget every conversation."""
    digest, policy, text = bytes(16), b"p" * 8, "AAAAAAAAAAAAAAAAAAAAAA"
    names = {
        key_name(digest, SUMMARY, policy, digest): f"ullage1:{{{text}}}:s:cHBwcHBwcHA:{text}",
        key_name(digest, LEASE, policy, digest): f"ullage1:{{{text}}}:k:cHBwcHBwcHA:{text}",
        key_name(digest, FAILED_SUMMARY, policy, digest): f"ullage1:{{{text}}}:x:cHBwcHBwcHA:{text}",
        key_name(digest, COMPACTION_REQUEST): f"ullage1:{{{text}}}:m",
        key_name(digest, NOTES): f"ullage1:{{{text}}}:n",
        key_name(digest, ARCHIVED, digest): f"ullage1:{{{text}}}:a:{text}",
        key_name(digest, ROOTS): f"ullage1:{{{text}}}:c",
        key_name(digest, CONSUMED): f"ullage1:{{{text}}}:u",
        key_name(digest, STATE): f"ullage1:{{{text}}}:v",
        key_name(digest, MEMORIES): f"ullage1:{{{text}}}:p",
        key_name(digest, CONVERSATIONS): f"ullage1:{{{text}}}:l",
        spending_name(digest, "in", 7): f"ullage1:b:{{{text}}}:in:7",
        summary_pause_name(digest): f"ullage1:b:{{{text}}}:pause",
        learned_route_name(digest): f"ullage1:f:{text}",
        naming_secret_name(policy): "ullage1:{names}:cHBwcHBwcHA",
    }
    assert list(names) == list(names.values())
    assert record_name(bytes(16), "openai,gpt-5", b"\xff" * 16) == (
        "ullage1:{AAAAAAAAAAAAAAAAAAAAAA}:e:mUc4ItsxUug:_____________________w"
    )


def test_names_around_summaries_share_the_conversations_slot() -> None:
    """Names around summaries have the root hash as their hash tag; those of a tenant's figures have the tenant."""
    root_hash, policy, prefix_hash = b"r" * 16, b"p" * 8, b"c" * 16
    names = [key_name(root_hash, kind, policy, prefix_hash) for kind in (SUMMARY, LEASE, FAILED_SUMMARY)]
    tags = {re.search(r"\{(.*)\}", name)[1] for name in (*names, record_name(root_hash, "r", prefix_hash))}  # type: ignore[index]
    assert len(tags) == 1
    assert [name.split("}:")[1][0] for name in names] == ["s", "k", "x"]
    figures = [
        summary_pause_name(b"t" * 16),
        spending_name(b"t" * 16, "in", 1),
        spending_name(b"t" * 16, "out", 2),
    ]
    assert len({name.partition("}")[0] for name in figures}) == 1
    assert len({*names, *figures}) == 6


def test_all_keys_of_a_conversation_share_its_slot() -> None:
    """A request to compact is read along with the records, and a page of the archive in one operation."""
    root_hash = b"r" * 16
    names = [
        key_name(root_hash, COMPACTION_REQUEST),
        key_name(root_hash, NOTES),
        key_name(root_hash, ARCHIVED, b"d" * 16),
        record_name(root_hash, "r", b"c" * 16),
    ]
    assert len({name.partition("}")[0] for name in names}) == len({*names}) - 3 == 1
    assert naming_secret_name(b"a" * 8).partition("}")[0] == naming_secret_name(b"b" * 8).partition("}")[0]
    assert len({key_name(b"n" * 16, ROOTS), key_name(b"n" * 16, CONVERSATIONS)}) == 2


def test_a_trial_is_in_the_slot_of_its_key() -> None:
    """A trial goes to the server that has the key, with and without a hash tag in it."""
    for key in (
        MASTER,
        record_name(b"r" * 16, "route", b"c" * 16),
        learned_route_name(b"l" * 16),
    ):
        assert key_slot(trial_name(key, "claim").encode()) == key_slot(key.encode())
        assert trial_name(key, "claim").startswith("ullage1:")

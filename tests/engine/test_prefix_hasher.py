"""Known prefixes of bodies are found by content, and only by the tenant that sent them."""

from __future__ import annotations

import random

import pytest

from proxy.engine.prefix_hasher import Prefix, PrefixHasher, name_in, scope_of

TENANT, OTHER = b"t" * 32, b"o" * 32
BODY = random.Random(3).randbytes(40_000)


def filed(body: bytes, border: int, tenant: bytes = TENANT) -> dict[bytes, Prefix]:
    """A cache that knows *body* up to *border*."""
    prefixes: dict[bytes, Prefix] = {}
    hasher = PrefixHasher(scope_of(tenant, "chat"), body)
    hasher.file(prefixes, Prefix(border, hasher.digest(border)))
    return prefixes


@pytest.mark.parametrize("border", [8_192, 10_000, 16_383, 16_384, 20_000])
@pytest.mark.parametrize("grown", [0, 1, 5_000, 12_000])
def test_a_longer_body_finds_its_prefix(border: int, grown: int) -> None:
    """What a body was known up to is found in a longer one of up to twice its size."""
    prefixes = filed(BODY[: border + 100], border)
    found = PrefixHasher(scope_of(TENANT, "chat"), BODY[: border + min(grown, border)]).find(prefixes)
    assert found is not None
    assert found.border == border


def test_what_differs_is_not_found() -> None:
    """One other byte before the border, a shorter body, another tenant or another scope: nothing is known."""
    border = 20_000
    prefixes = filed(BODY, border)
    changed = bytearray(BODY)
    changed[border - 1] ^= 1
    for tenant, api, body in (
        (TENANT, "chat", bytes(changed)),
        (TENANT, "chat", BODY[: border - 1]),
        (OTHER, "chat", BODY),
        (TENANT, "messages", BODY),
    ):
        assert PrefixHasher(scope_of(tenant, api), body).find(prefixes) is None


def test_a_digest_is_that_of_the_bytes_before_it() -> None:
    """In whatever order digests are asked for, each is the one of a hash over these bytes alone."""
    hasher, scope = PrefixHasher(scope_of(TENANT), BODY), scope_of(TENANT)
    for end in (1_000, 32_768, 9, 0, 20_000, 40_000, 32_768):
        assert hasher.digest(end) == name_in(scope, BODY[:end])

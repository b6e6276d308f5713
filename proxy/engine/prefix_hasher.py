"""Recognises the longest prefix of a body that was seen before, in one pass of a fast hash over it.

A client sends its whole conversation with every request, so that nearly all of a body was in the one before. What is
known of such a prefix is cached under digests of its bytes: no cache holds a body. Each digest begins with a random
seed and the tenant, so that nothing of one tenant can be found, or timed, by another.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from xxhash import xxh3_128

from proxy.engine.ports import Cache

SEED: Final = int.from_bytes(os.urandom(8), "big")
"""Seeds the names under which texts are cached. These never leave the process, so a fast hash will do:
https://github.com/Cyan4973/xxHash#performance-on-small-data. What is stored or sent has keyed cryptographic names."""

MOST_SCOPES: Final = 4_096
"""Scopes of cached texts that are remembered. Clients send credentials, so they are bounded."""

PREFIX_FROM: Final = 8_192
"""Bytes from which a body is worth remembering as a whole: below, reading it again costs as little."""


class Prefix(msgspec.Struct):
    """A body seen before, up to byte ``border``; ``digest`` is that of these bytes."""

    border: int
    digest: bytes


P = TypeVar("P", bound=Prefix)


@lru_cache(MOST_SCOPES)
def scope_of(tenant: bytes, *parts: str) -> Any:
    """Return the hash that the names of this tenant's texts begin with; *parts* say what is cached under them."""
    return xxh3_128(b"\0".join([tenant, *map(str.encode, parts), b""]), SEED)


def name_in(scope: Any, raw: bytes) -> bytes:
    """Return the name of *raw* in *scope*."""
    named = scope.copy()
    named.update(raw)
    digest: bytes = named.digest()
    return digest


class PrefixHasher:
    """Hashes a body once, to find its longest known prefix and to name a longer one.

    A prefix is filed under the digest of its first 2^k bytes, 2^k being at least half of it: conversations that begin
    alike differ there, and a longer body of the same conversation looks at no more than two such names.
    """

    def __init__(self, scope: Any, body: bytes) -> None:
        self._body = memoryview(body)
        self._marks = [(0, scope)]

    def find(self, prefixes: Cache[bytes, P]) -> P | None:
        """Return the longest known prefix whose bytes the body begins with."""
        power = len(self._body).bit_length() - 1
        found: P | None = None
        for exponent in (power - 1, power):
            candidate = prefixes.get(self.digest(1 << exponent))
            fits = candidate is not None and candidate.border <= len(self._body)
            if candidate and fits and self.digest(candidate.border) == candidate.digest:
                found = candidate
        return found

    def file(self, prefixes: Cache[bytes, P], prefix: P) -> None:
        """File *prefix*, up to which the body is known from now on."""
        prefixes[self.digest(1 << (prefix.border.bit_length() - 1))] = prefix

    def digest(self, end: int) -> bytes:
        """Return the digest of the first *end* bytes, computed from the last point reached before them."""
        at = len(self._marks) - 1
        while self._marks[at][0] > end:
            at -= 1
        start, mark = self._marks[at]
        if start < end:
            mark = mark.copy()
            mark.update(self._body[start:end])
            self._marks.append((end, mark))
        digest: bytes = mark.digest()
        return digest

"""Sealed values: compressed, encrypted, and bound to their name and tenant, so that the wrong value is never an answer.

Layout: version (1 byte: how it is compressed), key id (1 byte), nonce (12 bytes), AES-256-GCM ciphertext with its tag.
Version, key id and the value's name are authenticated with it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from cachetools import LRUCache
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, frame_content_size

MAX_PLAIN = 8 * 1024 * 1024
DEFLATE, ZSTD = 1, 2
"""Versions: records, which are small, and originals, which need not be."""
_LEVEL = 3
_HEAD, _NONCE, _TAG = 2, 12, 16
_TENANTS = 4096


class Sealer:
    """Derives each tenant's keys from *master* and seals values with them. Not thread-safe.

    What was sealed with one of *others* opens too. Names come from a secret of their own, *names*, so that they outlive
    a master key; without one it is that of *master*.
    """

    def __init__(self, master: bytes, others: Sequence[bytes] = (), names: bytes | None = None) -> None:
        self._own = _Ring(master)
        self._rings = (self._own, *(_Ring(other) for other in others))
        self.names = names or naming_secret(master)
        self._prefix_keys: LRUCache[bytes, bytes] = LRUCache(_TENANTS)

    def prefix_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's chains."""
        key = self._prefix_keys.get(tenant)
        if key is None:
            key = self._prefix_keys[tenant] = derive(self.names, b"chain", tenant)
        return key

    def item_key(self) -> bytes:
        """The secret (32 bytes) that tells what we gave clients to carry; no tenant's, since credentials change."""
        return derive(self.names, b"item", b"")

    def seal(self, tenant: bytes, key_name: str, plain: bytes) -> bytes:
        """The value to store under *key_name*, never the same twice. ``ValueError`` if over ``MAX_PLAIN``."""
        if len(plain) > MAX_PLAIN:
            raise ValueError(f"a record of {len(plain)} bytes is over the limit of {MAX_PLAIN}")
        return self._own.seal(tenant, key_name, zlib.compress(plain, 6), DEFLATE)

    def seal_packed(self, tenant: bytes, key_name: str, packed: bytes) -> bytes:
        """The value to store under *key_name* for what ``pack`` made, which may have been in another thread."""
        return self._own.seal(tenant, key_name, packed, ZSTD)

    def open(self, tenant: bytes, key_name: str, value: bytes) -> bytes | None:
        """What was sealed for this tenant under this name; ``None`` for anything else whatsoever."""
        if len(value) < _HEAD + _NONCE + _TAG or value[0] not in (DEFLATE, ZSTD):
            return None
        for ring in self._rings:
            packed = ring.open(tenant, key_name, value)
            if packed is not None:
                return _unpack(packed) if value[0] == DEFLATE else _unpack_zstd(packed)
        return None

    def is_former(self, value: bytes) -> bool:
        """Whether *value*, which opened, was sealed with another key than the present one."""
        return value[1:2] != self._own.key_id

    def is_foreign(self, value: bytes) -> bool:
        """Whether *value* was sealed, by its own word, with a key that is none of ours."""
        return value[:1] in (b"\1", b"\2") and all(value[1:2] != ring.key_id for ring in self._rings)


class _Ring:
    """One master key and what is derived from it."""

    def __init__(self, master: bytes) -> None:
        self._master = master
        self.key_id = derive(master, b"key id", b"")[:1]
        self._ciphers: LRUCache[bytes, AESGCM] = LRUCache(_TENANTS)

    def seal(self, tenant: bytes, key_name: str, packed: bytes, version: int) -> bytes:
        """*packed*, sealed."""
        head, nonce = bytes((version,)) + self.key_id, os.urandom(_NONCE)
        return head + nonce + self._cipher(tenant).encrypt(nonce, packed, head + key_name.encode())

    def open(self, tenant: bytes, key_name: str, value: bytes) -> bytes | None:
        """What was sealed with this key; ``None`` where it was another key, name or tenant, or the value changed."""
        head, nonce, sealed = value[:_HEAD], value[_HEAD : _HEAD + _NONCE], value[_HEAD + _NONCE :]
        if head[1:] != self.key_id:
            return None
        try:
            return self._cipher(tenant).decrypt(nonce, sealed, head + key_name.encode())
        except InvalidTag:
            return None

    def _cipher(self, tenant: bytes) -> AESGCM:
        cipher = self._ciphers.get(tenant)
        if cipher is None:
            cipher = self._ciphers[tenant] = AESGCM(derive(self._master, b"seal", tenant))
        return cipher


def derive(secret: bytes, purpose: bytes, tenant: bytes) -> bytes:
    """32 bytes for one *purpose* and one *tenant* (none: empty), of which nothing tells *secret*."""
    info = b"ullage1|" + purpose + b"|" + tenant
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def naming_secret(master: bytes) -> bytes:
    """The secret (32 bytes) that names come from where *master* is the first key a store ever had."""
    return derive(master, b"names", b"")


def pack(plain: bytes) -> bytes:
    """*plain*, compressed for ``seal_packed``. Thread-safe."""
    return ZstdCompressor(level=_LEVEL).compress(plain)


def _unpack_zstd(packed: bytes) -> bytes | None:
    try:
        if not 0 <= frame_content_size(packed) <= MAX_PLAIN:
            return None
        return ZstdDecompressor().decompress(packed, max_output_size=MAX_PLAIN)
    except ZstdError:
        return None


def _unpack(packed: bytes) -> bytes | None:
    # A writer who holds the key is still not trusted with our memory: what inflates beyond the limit is refused.
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(packed, MAX_PLAIN + 1)
    except zlib.error:
        return None
    return plain if len(plain) <= MAX_PLAIN and inflate.eof and not inflate.unused_data else None

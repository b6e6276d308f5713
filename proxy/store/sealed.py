"""Sealed values: compressed, encrypted, and bound to their name and tenant, so that the wrong value is never an answer.

Layout: version (1 byte), key id (1 byte), nonce (12 bytes), AES-256-GCM ciphertext with its tag. Version, key id and
the value's name are authenticated with it.
"""

from __future__ import annotations

import os
import zlib

from cachetools import LRUCache
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAX_PLAIN = 8 * 1024 * 1024
_VERSION = 1
_HEAD, _NONCE, _TAG = 2, 12, 16
_TENANTS = 4096


class Sealer:
    """Derives each tenant's keys from *master* and seals values with them. Not thread-safe."""

    def __init__(self, master: bytes) -> None:
        self._master = master
        self._head = bytes((_VERSION, self._derive(b"key id", b"")[0]))
        self._chain_keys: LRUCache[bytes, bytes] = LRUCache(_TENANTS)
        self._ciphers: LRUCache[bytes, AESGCM] = LRUCache(_TENANTS)

    def chain_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's chains."""
        key = self._chain_keys.get(tenant)
        if key is None:
            key = self._chain_keys[tenant] = self._derive(b"chain", tenant)
        return key

    def item_key(self) -> bytes:
        """The secret (32 bytes) that tells what we gave clients to carry; no tenant's, since credentials change."""
        return self._derive(b"item", b"")

    def seal(self, tenant: bytes, key_name: str, plain: bytes) -> bytes:
        """The value to store under *key_name*, never the same twice. ``ValueError`` if over ``MAX_PLAIN``."""
        if len(plain) > MAX_PLAIN:
            raise ValueError(f"a record of {len(plain)} bytes is over the limit of {MAX_PLAIN}")
        nonce = os.urandom(_NONCE)
        return self._head + nonce + self._cipher(tenant).encrypt(nonce, zlib.compress(plain, 6), self._bound(key_name))

    def open(self, tenant: bytes, key_name: str, value: bytes) -> bytes | None:
        """What was sealed for this tenant under this name; ``None`` for anything else whatsoever."""
        if len(value) < _HEAD + _NONCE + _TAG or value[:_HEAD] != self._head:
            return None
        nonce, sealed = value[_HEAD : _HEAD + _NONCE], value[_HEAD + _NONCE :]
        try:
            packed = self._cipher(tenant).decrypt(nonce, sealed, self._bound(key_name))
        except InvalidTag:
            return None
        return _unpack(packed)

    def _bound(self, key_name: str) -> bytes:
        return self._head + key_name.encode()

    def _cipher(self, tenant: bytes) -> AESGCM:
        cipher = self._ciphers.get(tenant)
        if cipher is None:
            cipher = self._ciphers[tenant] = AESGCM(self._derive(b"seal", tenant))
        return cipher

    def _derive(self, purpose: bytes, tenant: bytes) -> bytes:
        info = b"ullage1|" + purpose + b"|" + tenant
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(self._master)


def _unpack(packed: bytes) -> bytes | None:
    # A writer who holds the key is still not trusted with our memory: what inflates beyond the limit is refused.
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(packed, MAX_PLAIN + 1)
    except zlib.error:
        return None
    return plain if len(plain) <= MAX_PLAIN and inflate.eof and not inflate.unused_data else None

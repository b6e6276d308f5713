"""Sealed values: compressed, encrypted, and bound to their name and tenant, so that the wrong value is never an answer.

Layout: version (1 byte: how it is compressed), key id (1 byte), nonce (12 bytes), AES-256-GCM ciphertext with its tag.
Version, key id and the value's name are authenticated with it.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path

from cachetools import LRUCache
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, frame_content_size

from proxy.store import key_names
from proxy.store.backend import Backend, Unavailable

MAX_PLAIN = 8 * 1024 * 1024
DEFLATE, ZSTD = 1, 2
"""Versions: records, which are small, and originals, which need not be."""
_LEVEL = 3
_HEAD, _NONCE, _TAG = 2, 12, 16
_TENANTS = 4096


KEY_SIZE = 32
"""Bytes of a master key."""

KEY_FILE = "master.key"


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


def new_master_key() -> bytes:
    """A new random master key."""
    return secrets.token_bytes(KEY_SIZE)


def find_master_key(directory: Path) -> bytes | None:
    """The key in *directory*, where one was ever created. Raises ``OSError``, ``ValueError``."""
    return ensure_master_key(directory) if (directory / KEY_FILE).exists() else None


def ensure_master_key(directory: Path) -> bytes:
    """The key in *directory*, created there once, readable by its owner only. Raises ``OSError``, ``ValueError``.

    Processes that start together get the same key: it is written beside and linked into place, the first link wins.
    """
    path = directory / KEY_FILE
    if not path.exists():
        draft = directory / f".{KEY_FILE}.{secrets.token_hex(8)}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(new_master_key())
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first: its key is read below
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_SIZE:
        raise ValueError(f"{path} holds {len(key)} bytes instead of {KEY_SIZE}; remove it to have a new one created")
    return key


async def share_master_key(backend: Backend, ours: bytes) -> tuple[bytes, bool]:
    """The key every replica of this store uses, and whether it had to be put there. Raises ``Unavailable``."""
    (held,) = await backend.read([key_names.MASTER])
    put = False
    if held is None:
        held = await backend.claim(key_names.MASTER, ours, None)
        put = held is None
    if held is not None and len(held) != KEY_SIZE:
        raise Unavailable("master_key")
    return held or ours, put


async def share_naming_secret(backend: Backend, ring: Sequence[bytes]) -> bytes:
    """The secret that names come from, of whoever has a master key of *ring*, the first of which seals from now on.

    The first of them that has one in the store tells; where none has, it is derived from the first key of all, and in
    either case put there for that one. Raises ``Unavailable``.
    """
    places = [key_names.names(derive(key, b"fingerprint", b"")[:8]) for key in ring]
    held = await backend.read(places)
    found = [_opened(key, name, value) for key, name, value in zip(ring, places, held, strict=True)]
    secret = next((each for each in found if each is not None), None) or naming_secret(ring[0])
    if found[0] is None and held[0] is None:
        first = await backend.claim(places[0], Sealer(ring[0]).seal(b"", places[0], secret), None)
        secret = _opened(ring[0], places[0], first) or secret
    return secret


def _opened(key: bytes, name: str, value: bytes | None) -> bytes | None:
    return None if value is None else Sealer(key).open(b"", name, value)

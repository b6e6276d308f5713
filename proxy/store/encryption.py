"""Seals values, which is to compress, encrypt and authenticate them, and manages the keys for that.

A sealed value is bound to its name and tenant: it opens under no other name and for no other tenant.

Layout: version (1 byte: how it is compressed), key id (1 byte), nonce (12 bytes), AES-256-GCM ciphertext with its tag.
Version, key id and the value's name are authenticated with it. Random nonces of 12 bytes are safe for 2**32 values of
one key (https://csrc.nist.gov/pubs/sp/800/38/d/final); each tenant has a key of its own, derived by HKDF
(https://www.rfc-editor.org/rfc/rfc5869).

Values are sealed with keys derived from a master key. The names they are stored under come from another secret, the
naming secret. The store has a copy of it for each master key, sealed with that key. So after a change of the master key
every value still has its name.
"""

from __future__ import annotations

import hmac
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from cachetools import LRUCache
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, frame_content_size

from proxy.store.backend import Backend
from proxy.store.key_names import MASTER, naming_secret_name
from proxy.store.operations import Claim, Read, Unavailable

MAX_PLAIN = 8 * 1024 * 1024
"""Most bytes of a value before it is compressed."""

DEFLATE, ZSTD = 1, 2
"""Versions, by how a value is compressed: deflate below ``_ZSTD_FROM`` bytes, and zstd from there on.

Of 200 bytes deflate takes 6 us and zstd 22, of 19 KB 860 and 130, on about the same size.
"""

_ZSTD_FROM: Final = 2_048

_LEVEL: Final = 6
_MEMORY: Final = 4
"""Arguments of zlib: the level of compression, and the size of its hash table, here 4 KB.

Its own default clears tables of 260 KB for each value, which takes 70 us.
"""

_LEAST_WINDOW: Final = 9
"""The power of two of zlib's smallest window: https://docs.python.org/3/library/zlib.html#zlib.compressobj"""

_ZSTD_LEVEL = 3
_HEAD, _NONCE, _TAG = 2, 12, 16
"""Bytes of version and key id, of the nonce, and of the tag."""

_TENANTS = 4096
"""Tenants whose derived keys a process remembers."""

KEY_SIZE = 32
"""Bytes of a master key."""

KEY_FILE = "master.key"
"""The file in the store's directory with a master key that was created here."""


class Sealer:
    """Seals values with keys derived from *master*; opens those sealed with one of *others*, too. Not thread-safe.

    *names* is the naming secret; without one it is derived from *master*.
    """

    def __init__(self, master: bytes, others: Sequence[bytes] = (), names: bytes | None = None) -> None:
        self._own = _MasterKey(master)
        self._keys = (self._own, *(_MasterKey(other) for other in others))
        self.names = names or naming_secret(master)
        # Stored names depend on the purposes "chain", "item" and "names": they never change.
        self.prefix_key: Callable[[bytes], bytes] = lru_cache(_TENANTS)(partial(derive, self.names, b"chain"))
        """Returns the secret (32 bytes) that keys a tenant's prefix hashes."""

    def item_key(self) -> bytes:
        """Return the secret (32 bytes) of the codes by which we recognise our own items in a request.

        It is the same for every tenant: a client may change its credential in the middle of a conversation.
        """
        return derive(self.names, b"item", b"")

    def digest(self, tenant: bytes, message: bytes) -> bytes:
        """Return a digest (16 bytes) of *message* as the name of a key: only holders of the secret can compute it."""
        return hmac.digest(self.prefix_key(tenant), message, "sha256")[:16]

    def seal(self, tenant: bytes, key_name: str, plain: bytes) -> bytes:
        """Seal *plain* to store it under *key_name*; each result differs. Raises ``ValueError`` above ``MAX_PLAIN``."""
        if len(plain) > MAX_PLAIN:
            raise ValueError(f"a record of {len(plain)} bytes is over the limit of {MAX_PLAIN}")
        if len(plain) >= _ZSTD_FROM:
            return self._own.seal(tenant, key_name, pack(plain), ZSTD)
        # A window no larger than it has to be, since all of it is cleared.
        window = max(_LEAST_WINDOW, len(plain).bit_length())
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, window, _MEMORY)
        return self._own.seal(tenant, key_name, deflate.compress(plain) + deflate.flush(), DEFLATE)

    def seal_packed(self, tenant: bytes, key_name: str, packed: bytes) -> bytes:
        """Seal a value that ``pack`` has compressed, possibly in another thread."""
        return self._own.seal(tenant, key_name, packed, ZSTD)

    def open(self, tenant: bytes, key_name: str, value: bytes | None) -> bytes | None:
        """Return the value sealed for this tenant under this name; None for anything else."""
        if value is None or len(value) < _HEAD + _NONCE + _TAG or value[0] not in _UNPACK:
            return None
        for key in self._keys:
            packed = key.open(tenant, key_name, value)
            if packed is not None:
                return _UNPACK[value[0]](packed)
        return None

    def is_former(self, value: bytes) -> bool:
        """True if *value*, which opens, was sealed with another key than the present one."""
        return value[1:2] != self._own.key_id  # the second byte of the layout

    def is_foreign(self, value: bytes) -> bool:
        """True if *value* states a key id that is none of ours."""
        return value[:1] in (b"\1", b"\2") and all(value[1:2] != key.key_id for key in self._keys)


class _MasterKey:
    """One master key, and the keys that are derived from it."""

    def __init__(self, master: bytes) -> None:
        self._master = master
        self.key_id = derive(master, b"key id", b"")[:1]
        self._ciphers: LRUCache[bytes, AESGCM] = LRUCache(_TENANTS)

    def seal(self, tenant: bytes, key_name: str, packed: bytes, version: int) -> bytes:
        """Encrypt *packed*."""
        head, nonce = bytes((version,)) + self.key_id, os.urandom(_NONCE)
        return head + nonce + self._cipher(tenant).encrypt(nonce, packed, head + key_name.encode())

    def open(self, tenant: bytes, key_name: str, value: bytes) -> bytes | None:
        """Decrypt *value*. Return None if key, name or tenant are others, or the value was tampered with."""
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
    """Return 32 bytes for one *purpose* and one *tenant* (empty: all), from which *secret* cannot be derived."""
    info = b"ullage1|" + purpose + b"|" + tenant
    # Without a salt, which is optional (https://www.rfc-editor.org/rfc/rfc5869#section-3.1): every replica must derive
    # the same keys before it has read anything from the store.
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def naming_secret(master: bytes) -> bytes:
    """The naming secret (32 bytes) if *master* is the first key that a store ever had."""
    return derive(master, b"names", b"")


def pack(plain: bytes) -> bytes:
    """Compress *plain* for ``seal_packed``. Thread-safe."""
    return ZstdCompressor(level=_ZSTD_LEVEL).compress(plain)


def _unpack_zstd(packed: bytes) -> bytes | None:
    try:
        if not 0 <= frame_content_size(packed) <= MAX_PLAIN:
            return None
        return ZstdDecompressor().decompress(packed, max_output_size=MAX_PLAIN)
    except ZstdError:
        return None


def _unpack_deflate(packed: bytes) -> bytes | None:
    # A small value can inflate to gigabytes, and another holder of the key may have written it: the output is bounded.
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(packed, MAX_PLAIN + 1)
    except zlib.error:
        return None
    is_whole = inflate.eof and not inflate.unused_data
    if not is_whole or len(plain) > MAX_PLAIN:
        return None
    return plain


_UNPACK: Final[Mapping[int, Callable[[bytes], bytes | None]]] = {DEFLATE: _unpack_deflate, ZSTD: _unpack_zstd}


def new_master_key() -> bytes:
    """A new random master key."""
    return secrets.token_bytes(KEY_SIZE)


def find_master_key(directory: Path) -> bytes | None:
    """The key in *directory*. Return None if there is none. Raises ``OSError``, ``ValueError``."""
    if not (directory / KEY_FILE).exists():
        return None
    return ensure_master_key(directory)


def ensure_master_key(directory: Path) -> bytes:
    """The key in *directory*, created if missing, readable by its owner only. Raises ``OSError``, ``ValueError``.

    Processes that start together get the same key: each writes a draft and links it into place; the first link wins.
    """
    path = directory / KEY_FILE
    if not path.exists():
        # A link fails if its target exists (https://man7.org/linux/man-pages/man2/link.2.html), where a rename would
        # replace the key of a process that was faster. No process can read a key that is only half written.
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
    """The key that every replica of this store uses, and True if there was none before. Raises ``Unavailable``."""
    (shared,) = await backend.run(Read([MASTER]))
    if shared is None:
        shared = await backend.run(Claim(MASTER, ours, None))
        if shared is None:
            return ours, True
    if len(shared) != KEY_SIZE:
        raise Unavailable("master_key")
    return shared, False


async def share_naming_secret(backend: Backend, ring: Sequence[bytes]) -> bytes:
    """The naming secret that every holder of a master key of *ring* uses. Raises ``Unavailable``.

    The first key of *ring* that has one in the store decides; if none has, it is derived from the first key. Either way
    it is stored for the first key, which seals from now on.
    """
    names = [naming_secret_name(derive(key, b"fingerprint", b"")[:8]) for key in ring]
    values = await backend.run(Read(names))
    opened = [Sealer(key).open(b"", name, value) for key, name, value in zip(ring, names, values, strict=True)]
    shared = [secret for secret in opened if secret is not None]
    secret = (shared or [naming_secret(ring[0])])[0]
    if values[0] is not None:
        return secret
    theirs = await backend.run(Claim(names[0], Sealer(ring[0]).seal(b"", names[0], secret), None))
    return Sealer(ring[0]).open(b"", names[0], theirs) or secret

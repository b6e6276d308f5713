"""The master key: where it comes from when the configuration gives none, and how replicas come to share it.

Records are sealed with keys derived from it, and found under names that come from another secret, which the store keeps
for each master key, sealed with it. So a new master key moves no record: what it seals stands where it always did.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.sealed import Sealer, derive, naming_secret

SIZE = 32
FILE = "master.key"


def fresh() -> bytes:
    """A new random master key."""
    return secrets.token_bytes(SIZE)


def existing(directory: Path) -> bytes | None:
    """The key in *directory*, where one was ever created. Raises ``OSError``, ``ValueError``."""
    return from_directory(directory) if (directory / FILE).exists() else None


def from_directory(directory: Path) -> bytes:
    """The key in *directory*, created there once, readable by its owner only. Raises ``OSError``, ``ValueError``.

    Processes that start together get the same key: it is written beside and linked into place, the first link wins.
    """
    path = directory / FILE
    if not path.exists():
        draft = directory / f".{FILE}.{secrets.token_hex(8)}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(fresh())
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first: its key is read below
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != SIZE:
        raise ValueError(f"{path} holds {len(key)} bytes instead of {SIZE}; remove it to have a new one created")
    return key


async def agree(backend: Backend, ours: bytes) -> tuple[bytes, bool]:
    """The key every replica of this store uses, and whether it had to be put there. Raises ``Unavailable``."""
    (held,) = await backend.read([keys.MASTER])
    put = False
    if held is None:
        held = await backend.claim(keys.MASTER, ours, None)
        put = held is None
    if held is not None and len(held) != SIZE:
        raise Unavailable("master_key")
    return held or ours, put


async def naming(backend: Backend, ring: Sequence[bytes]) -> bytes:
    """The secret that names come from, of whoever has a master key of *ring*, the first of which seals from now on.

    The first of them that has one in the store tells; where none has, it is derived from the first key of all, and in
    either case put there for that one. Raises ``Unavailable``.
    """
    places = [keys.names(derive(key, b"fingerprint", b"")[:8]) for key in ring]
    held = await backend.read(places)
    found = [_opened(key, name, value) for key, name, value in zip(ring, places, held, strict=True)]
    secret = next((each for each in found if each is not None), None) or naming_secret(ring[0])
    if found[0] is None and held[0] is None:
        first = await backend.claim(places[0], Sealer(ring[0]).seal(b"", places[0], secret), None)
        secret = _opened(ring[0], places[0], first) or secret
    return secret


def _opened(key: bytes, name: str, value: bytes | None) -> bytes | None:
    return None if value is None else Sealer(key).open(b"", name, value)

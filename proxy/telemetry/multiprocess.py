"""The directory in which worker processes share the figures of ``/metrics``.

A module apart from ``metrics``: the parent creates the directory, and prometheus_client reads its path when it is
imported. https://prometheus.github.io/client_python/multiprocess/
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the directory; a worker needs it before it imports ``proxy.telemetry.metrics``."""

_NAME = re.compile(r"ullage-metrics-(\d+)-(\d+)-\w+")
"""The name of such a directory: the namespace of process ids, and the id of the process that created it."""


def make_directory() -> Path:
    """Return a new private directory for the figures of this run's workers. Remove those of runs that were killed.

    Raises ``OSError`` if it cannot be created.
    """
    space = _process_space()
    base = _base()
    for directory in base.glob("ullage-metrics-*"):
        if _is_stale(directory, space):
            remove_directory(directory)
    return Path(tempfile.mkdtemp(prefix=f"ullage-metrics-{space}-{os.getpid()}-", dir=base))


def _base() -> Path:
    """Return the temporary directory; shared memory if none is writable, as in a container with a read-only root."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/dev/shm")  # noqa: S108 - only the parent of a private directory


def _process_space() -> int:
    """Return the inode of this process's PID namespace: containers may share a folder and have the same process ids.

    https://man7.org/linux/man-pages/man7/pid_namespaces.7.html
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return 0


def _is_stale(directory: Path, space: int) -> bool:
    """True if *directory* was created by a process of this user and namespace that has ended."""
    named = _NAME.fullmatch(directory.name)
    if named is None or int(named[1]) != space or directory.is_symlink():
        return False
    try:
        if directory.stat().st_uid != os.getuid():
            return False
        os.kill(int(named[2]), 0)  # signal 0 only checks: https://man7.org/linux/man-pages/man2/kill.2.html
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # the process is another user's, or another process has removed the directory
        return False
    return False


def shared_directory() -> Path | None:
    """Return the directory that this process shares with other workers; None if it is the only one."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return None
    return Path(directory)


def forget_worker(directory: Path, pid: int) -> None:
    """Remove a dead worker's gauges from the sum. Its counters stay, so that totals never fall."""
    for file in directory.glob(f"gauge_live*_{pid}.db"):
        file.unlink(missing_ok=True)


def remove_directory(directory: Path) -> None:
    """Remove the figures of an ended run."""
    shutil.rmtree(directory, ignore_errors=True)

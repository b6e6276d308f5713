"""Where worker processes keep the figures that `/metrics` adds up. For the parent: it must not import the client."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Must hold the directory in a worker's environment before it imports ``proxy.telemetry.metrics``."""


def make_directory() -> Path:
    """A fresh private directory for the figures of this run's workers."""
    return Path(tempfile.mkdtemp(prefix="ullage-metrics-"))


def forget_worker(directory: Path, pid: int) -> None:
    """Take a dead worker's gauges out of the sum; its counters stay, so that totals never fall."""
    for file in directory.glob(f"gauge_live*_{pid}.db"):
        file.unlink(missing_ok=True)


def remove_directory(directory: Path) -> None:
    """Remove the figures of an ended run."""
    shutil.rmtree(directory, ignore_errors=True)

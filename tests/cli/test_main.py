"""The command line, run as a module."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_package_can_be_run() -> None:
    """``python -m proxy.cli`` takes the arguments that ``ullage`` takes."""
    command = [sys.executable, "-m", "proxy.cli", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout.startswith("ullage "), ended.stderr) == (True, "")

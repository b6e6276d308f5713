"""The way of a request is not longer than it was: a ratchet over what runs for it. No commit raises a number."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.proxy_process import ROOT

MOST = {
    "fits": {"files": 17, "functions": 90, "calls": 102},
    "counted": {"files": 35, "functions": 190, "calls": 250},
    "compacts": {"files": 58, "functions": 415},
    "follows": {"files": 41, "functions": 220, "calls": 305},
}
"""What `python -m tests.bench.way` printed when it was last made shorter. Only ever lower these."""

MORE = 3
"""Calls by which the count differs from run to run."""


@pytest.fixture(scope="module")
def ways() -> dict[str, dict[str, int]]:
    """The counts of this checkout."""
    command = [sys.executable, "-m", "tests.bench.way"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, dict[str, int]] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST)
def test_no_way_has_become_longer(ways: dict[str, dict[str, int]], kind: str) -> None:
    """Files, functions and calls of a request of each kind stay below what they were."""
    longer = {name: ways[kind][name] for name, most in MOST[kind].items() if ways[kind][name] > most + MORE}
    assert longer == {}

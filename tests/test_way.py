"""The way of a request is not longer than it was: a ratchet over what runs for it. No commit raises a number."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.bench.way import HOUSEKEEPING
from tests.support.proxy_process import ROOT

MOST = {
    "fits": {"files": 17, "functions": 87, "calls": 100, "changes": 60},
    "fits_first": {"files": 17, "functions": 109, "calls": 125, "changes": 75},
    "counted": {"files": 31, "functions": 171, "calls": 216, "changes": 126},
    "compacts": {"files": 55, "functions": 368, "calls": 2043, "changes": 456},
    "compacts_new": {"files": 56, "functions": 392, "calls": 3202, "changes": 479},
    "follows": {"files": 35, "functions": 191, "calls": 245, "changes": 144},
}
"""What `python -m tests.bench.way` printed when it was last made shorter. Only ever lower these.

``changes`` are changes of file, which putting modules together does not improve.
"""

MORE = 3
"""Calls by which the count differs from run to run."""


RUNS = 3
"""Runs at most: on a busy machine what is done behind an earlier answer may fall into a request's time."""


@pytest.fixture(scope="module")
def ways() -> dict[str, dict[str, int]]:
    """The counts of this checkout: of each kind the smallest of all runs."""
    shortest: dict[str, dict[str, int]] = {}
    for _ in range(RUNS):
        for kind, counts in run().items():
            before = shortest.get(kind, counts)
            shortest[kind] = {name: min(count, before[name]) for name, count in counts.items()}
        if not any(longer(shortest, kind) for kind in MOST):
            break
    return shortest


def run() -> dict[str, dict[str, int]]:
    """The counts of one run."""
    command = [sys.executable, "-m", "tests.bench.way"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, dict[str, int]] = json.loads(done.stderr.splitlines()[-1])
    return found


def longer(ways: dict[str, dict[str, int]], kind: str) -> dict[str, int]:
    """The counts of *kind* that are above what they were."""
    return {name: ways[kind][name] for name, most in MOST[kind].items() if ways[kind][name] > most + MORE}


@pytest.mark.slow
def test_what_runs_by_the_clock_is_there() -> None:
    """A function that is left out of the counts by its name has that name."""
    classes = [
        node
        for file in (ROOT / "proxy").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = {f"{each.name}.{node.name}" for each in classes for node in each.body if hasattr(node, "name")}
    assert names >= HOUSEKEEPING


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST)
def test_no_way_has_become_longer(ways: dict[str, dict[str, int]], kind: str) -> None:
    """Files, functions and calls of a request of each kind stay below what they were."""
    assert longer(ways, kind) == {}

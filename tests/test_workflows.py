"""The workflows that test and publish: read by a linter, with every action pinned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

WORKFLOWS = Path(__file__).parents[1] / ".github" / "workflows"
USES = re.compile(r"uses: (?P<action>[\w./-]+)@(?P<commit>\S+)(?: # v\d)?")


def test_a_linter_finds_nothing_in_them() -> None:
    """No secret, permission or input of a stranger is left open, as far as zizmor knows."""
    command = [Path(sys.executable).parent / "zizmor", "--offline", "--no-progress", WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_pinned_to_commits() -> None:
    """A tag may be moved to other code; a commit may not."""
    for file in sorted(WORKFLOWS.glob("*.yml")):
        used = USES.findall(file.read_text())
        assert used
        assert [commit for _, commit in used if not re.fullmatch(r"[0-9a-f]{40}", commit)] == []


def test_a_release_is_tested_first() -> None:
    """Nothing is published before the same checks passed that every change passes."""
    text = (WORKFLOWS / "release.yml").read_text()
    assert text.count("needs: [test, archives]") == text.count("environment: release") == 2
    assert "run: .ci/run" in text

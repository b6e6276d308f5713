"""The workflows that test and publish: read by a linter, with every action pinned."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
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


@pytest.mark.parametrize(
    ("urls", "expected"), [("", False), ("[project.urls]\nSource = 'https://example.org'\n", True)]
)
def test_a_release_needs_a_home(urls: str, expected: bool, tmp_path: Path) -> None:
    """A package that does not say where its source is cannot be published."""
    (command,) = re.findall(r"run: (python -c .*urls.*)", (WORKFLOWS / "release.yml").read_text())
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'x'\n{urls}")
    arguments = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) is expected


@pytest.mark.parametrize(
    ("statuses", "runs", "end"),
    [
        ([0], 1, 0),
        ([1, 0], 2, 0),
        ([1, 1, 0], 3, 0),
        ([1, 1, 1], 3, 1),
        ([1, 5], 2, 5),
        ([2], 1, 2),
        ([3], 1, 3),
        ([1, 124], 2, 124),
    ],
)
def test_only_failed_tests_run_again(statuses: list[int], runs: int, end: int, tmp_path: Path) -> None:
    """Three times at most; a run that was interrupted, broke or found no test fails the build as it is."""
    python, log = tmp_path / "python", tmp_path / "log"
    for number, status in enumerate(statuses, 1):
        (tmp_path / str(number)).write_text(str(status))
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit "$(cat {tmp_path}/"$(wc -l < {log})")"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TEST_PAUSE": "0"}
    done = subprocess.run([CI / "test"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    first, *again = log.read_text().splitlines()
    assert (done.returncode, 1 + len(again)) == (end, runs), done.stderr
    assert "--last-failed" not in first
    assert [command for command in again if "--last-failed --last-failed-no-failures none" not in command] == []

"""The workflows that test and publish: read by a linter, with every action pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
WORKFLOWS = ROOT / ".github" / "workflows"
USES = re.compile(r"uses: (?P<action>[\w./-]+)@(?P<commit>\S+)(?: # v\d)?")


@pytest.mark.slow
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


def release_step(start: str) -> str:
    """The commands of the one step of the release whose name begins with *start*."""
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if step.get("name", "").startswith(start)]
    assert len(steps) == 1
    return str(steps[0]["run"])


def run_step(start: str, folder: Path, **environment: str) -> int:
    """Exit code of that step in *folder*, run as GitHub runs it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", release_step(start)]
    done = subprocess.run(command, cwd=folder, env={"PATH": path, **environment}, capture_output=True, timeout=60)
    return done.returncode


@pytest.mark.parametrize(("source", "expected"), [("", False), ("https://example.org/fork/ullage", True)])
@pytest.mark.slow
def test_a_release_says_where_its_source_is(source: str, expected: bool, tmp_path: Path) -> None:
    """Archives that were built without the address of their source are not published."""
    environment = {**os.environ, "SOURCE_URL": source}
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, timeout=100, check=True)
    wanted = "https://example.org/fork/ullage"
    assert (run_step("Both archives say where", tmp_path, SOURCE_URL=wanted) == 0) is expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [("pip install . && ullage serve --upstream URL", False), ("uvx ullage serve --upstream URL", True)],
)
@pytest.mark.slow
def test_a_release_tells_the_published_command(command: str, expected: bool, tmp_path: Path) -> None:
    """What an index shows of a release begins with the command that needs no checkout."""
    (tmp_path / "README.md").write_text(f"# Ullage\n\n```sh\n{command}\n```\n")
    assert (run_step("The first command of the README", tmp_path) == 0) is expected


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
@pytest.mark.slow
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

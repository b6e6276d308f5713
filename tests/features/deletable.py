"""Shows that every optional feature can be deleted: ``python -m tests.features.deletable [FOLDER ...]``.

For each folder of ``proxy/features`` the repository is copied without it and without its own tests. In the copy the
tests of the engine, the server, the wiring and the other features are run, and a real proxy answers requests.
``ullage check`` must refuse the example of every key for the keys of the deleted feature, and for nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = (
    "compress",
    "recall",
    "history",
    "client_compaction",
    "context_management",
    "cap_results",
    "deferred_tools",
    "memories",
)

OWN_TESTS = {
    "compress": ("tests/e2e/test_compress.py", "tests/test_api.py"),
    "recall": (
        "tests/e2e/test_recall.py",
        "tests/e2e/test_sessions.py",
        "tests/support/recall_fixtures.py",
        "tests/server_tools/",
        "tests/bench/recall.py",
        "tests/bench/test_recall.py",
    ),
    "history": (
        "tests/e2e/test_conversations.py",
        "tests/e2e/test_archive.py",
        "tests/e2e/test_sessions.py",
        "tests/support/sample_notes.py",
        "tests/bench/records.py",
        "tests/bench/small.py",
    ),
    "client_compaction": (),
    "context_management": (),
    "cap_results": (),
    "deferred_tools": ("tests/e2e/test_deferred_tools.py",),
    "memories": ("tests/e2e/test_sessions.py",),
}
"""Files outside ``tests/features`` that are about one feature."""

KEYS: dict[str, tuple[str, ...]] = {
    "compress": (),
    "recall": ("compression.recall",),
    "history": ("archive", "budgets"),
    "memories": ("memories",),
    "client_compaction": ("compression.client_compaction", "upstreams[0].compaction"),
    "context_management": ("upstreams[0].context_management",),
    "deferred_tools": ("compression.deferred_tools",),
    "cap_results": ("compression.stages.truncate.always", "compression.stages.truncate.max_lines"),
}
"""The keys of each feature, as they stand in ``config/ullage.yaml``."""

TESTS = (
    "tests/core",
    "tests/features",
    "tests/engine",
    "tests/server",
    "tests/test_wiring.py",
    "tests/test_app.py",
    "tests/test_process.py",
    "tests/e2e/test_transparency.py",
    "tests/e2e/test_windows.py",
)


PROBLEM = re.compile(r"config/ullage\.yaml:\d+: (\S+): there is no such key")


def copy_without(folder: str, place: Path) -> None:
    """Copy the repository to *place*, but for the feature in *folder* and its own tests."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    gone = (f"proxy/features/{folder}/", f"tests/features/{folder}/", *OWN_TESTS[folder])
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if name.startswith(gone) or not source.is_file():
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def passes_without(folder: str) -> bool:
    """True if the tests of everything else pass in a copy without *folder*."""
    with tempfile.TemporaryDirectory() as place:
        copy_without(folder, Path(place))
        unknown = unknown_keys(place)
        if unknown != sorted(KEYS[folder]):
            print(f"without {folder} these keys are unknown: {', '.join(unknown) or 'none'}")
            return False
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(command, cwd=place, env=_environment(place), check=False).returncode == 0


def unknown_keys(place: str) -> list[str]:
    """Return the keys of the example for which the copy refuses it. Raises ``ValueError`` for any other problem."""
    command = [sys.executable, "-m", "proxy.cli", "check", "config/ullage.yaml"]
    done = subprocess.run(command, cwd=place, env=_environment(place), capture_output=True, text=True, check=False)
    problems = [line for line in done.stderr.splitlines() if line.startswith("config/ullage.yaml")]
    matches = [PROBLEM.fullmatch(line) for line in problems]
    if bool(problems) != bool(done.returncode) or not all(matches):
        raise ValueError(f"unexpected answer of `ullage check`: {done.stderr}")
    return sorted(match[1] for match in matches if match)


def _environment(place: str) -> dict[str, str]:
    """The environment in which the copy, and no installed package, is imported."""
    return {**os.environ, "PYTHONPATH": place}


def main() -> int:
    """Try each folder that is named, or all; return the exit code."""
    failed = [folder for folder in sys.argv[1:] or FOLDERS if not passes_without(folder)]
    print(f"needed by the rest: {', '.join(failed)}" if failed else "every folder can be deleted")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

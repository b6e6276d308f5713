"""Shows that every optional feature can be deleted: ``python -m tests.features.deletable [FOLDER ...]``.

For each folder of ``proxy/features`` the repository is copied without it and without its own tests. In the copy the
tests of the engine, the server, the wiring and the other features are run, and a real proxy answers requests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("recall", "history", "client_compaction", "context_management", "cap_results")

OWN_TESTS = {
    "recall": ("tests/e2e/test_recall.py", "tests/support/recall_fixtures.py"),
    "history": ("tests/e2e/test_conversations.py", "tests/e2e/test_archive.py"),
    "client_compaction": (),
    "context_management": (),
    "cap_results": (),
}
"""Files outside ``tests/features`` that are about one feature."""

TESTS = (
    "tests/features",
    "tests/engine",
    "tests/server",
    "tests/test_wiring.py",
    "tests/test_app.py",
    "tests/e2e/test_transparency.py",
    "tests/e2e/test_windows.py",
)


def copy_without(folder: str, place: Path) -> None:
    """Copy the files under version control to *place*, but for the feature in *folder* and its own tests."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
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
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(command, cwd=place, env=_environment(place), check=False).returncode == 0


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

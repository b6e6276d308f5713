"""The folder in which workers keep their figures."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from proxy.telemetry.multiprocess import forget_worker, make_directory, remove_directory


def test_only_the_gauges_of_a_dead_worker_go():
    """A dead worker's gauges leave the sum, its counters and every other worker's figures stay."""
    folder = make_directory()
    names = ["gauge_livesum_7.db", "gauge_livemin_7.db", "counter_7.db", "histogram_7.db", "gauge_livesum_77.db"]
    for name in names:
        (folder / name).touch()
    forget_worker(folder, 7)
    assert {file.name for file in folder.iterdir()} == set(names[2:])
    forget_worker(folder, 7)
    remove_directory(folder)
    assert not folder.exists()
    remove_directory(folder)


def test_the_folder_is_private_and_fresh():
    """Nobody else may read the figures, and two runs never share a folder."""
    first, second = make_directory(), make_directory()
    try:
        assert first != second
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
    finally:
        remove_directory(first)
        remove_directory(second)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_what_a_killed_run_left_behind_goes(temporary):
    """The next start removes the folder of a process that is gone, and no other folder."""
    code = "from proxy.telemetry.multiprocess import make_directory; print(make_directory(), flush=True); input()"
    environ = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = Path(other.stdout.readline().strip())
        (theirs / "counter_7.db").touch()
        strangers = [temporary / "ullage-metrics-notes", temporary / "ullage-metrics-1-999999999-abc"]
        for stranger in strangers:
            stranger.mkdir()
        mine = make_directory()
        assert theirs.is_dir(), "its owner lives"
        other.kill()
    again = make_directory()
    assert not theirs.exists()
    assert mine.is_dir()
    assert again.is_dir()
    assert all(stranger.is_dir() for stranger in strangers), "other names, and other spaces of process ids"


def test_a_link_is_not_followed(temporary):
    """Something else under such a name is left alone."""
    gone = make_directory()
    parts = gone.name.split("-")
    target = temporary / "precious"
    target.mkdir()
    link = temporary / "-".join([*parts[:3], "999999999", "abc"])
    link.symlink_to(target)
    make_directory()
    assert link.is_symlink()
    assert target.is_dir()


def test_without_a_temporary_directory_the_memory_that_is_shared_is_used(monkeypatch):
    """Under a read-only root workers have a place for their figures all the same."""

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    made = make_directory()
    try:
        assert made.parent == Path("/dev/shm")
    finally:
        remove_directory(made)

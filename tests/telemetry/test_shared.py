"""The folder in which workers keep their figures."""

import stat

from proxy.telemetry.shared import forget_worker, make_directory, remove_directory


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

"""What is exported beside the log and the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.telemetry.exports import NO_EXPORTS, CannotExport, open_exports
from tests.telemetry.test_golden import COMPACTED


def test_nothing_is_exported_by_default() -> None:
    """Without a path there is no observer, and nothing to close."""
    assert open_exports(None, 1, 1, 0).observers == NO_EXPORTS.observers == ()
    assert NO_EXPORTS.close() == 0


@pytest.mark.parametrize(("worker", "name"), [(0, "budget.jsonl"), (2, "budget-2.jsonl")])
def test_each_worker_has_a_file_of_its_own(tmp_path: Path, worker: int, name: str) -> None:
    """The first one has the configured name."""
    exports = open_exports(tmp_path / "budget.jsonl", 10_000, 1, worker)
    for observe in exports.observers:
        observe(COMPACTED, 0.1)
    assert exports.close() == 0
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 100


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the setting, the path, and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotExport, match=r"telemetry.budget_log.path: .*file/b.jsonl: .*Name a file in a folder"):
        open_exports(tmp_path / "file" / "b.jsonl", 1, 1, 0)

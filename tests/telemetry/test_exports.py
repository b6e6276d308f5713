"""What is exported beside the log and the metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proxy.core.report import SummaryReport
from proxy.telemetry.exports import NO_EXPORTS, CannotExport, Exports, open_budget_log, open_traces
from tests.support.engine_fixtures import Replica
from tests.support.scripted_upstream import accepting_upstream
from tests.telemetry.test_golden import COMPACTED


def test_nothing_is_exported_by_default() -> None:
    """Without settings there is no observer, nothing to close, and nothing around engine and upstream."""
    assert open_budget_log(None, 1, 1, 0) is None
    assert NO_EXPORTS.observers == ()
    assert NO_EXPORTS.close() == 0
    replica = Replica()
    assert NO_EXPORTS.traced_exchange(replica.engine) is replica.engine
    upstream = accepting_upstream()
    assert NO_EXPORTS.traced_upstream(upstream) is upstream
    NO_EXPORTS.summary(SummaryReport("written", "", "t", "m", "u", 1))


@pytest.mark.parametrize(("worker", "name"), [(0, "budget.jsonl"), (2, "budget-2.jsonl")])
def test_each_worker_has_a_file_of_its_own(tmp_path: Path, worker: int, name: str) -> None:
    """The first one has the configured name."""
    exports = Exports(open_budget_log(tmp_path / "budget.jsonl", 10_000, 1, worker))
    for observe in exports.observers:
        observe(COMPACTED, 0.1)
    assert exports.close() == 0
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 100


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the setting, the path, and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotExport, match=r"telemetry.budget_log.path: .*file/b.jsonl: .*Name a file in a folder"):
        open_budget_log(tmp_path / "file" / "b.jsonl", 1, 1, 0)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces that are wanted without OpenTelemetry say what to install."""
    monkeypatch.setitem(sys.modules, "proxy.telemetry.tracing", None)
    with pytest.raises(CannotExport, match=r"pip install 'ullage\[otel\]'"):
        open_traces("1")

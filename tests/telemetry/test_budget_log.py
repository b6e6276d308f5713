"""The budget log: one line of figures a request, warnings and recoveries, in files that are rotated."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from proxy.core.report import INTERNAL_ERROR, Report
from proxy.telemetry import budget_log
from proxy.telemetry.budget_log import BudgetLog, lines_of
from tests.telemetry.test_golden import COMPACTED, REPORTS

NOW = datetime(2026, 11, 23, 4, 5, 6, 789_000, UTC).timestamp()


@pytest.fixture
def log(tmp_path: Path) -> BudgetLog:
    return BudgetLog(tmp_path / "made" / "budget.jsonl", 4_000, 3)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of all files, the oldest first."""
    files = sorted(folder.iterdir(), key=lambda file: -int(file.suffix[1:]) if file.suffix[1:].isdigit() else 0)
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def lines_of_report(report: Report) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(report, NOW)]


def test_a_line_has_the_figures() -> None:
    """Tokens and budget, their ratio to two decimals, files, block, what was left out, and who asked."""
    assert lines_of_report(COMPACTED)[0] == {
        "ts": "2026-11-23T04:05:06.789Z",
        "event": "context_budget",
        "agent": "codex",
        "issue": "apollo",
        "context_loaded": 3500,
        "context_available": 7000,
        "context_ratio": 0.5,
        "files_loaded": 7,
        "checkpoint_entries": 0,
        "pruned": 5500,
    }
    unlabelled = COMPACTED.with_(project="", regions={"summary": 5})
    line = lines_of_report(unlabelled)[0]
    assert (line["issue"], line["checkpoint_entries"]) == ("c0ffee", 1)


@pytest.mark.parametrize("budget", [0, None])
def test_without_a_budget_there_is_no_ratio(budget: int | None) -> None:
    """It is null, never a division by zero."""
    line = lines_of_report(COMPACTED.with_(budget=budget))[0]
    assert (line["context_ratio"], line["context_available"]) == (None, budget)


@pytest.mark.parametrize(
    ("report", "kinds"),
    [
        (COMPACTED.with_(overflows=0), ["context_budget"]),
        (COMPACTED.with_(overflows=0, tokens_after=5600), ["context_budget"]),
        (COMPACTED.with_(overflows=0, tokens_after=5601), ["context_budget", "context_overflow_warning"]),
        (COMPACTED.with_(overflows=1), ["context_budget", "context_recovery"]),
        (COMPACTED.with_(overflows=0, reason=INTERNAL_ERROR), ["context_budget", "context_recovery"]),
    ],
)
def test_warnings_and_recoveries_have_lines_of_their_own(report: Report, kinds: list[str]) -> None:
    """More than 80 % of the budget warns; an overflow that was made good, and a fault of ours, is a recovery."""
    written = lines_of_report(report)
    assert [line.pop("event") for line in written] == kinds
    assert all(line == written[0] for line in written)


def test_every_report_can_be_written(log: BudgetLog, tmp_path: Path) -> None:
    """Forged names stay inside their line; relayed requests and counts have no context."""
    for report in REPORTS.values():
        log.observe(report.with_(project='x\n{"event":"forged"}\u2028\ud83d'), 0.1)
    log.observe(COMPACTED.with_(api="relay"), 0.1)
    log.observe(COMPACTED.with_(api="count_tokens"), 0.1)
    log.close()
    written = lines(tmp_path / "made")
    assert [line["event"] for line in written].count("context_budget") == len(REPORTS)
    assert all(line["event"].startswith("context_") for line in written)


def test_files_are_rotated(log: BudgetLog, tmp_path: Path) -> None:
    """No file grows beyond its size, the oldest are removed, and the newest lines are there in their order."""
    for number in range(100):
        log.observe(COMPACTED.with_(overflows=0, tokens_after=number), 0.1)
    log.close()
    files = sorted(file.name for file in (tmp_path / "made").iterdir())
    assert files == ["budget.jsonl", "budget.jsonl.1", "budget.jsonl.2", "budget.jsonl.3"]
    assert max(file.stat().st_size for file in (tmp_path / "made").iterdir()) <= 4_000
    written = [line["context_loaded"] for line in lines(tmp_path / "made")]
    assert written == list(range(100 - len(written), 100))
    assert 20 < len(written) < 100
    assert log.dropped == 0


def test_a_slow_disk_costs_lines_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that come while too many wait are dropped and counted."""
    monkeypatch.setattr(budget_log, "MOST_WAITING", 5)
    monkeypatch.setattr(budget_log, "BATCH_SECONDS", 60.0)
    log = BudgetLog(tmp_path / "budget.jsonl", 10**6, 1)
    for _ in range(8):
        log.observe(COMPACTED.with_(overflows=0), 0.1)
    assert log.dropped == 3
    log.close()
    assert len(lines(tmp_path)) == 5


def test_a_full_disk_costs_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that cannot be written is counted, and nothing is printed."""
    log = BudgetLog(Path("/dev/full"), 10**6, 1)
    log.observe(COMPACTED.with_(overflows=0), 0.1)
    log.close()
    assert log.dropped == 1
    assert capsys.readouterr() == ("", "")

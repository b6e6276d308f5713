"""What reports look like from outside, frozen: log lines byte for byte, response headers, and the whole exposition.

Names of log keys, headers and metrics are public. ``python -m tests.telemetry.test_golden`` writes the frozen files
anew; look at their difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from proxy.core.report import Report, SummaryReport, Usage, response_headers
from proxy.telemetry.logs import Logs
from proxy.telemetry.metrics import Telemetry

DATA = Path(__file__).parents[1] / "data" / "telemetry"

COMPACTED = Report(
    "req_1", "chat", model="gpt-5", upstream="openai", outcome="compacted", reason="fold", window=8192, budget=7000,
    tokens_before=9000, tokens_after=3500, stages=("fold", "drop", "recall"), conversation="c0ffee", event=True,
    retries=1, overflows=2, overhead_seconds=0.0015, status=200, usage=Usage(3400, 50, 3000), recalls=2,
    regions={"system": 500, "tool": 2900, "reserve": 1000}, borrowed={"older": 400}, source="table",
    project="apollo", task_size="small", epoch=3, summary_tokens=120, recall_tokens=900, large_result=0.42,
    client_compaction="codex", stream=True, agent="codex", files_read=7,
    first_fill=0.85, repeated_prefix=0.6, newest_tokens=2600,
    waste={"fresh_results": 2940, "fresh_result": 2500, "listing": 700},
)  # fmt: skip

REPORTS = {
    "nothing known": Report("r", "chat"),
    "fits by its bytes": Report(
        "r", "messages", model="m", upstream="u", window=128_000, budget=112_000, tokens_before=812, tokens_after=812,
        bounded=True, source="configured", status=200, usage=Usage(700, 3), overhead_seconds=0.0004,
    ),
    "compacted": COMPACTED,
    "other source of the window": COMPACTED.with_(source="learned", window=9000, reason="", large_result=0.0),
    "observed": COMPACTED.with_(outcome="verbatim", observed=True, reason="would_compact", source="request", retries=0),
    "refused": COMPACTED.with_(outcome="refused", reason="context_length_exceeded", status=400, retries=0, event=False),
    "fallback": COMPACTED.with_(outcome="degraded", reason="fallback", fallback="big", project="", task_size="large"),
    "cut": Report("r", "responses", model="m", upstream="u", reason="silently_truncated", status=200, window=0),
    "rate limited": Report("r", "chat", model="m", upstream="u", status=429, tokens_before=0, tokens_after=0, window=9),
    "upstream is gone": Report("r", "chat", upstream="u", status=502, outcome="refused", reason="upstream_unreachable"),
    "client left": Report("r", "chat", model="m", upstream="u", status=499, reason="client_left"),
    "forged": Report("r", "chat", model='m\n{"event":"x"}' + "y" * 300, status=404, reason="\x1b[31m", project="p\t"),
    "beyond JSON": Report("r", "chat", model="\ud83d", tokens_before=2**70, status=200),
    "budget nearly used": Report("r", "chat", conversation_budget={"total": 9, "consumed": 8, "remaining": 1}),
    "grown": Report("r", "chat", tokens_before=10, tokens_after=12, budget=11, status=200, regions={"user": 0}),
}  # fmt: skip


def log_lines(path: Path) -> list[str]:
    """The lines of all reports, without their time."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        logs = Logs("debug", "json", fd)
        for report in REPORTS.values():
            logs.request_done(report, 1.23456)
        logs.close()
        lines = path.read_text("utf-8").splitlines()
    finally:
        os.close(fd)
    return [re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", line) for line in lines]


def headers() -> dict[str, dict[str, str]]:
    """The response headers of all reports."""
    found = {}
    for name, report in REPORTS.items():
        pairs = response_headers(report)
        found[name] = dict(sorted(pairs))
        assert len(found[name]) == len(pairs)
    return found


def exposition() -> str:
    """The whole exposition after all reports and one of everything else, sorted, without times of creation."""
    telemetry = Telemetry("1.2.3")
    for report in REPORTS.values():
        telemetry.observe(report, 0.75)
    telemetry.summary(SummaryReport("written", "", "t1", "small", "u", 2, 900, 80, 1.5))
    telemetry.summary(SummaryReport("skipped", "budget", "t1", "", ""))
    telemetry.summaries_state(running=1, broken=2)
    telemetry.loop_lag(0.003)
    telemetry.in_flight(4)
    telemetry.refused_connections({"full": 2})
    telemetry.store_state(up=True, breaker="half-open")
    telemetry.store_error("timeout")
    telemetry.fault("answer", "r-1", ValueError())
    telemetry.archived("kept", 5)
    telemetry.lines_dropped(6)
    telemetry.without_descriptor(7)
    telemetry.learned_windows(8)
    # The order of families is no part of the format, nor are the times at which series began.
    lines = telemetry.exposition()[0].decode().splitlines()
    return "\n".join(sorted(line for line in lines if "_created" not in line)) + "\n"


def test_log_lines_are_as_they_were(tmp_path: Path) -> None:
    """Keys, their order, their values and how they are written stay."""
    assert log_lines(tmp_path / "log") == (DATA / "log.txt").read_text("utf-8").splitlines()


def test_response_headers_are_as_they_were() -> None:
    """Names and values of the headers stay."""
    assert headers() == json.loads((DATA / "headers.json").read_text("utf-8"))


def test_the_exposition_is_as_it_was() -> None:
    """Every metric's name, help, type, labels, buckets and figures stay."""
    assert exposition() == (DATA / "exposition.txt").read_text("utf-8")


def test_every_field_of_a_report_is_seen() -> None:
    """The reports together differ from an empty one in every field."""
    blank = Report("", "")
    fields = [name for name in Report.__struct_fields__ if name != "usage"]
    assert [n for n in fields if all(getattr(one, n) == getattr(blank, n) for one in REPORTS.values())] == []


if __name__ == "__main__":
    (DATA / "log.txt").write_text("\n".join(log_lines(DATA / "log.txt")) + "\n", "utf-8")
    (DATA / "headers.json").write_text(json.dumps(headers(), indent=1) + "\n", "utf-8")
    (DATA / "exposition.txt").write_text(exposition(), "utf-8")

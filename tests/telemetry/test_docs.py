"""The page about fields and metrics is that of the tables, and the tables are whole."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from proxy.core.report import DURATION, FIELDS, Report, Usage, response_headers
from proxy.telemetry.docs import page
from proxy.telemetry.metrics import PROCESS, Telemetry

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_current() -> None:
    """``docs/metrics.md`` is what the command prints."""
    command = [sys.executable, "-m", "proxy.telemetry.docs"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == page() == (ROOT / "docs" / "metrics.md").read_text("utf-8")


def test_every_field_of_a_report_has_a_row() -> None:
    """Each attribute of a report is one row of the table, and each row can be read from a report."""
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names))
    attributes = {name for name in Report.__struct_fields__ if name != "usage"}
    attributes |= {f"usage.{name}" for name in Usage.__struct_fields__}
    assert attributes <= set(names)
    attrgetter(*(name for name in names if name != DURATION))(Report("r", "chat"))


def test_names_are_unique_and_documented() -> None:
    """No two rows share a key, a header or a sentence; every sentence ends as one."""
    for kind in ("log", "header", "about"):
        given = [getattr(field, kind) for field in FIELDS if getattr(field, kind)]
        assert len(given) == len(set(given)), kind
    metrics = [metric for field in FIELDS for metric in field.metrics]
    sentences = [field.about for field in FIELDS] + [metric.about for metric in (*metrics, *PROCESS)]
    assert [text for text in sentences if not text.endswith(".")] == []


def test_every_exposed_metric_is_documented() -> None:
    """The page names each metric and header that there is, and no other."""
    families = {
        line.split()[2] for line in Telemetry("1").exposition()[0].decode().splitlines() if line.startswith("# TYPE")
    }
    metrics = {metric.name for field in FIELDS for metric in field.metrics} | {metric.name for metric in PROCESS}
    assert {name for name in families if not name.endswith("_created")} == metrics
    full = Report("r", "chat", tokens_before=9, tokens_after=4, window=9, budget=9, stages=("fold",), summary_tokens=1)
    budget = {"total": 9, "consumed": 8}
    full = full.with_(retries=1, fallback="m", conversation="c", recall_tokens=2, conversation_budget=budget)
    assert {name for name, _ in response_headers(full)} == {field.header for field in FIELDS if field.header}
    assert set(re.findall(r"^\| `(ullage_[a-z_]+)` \|", page(), re.MULTILINE)) == metrics

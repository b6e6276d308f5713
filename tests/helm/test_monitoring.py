"""The dashboard and the alert rules ask for metrics and labels that the proxy exposes, and load where they belong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.core.report import FIELDS, Metric
from proxy.telemetry.metrics import PROCESS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "ullage" / "files"
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]

METRICS: dict[str, Metric] = {metric.name: metric for field in FIELDS for metric in field.metrics}
METRICS |= {metric.name: metric for metric in PROCESS}

ADDED = {"namespace", "job", "instance", "pod"}
"""Labels that Prometheus adds to each series of a target."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the path (Debian: the package prometheus)"
)


def series_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each series in *expression*, and the labels that it is selected by."""
    for name, _, selector in re.findall(r"(ullage_\w+)(\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))


def labels_of(name: str) -> set[str]:
    """The labels of the series *name*; fails if no metric has such a series."""
    base = re.sub(r"_(?:bucket|sum|count)$", "", name)
    if name in METRICS and METRICS[name].kind != "histogram":
        return {*METRICS[name].labels, *METRICS[name].by}
    assert METRICS[base].kind == "histogram", name
    return {*METRICS[base].labels, *METRICS[base].by, *(["le"] if name.endswith("_bucket") else [])}


def problems(expression: str) -> list[str]:
    """What *expression* selects or groups by, and the exposition does not have."""
    messages, every = [], set(ADDED)
    for name, selected in series_of(expression):
        labels = labels_of(name) | ADDED
        every |= labels
        messages += [f"{name} has no label {label}" for label in selected - labels]
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        messages += [f"nothing has a label {label}" for label in set(re.split(r",\s*", group)) - every]
    return messages


PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{t} {x['refId']}" for t, x in TARGETS])
def test_each_panel_asks_for_what_there_is(title: str, target: dict[str, Any]) -> None:
    """Names, labels and groups are those of the exposition, and a legend names labels that are left."""
    assert problems(target["expr"]) == []
    assert list(series_of(target["expr"]))
    groups = {label for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in re.split(r",\s*", group)}
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= groups


def test_a_wrong_expression_is_noticed() -> None:
    """An unknown metric, a histogram without its suffix, a label of another metric."""
    assert problems('sum by (nobody) (ullage_requests_total{kind="x"})') == [
        "ullage_requests_total has no label kind",
        "nothing has a label nobody",
    ]
    for unknown in ("ullage_request_total", "ullage_overhead_seconds_total", "ullage_requests_total_bucket"):
        with pytest.raises((KeyError, AssertionError)):
            problems(unknown)
    with pytest.raises(AssertionError):
        labels_of("ullage_store_up_count")


def test_the_dashboard_is_whole() -> None:
    """Panels have ids of their own, do not overlap, and take their data from the chosen source."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & covered, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= covered
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(DASHBOARD["panels"])))
    assert used == variables == {"datasource", "namespace", "job"}
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in PANELS)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_each_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    """Names and labels are those of the exposition; the text says what to do and names labels that are left."""
    assert problems(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    text = " ".join(rule["annotations"].values())
    assert len(rule["annotations"]["description"]) > 40
    groups = {label for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in re.split(r",\s*", group)}
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= groups


def test_the_guide_names_every_alert() -> None:
    """docs/operations.md has each of them, and no other."""
    guide = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"`(Ullage[A-Z]\w+)`", guide)) == {rule["alert"] for rule in RULES}


@needs_promtool
@pytest.mark.slow
def test_prometheus_takes_the_rules() -> None:
    """Prometheus' own checker loads the file, and each alert fires for its fault and for nothing else."""
    for command in (["check", "rules", str(FILES / "alerts.yaml")], ["test", "rules", "tests/helm/alerts_test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_dashboards_expressions(tmp_path: Path) -> None:
    """Each expression of the dashboard is one that Prometheus can read."""
    rules = [
        {"record": f"panel:{at}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for at, (_, target) in enumerate(TARGETS)
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout

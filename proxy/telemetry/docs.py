"""Generates the page about fields and metrics from their tables.

Write it with ``python -m proxy.telemetry.docs > docs/metrics.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from proxy.core.report import FIELDS, Metric
from proxy.telemetry.metrics import PROCESS

_HEAD = """\
# Fields and metrics

Made by `python -m proxy.telemetry.docs` from `FIELDS` in `proxy/core/report.py` and `PROCESS` in
`proxy/telemetry/metrics.py`: change those.

Names of models and projects come from clients: after the first hundred of each, the rest are counted as `other`. No
label holds a key, a conversation or a piece of text. Counters whose labels are known begin at 0 with the process, those
of a model or upstream with its first request: a rate sees the first fault.
"""

_REQUEST = """\
## Fields of a request

Each request ends with one line `proxy.request_done` with these keys. A header is left out if there is nothing to say.

| key in the log | response header | meaning | metric |
| --- | --- | --- | --- |
"""

_METRICS = """
## Metrics of requests

| name | type, labels | meaning |
| --- | --- | --- |
"""

_PROCESS = """
## Metrics of the process, its store and its summaries

| name | type, labels | meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return the page about fields and metrics, as Markdown."""
    public = [field for field in FIELDS if field.log or field.header or field.metrics]
    fields = [_field_row(field.log, field.header, field.about, field.metrics) for field in public]
    # A metric may stand in several rows.
    metrics = {metric.name: metric for field in FIELDS for metric in field.metrics}
    of_requests, of_process = map(_metric_row, metrics.values()), map(_metric_row, PROCESS)
    return "".join([_HEAD, "\n", _REQUEST, *fields, _METRICS, *of_requests, _PROCESS, *of_process])


def _field_row(key: str, header: str, about: str, metrics: Iterable[Metric]) -> str:
    names = ", ".join(_code(metric.name) for metric in metrics)
    return f"| {_code(key)} | {_code(header)} | {about} | {names} |\n"


def _metric_row(metric: Metric) -> str:
    kind: str = metric.kind
    if labels := metric.labels + metric.by:
        kind = f"{kind}: {', '.join(map(_code, labels))}"
    return f"| {_code(metric.name)} | {kind} | {' '.join(filter(None, (metric.about, metric.doc)))} |\n"


def _code(name: str) -> str:
    if not name:
        return ""
    return f"`{name}`"


if __name__ == "__main__":
    sys.stdout.write(page())

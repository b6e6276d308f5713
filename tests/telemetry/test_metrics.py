"""Metrics: what a report counts as, and one answer for all worker processes."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.report import Report
from proxy.store.breaker import State
from proxy.telemetry.metrics import MOST_MODELS, MOST_WAITING, OTHER, Telemetry
from proxy.telemetry.multiprocess import VARIABLE, forget_worker, make_directory, remove_directory

ROOT = Path(__file__).parents[2]


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def shown(telemetry):
    text, kind = telemetry.exposition()
    assert kind.startswith("text/plain")
    return samples(text.decode())


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def test_a_compaction_is_counted_in_full():
    """A report's figures arrive under the documented names, with a route's labels."""
    telemetry = Telemetry("1.2.3")
    report = Report(
        "r", "chat", model="m", upstream="u", outcome="compacted", window=8000, budget=7000, tokens_before=9000,
        tokens_after=4000, stages=("fold", "clip"), event=True, retries=2, overflows=3, overhead_seconds=0.003,
        status=400,
    )  # fmt: skip
    telemetry.observe(report, 2.0)
    found = shown(telemetry)
    labels = {"api": "chat", "model": "m", "upstream": "u", "status": "400", "outcome": "compacted"}
    assert value(found, "ullage_requests_total", **labels) == 1
    assert value(found, "ullage_context_tokens_total", model="m", region="before") == 9000
    assert value(found, "ullage_context_tokens_total", model="m", region="after") == 4000
    assert value(found, "ullage_tokens_removed_total", model="m") == 5000
    assert value(found, "ullage_stages_total", stage="clip") == 1
    assert value(found, "ullage_compactions_total", model="m") == 1
    assert value(found, "ullage_context_fill_ratio_sum", model="m") == 0.5
    assert value(found, "ullage_retries_total", upstream="u") == 2
    assert value(found, "ullage_overflow_errors_total", stage="retried") == 2
    assert value(found, "ullage_overflow_errors_total", stage="returned") == 1
    assert value(found, "ullage_upstream_errors_total", upstream="u", **{"class": "client"}) == 1
    assert value(found, "ullage_overhead_seconds_sum", api="chat") == pytest.approx(0.003)
    assert value(found, "ullage_request_seconds_count", api="chat") == 1
    assert value(found, "ullage_build_info", version="1.2.3") == 1


@pytest.mark.parametrize(
    ("status", "outcome", "reason", "kind"),
    [
        (429, "verbatim", "", "rate_limited"),
        (500, "verbatim", "", "server"),
        (404, "verbatim", "", "client"),
        (502, "refused", "upstream_unreachable", "unreachable"),
        (504, "refused", "upstream_timeout", "timeout"),
        (200, "compacted", "upstream_stream_error", "stream_error"),
        (499, "verbatim", "client_left", None),
        (500, "refused", "internal_error", None),
        (400, "refused", "", None),
        (200, "verbatim", "", None),
    ],
)
def test_upstream_errors_have_a_class_and_refusals_are_none(status, outcome, reason, kind):
    """Errors of an upstream have a class; what Ullage itself refuses is no upstream's error."""
    telemetry = Telemetry("0")
    telemetry.observe(Report("r", "chat", upstream="u", status=status, outcome=outcome, reason=reason), 0.1)
    found = shown(telemetry).items()
    counted = {labels: count for (name, labels), count in found if name == "ullage_upstream_errors_total" and count}
    assert counted == ({} if kind is None else {(("class", kind), ("upstream", "u")): 1})


def test_counters_with_known_labels_begin_at_zero():
    """An alert sees the first fault: with the process, or for a model or upstream with its first request."""
    telemetry = Telemetry("0")
    begun = shown(telemetry)
    for stage in ("retried", "returned"):
        assert value(begun, "ullage_overflow_errors_total", stage=stage) == 0
    for where in ("request", "answer", "after"):
        assert value(begun, "ullage_internal_errors_total", where=where) == 0
    telemetry.observe(Report("r", "chat", model="m", upstream="u", status=200), 0.1)
    served = shown(telemetry)
    assert value(served, "ullage_silent_truncations_total", model="m") == 0
    assert value(served, "ullage_upstream_errors_total", upstream="u", **{"class": "timeout"}) == 0
    telemetry.fault("answer", "r", ValueError())
    telemetry.observe(Report("r", "chat", model="m", upstream="u", status=504, reason="upstream_timeout"), 0.1)
    broken = shown(telemetry)
    assert value(broken, "ullage_internal_errors_total", where="answer") == 1
    assert value(broken, "ullage_upstream_errors_total", upstream="u", **{"class": "timeout"}) == 1


def test_a_request_without_an_upstream_begins_no_series():
    """A request that was refused before its model was read has no upstream that could fail."""
    telemetry = Telemetry("0")
    telemetry.observe(Report("r", "chat", status=400, outcome="refused", reason="invalid_request"), 0.1)
    assert not any(name == "ullage_upstream_errors_total" for name, _ in shown(telemetry))


def test_fallbacks_and_silent_cuts_are_counted():
    """A request that another model answered, and a prompt that was cut, are counted by the requested model."""
    telemetry = Telemetry("1")
    telemetry.observe(Report("r", "chat", model="m", fallback="big", reason="fallback", outcome="degraded"), 1.0)
    telemetry.observe(Report("r", "chat", model="m", reason="silently_truncated"), 1.0)
    telemetry.learned_windows(3)
    found = shown(telemetry)
    assert value(found, "ullage_fallbacks_total", model="m", fallback="big") == 1
    assert value(found, "ullage_silent_truncations_total", model="m") == 1
    assert value(found, "ullage_learned_windows") == 3


def test_recalls_are_counted_with_what_they_took():
    """Generations beyond the first and the tokens of all of them are counted; without a recall there is nothing."""
    telemetry = Telemetry("1")
    report = Report("r", "chat", model="m", outcome="compacted", stages=("fold", "recall"))
    telemetry.observe(report, 1.0)
    assert not any(name.startswith("ullage_recall") for name, _ in shown(telemetry))
    telemetry.observe(report.with_(recalls=2, recall_tokens=900), 1.0)
    found = shown(telemetry)
    assert value(found, "ullage_recalls_total", model="m") == 2
    assert value(found, "ullage_recall_tokens_total", model="m") == 900
    assert value(found, "ullage_stages_total", stage="recall") == 2


def test_nothing_of_a_refused_request_went_upstream():
    """A refused request counts as a request and by what the client sent, and adds nothing to what went upstream."""
    telemetry = Telemetry("0")
    report = Report("r", "chat", model="m", status=400, outcome="refused", window=100, budget=90)
    telemetry.observe(report.with_(tokens_before=500, tokens_after=200, stages=("tools",)), 0.1)
    found = shown(telemetry)
    route = {"api": "chat", "model": "m", "upstream": "", "status": "400", "outcome": "refused"}
    assert value(found, "ullage_requests_total", **route) == 1
    assert value(found, "ullage_context_tokens_total", model="m", region="before") == 500
    assert value(found, "ullage_context_tokens_total", model="m", region="after") == 0
    assert value(found, "ullage_tokens_removed_total", model="m") == 0
    assert value(found, "ullage_context_fill_ratio_count", model="m") == 0
    assert not [name for name, _ in found if name == "ullage_stages_total"]


def test_observing_counts_no_compaction():
    """Changes that were only considered (mode observe) are not counted as done."""
    telemetry = Telemetry("0")
    report = Report(
        "r", "chat", stages=("fold",), event=True, observed=True, tokens_before=9, tokens_after=1,
        reason="would_compact", model="m", window=10,
    )  # fmt: skip
    telemetry.observe(report, 0.1)
    found = shown(telemetry)
    assert value(found, "ullage_observed_total", would="compact") == 1
    assert value(found, "ullage_context_tokens_total", model="m", region="after") == 9
    assert found.get(("ullage_tokens_removed_total", (("model", ""),)), 0) == 0
    assert value(found, "ullage_compactions_total", model="m") == 0
    assert not any(name == "ullage_stages_total" for name, _ in found)


def test_model_labels_are_bounded():
    """However many model names clients invent, no more than the cap become labels."""
    telemetry = Telemetry("0")
    for number in range(MOST_MODELS + 50):
        telemetry.observe(Report("r", "chat", model=f"m{number}"), 0.1)
    telemetry.observe(Report("r", "chat", model="x" * 5000), 0.1)
    telemetry.observe(Report("r", "chat", model="m0"), 0.1)
    counts = {
        dict(labels)["model"]: count
        for (name, labels), count in shown(telemetry).items()
        if name == "ullage_requests_total"
    }
    assert len(counts) == MOST_MODELS + 1
    assert counts[OTHER] == 51
    assert counts["m0"] == 2


def test_tokens_are_counted_by_region_and_borrowed_share():
    """Regions and what parts borrowed are added up; labels are the fixed names of both."""
    telemetry = Telemetry("0")
    report = Report("r", "chat", model="m", tokens_before=900, tokens_after=900, window=2000, budget=1800)
    telemetry.observe(report.with_(regions={"system": 100, "tool": 800, "reserve": 200}, borrowed={"older": 50}), 0.1)
    telemetry.observe(report.with_(regions={"system": 100, "summary": 300}), 0.1)
    found = shown(telemetry)
    name = "ullage_region_tokens_total"
    regions = {dict(labels)["region"]: count for (series, labels), count in found.items() if series == name}
    assert regions == {"system": 200, "tool": 800, "summary": 300, "reserve": 200}
    assert value(found, "ullage_share_borrowed_tokens_total", part="older") == 50


def test_a_window_is_shown_with_its_source():
    """The gauge has a model's window under its source; an earlier source shows 0, a client's own option nothing."""
    telemetry = Telemetry("0")
    report = Report("r", "chat", model="m", upstream="u", tokens_before=9, tokens_after=9, window=8000, source="table")
    telemetry.observe(report, 0.1)
    telemetry.observe(report.with_(window=500, source="request"), 0.1)
    assert value(shown(telemetry), "ullage_window_tokens", upstream="u", model="m", source="table") == 8000
    telemetry.observe(report.with_(window=4096, source="server"), 0.1)
    found = shown(telemetry)
    assert value(found, "ullage_window_tokens", upstream="u", model="m", source="server") == 4096
    assert value(found, "ullage_window_tokens", upstream="u", model="m", source="table") == 0
    assert not any(("source", "request") in labels for _, labels in found)


def test_a_window_is_shown_once_whatever_the_outcome():
    """Requests with another outcome change the same gauge, and it changes back."""
    telemetry = Telemetry("0")
    table = Report("r", "chat", model="m", upstream="u", tokens_before=9, tokens_after=9, window=8000, source="table")
    server = table.with_(outcome="compacted", window=4096, source="server")
    for report, sizes in ((table, (8000, 0)), (server, (0, 4096)), (table, (8000, 0)), (table, (8000, 0))):
        telemetry.observe(report, 0.1)
        found = {dict(labels).get("source"): size for (_, labels), size in shown(telemetry).items()}
        assert (found["table"], found.get("server", 0)) == sizes


def test_projects_are_labels_as_bounded_as_models():
    """Requests that name a project are counted under it, the first hundred; requests that name none add no series."""
    telemetry = Telemetry("0")
    report = Report("r", "chat", tokens_before=20, tokens_after=10)
    telemetry.observe(report, 0.1)
    for number in range(MOST_MODELS + 3):
        telemetry.observe(report.with_(project=f"p{number}", task_size="tiny"), 0.1)
    telemetry.observe(report.with_(task_size="large"), 0.1)
    telemetry.observe(report.with_(project="p0", task_size="tiny", outcome="refused"), 0.1)
    found = shown(telemetry)
    names = {dict(labels)["project"] for name, labels in found if name == "ullage_project_requests_total"}
    assert len(names) == MOST_MODELS + 1  # the names, with the empty one among them, and what is beyond them
    assert OTHER in names
    assert value(found, "ullage_project_requests_total", project="p0", task_size="tiny") == 2
    assert value(found, "ullage_project_tokens_total", project="p0", task_size="tiny") == 10
    assert sum(1 for name, _ in found if name == "ullage_project_requests_total") <= MOST_MODELS + 2


def test_a_project_counts_the_tokens_sent_in_mode_observe():
    """With mode observe the client's own tokens go upstream, and those are the project's."""
    telemetry = Telemetry("0")
    report = Report("r", "chat", observed=True, tokens_before=20, tokens_after=10, project="p", task_size="tiny")
    telemetry.observe(report, 0.1)
    assert value(shown(telemetry), "ullage_project_tokens_total", project="p", task_size="tiny") == 20


@pytest.mark.parametrize(("state", "figure"), [("closed", 0), ("half-open", 1), ("open", 2)])
def test_every_state_of_a_breaker_has_its_figure(state: State, figure: int):
    """The gauge knows each word that the store's breaker uses."""
    assert state in get_args(State)
    assert len(get_args(State)) == 3
    telemetry = Telemetry("0")
    telemetry.store_state(up=False, breaker=state)
    assert value(shown(telemetry), "ullage_store_breaker_state") == figure


def test_gauges_show_their_last_value():
    """Requests under way, the store's state and its errors are shown as last set."""
    telemetry = Telemetry("0")
    telemetry.in_flight(2)
    telemetry.in_flight(1)
    telemetry.store_state(up=False, breaker="open")
    telemetry.store_error("timeout")
    telemetry.fault("answer", "r-1", ValueError("CANARY"))
    telemetry.lines_dropped(4)
    telemetry.refused_connections({"full": 2})
    telemetry.refused_connections({"full": 3, "not_http": 1})
    found = shown(telemetry)
    assert value(found, "ullage_in_flight") == 1
    assert value(found, "ullage_store_up") == 0
    assert value(found, "ullage_store_breaker_state") == 2
    assert value(found, "ullage_store_errors_total", kind="timeout") == 1
    assert value(found, "ullage_internal_errors_total", where="answer") == 1
    assert value(found, "ullage_log_lines_dropped") == 4
    assert value(found, "ullage_refused_connections_total", reason="full") == 3
    assert value(found, "ullage_refused_connections_total", reason="not_http") == 1


WORKER = """
import sys
import threading
from pathlib import Path
from proxy.core.report import Report
from proxy.store.breaker import State
from proxy.telemetry.metrics import Telemetry
telemetry = Telemetry("1", Path(sys.argv[1]))
telemetry.observe(Report("r", "chat", model="m", upstream="u", status=200, tokens_before=10, tokens_after=10), 0.1)
telemetry.in_flight(1)
telemetry.store_state(up=sys.argv[2] == "up", breaker="closed")
telemetry.flush()
print("ready", flush=True)
sys.stdin.readline()
print(telemetry.exposition()[0].decode(), flush=True)
"""


@pytest.mark.slow
def test_one_answer_covers_all_worker_processes():
    """Any worker shows the sum of all; a dead worker's gauges leave the sum, its counters stay."""
    directory = make_directory()
    command = [sys.executable, "-c", WORKER, str(directory)]
    environ = {**os.environ, VARIABLE: str(directory), "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    with subprocess.Popen([*command, "up"], **pipes) as first, subprocess.Popen([*command, "down"], **pipes) as second:
        assert first.stdout.readline() == second.stdout.readline() == "ready\n"
        both = samples(first.communicate("\n", timeout=60)[0])
        forget_worker(directory, first.pid)
        after = samples(second.communicate("\n", timeout=60)[0])
    labels = {"api": "chat", "model": "m", "upstream": "u", "status": "200", "outcome": "verbatim"}
    assert value(both, "ullage_requests_total", **labels) == value(after, "ullage_requests_total", **labels) == 2
    assert value(both, "ullage_request_seconds_count", api="chat") == 2
    assert (value(both, "ullage_in_flight"), value(after, "ullage_in_flight")) == (2, 1)
    assert value(both, "ullage_store_up") == 0
    assert value(both, "ullage_build_info", version="1") == 1
    remove_directory(directory)
    assert not directory.exists()


def test_each_flush_adds_only_what_is_new():
    """Figures are the same however often they are read in between; a request after a flush is in the next answer."""
    once, often = Telemetry("0"), Telemetry("0")
    report = Report(
        "r", "chat", model="m", tokens_before=9, tokens_after=4, regions={"user": 0, "tool": 4}, window=10,
        outcome="compacted", retries=1, project="p", overhead_seconds=0.25, source="table",
    )  # fmt: skip
    for number in range(5):
        for telemetry in (once, often):
            telemetry.observe(report, 2.0**number)
        often.flush()
        often.flush()
        assert value(shown(often), "ullage_request_seconds_count", api="chat") == number + 1
    begun = ("ullage_build_info", "_created")
    assert {key: figure for key, figure in shown(once).items() if not key[0].endswith(begun)} == {
        key: figure for key, figure in shown(often).items() if not key[0].endswith(begun)
    }


def test_many_reports_are_counted_before_anybody_asks():
    """What waits to be counted is bounded, unless another thread is counting."""
    telemetry = Telemetry("1")
    for _ in range(MOST_WAITING - 1):
        telemetry.observe(Report("r", "chat"), 0.5)
    counted = "ullage_request_seconds_count"
    labels = (("api", "chat"),)
    assert samples(generate_latest(telemetry._registry).decode()).get((counted, labels), 0) == 0
    telemetry.observe(Report("r", "chat"), 0.5)
    assert samples(generate_latest(telemetry._registry).decode())[counted, labels] == MOST_WAITING
    assert value(shown(telemetry), counted, api="chat") == MOST_WAITING


def test_flushes_in_other_threads_lose_nothing():
    """Requests that end while other threads read the metrics are counted once each."""
    telemetry = Telemetry("0")
    ended = threading.Event()

    def read():
        while not ended.is_set():
            telemetry.exposition()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(3000):
        telemetry.observe(Report("r", "chat", model=f"m{number % 7}", tokens_before=3, tokens_after=3), 0.1)
    ended.set()
    for reader in readers:
        reader.join()
    found = shown(telemetry)
    counts = [count for (name, _), count in found.items() if name == "ullage_requests_total"]
    assert sum(counts) == 3000
    assert value(found, "ullage_request_seconds_bucket", api="chat", le="0.1") == 3000
    assert value(found, "ullage_context_tokens_total", model="m0", region="before") == 3 * counts[0]


def test_a_directory_without_the_variable_is_an_error(tmp_path):
    """Figures that would silently stay in one process are refused."""
    with pytest.raises(ValueError, match=VARIABLE):
        Telemetry("0", tmp_path)


def test_the_loops_lag_is_a_histogram():
    """Every beat counts, and its lag is found in the buckets."""
    telemetry = Telemetry("1")
    telemetry.loop_lag(0.0)
    telemetry.loop_lag(0.3)
    found = shown(telemetry)
    assert value(found, "ullage_loop_lag_seconds_count") == 2
    assert value(found, "ullage_loop_lag_seconds_bucket", le="0.25") == 1

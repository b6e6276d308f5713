"""What an operator and a caller are told: health, metrics, headers, log lines, and the command line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Fault
from tests.stub.faults import error
from tests.support.forked_ullage import run_ullage
from tests.support.loopback import loopback_client
from tests.support.process_inspection import log_lines, metrics, request_lines, total
from tests.support.proxy_process import ROOT, until
from tests.support.sample_conversations import agent_session, chat_turn, coding_session, tool

WINDOW = 8192
SHORT: dict[str, Any] = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hi."}]}
LONG: dict[str, Any] = {
    "model": "gpt-4o-mini",
    "messages": [m for turn in range(16) for m in chat_turn(turn, 320)] + chat_turn(99, 40)[:1],
}
GUIDE = (ROOT / "docs" / "operations.md").read_text()
FIELDS_AND_METRICS = (ROOT / "docs" / "metrics.md").read_text()


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    async with loopback_client() as client:
        yield client


def own(answer: httpx.Response) -> dict[str, str]:
    """The answer's ``x-ullage-*`` headers by the rest of their name."""
    prefix = "x-ullage-"
    return {k.removeprefix(prefix): v for k, v in answer.headers.items() if k.startswith(prefix)}


async def test_headers_say_what_was_done(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """A verbatim, a counted, a compacted, a refused and an off answer each carry the headers that docs/api.md lists."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW)
    url = f"{front.url}/chat/completions"

    verbatim = own(await web.post(url, json=SHORT))
    assert verbatim == {"outcome": "verbatim", "tokens": verbatim["tokens"], "window": "8192", "pressure": "<0.01"}
    assert re.fullmatch(r"<\d+", verbatim["tokens"])

    counted = own(await web.post(url, json={**SHORT, "messages": chat_turn(1, 4000)[:1]}))
    assert counted["outcome"] == "verbatim"
    assert abs(int(counted["tokens"]) - server.seen[-1].tokens) < 0.05 * server.seen[-1].tokens
    assert float(counted["pressure"]) == pytest.approx(int(counted["tokens"]) / (WINDOW - WINDOW // 8), abs=0.3)

    compacted = own(await web.post(url, json=LONG))
    assert compacted["outcome"] == "compacted"
    assert compacted["stages"] == "fold"
    assert int(compacted["tokens"]) + int(compacted["tokens-removed"]) > WINDOW
    assert abs(int(compacted["tokens"]) - server.seen[-1].tokens) < 0.05 * server.seen[-1].tokens
    assert len(compacted["conversation"]) > 8
    assert own(await web.post(url, json=LONG))["conversation"] == compacted["conversation"]
    apart = own(await web.post(url, json=LONG, headers={"x-ullage-conversation": "other"}))
    assert apart["conversation"] != compacted["conversation"]

    wide = [tool(f"lookup_{at}_{'n' * 50}", "", **{f"key_{n}_{at}": "" for n in range(12)}) for at in range(90)]
    refused = await web.post(url, json={**SHORT, "tools": wide})
    assert refused.status_code == 400
    assert own(refused)["outcome"] == "refused;context_length_exceeded"
    assert refused.json()["error"]["code"] == "context_length_exceeded"

    off = await web.post(url, json=LONG, headers={"x-ullage-mode": "off"})
    assert (off.status_code, own(off)["outcome"]) == (400, "degraded;overflow")
    observed = await web.post(
        url,
        json={**SHORT, "messages": LONG["messages"][-9:]},
        headers={"x-ullage-mode": "observe", "x-ullage-window": "2048"},
    )
    assert (observed.status_code, own(observed)["outcome"]) == (200, "verbatim;would_compact")
    assert int(own(observed)["tokens-removed"]) > 0, "what would have been done is told"
    assert len(server.seen[-1].messages) == 9
    smaller = own(
        await web.post(url, json={**SHORT, "messages": chat_turn(1, 1500)[:1]}, headers={"x-ullage-window": "2048"})
    )
    assert smaller["window"] == "2048"
    now = own(
        await web.post(url, json={**LONG, "messages": LONG["messages"][-9:]}, headers={"x-ullage-compact": "now"})
    )
    assert now["outcome"] == "compacted"


async def test_health_routes_answer_under_all_their_names(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Live and ready answer under all their names; other paths below /health do not reach the upstream."""
    server = await stub()
    front = await proxy(server.url)
    for path in ("/health/live", "/health/ready", "/healthz", "/readyz", "/health/liveliness", "/health/readiness"):
        assert (await web.get(front.root + path)).status_code == 200
        assert (await web.head(front.root + path)).status_code == 200
        assert path in GUIDE
    assert (await web.get(f"{front.root}/health/other")).status_code == 404
    status = (await web.get(f"{front.root}/ullage/api/status")).json()
    assert status["store"]["up"] is True
    assert server.seen == []


async def test_every_metric_of_the_guide_is_there_after_traffic(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """After a day of everything, each metric of docs/metrics.md has a figure, and the figures are right."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=2 * WINDOW, arguments=["--store", "redis://127.0.0.1:9"])
    url = f"{front.url}/chat/completions"
    await web.post(url, json=SHORT, headers={"x-ullage-project": "apollo", "x-ullage-task-size": "small"})
    recovered = await web.post(url, json=LONG)
    assert own(recovered)["retries"] == "1"
    server.fail(error(503))
    await web.post(url, json=SHORT)
    server.fail(Fault(cut="before_headers"))
    assert (await web.post(url, json=SHORT)).status_code == 502
    for messages in (chat_turn(1, 5000)[:1], agent_session(1, 5000)):  # a full beginning, a large fresh result
        assert (await web.post(url, json={**SHORT, "messages": messages})).status_code == 200
    await web.get(f"{front.url}/models")
    await until(lambda: len(request_lines(front)) == 7)
    figures = await metrics(front)
    names = set(re.findall(r"^\| `(ullage_[a-z_]+)` \|", FIELDS_AND_METRICS, re.MULTILINE))
    assert len(names) > 30
    shown = {name.removesuffix("_count") for name, _ in figures}
    # Store errors come with the next look at the store, borrowed shares where there is an allocation, figures of
    # summaries, fallbacks, observed plans, silent cuts, clients' compactions, recalls, archived items and refused
    # connections with the first one.
    later = {"ullage_store_errors_total", "ullage_share_borrowed_tokens_total", "ullage_summaries_total"}
    later |= {"ullage_summary_calls_total", "ullage_summary_tokens_total"}
    later |= {"ullage_fallbacks_total", "ullage_observed_total", "ullage_silent_truncations_total"}
    later |= {"ullage_client_compactions_total", "ullage_recalls_total", "ullage_recall_tokens_total"}
    later |= {"ullage_archive_items_total", "ullage_refused_connections_total", "ullage_internal_errors_total"}
    assert names - shown - later == set()
    assert total(figures, "ullage_project_requests_total", project="apollo", task_size="small") == 1
    assert total(figures, "ullage_requests_total") == 7
    assert total(figures, "ullage_requests_total", outcome="compacted", status="200", upstream="upstream") == 1
    assert total(figures, "ullage_retries_total") == 1
    assert total(figures, "ullage_overflow_errors_total", stage="retried") == 1
    assert total(figures, "ullage_overflow_errors_total", stage="returned") == 0
    assert total(figures, "ullage_compactions_total", model="gpt-4o-mini") == 1
    errors = {
        dict(labels)["class"]
        for (name, labels), value in figures.items()
        if name == "ullage_upstream_errors_total" and value
    }
    assert errors == {"server", "unreachable"}
    assert total(figures, "ullage_store_up") == 0
    removed = total(figures, "ullage_tokens_removed_total")
    before, after = (total(figures, "ullage_context_tokens_total", region=region) for region in ("before", "after"))
    assert removed == before - after > 0
    assert total(figures, "ullage_overhead_seconds_count") == 7
    assert total(figures, "ullage_first_fill_ratio_count") == 1
    assert total(figures, "ullage_waste_tokens_total", kind="fresh_results") > 4000


async def test_a_request_is_one_line_with_the_guides_fields(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """The JSON line of a request holds exactly the fields that docs/metrics.md lists."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW)
    await web.post(f"{front.url}/chat/completions", json=LONG)
    await web.post(
        f"{front.url}/chat/completions", json={**SHORT, "stream": True, "stream_options": {"include_usage": True}}
    )
    await until(lambda: len(request_lines(front)) == 2)
    page = FIELDS_AND_METRICS
    table = page[page.index("## Fields of a request") : page.index("## Metrics of requests")]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    first, second = request_lines(front)
    assert first.keys() - {"event", "level", "timestamp"} == documented
    assert (first["outcome"], first["stages"], first["status"], first["compaction"]) == (
        "compacted",
        ["fold"],
        200,
        True,
    )
    assert first["input_tokens"] == server.seen[0].tokens
    assert (second["stream"], second["input_tokens"]) == (True, server.seen[1].tokens)
    # A busy machine may hold the loop for a moment, and a full window has advice: each is a warning of its own.
    warnings = {line["event"] for line in log_lines(front) if line["level"] != "info"}
    assert warnings <= {"proxy.loop_lagged", "conversation.nearly_full"}


async def test_the_commented_configuration_starts(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """``ullage serve --config config/ullage.yaml`` runs; flags and variables win over what the file says."""
    server = await stub()
    front = await proxy(
        server.url,
        arguments=["--config", str(ROOT / "config" / "ullage.yaml")],
        environment={"ULLAGE_COMPRESSION__HIGH_MARK": "0.80"},
    )
    assert (await web.post(f"{front.url}/chat/completions", json=SHORT)).status_code == 200
    assert len(server.chats()) == 1
    summary = front.log.read_text()
    assert "above 80% of the room" in summary
    assert f"listening    http://127.0.0.1:{front.port}/v1" in summary


async def test_an_agent_is_seen_in_the_figures(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """One conversation that is compacted once and continued counts one compaction, however many requests follow."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW)
    session = agent_session(20, 400)
    for rounds in range(17, 20):
        body = {"model": "gpt-4o-mini", "messages": session[: 2 + 2 * rounds]}
        answer = await web.post(f"{front.url}/chat/completions", json=body)
        assert answer.headers["x-ullage-outcome"] == "compacted"
    assert len(server.chats("ok")) == 3
    figures = await metrics(front)
    assert total(figures, "ullage_requests_total", outcome="compacted") == 3
    assert total(figures, "ullage_compactions_total") == 1


async def test_the_budget_log_has_every_request(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Each request has its line with client, tokens and files, also where nothing is compacted, and no content."""
    server = await stub(window=WINDOW)
    path = tmp_path / "logs" / "budget.jsonl"
    front = await proxy(server.url, window=WINDOW, config={"telemetry": {"budget_log": {"path": str(path)}}})
    sessions = [coding_session(6, 20), agent_session(40, 300), [{"role": "user", "content": "CANARY"}]]
    for messages in sessions:
        headers = {"user-agent": "claude-cli/2.1.330 (external, cli)", "x-ullage-project": "apollo"}
        answer = await web.post(f"{front.url}/chat/completions", json={**SHORT, "messages": messages}, headers=headers)
        assert answer.status_code == 200
    await until(lambda: len(request_lines(front)) == 3)
    await asyncio.to_thread(front.end)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    budget = [line for line in written if line["event"] == "context_budget"]
    assert budget[0]["files_loaded"] == 3
    assert [(line["agent"], line["issue"]) for line in budget] == [("claude-code", "apollo")] * 3
    assert [bool(line["pruned"]) for line in budget] == [False, True, False]
    assert [line["checkpoint_entries"] for line in budget] == [0, 1, 0]
    assert budget[2]["files_loaded"] is None, "the bytes alone show that it fits: nothing is read"
    logged = request_lines(front)
    assert [line["agent"] for line in logged] == ["claude-code"] * 3
    assert [line["files_read"] for line in logged] == [line["files_loaded"] for line in budget]
    assert "CANARY" not in path.read_text() + front.log.read_text()


async def test_a_budget_log_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    """The proxy does not start, and says which setting names what."""
    (tmp_path / "file").write_text("")
    config = tmp_path / "ullage.yaml"
    config.write_text(f"telemetry: {{budget_log: {{path: {tmp_path}/file/b.jsonl}}}}\n")
    done = await asyncio.to_thread(run_ullage, "serve", "--config", str(config), "--upstream", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "cannot start: telemetry.budget_log.path: " in done.stderr

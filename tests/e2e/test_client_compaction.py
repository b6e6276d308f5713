"""A client that compacts its conversation itself: it reads what was said while that fits, and begins another chain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.compaction.schedule import CompactionTarget
from tests.conftest import StartProxy, StartStub
from tests.stub import Rules, chat, messages, responses, slices
from tests.support.api_formats import next_request, request_body
from tests.support.engine_fixtures import Replica
from tests.support.loopback import loopback_client
from tests.support.proxy_process import until
from tests.support.sample_conversations import agent_session, chat_turn

API_FORMATS: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses}
WINDOW = 8192
PROMPTS = {
    "chat": "First, reason in your scratchpad. Then, generate the <state_snapshot>.",
    "messages": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nWrite a <summary> block.",
    "responses": "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.",
}
OWNERS = {"chat": "qwen-code", "messages": "claude-code", "responses": "codex"}


def raw(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def compacting(api: str, rounds: int) -> dict[str, Any]:
    """The request by which a client of *api* compacts a session of so many rounds."""
    talk = agent_session(rounds, 300)
    if api != "messages":
        return next_request(api, [*talk, {"role": "user", "content": PROMPTS[api]}])
    body = next_request(api, talk)
    body["messages"][-1]["content"].append({"type": "text", "text": PROMPTS[api]})
    return body


def size(api: str, body: dict[str, Any]) -> int:
    tokens: int = API_FORMATS[api].judge(body, Rules(window=10**9)).tokens
    return tokens


def rounds_up_to(api: str, tokens: int) -> int:
    """The most rounds of a session whose compaction takes at most so many tokens."""
    return max(at for at in range(10, 30) if size(api, compacting(api, at)) <= tokens)


@pytest.mark.parametrize("api", API_FORMATS)
@pytest.mark.parametrize(
    ("words", "client"),
    [
        ("Turn this session into a handoff that another model resumes from, and call no tools.", "other"),
        ("Add a command that summarizes the history of a session, so that another model can resume it.", ""),
    ],
)
async def test_a_compaction_in_unknown_words_goes_whole(api: str, words: str, client: str) -> None:
    """What asks for a handoff is left as it is above the high mark; work on such texts is compacted as ever."""
    talk = [*agent_session(rounds_up_to(api, WINDOW - 400) - 1, 300), {"role": "user", "content": words}]
    body = raw(next_request(api, talk))
    plan = await Replica().plan(body, WINDOW, api=api)
    assert plan.report.client_compaction == client
    assert (plan.body == body) is bool(client)


@pytest.mark.parametrize("api", API_FORMATS)
async def test_what_a_client_compacts_goes_whole_while_it_fits(api: str) -> None:
    """An event on the chain and the high mark change nothing; what is too big is made smaller; nothing is confused."""
    replica, route = Replica(), {"api": api}
    rounds = rounds_up_to(api, WINDOW - 400)
    ordinary = await replica.plan(raw(next_request(api, agent_session(rounds, 300))), WINDOW, **route)
    assert ordinary.report.event, "the session itself has to be compacted, or nothing is shown"
    assert ordinary.report.client_compaction == ""
    body = compacting(api, rounds)
    plan = await replica.plan(raw(body), WINDOW, **route)
    assert plan.body == raw(body)
    assert (plan.report.outcome, plan.report.client_compaction) == ("verbatim", OWNERS[api])
    assert not plan.report.event
    assert len(replica.records) == 1, "a client's own compaction makes no event of ours"
    forced = await replica.plan(raw(body), WINDOW, CompactionTarget(force=True), **route)
    assert forced.report.outcome == "compacted"
    for more, stages in ((1, {"prune"}), (12, {"prune"}), (80, {"fold"})):
        body = compacting(api, rounds + more)
        larger = await replica.plan(raw(body), WINDOW, **route)
        assert stages <= set(larger.report.stages)
        assert API_FORMATS[api].judge(json.loads(larger.body), Rules(window=WINDOW)).kind == "ok"
        assert PROMPTS[api][:40].encode() in larger.body
        if stages == {"prune"}:
            was, now = [slices(each) for each in (raw(body), larger.body)]
            swapped = [at for at, pair in enumerate(zip(was, now, strict=True)) if pair[0] != pair[1]]
            assert swapped[0] < 6, "the oldest results go first"
            assert len(swapped) in (range(1, 5) if more == 1 else range(5, rounds + more))
            assert not larger.report.event
    after = [{"role": "user", "content": "Summary: the rows get lost at midnight."}, *chat_turn(3, 40)[:1]]
    fresh = await replica.plan(raw(next_request(api, after)), WINDOW, **route)
    assert fresh.body == raw(next_request(api, after)), "what follows is another chain"
    again = await replica.plan(raw(next_request(api, agent_session(rounds + 1, 300))), WINDOW, **route)
    records = [plan.view.edits.record for plan in (again, ordinary) if plan.view is not None]
    blocks = [record.block for record in records if record is not None]
    assert len(blocks) == 2
    assert blocks[0] == blocks[1], "who goes on with the old chain has its view"


@pytest.mark.parametrize("api", API_FORMATS)
async def test_a_large_output_figure_costs_a_summary_nothing_of_what_it_is_of(api: str) -> None:
    """Before any result goes, the answer has the room of a summary; and what goes then is verified by its count."""
    figure = "max_output_tokens" if api == "responses" else "max_tokens"
    body = {**compacting(api, rounds_up_to(api, WINDOW - 2000)), figure: 6000}
    plan = await Replica().plan(raw(body), WINDOW, api=api)
    sent = json.loads(plan.body)
    assert {**sent, figure: 6000} == body, "only the output figure was lowered"
    assert (plan.report.stages, 1024 <= sent[figure] < 6000) == (("output",), True)
    assert API_FORMATS[api].judge(sent, Rules(window=WINDOW)).kind == "ok"
    body = {**compacting(api, rounds_up_to(api, WINDOW - 400) + 4), figure: 6000}
    plan = await Replica().plan(raw(body), WINDOW, api=api)
    assert plan.report.stages == ("prune", "output")
    sent = json.loads(plan.body)
    assert sent[figure] >= 1024
    verdict = API_FORMATS[api].judge(sent, Rules(window=WINDOW))
    assert (verdict.kind, verdict.tokens > 0.8 * (WINDOW - 1024)) == ("ok", True)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.45])
async def test_a_pruned_compaction_fits_by_what_the_provider_counts(factor: float) -> None:
    """With every tokenizer and any number of rounds too many, what is sent fits as the server counts."""
    for more in range(1, 14, 3):
        body = compacting("chat", int(rounds_up_to("chat", WINDOW - 400) / factor) + more)
        plan = await Replica().plan(raw(body), WINDOW, factor=factor)
        assert plan.error is None
        verdict = chat.judge(json.loads(plan.body), Rules(window=WINDOW, factor=factor * 0.995))
        assert verdict.kind == "ok", (more, verdict, plan.report.stages)


async def test_reports_and_branches_of_a_running_proxy(stub: StartStub, proxy: StartProxy) -> None:
    """Metrics and the log say whose compaction it was and in which epoch; a title call is another branch."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW)
    rounds = rounds_up_to("responses", WINDOW - 400)
    told = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"}), "x-codex-window-id": "t-1:3"}
    named = {"x-session-id": "ses_1"}
    talk = agent_session(rounds, 300)
    title = [{"role": "system", "content": "You are a title generator."}, talk[1]]
    async with loopback_client(headers={"authorization": "Bearer sk-1"}) as web:
        first = await web.post(f"{front.url}/chat/completions", json=next_request("chat", talk), headers=named)
        assert first.headers["x-ullage-outcome"] == "compacted"
        body = request_body("chat", [*title, {"role": "user", "content": "Summarize that as a title."}])
        aside = await web.post(f"{front.url}/chat/completions", json=body, headers=named)
        assert json.loads(server.seen[-1].body) == body
        assert aside.headers["x-ullage-outcome"] == "verbatim"
        assert aside.headers["x-ullage-conversation"] == first.headers["x-ullage-conversation"]
        await web.post(f"{front.url}/chat/completions", json=next_request("chat", talk), headers=named)
        assert server.seen[-1].body == server.seen[0].body, "the branch beside it changes nothing"
        whole = raw(next_request("responses", talk))
        kept = await web.post(f"{front.url}/responses", content=whole, headers=told)
        assert kept.status_code == 200
        assert server.seen[-1].body == whole
        metrics = (await web.get(f"{front.root}/metrics")).text
    assert 'ullage_client_compactions_total{client="codex"} 1.0' in metrics
    await until(lambda: front.log.read_text().count("proxy.request_done") == 4)
    done = [json.loads(line) for line in front.log.read_text().splitlines() if "proxy.request_done" in line]
    assert [(line["client_compaction"], line["epoch"]) for line in done] == [("", 0)] * 3 + [("codex", 3)]

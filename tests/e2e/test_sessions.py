"""What one conversation leaves for the next: found by its own caller and project, dated, and never from a tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.features.recall.search import NOTHING_EARLIER, RECORD
from proxy.features.recall.tool import NAME
from tests.conftest import StartStub
from tests.stub import Answer, Call, Stub
from tests.support.api_formats import request_body
from tests.support.recall_fixtures import SAID, WINDOW, compacted_request, long_history
from tests.support.sample_conversations import AGENT_TOOLS
from tests.support.server_tool_fixtures import WORDING, ProxyInProcess, every, model_answering, proxy_in_process

DECISION = "We decided to name the queue heron-7 and to keep the old one until March."
LOOK = Call(NAME, json.dumps({"query": "which name did we decide for the queue", "scope": "earlier"}))
LOOK_FOR_RESULT = Call(NAME, json.dumps({"query": "vault code word kingfisher", "scope": "earlier"}))
DAY = 86_400.0
MONDAY = 1_795_392_000.0
"""Unix time of Monday, 23 November 2026."""

SETTINGS: dict[str, Any] = {
    "store_url": "embedded",
    "archive": {"enabled": True},
    "compression": {"recall": {"enabled": True, "sessions": True, "max_tokens": 1_000}},
}
PROJECT = {"x-ullage-project": "heron"}


class Days:
    """A clock of days; ``now`` is Unix time."""

    def __init__(self) -> None:
        self.now = MONDAY

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> Days:
    """The clock of proxies that are started from now on."""
    clock = Days()
    monkeypatch.setattr("time.time", clock)
    return clock


def first_session(api: str) -> dict[str, Any]:
    """A request that is compacted: the user decided something early on, and a tool's result says something else."""
    history = long_history()
    decided = [{"role": "user", "content": DECISION}, {"role": "assistant", "content": "Noted: heron-7."}]
    at = next(index for index, message in enumerate(history) if message["role"] == "tool") + 1
    return compacted_request(api, [*history[:at], *decided, *history[at:], {"role": "user", "content": "Go on."}])


def next_session(api: str, question: str = "What did we name the queue?") -> dict[str, Any]:
    """The first request of another conversation, which fits."""
    extra = {"store": False} if api == "responses" else {}
    return request_body(api, [{"role": "user", "content": question}], AGENT_TOOLS, **extra)


async def recalled(server: Stub, proxy: ProxyInProcess, api: str, call: Call, **headers: str) -> str:
    """What the model reads after *call* in a new conversation."""
    server.script = model_answering(Answer("I look.", (call,)), Answer("heron-7"))
    before = len(server.seen)
    answer = await proxy.ask(api, next_session(api), **headers)
    assert answer.status_code == 200, answer.text
    assert NAME not in answer.text
    first, second = server.seen[before:]
    assert [first.verdict, second.verdict] == ["ok", "ok"], second.why
    return second.body.decode()


@every
async def test_an_earlier_conversation_is_found_by_its_own_project_only(
    stub: StartStub, tmp_path: Path, days: Days, api: str
) -> None:
    """Two days and a restart later it is quoted with its date; another key, another project, or a result is not."""
    server = await stub(window=WINDOW, wording=WORDING[api], alternation=False)
    async with proxy_in_process(server, tmp_path, **SETTINGS) as proxy:
        answer = await proxy.ask(api, first_session(api), **PROJECT)
        assert "fold" in answer.headers["x-ullage-stages"]
    days.now += 2 * DAY
    async with proxy_in_process(server, tmp_path, **SETTINGS) as proxy:
        page = await recalled(server, proxy, api, LOOK, **PROJECT)
        assert DECISION in page
        assert RECORD in page
        assert "user, 2026-11-23, session " in page
        assert SAID not in await recalled(server, proxy, api, LOOK_FOR_RESULT, **PROJECT)
        for headers in ({}, {"x-ullage-project": "crane"}, {**PROJECT, "authorization": "Bearer sk-of-another-0000"}):
            page = await recalled(server, proxy, api, LOOK, **headers)
            assert NOTHING_EARLIER in page
            assert DECISION not in page
        assert proxy.faults == []

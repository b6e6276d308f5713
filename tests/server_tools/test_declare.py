"""Tools that are declared before a request is planned: in every request that may have them, and in no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.features.recall.tool import NAME
from tests.conftest import StartStub
from tests.stub import Answer
from tests.support.api_formats import request_body
from tests.support.sample_conversations import AGENT_TOOLS, agent_session
from tests.support.server_tool_fixtures import WORDING, every, model_answering, proxy_in_process

ON: dict[str, Any] = {"compression": {"recall": {"enabled": True, "sessions": True}}}


def request(api: str, **members: Any) -> dict[str, Any]:
    """A request that fits, with the agent's tools unless *members* has others."""
    members = {"tools": AGENT_TOOLS, **members}
    extra = {"store": False} if api == "responses" else {}
    return request_body(api, agent_session(2, 50), members.pop("tools"), **extra, **members)


@every
async def test_it_stands_behind_the_clients_own_tools(stub: StartStub, tmp_path: Path, api: str) -> None:
    """From the first request on, at the same place, and the report says so."""
    server = await stub(wording=WORDING[api])
    server.script = model_answering(Answer("Understood."))
    async with proxy_in_process(server, tmp_path, **ON) as proxy:
        for _ in range(2):
            answer = await proxy.ask(api, request(api))
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ullage-stages"] == "recall"
    first, second = server.seen
    assert first.verdict == "ok", first.why
    assert first.tools[-1] == NAME
    assert len(first.tools) == len(AGENT_TOOLS) + 1
    assert first.body == second.body


OWN = json.loads(json.dumps(AGENT_TOOLS))
OWN[0]["function"]["name"] = NAME
FALLBACK = [
    {"name": "house-model", "context_window": 8192, "overflow": ["compress", {"fallback": "gpt-4o"}]},
    {"name": "gpt-4o", "context_window": 16_384},
]
WITHOUT: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "no tools": ({"tools": []}, {}, {}),
    "forced": ({"tool_choice": "required"}, {}, {}),
    "own name": ({"tools": OWN}, {}, {}),
    "off": ({}, {"x-ullage-mode": "off"}, {}),
    "observed": ({}, {"x-ullage-mode": "observe"}, {}),
    "unknown window": ({}, {}, {"models": [{"name": "*"}]}),
    "fallbacks": ({}, {}, {"models": FALLBACK}),
    "small window": ({}, {}, {"models": [{"name": "*", "context_window": 2048}]}),
}


@pytest.mark.parametrize("case", WITHOUT)
async def test_no_other_request_is_changed(stub: StartStub, tmp_path: Path, case: str) -> None:
    """It leaves as the client's own bytes."""
    members, headers, settings = WITHOUT[case]
    server = await stub()
    body = {**request("chat", **members), "model": "house-model"}
    async with proxy_in_process(server, tmp_path, **{**ON, **settings}) as proxy:
        answer = await proxy.client.post("/chat/completions", content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 200, answer.text
    assert server.seen[0].body == json.dumps(body).encode()

"""Deferred tools as their users meet them: real clients of each API, a real proxy, five windows of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.features.deferred_tools.search import NAME
from tests.conftest import StartProxy, StartStub
from tests.features.deferred_tools.test_feature import LOOK, USE, WANTED, WINDOW, many_tools
from tests.stub import Answer
from tests.support.api_formats import text_of
from tests.support.process_inspection import request_lines
from tests.support.proxy_process import until
from tests.support.sample_conversations import agent_session
from tests.support.sdk_clients import SDK_CLIENTS
from tests.support.server_tool_fixtures import WORDING, model_answering

ON: dict[str, Any] = {"deferred_tools": {"enabled": True}}


@pytest.mark.parametrize("api", SDK_CLIENTS)
async def test_a_clients_session_with_too_many_tools_goes_on(stub: StartStub, proxy: StartProxy, api: str) -> None:
    """An SDK finds, calls and goes on with a tool that no window had room for, whole and streamed."""
    server = await stub(window=WINDOW, wording=WORDING[api], alternation=False)
    rules = [{"name": "*", "context_window": WINDOW}]
    front = await proxy(server.url, config={"models": rules, "compression": ON, "summaries": {"mode": "off"}})
    async with SDK_CLIENTS[api](front.url) as sdk:
        items, more = sdk.opening(agent_session(2, 60))
        options = {"model": "gpt-4o-mini", **sdk.options({"tools": many_tools(), "max_tokens": 300}), **more}
        for at in range(4):
            server.script = model_answering(Answer("I look.", (LOOK,)), Answer("", (USE,)))
            if at == 3:
                server.script = model_answering(Answer("It will rain."))
            answer = await sdk.ask(options, items, stream=at % 2 == 1)
            assert NAME not in json.dumps(answer)
            calls = sdk.calls(answer)
            items += answer
            if calls:
                assert WANTED in json.dumps(answer)
                items += sdk.results(calls, ["Rain."] * len(calls))
        assert "It will rain." in "".join(map(text_of, answer))
    assert [seen.verdict for seen in server.seen] == ["ok"] * 7
    assert WANTED not in server.seen[0].tools
    assert WANTED in server.seen[2].tools, "it was called before"
    await until(lambda: len(request_lines(front)) == 4)
    assert "weather" not in front.log.read_text()

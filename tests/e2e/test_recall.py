"""Recall as its users meet it: real clients of each API, a real proxy, a model that looks things up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.features.recall.tool import MENTION, NAME
from tests.conftest import StartProxy, StartStub
from tests.stub import Answer
from tests.support.api_formats import text_of
from tests.support.process_inspection import metrics, request_lines, total
from tests.support.proxy_process import until
from tests.support.recall_fixtures import LOOK, READ, SAID, WINDOW, long_history
from tests.support.sample_conversations import AGENT_TOOLS
from tests.support.sdk_clients import SDK_CLIENTS
from tests.support.server_tool_fixtures import WORDING, model_answering
from tests.support.view_checks import view_problems

MODEL = "gpt-4o-mini"
ON: dict[str, Any] = {"recall": {"enabled": True}}


@pytest.mark.parametrize("api", SDK_CLIENTS)
async def test_a_clients_session_goes_on_over_recalls(stub: StartStub, proxy: StartProxy, api: str) -> None:
    """An SDK gets whole and streamed answers without a trace of the tool, and its next turns are valid and found."""
    server = await stub(window=WINDOW, wording=WORDING[api], alternation=False)
    rules = [{"name": "*", "context_window": WINDOW}]
    front = await proxy(server.url, config={"models": rules, "compression": ON, "summaries": {"mode": "off"}})
    thought, words = "What was it again?", "It is kingfisher 4711."
    async with SDK_CLIENTS[api](front.url) as sdk:
        items, more = sdk.opening(long_history())
        options = {"model": MODEL, **sdk.options({"tools": AGENT_TOOLS, "max_tokens": 300}), **more}
        recalls = 0
        for at in range(6):
            stream = at % 2 == 1
            looks = [Answer("I look.", (LOOK,), reasoning=thought), Answer("", (LOOK, READ))][: 1 + (at > 3)]
            last = Answer(words, (READ,), reasoning=thought) if at % 3 else Answer(words)
            server.script = model_answering(*looks, last)
            before = len(server.seen)
            answer = await sdk.ask(options, items, stream=stream)
            assert NAME not in json.dumps(answer)
            assert words in "".join(map(text_of, answer))
            assert [seen.verdict for seen in server.seen[before:]] == ["ok"] * (1 + len(looks)), server.seen[-1].why
            assert view_problems(sdk.bodies[-1], server.seen[before]) == []
            assert SAID in server.seen[before + 1].body.decode()
            recalls += len(looks)
            items += answer
            calls = sdk.calls(answer)
            following = [{"role": "user", "content": f"Go on with step {at}."}]
            items += sdk.results(calls, ["Nothing new here."] * len(calls)) if calls else following
        views = [seen for seen in server.seen if seen.body.count(MENTION.encode())]
        assert len(views) == len(server.seen)
        assert all(seen.tools[-1] == NAME for seen in server.seen)
    await until(lambda: len(request_lines(front)) == 6)
    figures = await metrics(front)
    assert total(figures, "ullage_recalls_total", model=MODEL) == recalls
    assert total(figures, "ullage_recall_tokens_total") >= sum(seen.tokens for seen in server.seen)
    assert total(figures, "ullage_stages_total", stage="recall") == 6
    assert sum(line["recalls"] for line in request_lines(front)) == recalls
    assert "kingfisher" not in front.log.read_text()

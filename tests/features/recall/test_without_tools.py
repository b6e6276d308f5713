"""Recall for clients that send no tools: as for others, unless the server or the model has no tools at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.features.recall.tool import MENTION, NAME
from tests.stub import Answer, Stub
from tests.stub.faults import error
from tests.support.api_formats import request_body
from tests.support.recall_fixtures import LOOK, SAID, StartRecall, read_answer, request
from tests.support.sample_conversations import prose
from tests.support.server_tool_fixtures import ProxyInProcess, both, every

ROOM: dict[str, Any] = {
    "models": [{"name": "*", "context_window": 16_384}],
    "compression": {
        "recall": {"enabled": True, "max_tokens": 400},
        "shares": {"digest": 0.03, "steps": 0.0, "summary": 0.0},  # else the block says it by itself
    },
}
"""A window in which the tool is small enough for every API."""


async def start(start_recall: StartRecall, api: str, *answers: Answer) -> tuple[Stub, ProxyInProcess]:
    """An upstream with that window, and a proxy in front of it."""
    server, proxy = await start_recall(api, *answers, **ROOM)
    server.rules = replace(server.rules, window=16_384)
    return server, proxy


REFUSALS = (
    (400, "registry.ollama.ai/library/gemma3:4b does not support tools"),
    (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
    (500, "tools param requires --jinja flag"),
    (404, "No endpoints found that support tool use."),
)


def long_request(api: str, stream: bool = False) -> dict[str, Any]:
    """A talk that is longer than its window, whose fourth turn says what nothing else does, too long to quote."""
    turns = [{"role": role, "content": prose(at, 150)} for at in range(72) for role in ("user", "assistant")]
    turns[3] = {"role": "assistant", "content": f"{prose(1, 300).replace('.', ',')} and {SAID} {prose(2, 60)}"}
    more: dict[str, Any] = {"store": False} if api == "responses" else {}
    more |= {"stream": True} if stream else {}
    return request_body(api, [*turns, {"role": "user", "content": "What was it again?"}], **more)


@every
@both
async def test_a_chat_without_tools_recalls_too(start_recall: StartRecall, api: str, stream: bool) -> None:
    """The model gets the tool, and the client one answer without a trace of it."""
    server, proxy = await start(start_recall, api, Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    answered = read_answer(api, await proxy.ask(api, long_request(api, stream)), stream)
    assert answered.text.replace("\n", "") == "Let me look.It is kingfisher."
    assert [seen.verdict for seen in server.seen] == ["ok", "ok"]
    assert [NAME in seen.body.decode() for seen in server.seen] == [True, True]
    assert SAID not in server.seen[0].body.decode()
    assert SAID in server.seen[1].body.decode()


@every
@both
@pytest.mark.parametrize(("status", "message"), REFUSALS)
@pytest.mark.slow
async def test_a_model_without_tools_is_called_again_without_it(
    start_recall: StartRecall, api: str, stream: bool, status: int, message: str
) -> None:
    """The client gets the answer; the next request does not offer the tool any more."""
    server, proxy = await start(start_recall, api, Answer("It is so."))
    server.fail(error(status, message))
    answer = await proxy.ask(api, long_request(api, stream))
    assert read_answer(api, answer, stream).text == "It is so."
    assert "recall" not in answer.headers["x-ullage-stages"] or stream
    assert [NAME in seen.body.decode() for seen in server.seen] == [True, False]
    assert MENTION not in server.seen[1].body.decode()
    assert "tools" not in server.seen[1].parsed
    assert proxy.reports[0].retries == 1
    assert "recall" not in proxy.reports[0].stages
    read_answer(api, await proxy.ask(api, long_request(api, stream)), stream)
    assert len(server.seen) == 3
    assert NAME not in server.seen[2].body.decode()


@every
async def test_other_errors_pass_as_they_came(start_recall: StartRecall, api: str) -> None:
    """An error that names no tools, and one that has another status, cost no second request."""
    server, proxy = await start(start_recall, api, Answer("It is so."))
    for status, message in ((400, "The temperature is out of range."), (429, "Too many tool calls.")):
        fault = error(status, message)
        server.fail(fault)
        answer = await proxy.ask(api, long_request(api))
        assert (answer.status_code, answer.content) == (status, fault.body)
    assert [NAME in seen.body.decode() for seen in server.seen] == [True, True]


@every
async def test_a_client_with_tools_gets_the_refusal_itself(start_recall: StartRecall, api: str) -> None:
    """Its own tools are refused as well."""
    server, proxy = await start_recall(api, Answer("It is so."))
    fault = error(*REFUSALS[0])
    server.fail(fault)
    answer = await proxy.ask(api, request(api, False))
    assert (answer.status_code, answer.content) == (400, fault.body)
    assert len(server.seen) == 1


async def test_switched_off_a_chat_without_tools_is_not_offered_it(start_recall: StartRecall) -> None:
    """``without_tools: false``."""
    recall = {"enabled": True, "without_tools": False}
    server, proxy = await start_recall("chat", Answer("Yes."), **{**ROOM, "compression": {"recall": recall}})
    read_answer("chat", await proxy.ask("chat", long_request("chat")), False)
    assert "tools" not in server.seen[0].parsed
    assert "fold" in proxy.reports[0].stages

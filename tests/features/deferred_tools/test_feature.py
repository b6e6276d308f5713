"""Requests whose tools leave no room are served, over real HTTP, in front of a strict upstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.features.deferred_tools.search import NAME, reserve
from tests.conftest import StartStub
from tests.stub import Answer, Call
from tests.stub.faults import NO_FAULT, error
from tests.support.answer_parser import parse_answer
from tests.support.api_formats import request_body
from tests.support.sample_conversations import agent_session
from tests.support.server_tool_fixtures import WORDING, both, every, model_answering, proxy_in_process

WINDOW = 8_192
WANTED = "mcp__weather__forecast_for_place"
LOOK = Call(NAME, json.dumps({"query": "weather forecast"}))
USE = Call(WANTED, json.dumps({"field_0": "Graz"}))


def tool(name: str, says: str) -> dict[str, Any]:
    """A tool as MCP servers declare them: few words, many fields."""
    fields = {f"field_{at}": {"enum": [f"{name}_{at}_{value}" for value in range(4)]} for at in range(8)}
    parameters = {"type": "object", "properties": {**fields, "field_0": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}


def many_tools(count: int = 120) -> list[dict[str, Any]]:
    """Tools that take several times the window; the one that is wanted stands among the last."""
    tools = [tool(f"mcp__server_{at % 7}__action_{at}", f"Does the thing number {at}.") for at in range(count)]
    tools[-5] = tool(WANTED, "Tells the weather of the next days at a place.")
    return tools


def request(api: str, stream: bool, tools: list[dict[str, Any]] | None = None, **members: Any) -> dict[str, Any]:
    """A short session with more tools than the window holds."""
    more: dict[str, Any] = {"stream": True} if stream else {}
    more |= {"store": False} if api == "responses" else {}
    return request_body(api, agent_session(2, 60), tools or many_tools(), **more, **members)


def on(**settings: Any) -> dict[str, Any]:
    """The settings of a proxy that defers tools."""
    return {"compression": {"deferred_tools": {"enabled": True, **settings}}}


@every
@both
async def test_a_request_that_would_be_refused_is_served(
    stub: StartStub, tmp_path: Path, api: str, stream: bool
) -> None:
    """The model finds the tool that it needs and calls it; the client gets that call, and never hears of the search."""
    server = await stub(window=WINDOW, wording=WORDING[api])
    server.script = model_answering(Answer("Let me see.", (LOOK,)), Answer("", (USE,)))
    async with proxy_in_process(server, tmp_path, **on()) as proxy:
        answer = await proxy.ask(api, request(api, stream))
        assert answer.status_code == 200, answer.text
        answered = parse_answer(api, answer.content, stream=stream)
    assert NAME not in answer.text
    assert [name for name, *_ in answered.calls] == [WANTED]
    first, second = server.seen
    assert (first.verdict, second.verdict) == ("ok", "ok"), second.why
    assert first.tools[-1] == NAME
    assert WANTED not in first.tools
    assert second.tools[: len(first.tools)] == first.tools
    assert WANTED in second.tools
    assert proxy.reports[0].recalls == 1
    assert proxy.reports[0].window == WINDOW - reserve(WINDOW, 4_000), "the rest is for tools that a search adds"
    report = proxy.reports[0]
    assert "deferred_tools" in report.stages
    assert report.outcome == "compacted"
    assert (report.tokens_before or 0) > WINDOW > (report.tokens_after or 0), "the client's tools count as sent"
    assert proxy.faults == []


@every
@both
async def test_a_tool_that_is_found_again_is_declared_once(
    stub: StartStub, tmp_path: Path, api: str, stream: bool
) -> None:
    """Calls at once, a later call, and a client that sends a tool twice: no request has two found tools of one name."""
    server = await stub(window=WINDOW, wording=WORDING[api])
    server.script = model_answering(Answer("", (LOOK, LOOK, LOOK)), Answer("", (LOOK,)), Answer("", (USE,)))
    tools = many_tools()
    async with proxy_in_process(server, tmp_path, **on()) as proxy:
        answer = await proxy.ask(api, request(api, stream, [*tools, tools[-5]]))
        assert answer.status_code == 200, answer.text
    assert [seen.tools.count(WANTED) for seen in server.seen] == [0, 1, 1]
    assert proxy.faults == []


@every
@pytest.mark.slow
async def test_the_choice_is_the_same_once_more_is_known_of_the_route(
    stub: StartStub, tmp_path: Path, api: str
) -> None:
    """A provider that counts a fifth more or less than we do teaches that with its answers, and no tool changes."""
    for factor in (1.2, 0.8):
        server = await stub(window=WINDOW, wording=WORDING[api], usage_factor=factor)
        server.script = model_answering(Answer("It will rain."))
        async with proxy_in_process(server, tmp_path, **on()) as proxy:
            for _ in range(8):
                assert (await proxy.ask(api, request(api, False))).status_code == 200
        assert len({tuple(seen.tools) for seen in server.seen}) == 1


@every
async def test_switched_off_it_is_refused(stub: StartStub, tmp_path: Path, api: str) -> None:
    """Without the feature such a request has no view that fits."""
    server = await stub(window=WINDOW, wording=WORDING[api])
    async with proxy_in_process(server, tmp_path) as proxy:
        answer = await proxy.ask(api, request(api, False))
    assert answer.status_code == 400
    assert server.seen == []


@every
async def test_a_tool_that_was_called_stays(stub: StartStub, tmp_path: Path, api: str) -> None:
    """The next request declares it, in its place, and the same first ones; the search is still there."""
    server = await stub(window=WINDOW, wording=WORDING[api])
    server.script = model_answering(Answer("So it is."))
    chat = agent_session(2, 60)
    call = {"id": "c9", "type": "function", "function": {"name": WANTED, "arguments": "{}"}}
    after = [
        *chat,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c9", "content": "Rain."},
    ]
    more = {"store": False} if api == "responses" else {}
    async with proxy_in_process(server, tmp_path, **on()) as proxy:
        for messages in (chat, after):
            answer = await proxy.ask(api, request_body(api, messages, many_tools(), **more))
            assert answer.status_code == 200, answer.text
    first, second = server.seen
    assert second.tools == [*first.tools[:-1], WANTED, NAME]


@every
@pytest.mark.parametrize("case", ["few tools", "own name", "a choice", "a form", "unknown window"])
@pytest.mark.slow
async def test_other_requests_are_left_alone(stub: StartStub, tmp_path: Path, api: str, case: str) -> None:
    """A request whose tools have room, or to which no search may be added, is sent as without the feature."""
    server = await stub(window=200_000, wording=WORDING[api])
    server.script = model_answering(Answer("Yes."))
    tools, members, settings = many_tools(), dict[str, Any](), dict[str, Any]()
    if case == "few tools":
        tools = many_tools(10)
    elif case == "own name":
        tools[3] = tool(NAME, "The client's own.")
    elif case == "a choice":
        members = {"tool_choice": {"type": "any"} if api == "messages" else "required"}
    elif case == "a form":
        form = {"type": "json_object"}
        members = {"response_format": form, "output_config": {"format": form}, "text": {"format": form}}
    else:
        settings = {"models": [{"name": "*"}]}
    bodies = []
    for switched in (on(), {}):
        async with proxy_in_process(server, tmp_path, **switched, **settings) as proxy:
            bodies.append((await proxy.ask(api, request(api, False, tools, **members))).status_code)
            assert "deferred_tools" not in proxy.reports[-1].stages
    assert bodies[0] == bodies[1]
    assert len({seen.body for seen in server.seen}) <= 1


@both
async def test_two_searches_and_no_more(stub: StartStub, tmp_path: Path, stream: bool) -> None:
    """A model that only ever searches ends with an answer that has no call of ours."""
    server = await stub(window=WINDOW)
    server.script = model_answering(Answer("Hm.", (LOOK,)))
    async with proxy_in_process(server, tmp_path, **on()) as proxy:
        answer = await proxy.ask("chat", request("chat", stream))
    assert len(server.seen) == 3
    assert all(seen.verdict == "ok" for seen in server.seen)
    assert NAME not in answer.text
    assert parse_answer("chat", answer.content, stream=stream).calls == []


async def test_a_window_that_is_smaller_than_believed_is_learned(stub: StartStub, tmp_path: Path) -> None:
    """If a later generation is too long, what it found is cut, and the request is still served."""
    server = await stub(window=WINDOW)
    server.script = model_answering(Answer("", (LOOK,)), Answer("", (USE,)))
    server.fail(NO_FAULT)
    server.fail(error(400, "too long", "context_length_exceeded"))
    async with proxy_in_process(server, tmp_path, **on(max_tokens=3_000)) as proxy:
        answer = await proxy.ask("chat", request("chat", False))
    assert answer.status_code == 200
    assert [name for name, *_ in parse_answer("chat", answer.content, stream=False).calls] == [WANTED]
    assert len(server.seen[2].body) < len(server.seen[1].body)


@pytest.mark.slow
async def test_there_is_room_for_a_tool_however_long_the_session_is(stub: StartStub, tmp_path: Path) -> None:
    """A part of the window is left for it, so that a view just below the high mark does not shut the search."""
    server = await stub(window=WINDOW)
    async with proxy_in_process(server, tmp_path, **on()) as proxy:
        for rounds in range(4, 26, 3):
            server.forget()
            server.script = model_answering(Answer("", (LOOK,)), Answer("", (USE,)))
            answer = await proxy.ask("chat", request_body("chat", agent_session(rounds, 250), many_tools()))
            assert [name for name, *_ in parse_answer("chat", answer.content, stream=False).calls] == [WANTED]
            assert [seen.verdict for seen in server.seen] == ["ok", "ok"]
    assert any("fold" in report.stages for report in proxy.reports)
    assert any("fold" not in report.stages for report in proxy.reports)

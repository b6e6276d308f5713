"""Fail open: what becomes of a request after a fault of our own, by how far it came."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.core.errors import InvalidRequest, UpstreamTimeout
from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Origin, Request
from proxy.engine.engine import Engine
from proxy.engine.measuring import Measurer
from proxy.engine.retries import Retries
from proxy.engine.upstream_calls import UpstreamCalls
from tests.support.engine_fixtures import TENANT
from tests.support.scripted_upstream import (
    DONE,
    JSON,
    ROLE,
    SSE,
    TOO_LONG,
    WINDOW,
    WORD,
    EngineFixture,
    Exchanged,
    ScriptedReply,
    ScriptedUpstream,
    agent_body,
    agent_request,
    read_whole,
    upstream_replying,
)

DEGRADED = ("degraded", "internal_error")


def broken(*_: object, **__: object) -> Any:
    """A fault."""
    raise ZeroDivisionError("CANARY")


def outcome(answer: Exchanged) -> tuple[str, str]:
    return answer.report.outcome, answer.report.reason


async def test_before_anything_was_sent_the_clients_own_bytes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go once, untouched, however far above the window they are; the answer teaches nothing."""
    monkeypatch.setattr(Engine, "first_plan", broken)
    room, upstream, body = (
        EngineFixture(),
        upstream_replying(ScriptedReply(200, [ROLE, WORD, DONE], SSE)),
        agent_body(60_000, stream=True),
    )
    answer = await room.ask(body, upstream)
    assert (outcome(answer), answer.report.upstream, answer.report.model) == (DEGRADED, "stub", "gpt-4o-mini")
    assert await read_whole(answer) == ROLE + WORD + DONE
    assert upstream.bodies == [body]
    assert upstream.replies[0].chunks_read > 0
    assert (answer.answer.ending, answer.answer.at_end) == (None, None)
    assert room.faults == [("request", ZeroDivisionError)]


async def test_an_error_to_the_clients_own_bytes_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried again, whatever comes back."""
    monkeypatch.setattr(Engine, "first_plan", broken)
    upstream = upstream_replying(ScriptedReply(400, [TOO_LONG], JSON))
    answer = await EngineFixture().ask(agent_body(9_000), upstream)
    assert (outcome(answer), await read_whole(answer), len(upstream.bodies)) == (DEGRADED, TOO_LONG, 1)


@pytest.mark.parametrize("status", [200, 400])
async def test_a_reply_in_hand_is_the_answer(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """If looking at it fails, the reply passes with the bytes already read, and nothing is sent again."""
    stream = [ROLE, b'data: {"error": "x"}\n\n', DONE]
    chunks, headers, name = (stream, SSE, "event") if status == 200 else ([TOO_LONG[:9], TOO_LONG[9:]], JSON, "answer")
    monkeypatch.setattr(f"proxy.core.overflow.classify.Classifier.{name}", broken)
    upstream = upstream_replying(ScriptedReply(status, chunks, headers))
    answer = await EngineFixture().ask(agent_body(6200, stream=status == 200), upstream)
    assert (outcome(answer), len(upstream.bodies)) == (DEGRADED, 1)
    assert not upstream.replies[0].closed
    assert await read_whole(answer) == b"".join(chunks)


async def test_after_an_overflow_its_reply_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If making the request smaller fails, the client gets the first overflow's status, headers and bytes."""
    monkeypatch.setattr(Retries, "smaller", broken)
    upstream = upstream_replying(ScriptedReply(400, [TOO_LONG[:9], TOO_LONG[9:]], JSON), ScriptedReply(200, [b"{}"]))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert (outcome(answer), len(upstream.bodies)) == (DEGRADED, 1)
    assert answer.reply is not None
    assert (answer.reply.status, answer.reply.headers) == (400, JSON)
    assert await read_whole(answer) == TOO_LONG
    assert upstream.replies[0].closed


async def test_a_retry_in_hand_wins_over_the_overflow_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller request was answered: that is the answer, although looking at it failed."""
    look, calls = UpstreamCalls._refusal_in, []

    async def failing(self: UpstreamCalls, *given: Any, **named: Any) -> Any:
        calls.append(1)
        return await look(self, *given, **named) if len(calls) == 1 else broken()

    monkeypatch.setattr(UpstreamCalls, "_refusal_in", failing)
    upstream = upstream_replying(ScriptedReply(400, [TOO_LONG], JSON), ScriptedReply(200, [b'{"ok":true}']))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert (outcome(answer), await read_whole(answer), len(upstream.bodies)) == (DEGRADED, b'{"ok":true}', 2)


async def test_the_upstreams_name_of_the_model_is_used_while_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias is renamed as ever; if finding its place fails, too, the bytes go as they came."""
    monkeypatch.setattr(Engine, "first_plan", broken)
    body = agent_body(600).replace(b"gpt-4o-mini", b"fast")
    for locate, sent in ((Measurer.locate, b"gpt-4o-mini"), (broken, b"fast")):
        monkeypatch.setattr(Measurer, "locate", locate)
        room, upstream = (
            EngineFixture(rules=[ModelRule("fast", "other", WINDOW, model="gpt-4o-mini")]),
            upstream_replying(ScriptedReply(200, [b"{}"])),
        )
        answer = await room.ask(body, upstream)
        assert (outcome(answer), upstream.names) == (DEGRADED, ["other"])
        assert upstream.bodies == [body.replace(b"fast", sent)]


async def test_the_upstreams_name_of_the_model_is_put_into_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Gemini's API the path names it, and the body goes as it came."""
    monkeypatch.setattr(Engine, "first_plan", broken)
    room = EngineFixture(rules=[ModelRule("fast", "other", WINDOW, model="gemini-2.5-flash")])
    upstream = upstream_replying(ScriptedReply(200, [b"{}"]))
    origin = Origin("/v1beta/models/fast:generateContent?x=1", (("x-goog-api-key", "k"),))
    room.switch.upstream = upstream
    request = Request("gemini", b'{"contents": 1}', TENANT, "r1", path_model="fast", origin=origin)
    answer = Exchanged(await room.engine.exchange(request))
    assert (outcome(answer), upstream.names, upstream.bodies) == (DEGRADED, ["other"], [b'{"contents": 1}'])
    assert upstream.paths == ["/v1beta/models/gemini-2.5-flash:generateContent?x=1"]


async def test_without_a_route_the_default_upstream_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """If resolving the model is what failed, the default upstream may still know it."""
    room, upstream = (
        EngineFixture(rules=[ModelRule("*", "other", WINDOW)]),
        upstream_replying(ScriptedReply(200, [b"{}"])),
    )
    monkeypatch.setattr(Catalogue, "resolve", broken)
    answer = await room.ask(agent_body(600), upstream)
    assert (outcome(answer), upstream.names, upstream.bodies) == (DEGRADED, ["stub"], [agent_body(600)])


async def test_what_is_refused_on_purpose_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that cannot be read, or an upstream that failed, is no fault of ours; nor is a client that leaves."""
    room, upstream = EngineFixture(), upstream_replying(ScriptedReply(200, [b"{}"]))
    with pytest.raises(InvalidRequest):
        await room.ask(b'{"model": "gpt-4o-mini", "messages": 3}', upstream)
    for raised in (UpstreamTimeout("stub", 1.0), asyncio.CancelledError()):

        def failing(*_: object, raised: BaseException = raised, **__: object) -> None:
            raise raised

        monkeypatch.setattr(Engine, "first_plan", failing)
        with pytest.raises(type(raised)):
            await room.ask(agent_body(600), upstream)
    assert (upstream.bodies, room.faults) == ([], [])


@pytest.mark.parametrize("raised", [UpstreamTimeout("stub", 1.0), asyncio.CancelledError()])
async def test_a_reply_that_nobody_waits_for_is_closed(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    """Whoever waited is gone or the connection broke: the upstream's call ends at once."""

    async def failing(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(UpstreamCalls, "_refusal_in", failing)
    upstream = upstream_replying(ScriptedReply(200, [b"{}"]))
    with pytest.raises(type(raised)):
        await EngineFixture().ask(agent_body(600), upstream)
    assert upstream.replies[0].closed


async def test_a_count_that_fails_is_left_to_the_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own count of the client's bytes; its refusal where it has none and ours failed behind it."""
    body = json.dumps({**json.loads(agent_body(600)), "max_tokens": 9}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "first_plan", broken)
        upstream = upstream_replying(ScriptedReply(200, [b'{"input_tokens":7}']))
        answer = await EngineFixture().count(body, upstream)
        assert (outcome(answer), answer.report.api, upstream.bodies) == (DEGRADED, "count_tokens", [body])
    monkeypatch.setattr(Measurer, "tokens_of", broken)
    upstream = upstream_replying(ScriptedReply(404, [b"no such path"]))
    answer = await EngineFixture(window=None).count(body, upstream)
    assert (outcome(answer), await read_whole(answer), len(upstream.bodies)) == (DEGRADED, b"no such path", 1)


async def test_what_could_not_even_be_read_is_sent_untouched() -> None:
    """The server may give up on reading a request: the engine sends it as it came."""
    for body in (b"\x1f\x8b...", b'{"x":' + b"[" * 100_000, b""):
        room, upstream = EngineFixture(), ScriptedUpstream(lambda _: ScriptedReply(200, [b"{}"]))
        room.switch.upstream = upstream
        answer = Exchanged(await room.engine.pass_through(Request("chat", body, TENANT, "r1")))
        assert (outcome(answer), upstream.bodies, upstream.names) == (DEGRADED, [body], ["stub"])


CALLED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
USE = {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.py"}}
MISPLACED: list[tuple[str, dict[str, Any]]] = [
    *[("chat", {"role": role, "content": "Odd.", "tool_calls": [CALLED]}) for role in ("user", "system", "tool")],
    ("chat", {"role": "user", "content": "Odd.", "tool_call_id": "call-1"}),
    ("chat", {"role": "assistant", "content": "Odd.", "tool_call_id": "call-1"}),
    ("messages", {"role": "user", "content": [USE]}),
    ("messages", {"role": "user", "content": [{"type": "tool_result", "content": "Odd."}, USE]}),
    ("responses", {"type": "function_call", "role": "user", "name": "read", "arguments": "{}", "call_id": "c1"}),
    ("responses", {"type": "message", "role": "user", "content": "Odd.", "call_id": "c1"}),
    ("gemini", {"role": "user", "parts": [{"functionCall": {"name": "read", "args": {"path": "a.py"}}}]}),
    ("gemini", {"role": "model", "parts": [{"functionResponse": {"name": "read", "response": {"output": "Odd."}}}]}),
]


@pytest.mark.parametrize(("api", "item"), MISPLACED)
async def test_calls_and_results_of_the_wrong_role_are_no_fault(api: str, item: dict[str, Any]) -> None:
    """A conversation with such an item is compacted like any other."""
    room, upstream = EngineFixture(), upstream_replying(ScriptedReply(200, [b"{}"]))
    if api == "chat":
        request = json.loads(agent_body(9_000))
    else:
        request = json.loads(agent_request(api, 24))
    items = request["contents" if api == "gemini" else "input" if api == "responses" else "messages"]
    items.insert(len(items) // 2, item)
    answer = await room.ask(json.dumps(request).encode(), upstream, api)
    assert (answer.report.outcome, room.faults) == ("compacted", [])

"""The engine: one call where it fits, something smaller where the provider says no, everything else verbatim."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.compaction.truncate import TruncateLimits
from proxy.core.errors import InvalidRequest, UpstreamUnreachable
from proxy.core.models import ModelRule
from proxy.core.report import Usage
from proxy.engine.engine import Counting
from proxy.engine.ports import Reply
from tests.stub import Rules, judge
from tests.stub.rules import Wording, overflow_error
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import POLICY, TENANT, chat_body, message_problems, message_slices, outline_problems
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, prose
from tests.support.scripted_upstream import (
    DONE,
    JSON,
    ROLE,
    ROUTE,
    SSE,
    STORED,
    TOO_LONG,
    WINDOW,
    WORD,
    WORDINGS,
    EngineFixture,
    ScriptedReply,
    ScriptedUpstream,
    accepting_upstream,
    agent_body,
    agent_request,
    read_whole,
    strict_upstream,
    upstream_replying,
)


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("shape", ["whole", "stream", "in stream"])
async def test_an_overflow_is_answered_with_something_smaller(wording: Wording, shape: str) -> None:
    """A provider whose window is smaller than we thought gets a smaller view; the client sees only the success."""
    upstream = strict_upstream(shape != "whole", window=5000, wording=wording, overflow_in_stream=shape == "in stream")
    body = agent_body(6200, **({} if shape == "whole" else {"stream": True}))
    answer = await EngineFixture().ask(body, upstream)
    assert await read_whole(answer) == (b'{"ok":true}' if shape == "whole" else ROLE + WORD + DONE)
    assert answer.reply is not None
    assert answer.reply.status == 200
    assert answer.report.retries == answer.report.overflows == len(upstream.bodies) - 1 >= 1
    assert answer.report.outcome == "compacted"
    sizes = [request_tokens(json.loads(sent)) for sent in upstream.bodies]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(reply.closed for reply in upstream.replies[:-1])
    assert not upstream.replies[-1].closed


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_that_never_has_enough_gets_two_retries(wording: Wording, stream: bool) -> None:
    """After two smaller attempts the first error goes to the client: its status, its headers and all its bytes."""
    verdict = judge(json.loads(agent_body(6200)), Rules(window=2500))
    status, error = overflow_error(verdict, Rules(window=2500, wording=wording))
    first = (
        ScriptedReply(200, [ROLE, b"data: " + error[:20], error[20:] + b"\n\n", DONE], SSE)
        if stream
        else ScriptedReply(status, [error[:9], error[9:]], (*JSON, ("x-request-id", "again")))
    )
    said = ROLE + b"data: " + error + b"\n\n" + DONE if stream else error
    later = ScriptedReply(200, [b"data: " + error + b"\n\n"], SSE) if stream else ScriptedReply(status, [error])
    upstream = upstream_replying(first, later, ScriptedReply(later.status, list(later._chunks), later.headers))
    answer = await EngineFixture().ask(agent_body(6200, stream=stream), upstream)
    sizes = [request_tokens(json.loads(sent)) for sent in upstream.bodies]
    assert 1 < len(sizes) <= 3
    assert sizes == sorted(set(sizes), reverse=True)
    assert answer.reply is not None
    assert answer.reply.status == first.status
    assert list(answer.reply.headers) == list(first.headers)
    assert await read_whole(answer) == said
    assert (answer.report.outcome, answer.report.reason) == ("degraded", "overflow")
    assert answer.report.overflows == len(sizes)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, b'{"error":{"message":"Invalid value for temperature","code":"invalid_value"}}'),
        (400, b'{"error":{"message":"string too long. Expected a string with maximum length 1024","code":"x"}}'),
        (400, b"not json"),
        (401, b'{"error":{"message":"Incorrect API key"}}'),
        (404, b""),
        (413, b'{"error":{"message":"no upload here"}}'),
        (
            429,
            b'{"error":{"message":"Rate limit: maximum context length tokens per min","code":"rate_limit_exceeded"}}',
        ),
        (500, b'{"error":{"message":"The server had an error"}}'),
        (503, b"busy"),
    ],
)
async def test_every_other_error_passes_verbatim(status: int, error: bytes) -> None:
    """An error that is no overflow costs one call and arrives as it was, headers included."""
    upstream = upstream_replying(ScriptedReply(status, [error[:4], error[4:]] if error else []))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert len(upstream.bodies) == 1
    assert answer.reply is upstream.replies[0]
    assert await read_whole(answer) == error
    assert answer.report.retries == answer.report.overflows == 0
    assert not upstream.replies[0].closed


async def test_an_unknown_window_is_learned_from_the_first_overflow() -> None:
    """Nothing is compressed ahead of an unknown window; once it is told, the next request fits without an overflow."""
    room, upstream = EngineFixture(window=None), strict_upstream(window=4000)
    messages = agent_session(18, 300)
    body = chat_body(messages)
    first = await room.ask(body, upstream)
    assert upstream.bodies[0] is body
    assert first.report.retries == 1
    grown = chat_body([*messages, *agent_round(99, 100)])
    second = await room.ask(grown, upstream)
    assert second.report.retries == 0
    assert second.report.window == 4000
    assert message_slices(upstream.bodies[-1])[: len(message_slices(upstream.bodies[-2]))] == message_slices(
        upstream.bodies[-2]
    )


async def test_an_overflow_that_states_nothing_is_recovered_from_and_invents_no_window() -> None:
    """Where neither we nor the error know the window, the view shrinks all the same and no window is told."""
    bare = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
    upstream = upstream_replying(ScriptedReply(400, [bare]), ScriptedReply(200, [b'{"ok":true}']))
    answer = await EngineFixture(window=None).ask(agent_body(6200), upstream)
    assert await read_whole(answer) == b'{"ok":true}'
    assert len(upstream.bodies[1]) < len(upstream.bodies[0])
    assert (answer.report.window, answer.report.budget, answer.report.retries) == (None, None, 1)


@pytest.mark.parametrize("wording", ["openai", "anthropic", "llamacpp"])
async def test_stated_prompt_tokens_correct_the_count(wording: Wording) -> None:
    """A provider that counts half as much again is believed: the next requests fit at once, by its own count."""
    room, upstream = EngineFixture(), strict_upstream(window=WINDOW, wording=wording, factor=1.5)
    messages = agent_session(18, 300)
    answer = await room.ask(chat_body(messages), upstream)
    assert answer.report.retries == 1
    assert 1.4 <= room.replica.learned.known(ROUTE, TENANT).lesson.calibration.factor <= 1.6
    for at in range(12):
        messages += agent_round(100 + at, 300)
        again = await room.ask(chat_body(messages), upstream)
        assert again.report.retries == 0
        assert await read_whole(again) == b'{"ok":true}'


async def test_an_output_figure_that_is_too_large_is_lowered_first() -> None:
    """Where input and output together are too much, the output figure gives way before any message does."""
    upstream = strict_upstream(window=5000, wording="vllm")
    body = chat_body([{"role": "user", "content": prose(1, 3000)}], max_tokens=3500)
    answer = await EngineFixture().ask(body, upstream)
    assert answer.report.retries == 1
    first, second = map(json.loads, upstream.bodies)
    assert second["messages"] == first["messages"]
    assert 1000 <= second["max_tokens"] < first["max_tokens"]
    assert "output" in answer.report.stages


async def test_a_body_that_is_no_request_is_invalid() -> None:
    """What cannot be read is an error of the caller, before anything is sent."""
    upstream = strict_upstream()
    for body in (b"", b"[]", b'{"model":"m"}', b'{"model":"m","model":"n","messages":[]}', b'{"messages":7}'):
        with pytest.raises(InvalidRequest):
            await EngineFixture().ask(body, upstream)
    assert upstream.bodies == []


async def test_a_connection_that_fails_is_the_callers_to_know() -> None:
    """What sending raises goes through, after one call; a reply that breaks while it is judged is closed."""

    class Broken(ScriptedReply):
        async def next_chunk(self) -> bytes:
            raise UpstreamUnreachable("stub", "reset")

    upstream = upstream_replying(Broken(400, []))
    with pytest.raises(UpstreamUnreachable):
        await EngineFixture().ask(agent_body(6200), upstream)
    assert len(upstream.bodies) == 1
    assert upstream.replies[0].closed


async def test_only_our_own_time_is_overhead() -> None:
    """The clock runs while a request is fitted and while a smaller one is found, not while the provider answers."""
    room, upstream = EngineFixture(), strict_upstream(window=5000)
    answer = await room.ask(agent_body(6200), upstream)
    assert answer.report.retries == 1
    assert answer.report.overhead_seconds == pytest.approx(0.5)


async def test_every_attempt_is_a_faithful_view() -> None:
    """Retries too keep pairs, systems and bytes."""
    upstream = strict_upstream(window=3000)
    body = agent_body(6200, tools=AGENT_TOOLS)
    answer = await EngineFixture().ask(body, upstream)
    assert answer.report.retries >= 1
    for sent in upstream.bodies[1:]:
        assert message_problems(body, sent) == []
        assert outline_problems(body, sent) == []


def test_the_engine_tells_who_serves_a_model() -> None:
    """The upstream of a model is what the catalogue says."""
    assert EngineFixture().engine.upstream_of("anything") == "stub"


async def test_no_more_than_three_calls() -> None:
    """However small the views become, a provider that says no to everything is asked three times."""
    refusal = b'{"error":{"message":"exceeds the context window","code":"context_length_exceeded"}}'
    upstream = ScriptedUpstream(lambda _: ScriptedReply(400, [refusal]))
    answer = await EngineFixture(window=32_768).ask(agent_body(25_000), upstream)
    assert len(upstream.bodies) == 3
    assert await read_whole(answer) == refusal
    assert (answer.report.retries, answer.report.overflows) == (2, 3)


async def test_a_count_is_the_upstreams_where_it_has_one() -> None:
    """The view goes up to be counted, and the answer comes back as it is; nothing is recorded."""
    room, upstream = EngineFixture(), upstream_replying(ScriptedReply(200, [b'{"input_tokens":77}']))
    body = agent_request("messages", 40)
    answer = await room.count(body, upstream)
    assert await read_whole(answer) == b'{"input_tokens":77}'
    assert answer.report.api == "count_tokens"
    assert len(upstream.bodies[0]) < len(body)
    assert room.book.records() == []


COMPACT = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 4000}}]}


@pytest.mark.parametrize(("system", "said"), [(6000, 10), (10, 6000)])
async def test_a_size_to_compact_from_refuses_and_clips_nothing(system: int, said: int) -> None:
    """What fits the window but not the size from which a client wants compaction goes up with every word of it."""
    room, upstream = EngineFixture(20_000, owned=["stub"]), upstream_replying(ScriptedReply(200, [b"{}"]))
    body: dict[str, Any] = {"model": "m", "max_tokens": 500, "system": prose(1, system)}
    body["messages"] = [{"role": "user", "content": prose(2, said)}]
    answer = await room.ask(json.dumps({**body, "context_management": COMPACT}).encode(), upstream, "messages")
    assert answer.report.outcome == "verbatim"
    assert json.loads(upstream.bodies[0]) == body
    assert room.book.records() == []


async def test_a_count_for_a_fallback_takes_no_key_along_and_records_nothing() -> None:
    """Where another model would answer, its upstream is asked without the client's key, and nothing is recorded."""
    small = ModelRule("small", "stub", 2048, steps=("", "big"))
    room = EngineFixture(rules=[ModelRule("big", "other", WINDOW), small])
    keyless: list[tuple[str, bool]] = []
    upstream = upstream_replying(ScriptedReply(200, [b'{"input_tokens":77}']))

    async def send(name: str, body: bytes, **named: Any) -> Reply:
        keyless.append((name, named.get("keyless", False)))
        return await upstream.send(name, body, **named)

    body = json.dumps({**json.loads(agent_request("messages", 40, model="small")), "system": prose(1, 3_000)}).encode()
    answer = await room.count(body, send)
    assert answer.report.fallback == "big"
    assert keyless == [("other", True)]
    assert room.book.records() == []


@pytest.mark.parametrize(("counting", "status", "sent"), [("auto", 404, 1), ("auto", 405, 1), ("own", 200, 0)])
async def test_a_count_is_ours_where_the_upstream_has_none(counting: Counting, status: int, sent: int) -> None:
    """An upstream that cannot count, or is not to be asked, leaves it to us; so does an unknown window."""
    for room in (EngineFixture(counting=counting), EngineFixture(None, counting=counting)):
        upstream = upstream_replying(ScriptedReply(status, [b"{}"]))
        for rounds in (1, 8, 40):
            answer = await room.count(agent_request("messages", rounds), upstream)
            tokens = json.loads(await read_whole(answer))["input_tokens"]
            assert answer.reply is not None
            assert answer.reply.status == 200
            assert answer.reply.header("Content-Type") == "application/json"
            assert 100 * rounds < tokens or tokens < WINDOW
        assert len(upstream.bodies) == 3 * sent
        assert all(reply.closed for reply in upstream.replies)


@pytest.mark.parametrize("window", [None, 200_000])
async def test_what_is_counted_is_what_would_be_sent(window: int | None) -> None:
    """Results that are capped before they are first sent are counted as capped, known window or not."""
    policy, told = replace(POLICY, always=TruncateLimits(5, 50_000)), []
    for room in (EngineFixture(window, counting="own"), EngineFixture(window, counting="own", policy=policy)):
        answer = await room.count(agent_request("messages", 6), upstream_replying(ScriptedReply(500, [])))
        told.append(json.loads(await read_whole(answer))["input_tokens"])
    assert told[1] < 0.7 * told[0]


@pytest.mark.parametrize(("counting", "status"), [("relay", 404), ("auto", 401), ("auto", 500)])
async def test_every_other_answer_to_a_count_passes(counting: Counting, status: int) -> None:
    """Errors that do not say that there is no such route are the upstream's answer."""
    answer = await EngineFixture(counting=counting).count(
        agent_request("messages", 2), upstream_replying(ScriptedReply(status, [b"no"]))
    )
    assert answer.reply is not None
    assert (answer.reply.status, await read_whole(answer)) == (status, b"no")


async def test_a_stored_history_is_left_to_the_provider() -> None:
    """An overflow of what only the provider has is answered with leave to truncate, once, and teaches nothing."""
    room, body = EngineFixture(), json.dumps({"model": "m", "input": "Go on.", **STORED}).encode()
    upstream = upstream_replying(ScriptedReply(400, [TOO_LONG]), ScriptedReply(200, [b"{}"]))
    answer = await room.ask(body, upstream, "responses")
    assert await read_whole(answer) == b"{}"
    assert answer.report.stages == ("truncation",)
    assert [json.loads(sent).get("truncation") for sent in upstream.bodies] == [None, "auto"]
    assert {**json.loads(upstream.bodies[1]), "truncation": 0} == {**json.loads(body), "truncation": 0}
    assert room.book.learned == {}
    never = upstream_replying(ScriptedReply(400, [TOO_LONG]), ScriptedReply(400, [TOO_LONG]))
    assert await read_whole(await room.ask(body, never.send, "responses")) == TOO_LONG
    assert len(never.bodies) == 2


async def test_a_client_that_wants_no_truncation_gets_the_error() -> None:
    """Whatever the client said of truncation stands."""
    for said in ("disabled", "auto", None):
        body = json.dumps({"model": "m", "input": "Go on.", "truncation": said, **STORED}).encode()
        upstream = upstream_replying(ScriptedReply(400, [TOO_LONG]))
        assert await read_whole(await EngineFixture().ask(body, upstream, "responses")) == TOO_LONG
        assert upstream.bodies == [body]


async def test_what_the_provider_adds_teaches_nothing() -> None:
    """Usage that counts what hosted tools found, or a stored prompt, says nothing of our count."""
    hosted = {**json.loads(agent_request("responses", 14)), "tools": [{"type": "web_search"}]}
    for body in (json.dumps(hosted).encode(), agent_request("responses", 14, prompt={"id": "p"})):
        room = EngineFixture()
        answer = await room.ask(body, accepting_upstream().send, "responses")
        assert not answer.learn(Usage(40_000, 5, None))
        assert room.replica.learned.known(ROUTE, TENANT).lesson.calibration.factor == 1.0


async def test_what_goes_wrong_beside_an_answer_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in what is done after an answer is reported; the client gets its answer whole."""
    room = EngineFixture()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(room.replica.fitter.events, "answered", broken)
    answer = await room.ask(agent_body(600), upstream_replying(ScriptedReply(200, [b'{"choices": []}'], JSON)))
    assert await read_whole(answer) == b'{"choices": []}'
    await asyncio.sleep(0)
    assert room.faults == [("after", ZeroDivisionError)]

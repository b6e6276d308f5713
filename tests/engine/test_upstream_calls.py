"""Answers looked at before they are passed on: what is held, for how long, and what is an overflow."""

from __future__ import annotations

import gzip
import json

import pytest

from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.models import ModelRule
from proxy.core.report import Usage
from proxy.core.request import Origin, Request
from proxy.engine.upstream_calls import HOLD_SECONDS
from tests.stub import Rules, judge
from tests.stub.rules import overflow_error
from tests.support.engine_fixtures import TENANT
from tests.support.scripted_upstream import (
    DONE,
    JSON,
    ROLE,
    SSE,
    WORD,
    EngineFixture,
    ScriptedReply,
    ScriptedUpstream,
    agent_body,
    read_whole,
    upstream_replying,
)


async def test_an_overflow_after_content_passes() -> None:
    """Once the model has spoken nothing is retried, whatever comes behind."""
    error = b'data: {"error":{"message":"maximum context length exceeded","code":"context_length_exceeded"}}\n\n'
    upstream = upstream_replying(ScriptedReply(200, [ROLE, WORD, error], SSE))
    answer = await EngineFixture().ask(agent_body(6200, stream=True), upstream)
    assert await read_whole(answer) == ROLE + WORD + error
    assert len(upstream.bodies) == 1


@pytest.mark.parametrize(
    ("error", "taught"),
    [
        (b'{"error":{"message":"The image is too large: 3000 tokens, at most 2048 are allowed"}}', False),
        (b'{"error":{"message":"Input is too long for requested model."}}', False),
        (b'{"error":{"message":"maximum context length is 1000 tokens","code":"context_length_exceeded"}}', True),
    ],
)
async def test_what_a_claim_behind_content_teaches(error: bytes, taught: bool) -> None:
    """A claim in the midst of an answer is held against the request, too, before a window is learned from it."""
    room = EngineFixture(window=60_000)
    upstream = upstream_replying(ScriptedReply(200, [ROLE, WORD, b"data: " + error + b"\n\n"], SSE))
    answer = await room.ask(agent_body(6200, stream=True), upstream)
    for chunk in (answer.head, await read_whole(answer)):
        assert answer.answer.ending is not None
        answer.answer.ending.feed(chunk)
    answer.learn(Usage(None, None, None))
    assert bool(room.replica.learned.shown_windows()) is taught


@pytest.mark.parametrize("cuts", [1, 7, 40, 10_000])
async def test_the_hold_ends_with_the_first_word(cuts: int) -> None:
    """Of a stream only what comes before the first content is held, and every byte arrives in order."""
    opening = b": comment\n\n" + ROLE + b'event: ping\ndata: {"type":"ping"}\n\n' + WORD
    pieces = [opening[at : at + cuts] for at in range(0, len(opening), cuts)]
    upstream = upstream_replying(ScriptedReply(200, [*pieces, b"rest of it", DONE], SSE))
    answer = await EngineFixture().ask(agent_body(6200, stream=True), upstream)
    assert upstream.replies[0].chunks_read == len(pieces)
    assert answer.head == opening
    assert await read_whole(answer) == opening + b"rest of it" + DONE


async def test_the_hold_ends_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that begins and then says nothing is passed on with what came so far."""
    monkeypatch.setattr("proxy.engine.upstream_calls.HOLD_SECONDS", 0.05)
    assert HOLD_SECONDS <= 5
    upstream = upstream_replying(ScriptedReply(200, [ROLE, 0.5, WORD], SSE))
    answer = await EngineFixture().ask(agent_body(6200, stream=True), upstream)
    assert answer.head == ROLE
    assert await read_whole(answer) == ROLE + WORD


async def test_a_small_stream_is_watched_to_its_first_content_and_no_further() -> None:
    """A view far below the budget is watched like any other: whoever believes in too large a window counts it small."""
    upstream = upstream_replying(ScriptedReply(200, [ROLE, WORD, DONE], SSE))
    answer = await EngineFixture().ask(agent_body(1500, stream=True), upstream)
    assert (answer.head, upstream.replies[0].chunks_read) == (ROLE + WORD, 2)
    assert await read_whole(answer) == ROLE + WORD + DONE


@pytest.mark.parametrize("headers", [(("content-type", "application/json"),), ()])
async def test_what_is_neither_events_nor_an_object_is_not_buffered(headers: tuple[tuple[str, str], ...]) -> None:
    """A 200 whose first bytes are those of no event and no JSON goes straight on."""
    upstream = upstream_replying(ScriptedReply(200, [b"xxxxx", b"y"], headers))
    answer = await EngineFixture().ask(agent_body(6200, stream=True), upstream)
    assert answer.head == b"xxxxx"
    assert await read_whole(answer) == b"xxxxxy"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overflow_in_an_object_with_status_200(stream: bool) -> None:
    """An error object that comes with status 200, asked for as a stream or not, is made good like any other."""
    error = b'{"error": {"message": "maximum context length is 4000 tokens", "code": "context_length_exceeded"}}'
    answers = iter([ScriptedReply(200, [error[:20], error[20:]], JSON), ScriptedReply(200, [b'{"choices": []}'], JSON)])
    upstream = ScriptedUpstream(lambda _: next(answers))
    answer = await EngineFixture().ask(agent_body(6200, stream=stream), upstream)
    assert len(upstream.bodies) == 2
    assert await read_whole(answer) == b'{"choices": []}'


async def test_a_compressed_error_is_understood_and_passed_compressed() -> None:
    """A gzipped overflow is recognised; the one that is passed on keeps its bytes."""
    _, error = overflow_error(judge(json.loads(agent_body(6200)), Rules(window=3000)), Rules(window=3000))
    packed = gzip.compress(error)
    upstream = ScriptedUpstream(lambda _: ScriptedReply(400, [packed], (*JSON, ("content-encoding", "gzip"))))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert len(upstream.bodies) > 1
    assert await read_whole(answer) == packed


async def test_a_huge_error_is_passed_unread() -> None:
    """An error answer above a megabyte is relayed whole and taken for no overflow."""
    piece = b"maximum context length is 10 tokens " * 3000
    upstream = upstream_replying(ScriptedReply(400, [piece] * 20))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert len(upstream.bodies) == 1
    assert await read_whole(answer) == piece * 20


@pytest.mark.parametrize("broken", [UpstreamUnreachable("stub", "it broke"), UpstreamTimeout("stub", 1)])
async def test_an_error_whose_body_is_cut_keeps_its_status(broken: UllageError) -> None:
    """The client gets status, headers and the bytes that came; then its body breaks as the upstream's did."""
    limited = (*JSON, ("retry-after", "7"))
    upstream = upstream_replying(ScriptedReply(429, [b'{"error": {"mess', broken], limited))
    answer = await EngineFixture().ask(agent_body(6200), upstream)
    assert (answer.reply.status, answer.reply.headers[-1], answer.head) == (429, limited[-1], b'{"error": {"mess')
    with pytest.raises(type(broken)):
        await answer.reply.next_chunk()


async def test_what_tells_who_the_client_is_stays() -> None:
    """A fallback on an upstream that the client did not choose gets no credentials, cookies or organisations."""
    left = [("Accept", "a"), ("anthropic-beta", "b"), ("X-Trace", "t")]
    secret = [("Authorization", "x"), ("X-API-Key", "x"), ("api-key", "x"), ("Cookie", "x"), ("OpenAI-Project", "x")]
    origin = Origin("/v1/chat/completions", (*secret[:2], *left, *secret[2:]))
    room = EngineFixture(rules=[ModelRule("big", "other", 60_000), ModelRule("small", "stub", 2048, steps=("big",))])
    upstream = upstream_replying(ScriptedReply(200, [b"{}"]))
    request = Request("chat", agent_body(6200, model="small"), TENANT, "r1", origin=origin)
    answer = await room.exchange(request, upstream)
    assert (answer.report.fallback, upstream.names) == ("big", ["other"])
    assert list(upstream.headers[0]) == left

"""The engine, as transcripts: one call where it fits, something smaller after an overflow, everything else verbatim.

The notation is that of ``tests/support/transcript.py``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from proxy.core.advice import NEARLY_FULL
from proxy.core.decisions import CountedView
from proxy.core.report import Report, Usage
from proxy.engine.features import Feature
from tests.stub import Rules
from tests.stub import judge as verdict_on
from tests.stub.rules import Wording, overflow_error
from tests.support.engine_fixtures import TENANT, chat_body
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, prose
from tests.support.scripted_upstream import (
    DONE,
    ROLE,
    ROUTE,
    STORED,
    TOO_LONG,
    WINDOW,
    WORDINGS,
    EngineFixture,
    ScriptedReply,
    ScriptedUpstream,
    accepting_upstream,
    agent_body,
    agent_request,
)
from tests.support.transcript import Judge, play


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("shape", ["whole", "stream", "in stream"])
async def test_an_overflow_is_answered_with_something_smaller(wording: Wording, shape: str) -> None:
    """A provider whose window is smaller than we thought gets a smaller view; the client sees only the success."""
    rules = Rules(window=5000, wording=wording, overflow_in_stream=shape == "in stream")
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> overflow
        upstream << stub, smaller
        upstream >> ok
        client   << 200 ok
        report   : outcome=compacted retries=1 overflows=1
        replies  : closed, open
        """,
        judge=Judge(rules, stream=shape != "whole"),
        session=agent_body(6200, **({} if shape == "whole" else {"stream": True})),
    )


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_that_never_has_enough_gets_two_retries(wording: Wording, stream: bool) -> None:
    """After two smaller attempts the first error goes to the client: its status, its headers and all its bytes."""
    verdict = verdict_on(json.loads(agent_body(6200)), Rules(window=2500))
    status, error = overflow_error(verdict, Rules(window=2500, wording=wording))
    await play(
        f"""
        client   >> session
        upstream << stub, session
        upstream >> {200 if stream else status} first
        upstream << stub, smaller
        upstream >> {200 if stream else status} later
        upstream << stub, smaller
        upstream >> {200 if stream else status} later
        client   << reply 1
        report   : outcome=degraded reason=overflow overflows=3
        """,
        session=agent_body(6200, stream=stream),
        first=[b"data: " + ROLE[6:], b"data: " + error[:20], error[20:] + b"\n\n", DONE]
        if stream
        else [error[:9], error[9:]],
        later=b"data: " + error + b"\n\n" if stream else error,
    )


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
    await play(
        f"""
        client   >> session
        upstream << stub, session
        upstream >> {status} error
        client   << reply 1 unread
        report   : retries=0 overflows=0
        replies  : open
        """,
        session=agent_body(6200),
        error=[error[:4], error[4:]],
    )


async def test_an_unknown_window_is_learned_from_the_first_overflow() -> None:
    """Nothing is compressed ahead of an unknown window; once it is told, the next request fits without an overflow."""
    messages = agent_session(18, 300)
    first, _ = await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> overflow
        upstream << stub, smaller
        upstream >> ok
        client   << 200 ok
        report   : retries=1

        client   >> grown
        upstream << stub, extends
        upstream >> ok
        client   << 200 ok
        report   : retries=0 window=4000
        """,
        EngineFixture(window=None),
        Judge(Rules(window=4000)),
        session=(session := chat_body(messages)),
        grown=chat_body([*messages, *agent_round(99, 100)]),
    )
    assert first.bodies[0] is session


async def test_an_overflow_that_states_nothing_is_recovered_from_and_invents_no_window() -> None:
    """Where neither we nor the error know the window, the view shrinks all the same and no window is told."""
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> 400 bare
        upstream << stub, smaller
        upstream >> 200 answer
        client   << 200 answer
        report   : window=- budget=- retries=1
        """,
        EngineFixture(window=None),
        session=agent_body(6200),
        bare=b'{"error":{"message":"too long","code":"context_length_exceeded"}}',
        answer=b'{"ok":true}',
    )


@pytest.mark.parametrize("wording", ["openai", "anthropic", "llamacpp"])
async def test_stated_prompt_tokens_correct_the_count(wording: Wording) -> None:
    """A provider that counts half as much again is believed: the next requests fit at once, by its own count."""
    engine, judge = EngineFixture(), Judge(Rules(window=WINDOW, wording=wording, factor=1.5))
    messages = agent_session(18, 300)
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> overflow
        upstream << stub, smaller
        upstream >> ok
        client   << 200 ok
        report   : retries=1
        """,
        engine,
        judge,
        session=chat_body(messages),
    )
    assert 1.4 <= engine.replica.learned.get_cached(ROUTE, TENANT).calibration.factor <= 1.6
    for at in range(12):
        messages += agent_round(100 + at, 300)
        await play(
            """
            client   >> session
            upstream << stub
            upstream >> ok
            client   << 200 ok
            report   : retries=0
            """,
            engine,
            judge,
            session=chat_body(messages),
        )


async def test_an_output_figure_that_is_too_large_is_lowered_first() -> None:
    """Where input and output together are too much, the output figure gives way before any message does."""
    await play(
        """
        client   >> question
        upstream << stub, question
        upstream >> overflow
        upstream << stub, same messages, max_tokens in 1000..3499
        upstream >> ok
        client   << 200 ok
        report   : retries=1 stages~output
        """,
        judge=Judge(Rules(window=5000, wording="vllm")),
        question=chat_body([{"role": "user", "content": prose(1, 3000)}], max_tokens=3500),
    )


async def test_a_body_that_is_no_request_is_invalid() -> None:
    """What cannot be read is an error of the caller, before anything is sent."""
    for body in (b"", b"[]", b'{"model":"m"}', b'{"model":"m","model":"n","messages":[]}', b'{"messages":7}'):
        await play(
            """
            client >> body
            client << raises InvalidRequest
            """,
            body=body,
        )


async def test_a_connection_that_fails_is_the_callers_to_know() -> None:
    """What sending raises goes through, after one call; a reply that breaks while it is judged is closed."""
    await play(
        """
        client   >> session
        upstream << stub
        upstream >> breaks 200
        client   << raises UpstreamUnreachable
        replies  : closed
        """,
        session=agent_body(6200),
    )


async def test_only_our_own_time_is_overhead() -> None:
    """The clock runs while a request is fitted and while a smaller one is found, not while the provider answers."""
    (played,) = await play(
        """
        client   >> session
        upstream << stub
        upstream >> overflow
        upstream << stub, smaller
        upstream >> ok
        report   : retries=1
        """,
        judge=Judge(Rules(window=5000)),
        session=agent_body(6200),
    )
    assert played.answer.report.overhead_seconds == pytest.approx(0.5)


async def test_every_attempt_is_a_faithful_view() -> None:
    """Retries too keep pairs, systems and bytes."""
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> overflow
        upstream << stub, smaller, view of session
        upstream >> ok
        client   << 200 ok
        """,
        judge=Judge(Rules(window=3000)),
        session=agent_body(6200, tools=AGENT_TOOLS),
    )


async def test_no_more_than_three_calls() -> None:
    """However small the views become, a provider that says no to everything is asked three times."""
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> 400 refusal
        upstream << stub, smaller
        upstream >> 400 refusal
        upstream << stub, smaller
        upstream >> 400 refusal
        client   << 400 refusal
        report   : retries=2 overflows=3
        """,
        EngineFixture(window=32_768),
        session=agent_body(25_000),
        refusal=b'{"error":{"message":"exceeds the context window","code":"context_length_exceeded"}}',
    )


async def test_a_stored_history_is_left_to_the_provider() -> None:
    """An overflow of what only the provider has is answered with leave to truncate, once, and teaches nothing."""
    engine, body = EngineFixture(), json.dumps({"model": "m", "input": "Go on.", **STORED}).encode()
    first, *_ = await play(
        """
        client   >> question, api=responses
        upstream << stub, question, truncation=-
        upstream >> 400 too_long
        upstream << stub, truncation=auto
        upstream >> 200 answer
        client   << 200 answer
        report   : stages=truncation
        learned  : nothing

        client   >> question, api=responses     # it is known that the provider has to truncate: it is at once
        upstream << stub, truncation=auto
        upstream >> 400 too_long                # and now it is too long all the same
        client   << 400 too_long

        client   >> question, api=responses     # the same again is refused here
        client   << raises StoredHistoryTooLong
        """,
        engine,
        question=body,
        too_long=TOO_LONG,
        answer=b"{}",
    )
    assert {**json.loads(first.bodies[1]), "truncation": 0} == {**json.loads(body), "truncation": 0}
    assert engine.book.routes == {}


async def test_a_client_that_wants_no_truncation_gets_the_error() -> None:
    """Whatever the client said of truncation stands."""
    for said in ("disabled", "auto", None):
        await play(
            """
            client   >> question, api=responses
            upstream << stub, question
            upstream >> 400 too_long
            client   << 400 too_long
            """,
            question=json.dumps({"model": "m", "input": "Go on.", "truncation": said, **STORED}).encode(),
            too_long=TOO_LONG,
        )


async def test_what_the_provider_adds_teaches_nothing() -> None:
    """Usage that counts what hosted tools found, or a stored prompt, says nothing of our count."""
    hosted = {**json.loads(agent_request("responses", 14)), "tools": [{"type": "web_search"}]}
    for body in (json.dumps(hosted).encode(), agent_request("responses", 14, prompt={"id": "p"})):
        engine = EngineFixture()
        (played,) = await play(
            """
            client   >> session, api=responses
            upstream << stub
            upstream >> 200 answer
            """,
            engine,
            session=body,
            answer=b"{}",
        )
        assert not played.answer.learn(Usage(40_000, 5, None))
        assert engine.replica.learned.get_cached(ROUTE, TENANT).calibration.factor == 1.0


class Observer(Feature):
    """Notes the figures of the answers that it is to note."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, bool, bool]] = []

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Note how many items there were, if they were compacted now, and if they are nearly full."""
        is_nearly_full = (report.pressure or 0.0) > NEARLY_FULL
        self.noted.append((len(view.measured.parsed.items), report.event, is_nearly_full))


async def test_a_conversation_is_noted_once_in_a_while_and_when_something_happens() -> None:
    """The first request that is laid out, every compaction, the first nearly full one after each, and after a while."""
    observer = Observer()
    engine = EngineFixture(features=lambda _: [observer])

    async def ask(rounds: int) -> tuple[int, bool, bool] | None:
        observer.noted.clear()
        messages = agent_session(rounds, 300)
        upstream = ScriptedUpstream(lambda _: ScriptedReply(200, [b"{}"]))
        await engine.ask(chat_body(messages), upstream)
        await asyncio.sleep(0)
        return observer.noted[0] if observer.noted else None

    noted = {rounds: note for rounds in range(2, 40) if (note := await ask(rounds))}
    figures = list(noted.values())
    assert figures[0][1:] == (False, False)
    assert figures[1][1:] == (False, True)
    kinds = [(is_event, is_full) for _, is_event, is_full in figures[2:]]
    assert kinds[0][0]
    assert sum(is_event for is_event, _ in kinds) > 1
    assert all(is_event or (is_full and before[0]) for before, (is_event, is_full) in pairwise(kinds))
    assert await ask(39) is None
    engine.replica.hooks.noted.clear()
    assert await ask(39) is not None


class BrokenObserver(Feature):
    """Fails when it is to note an answer."""

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        raise ZeroDivisionError


async def test_what_goes_wrong_beside_an_answer_costs_no_request() -> None:
    """A fault in what is done after an answer is reported; the client gets its answer whole."""
    engine = EngineFixture(features=lambda _: [BrokenObserver()])
    await play(
        """
        client   >> session
        upstream << stub, session
        upstream >> 200 answer
        client   << 200 answer
        """,
        engine,
        session=agent_body(5_000),
        answer=b'{"choices": []}',
    )
    await asyncio.sleep(0)
    assert engine.faults == [("after", ZeroDivisionError)]


async def test_the_calls_of_many_items_are_looked_at_on_a_thread() -> None:
    """Neither the compaction of a large request nor its report goes through all calls on the loop's thread."""
    ran: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code.co_name)

    fixture = EngineFixture(window=16_000)
    sys.setprofile(watch)
    try:
        exchanged = await fixture.ask(chat_body(agent_session(700, 30)), accepting_upstream())
    finally:
        sys.setprofile(None)
    assert exchanged.report.files_read
    assert "_answer_of" in ran
    assert ran & {"pairs_of", "needless_items", "files_read", "lay_out"} == set()

"""What is sent after an overflow, by its kind, and another model's turn, by policy and as a rescue: as transcripts.

Behind the engine stand two upstreams: ``own`` has the model that is asked for, ``other`` the fallback. The notation is
that of ``tests/support/transcript.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from proxy.core.attempts import is_smaller
from proxy.core.models import COMPRESS, Failure, ModelRule
from proxy.core.request import Request
from tests.stub import Rules
from tests.stub.rules import Wording
from tests.support.engine_fixtures import POLICY, TENANT, Replica, chat_body
from tests.support.sample_conversations import agent_session, prose
from tests.support.scripted_upstream import ROLE, WORD, EngineFixture, agent_body
from tests.support.transcript import Judge, Played, Value, play

OWN, BIG = "gpt-4o-mini", "big-model"
DENIED = b'{"error":"no key"}'


@dataclass
class TwoUpstreams:
    """An engine whose overflow policy is *steps*, and what the two windows really are.

    The engine believes that the own window has *believed* tokens and the other one *said_other*, if that is given.
    """

    steps: tuple[str, ...] = (COMPRESS,)
    fail_over_on: frozenset[Failure] = frozenset()
    own: int = 5_000
    said_other: int = 0
    other: int = 60_000
    believed: int | None = None
    lower: Any = "last"
    wording: Wording = "openai"

    def __post_init__(self) -> None:
        rules = [ModelRule(BIG, "other", self.said_other or self.other)]
        asked = ModelRule("*", "own", self.believed or self.own, steps=self.steps)
        if self.fail_over_on:
            asked = structs.replace(asked, failovers=(BIG,), fail_over_on=self.fail_over_on)
        rules.append(asked)
        self.engine = EngineFixture(rules=rules, policy=structs.replace(POLICY, lower_output=self.lower))
        windows = {"own": self.own, "other": self.other}
        self.judge = Judge({name: Rules(window=window, wording=self.wording) for name, window in windows.items()})

    async def play(self, text: str, **values: Value) -> list[Played]:
        return await play(text, self.engine, self.judge, **values)


def clipping() -> bytes:
    """A conversation whose newest message alone is too much for the small window: it would have to be clipped."""
    return chat_body([*agent_session(4, 200), {"role": "user", "content": prose(1, 6_000)}])


async def test_a_fallback_takes_what_would_have_to_be_clipped() -> None:
    """With compress first, folding is done here, and what needs a clip goes to the bigger window unchanged."""
    body = clipping()
    await TwoUpstreams((COMPRESS, BIG)).play(
        """
        client   >> foldable
        upstream << own, with key
        upstream >> ok
        report   : fallback= outcome=compacted

        client   >> clipping
        upstream << other, renamed, keyless
        upstream >> ok
        client   << 200 ok
        report   : model=gpt-4o-mini upstream=other fallback=big-model
        report   : outcome=degraded reason=fallback window=60000 retries=0
        """,
        foldable=agent_body(8_000),
        clipping=body,
        renamed=body.replace(OWN.encode(), BIG.encode(), 1),
    )


async def test_the_bigger_window_first() -> None:
    """With the fallback first nothing is compressed here while the fallback takes it whole."""
    first, _ = await TwoUpstreams((BIG, COMPRESS)).play(
        """
        client   >> small
        upstream << own, small
        upstream >> ok

        client   >> large
        upstream << other, messages of large
        upstream >> ok
        """,
        small=(small := chat_body(agent_session(6, 200))),
        large=agent_body(8_000),
    )
    assert first.bodies[0] is small


@pytest.mark.parametrize(("steps", "where"), [((COMPRESS, BIG), "own"), ((BIG, COMPRESS), "other"), ((BIG,), "other")])
async def test_where_all_would_lose_something_the_first_one_does(steps: tuple[str, ...], where: str) -> None:
    """Steps that would drop or clip are taken in their order once every step would."""
    await TwoUpstreams(steps, other=5_500).play(
        f"""
        client   >> clipping
        upstream << {where}
        upstream >> ok
        client   << 200 ok
        report   : stages~clip
        """,
        clipping=clipping(),
    )


async def test_what_nobody_takes_is_refused() -> None:
    """System text above both windows is refused here, by the window that was asked for."""
    system = {"role": "system", "content": prose(1, 9_000)}
    await TwoUpstreams((COMPRESS, BIG), other=8_000).play(
        """
        client >> system
        client << refused context_length_exceeded
        report : window=5000
        """,
        system=chat_body([system, {"role": "user", "content": "hi"}]),
    )


async def test_a_fallback_makes_an_overflow_good() -> None:
    """After the last retry the fallback is asked; its answer is the client's."""
    await TwoUpstreams((COMPRESS, BIG), believed=16_000, own=100).play(
        """
        client   >> session
        upstream << own, session
        upstream >> overflow
        upstream << own, smaller
        upstream >> overflow
        upstream << other, keyless
        upstream >> ok
        client   << 200 ok
        report   : fallback=big-model overflows=2 retries=2
        """,
        session=agent_body(6_000),
    )


@pytest.mark.parametrize("answer", ["401 denied", "unreachable"])
async def test_a_fallback_that_fails_leaves_the_first_error(answer: str) -> None:
    """A rescue that is down, or says no in its own way, is not news: the client gets the first overflow, verbatim."""
    await TwoUpstreams((COMPRESS, BIG), believed=16_000, own=100).play(
        f"""
        client   >> session
        upstream << own, session
        upstream >> overflow
        upstream << own, smaller
        upstream >> overflow
        upstream << other
        upstream >> {answer}
        client   << reply 1                     # 400, "maximum context length is 100"
        report   : outcome=degraded reason=overflow fallback=
        """,
        session=agent_body(6_000),
        denied=DENIED,
    )


async def test_elsewhere_first_holds_for_overflows_too() -> None:
    """With the fallback first, an overflow nobody foresaw goes there at once; where that fails, the view shrinks."""
    begin = """
        client   >> session
        upstream << own, session
        upstream >> overflow
        upstream << other
        """
    session = agent_body(6_000)
    await TwoUpstreams((BIG, COMPRESS), believed=16_000).play(f"{begin}\nupstream >> ok", session=session)
    await TwoUpstreams((BIG, COMPRESS), believed=16_000).play(
        f"""
        {begin}
        upstream >> 500 broken
        upstream << own
        upstream >> ok
        client   << 200 ok
        """,
        session=session,
        broken=b"{}",
    )


async def test_a_fallback_by_policy_speaks_for_itself() -> None:
    """Where the fallback was the first to be asked, its error is the answer."""
    await TwoUpstreams((COMPRESS, BIG)).play(
        """
        client   >> clipping
        upstream << other
        upstream >> 401 denied
        client   << 401 denied
        """,
        clipping=clipping(),
        denied=b"denied",
    )


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_other_modes_go_nowhere_else(mode: str) -> None:
    """Who asked for no change is not sent to another model."""
    await TwoUpstreams((COMPRESS, BIG)).play(
        f"""
        client   >> clipping, mode={mode}
        upstream << own, clipping
        upstream >> overflow
        client   << reply 1
        """,
        clipping=clipping(),
    )


async def test_what_belongs_to_one_server_stays_there() -> None:
    """A model named by the path, and a history that only its server has, are answered by no other."""
    two = TwoUpstreams((BIG, COMPRESS))
    await two.play(
        """
        client   >> clipping, path_model=gpt-4o-mini
        upstream << own
        upstream >> ok
        report   : fallback=
        """,
        clipping=clipping(),
    )
    body = {"model": OWN, "previous_response_id": "resp_1", "input": [{"role": "user", "content": prose(1, 6_000)}]}
    plan = await two.engine.plan(Request("responses", json.dumps(body).encode(), TENANT, "r1"))
    assert plan.view.request.fallback_model == ""


async def test_sealed_reasoning_stays_at_home() -> None:
    """Signed reasoning goes to the model that wrote it, never to a fallback."""
    messages = agent_session(4, 200)
    messages[2] = {**messages[2], "reasoning_details": [{"type": "reasoning.encrypted", "data": "SECRET"}]}
    await TwoUpstreams((COMPRESS, BIG)).play(
        """
        client   >> small
        upstream << own, with SECRET
        upstream >> ok

        client   >> large
        upstream << other, without SECRET
        upstream >> ok
        """,
        small=chat_body([*messages, {"role": "user", "content": "hi"}]),
        large=chat_body([*messages, {"role": "user", "content": prose(1, 6_000)}]),
    )


async def test_a_body_without_a_model_gets_one() -> None:
    """What goes to a fallback names it, whether or not the client named anything."""
    body = {"messages": [{"role": "user", "content": prose(1, 6_000)}]}
    (played,) = await TwoUpstreams((COMPRESS, BIG)).play(
        """
        client   >> nameless
        upstream << other, model=big-model
        upstream >> ok
        """,
        nameless=json.dumps(body).encode(),
    )
    assert json.loads(played.bodies[0]) == {"model": BIG, **body}


BUSY, DOWN = b'{"error":{"message":"Rate limit reached","code":"rate_limit_exceeded"}}', b'{"error":"down"}'
EVERY_FAILURE: frozenset[Failure] = frozenset({"rate_limit", "unavailable"})


@pytest.mark.parametrize("answer", ["429 busy", "503 down", "unreachable", "breaks 200", "breaks 500"])
async def test_another_model_is_called_after_a_failure(answer: str) -> None:
    """If the rule asks for it, a rate limit or a server that is down is another model's turn."""
    await TwoUpstreams(fail_over_on=EVERY_FAILURE).play(
        f"""
        client   >> session
        upstream << own, session
        upstream >> {answer}
        upstream << other, same messages, keyless, model=big-model
        upstream >> ok
        client   << 200 ok
        report   : fallback=big-model upstream=other retries=1 overflows=0 outcome=degraded reason=fallback
        """,
        session=agent_body(2_000),
        busy=BUSY,
        down=DOWN,
    )


def opened(error: object, *before: bytes) -> list[bytes]:
    """A stream with *error* for its first event behind *before*."""
    return [*(before or [ROLE]), b"data: " + json.dumps(error).encode() + b"\n\n"]


STREAMED = {
    "chat": opened({"error": {"message": "Slow down", "code": "rate_limit_exceeded"}}),
    "gateway": opened({"error": {"message": "Provider returned error", "code": 429}, "choices": []}),
    "messages": opened(
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        b'data: {"type":"message_start","message":{}}\n\n',
    ),
    "responses": opened(
        {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "Try again"}}},
        b'data: {"type":"response.created","response":{"error":null}}\n\n',
    ),
    "gemini": opened({"error": {"code": 503, "message": "Overloaded.", "status": "UNAVAILABLE"}}),
}


@pytest.mark.parametrize("form", STREAMED)
async def test_a_stream_that_begins_with_a_failure_goes_to_a_fallback(form: str) -> None:
    """A rate limit or a fault of the server as a stream's first event costs no answer; it stands if all fail."""
    begin = """
        client   >> session
        upstream << own, session
        upstream >> 200 failed
        upstream << other, same messages, keyless, model=big-model
        """
    values: dict[str, Any] = {"session": agent_body(2_000, stream=True), "failed": STREAMED[form], "down": DOWN}
    for answer, said in (("ok", "200 ok"), ("200 failed", "reply 1"), ("503 down", "reply 1")):
        two = TwoUpstreams(fail_over_on=EVERY_FAILURE)
        two.judge.stream = True
        await two.play(f"{begin}\nupstream >> {answer}\nclient << {said}", **values)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_object_with_status_200_goes_to_a_fallback(stream: bool) -> None:
    """Some gateways answer 200 with an error for a body, and say in it what the status should have been."""
    await TwoUpstreams(fail_over_on=EVERY_FAILURE).play(
        """
        client   >> session
        upstream << own
        upstream >> 200 busy
        upstream << other
        upstream >> ok
        report   : fallback=big-model
        """,
        session=agent_body(2_000, stream=stream),
        busy=BUSY,
    )


@pytest.mark.parametrize("failures", [frozenset[Failure](), frozenset[Failure]({"unavailable"})])
async def test_a_failure_in_a_stream_that_no_rule_names_passes(failures: frozenset[Failure]) -> None:
    """Without a rule for it the error passes as it came, and so does one behind the first word."""
    for failed in (STREAMED["chat"], [ROLE, WORD, STREAMED["messages"][-1]]):
        await TwoUpstreams(fail_over_on=failures).play(
            """
            client   >> session
            upstream << own
            upstream >> 200 failed
            client   << reply 1
            """,
            session=agent_body(2_000, stream=True),
            failed=failed,
        )


@pytest.mark.parametrize(
    ("failure", "answer"), [("rate_limit", "503 down"), ("unavailable", "429 busy"), ("unavailable", "404 down")]
)
async def test_only_the_named_failures_are_anothers_turn(failure: Failure, answer: str) -> None:
    """Every other error is the client's to see."""
    await TwoUpstreams(fail_over_on=frozenset({failure})).play(
        f"""
        client   >> session
        upstream << own
        upstream >> {answer}
        client   << reply 1
        """,
        session=agent_body(2_000),
        busy=BUSY,
        down=DOWN,
    )


@pytest.mark.parametrize("second", ["429 busy", "unreachable", "401 denied"])
@pytest.mark.parametrize(("first", "said"), [("503 down", "reply 1"), ("unreachable", "raises UpstreamUnreachable")])
async def test_if_all_fail_the_first_failure_is_returned(first: str, said: str, second: str) -> None:
    """A fallback that fails too is not news: the client gets the answer of the model that it asked."""
    report = "report : fallback= outcome=verbatim retries=1" if said == "reply 1" else ""
    await TwoUpstreams(fail_over_on=EVERY_FAILURE).play(
        f"""
        client   >> session
        upstream << own
        upstream >> {first}
        upstream << other
        upstream >> {second}
        client   << {said}
        {report}
        """,
        session=agent_body(2_000),
        busy=BUSY,
        down=DOWN,
        denied=DENIED,
    )


async def test_a_fallback_that_overflows_after_a_failure_is_retried_smaller() -> None:
    """What the other model refuses for its length is made to fit that one."""
    await TwoUpstreams(fail_over_on=EVERY_FAILURE, own=60_000, other=5_000, said_other=60_000).play(
        """
        client   >> session
        upstream << own, session
        upstream >> 503 down
        upstream << other, same messages
        upstream >> overflow
        upstream << other, smaller
        upstream >> ok
        client   << 200 ok
        report   : fallback=big-model overflows=1 retries=2
        """,
        session=agent_body(8_000),
        down=DOWN,
    )


async def test_an_overflow_comes_before_a_failure() -> None:
    """A failure while a smaller view is tried is another model's turn; without one, the overflow stands."""
    begin = """
        client   >> session
        upstream << own, session
        upstream >> overflow
        upstream << own, smaller
        upstream >> 503 down
        upstream << other
        """
    values = {"session": agent_body(6_000), "down": DOWN}
    for answer, said in (("ok", "200 ok"), ("503 down", "reply 1")):
        two = TwoUpstreams(fail_over_on=EVERY_FAILURE, believed=16_000)
        await two.play(f"{begin}\nupstream >> {answer}\nclient << {said}", **values)


async def test_the_requested_model_stands_in_for_its_fallback() -> None:
    """If the first to be asked was the fallback, by the overflow policy, the asked model is the one that is left."""
    await TwoUpstreams((BIG, COMPRESS), fail_over_on=EVERY_FAILURE).play(
        """
        client   >> session
        upstream << other, messages of session
        upstream >> 503 down
        upstream << own, view of session
        upstream >> ok
        report   : fallback= outcome=compacted
        """,
        session=agent_body(8_000),
        down=DOWN,
    )


@pytest.mark.parametrize("bound", ["mode=off", "mode=observe", "path_model=gpt-4o-mini"])
async def test_what_may_not_leave_does_not_after_a_failure(bound: str) -> None:
    """Neither a mode that changes nothing nor a path that names the model sends it elsewhere."""
    await TwoUpstreams(fail_over_on=EVERY_FAILURE).play(
        f"""
        client   >> session, {bound}
        upstream << own
        upstream >> 503 down
        client   << reply 1
        """,
        session=agent_body(2_000),
        down=DOWN,
    )


async def test_payloads_shrink_and_teach_no_window() -> None:
    """Too many bytes make the view smaller; no window is made up from it."""
    await TwoUpstreams(own=20_000).play(
        """
        client   >> session
        upstream << own, session
        upstream >> 413 too_large
        upstream << own, tokens<=0.75
        upstream >> ok
        client   << 200 ok
        learned  : nothing
        """,
        session=agent_body(6_000),
        too_large=b'{"error":{"type":"request_too_large","message":"Request exceeds the maximum size"}}',
    )


@pytest.mark.parametrize(
    ("lower", "retry"),
    [("last", "same messages, max_tokens in 1000..2499"), ("never", "other messages, max_tokens=2500")],
)
async def test_input_and_output_together_lower_the_output(lower: str, retry: str) -> None:
    """The output figure gives way before any message does, if what is left is of use and the setting allows."""
    await TwoUpstreams(lower=lower, wording="vllm", own=5_000, believed=16_000).play(
        f"""
        client   >> session
        upstream << own
        upstream >> overflow
        upstream << own, {retry}
        upstream >> ok
        client   << 200 ok
        """,
        session=chat_body(agent_session(11, 250), max_tokens=2_500),
    )


@pytest.mark.parametrize("code", ['"context_length_exceeded"', "null"])
async def test_a_refused_sum_lowers_a_lowered_output_again(code: str) -> None:
    """An error that states only the sum of both: the figure that was lowered is lowered again, and no word is lost."""
    two = TwoUpstreams(own=5_000)
    stated = '{"error":{"message":"This model supports at most 5000 tokens. Your request needs 5320.","code":%s}}'
    await two.play(
        """
        client   >> one
        upstream << own, messages of one, max_tokens in 2900..2950
        upstream >> 400 stated
        upstream << own, messages of one, max_tokens in 2400..2500
        upstream >> ok
        client   << 200 ok
        report   : stages=output retries=1
        """,
        one=chat_body([{"role": "user", "content": prose(1, 1_600)}], max_tokens=5_000),
        stated=(stated % code).encode(),
    )


CAP = (
    b'{"error":{"message":"max_tokens is too large: 9000. This model supports at most 4096 completion tokens, '
    b'whereas you provided 9000.","type":"invalid_request_error","param":"max_tokens","code":"invalid_value"}}'
)


@pytest.mark.parametrize("lower", ["last", "never", "first"])
async def test_a_cap_of_the_output(lower: str) -> None:
    """An answer longer than the model gives is the client's to correct, unless figures may be lowered first."""
    passed_on = "client << 400 cap"
    lowered = """
        upstream << own, lowered
        upstream >> ok
        client   << 200 ok
        report   : stages~output
        """
    (played,) = await TwoUpstreams((COMPRESS, BIG), own=40_000, lower=lower).play(
        f"""
        client   >> session
        upstream << own, session
        upstream >> 400 cap
        {lowered if lower == "first" else passed_on}
        learned  : nothing
        """,
        session=(body := chat_body(agent_session(6, 200), max_tokens=9_000)),
        cap=CAP,
        lowered=body.replace(b"9000", b"4096"),
    )
    assert played.bodies[0] is body


@pytest.mark.parametrize("status", [429, 200])
async def test_a_rate_limit_is_passed_on(status: int) -> None:
    """Tokens per minute are no window: nothing is sent again, nothing learned, and no other model asked."""
    await TwoUpstreams((COMPRESS, BIG), own=40_000).play(
        f"""
        client   >> session
        upstream << own
        upstream >> {status} limit
        client   << {status} limit
        learned  : nothing
        """,
        session=agent_body(6_000),
        limit=b'{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 3000, '
        b'Requested 6012.","type":"tokens","code":"rate_limit_exceeded"}}',
    )


async def test_repeated_refusals_without_a_figure_teach() -> None:
    """A provider that never says its limit is believed to have less than it refused: later requests fit at once."""
    two = TwoUpstreams(believed=16_000, own=5_000)
    bare = b'{"error":{"message":"input is too long","code":"context_length_exceeded"}}'
    retry = """
        upstream << own, smaller
        upstream >> ok
        """
    for number, retries in enumerate((1, 0, 0, 0)):
        await two.play(
            f"""
            client   >> session
            upstream << own
            upstream >> {"400 bare" if retries else "ok"}
            {retry * retries}
            client   << 200 ok
            report   : retries={retries}
            """,
            session=chat_body(agent_session(18 + number, 300)),
            bare=bare,
        )
    assert [row["how"] for row in two.engine.replica.learned.shown_windows()] in ([], ["worked out"])


async def test_smaller_is_less_and_never_the_same() -> None:
    """Fewer tokens or less output, and never the same bytes."""
    view = (await Replica().plan(chat_body(agent_session(3, 100)), 8192)).view
    tokens, lower = view.tokens, structs.replace(view.edits, lowered_output=5)
    assert is_smaller(structs.replace(view, body=b"b", extension=-1), view, tokens)
    assert not is_smaller(structs.replace(view, extension=-1), view, tokens)
    assert not is_smaller(structs.replace(view, body=b"b"), view, tokens)
    assert is_smaller(structs.replace(view, body=b"b", edits=lower), view, tokens)
    assert not is_smaller(structs.replace(view, body=b"b", edits=lower), structs.replace(view, edits=lower), tokens)

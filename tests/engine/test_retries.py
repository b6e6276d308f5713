"""What is sent after an overflow, by its kind; and another model's turn, by policy and as a rescue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.attempts import is_smaller
from proxy.core.errors import UpstreamUnreachable
from proxy.core.models import COMPRESS, Catalogue, ModelRule
from proxy.core.request import Options, Origin, Request
from proxy.engine.ports import Reply, Upgradable
from tests.stub import Rules, judge
from tests.stub.rules import overflow_error
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import POLICY, TENANT, DictRecords, Replica, chat_body, message_slices
from tests.support.sample_conversations import agent_session, prose
from tests.support.scripted_upstream import Exchanged, ScriptedReply, agent_body, read_whole

Headers = Sequence[tuple[str, str]]
OWN, BIG = "gpt-4o-mini", "big-model"


class House:
    """Two upstreams behind one engine: ``own`` with the model that is asked for, ``other`` with the fallback."""

    def __init__(
        self,
        *steps: str,
        own: int = 5_000,
        other: int = 60_000,
        told: int | None = None,
        lower: Any = "last",
        **rules: Any,
    ) -> None:
        self.sent: list[tuple[str, bytes, bool]] = []
        self.windows = {"own": own, "other": other}
        self.rules = rules
        self.broken: Callable[[str], Reply | None] = lambda upstream: None
        self.catalogue = Catalogue(
            [ModelRule(BIG, "other", other), ModelRule("*", "own", told or own, steps=steps or (COMPRESS,))], {}, "own"
        )
        self.replica = Replica(
            DictRecords(), replace(POLICY, lower_output=lower), upstream=self, catalogue=self.catalogue
        )

    async def send(self, target: str, method: str, path_qs: str, headers: Headers, body: Any, added: Any = ()) -> Reply:
        keyless = not any(name == "authorization" for name, _ in headers)
        self.sent.append((target, body, keyless))
        if instead := self.broken(target):
            return instead
        rules = Rules(window=self.windows[target], **self.rules)
        verdict = judge(json.loads(body), rules)
        assert verdict.kind != "invalid", verdict.message
        if verdict.kind == "ok":
            return ScriptedReply(200, [b'{"ok":true}'])
        status, error = overflow_error(verdict, rules)
        return ScriptedReply(status, [error])

    async def upgrade(self, *call: object) -> Upgradable:
        raise AssertionError("a tunnel was wanted")

    async def ask(self, body: bytes, **options: Any) -> Exchanged:
        return await self.exchange(Request("chat", body, TENANT, "r", Options(**options)))

    async def exchange(self, request: Request) -> Exchanged:
        origin = Origin("/v1/chat/completions", (("authorization", "Bearer own"),))
        return Exchanged(await self.replica.engine.exchange(replace(request, origin=origin)))

    @property
    def route(self) -> list[str]:
        """Where the calls went."""
        return [upstream for upstream, _, _ in self.sent]


def clipping() -> bytes:
    """A conversation whose newest message alone is too much for the small window: it would have to be clipped."""
    return chat_body([*agent_session(4, 200), {"role": "user", "content": prose(1, 6_000)}])


async def test_a_fallback_takes_what_would_have_to_be_clipped() -> None:
    """With compress first, folding is done here, and what needs a clip goes to the bigger window unchanged."""
    house = House(COMPRESS, BIG)
    folded = await house.ask(agent_body(8_000))
    assert (house.route, folded.report.fallback, folded.report.outcome) == (["own"], "", "compacted")
    body = clipping()
    answer = await house.ask(body)
    assert house.route == ["own", "other"]
    _, sent, keyless = house.sent[-1]
    assert sent == body.replace(OWN.encode(), BIG.encode(), 1)
    assert keyless
    report = answer.report
    assert (report.model, report.upstream, report.fallback) == (OWN, "other", BIG)
    assert (report.outcome, report.reason, report.window, report.retries) == ("degraded", "fallback", 60_000, 0)
    assert await read_whole(answer) == b'{"ok":true}'


async def test_the_bigger_window_first() -> None:
    """With the fallback first nothing is compressed here while the fallback takes it whole."""
    house = House(BIG, COMPRESS)
    small = chat_body(agent_session(6, 200))
    await house.ask(small)
    await house.ask(agent_body(8_000))
    assert house.route == ["own", "other"]
    assert house.sent[0][1] is small
    assert message_slices(house.sent[1][1]) == message_slices(agent_body(8_000))


async def test_where_all_would_lose_something_the_first_one_does() -> None:
    """Steps that would drop or clip are taken in their order once every step would."""
    for steps, where in (((COMPRESS, BIG), "own"), ((BIG, COMPRESS), "other"), ((BIG,), "other")):
        house = House(*steps, other=5_500)
        answer = await house.ask(clipping())
        assert house.route == [where]
        assert "clip" in answer.report.stages
        assert await read_whole(answer) == b'{"ok":true}'


async def test_what_nobody_takes_is_refused() -> None:
    """System text above both windows is refused here, by the window that was asked for."""
    house = House(COMPRESS, BIG, other=8_000)
    answer = await house.ask(
        chat_body([{"role": "system", "content": prose(1, 9_000)}, {"role": "user", "content": "hi"}])
    )
    assert house.sent == []
    assert answer.error is not None
    assert answer.report.window == 5_000


async def test_a_fallback_makes_an_overflow_good() -> None:
    """After the last retry the fallback is asked; its answer is the client's."""
    house = House(COMPRESS, BIG, told=16_000, own=100)
    answer = await house.ask(agent_body(6_000))
    assert house.route[-1] == "other"
    assert set(house.route[:-1]) == {"own"}
    assert len(house.route) <= 4
    assert await read_whole(answer) == b'{"ok":true}'
    assert answer.report.fallback == BIG
    assert answer.report.overflows == answer.report.retries == len(house.route) - 1


async def test_a_fallback_that_fails_leaves_the_first_error() -> None:
    """A rescue that is down, or says no in its own way, is not news: the client gets the first overflow, verbatim."""
    for broken in (ScriptedReply(401, [b'{"error":"no key"}']), None):
        house = House(COMPRESS, BIG, told=16_000, own=100)

        def fails(upstream: str, reply: ScriptedReply | None = broken) -> Reply | None:
            if upstream == "other" and reply is None:
                raise UpstreamUnreachable("other", "refused")
            return reply if upstream == "other" else None

        house.broken = fails
        answer = await house.ask(agent_body(6_000))
        assert house.route[-1] == "other"
        assert answer.reply is not None
        assert answer.reply.status == 400
        assert b"maximum context length is 100" in await read_whole(answer)
        assert (answer.report.outcome, answer.report.reason, answer.report.fallback) == ("degraded", "overflow", "")


async def test_elsewhere_first_holds_for_overflows_too() -> None:
    """With the fallback first, an overflow nobody foresaw goes there at once; where that fails, the view shrinks."""
    house = House(BIG, COMPRESS, told=16_000, own=5_000)
    await house.ask(agent_body(6_000))
    assert house.route == ["own", "other"]
    house = House(BIG, COMPRESS, told=16_000, own=5_000)
    house.broken = lambda upstream: ScriptedReply(500, [b"{}"]) if upstream == "other" else None
    answer = await house.ask(agent_body(6_000))
    assert house.route == ["own", "other", "own"]
    assert await read_whole(answer) == b'{"ok":true}'


async def test_a_fallback_by_policy_speaks_for_itself() -> None:
    """Where the fallback was the first to be asked, its error is the answer."""
    house = House(COMPRESS, BIG)
    house.broken = lambda upstream: ScriptedReply(401, [b"denied"])
    answer = await house.ask(clipping())
    assert await read_whole(answer) == b"denied"
    assert house.route == ["other"]


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_other_modes_go_nowhere_else(mode: str) -> None:
    """Who asked for no change is not sent to another model."""
    house = House(COMPRESS, BIG)
    await house.ask(clipping(), mode=mode)
    assert house.route == ["own"]


async def test_what_belongs_to_one_server_stays_there() -> None:
    """A model named by the path, and a history that only its server has, are answered by no other."""
    house = House(BIG, COMPRESS)
    named = Request("chat", clipping(), TENANT, "r", Options(), OWN)
    answer = await house.exchange(named)
    assert (house.route, answer.report.fallback) == (["own"], "")
    body = {"model": OWN, "previous_response_id": "resp_1", "input": [{"role": "user", "content": prose(1, 6_000)}]}
    plan = await house.replica.engine.first_plan(Request("responses", json.dumps(body).encode(), TENANT, "r"))
    assert plan.view.request.fallback_model == ""


async def test_sealed_reasoning_stays_at_home() -> None:
    """Signed reasoning goes to the model that wrote it, never to a fallback."""
    messages = agent_session(4, 200)
    messages[2] = {**messages[2], "reasoning_details": [{"type": "reasoning.encrypted", "data": "SECRET"}]}
    house = House(COMPRESS, BIG)
    await house.ask(chat_body([*messages, {"role": "user", "content": "hi"}]))
    await house.ask(chat_body([*messages, {"role": "user", "content": prose(1, 6_000)}]))
    assert house.route == ["own", "other"]
    assert [b"SECRET" in body for _, body, _ in house.sent] == [True, False]


async def test_a_body_without_a_model_gets_one() -> None:
    """What goes to a fallback names it, whether or not the client named anything."""
    house = House(COMPRESS, BIG)
    body = json.dumps({"messages": [{"role": "user", "content": prose(1, 6_000)}]}).encode()
    await house.ask(body)
    assert json.loads(house.sent[0][1]) == {"model": BIG, **json.loads(body)}


async def test_payloads_shrink_and_teach_no_window() -> None:
    """Too many bytes make the view smaller; no window is made up from it."""
    house = House(own=20_000)
    error = b'{"error":{"type":"request_too_large","message":"Request exceeds the maximum size"}}'
    replies = [ScriptedReply(413, [error])]
    house.broken = lambda upstream: replies.pop() if replies else None
    answer = await house.ask(agent_body(6_000))
    assert await read_whole(answer) == b'{"ok":true}'
    first, second = (request_tokens(json.loads(body)) for _, body, _ in house.sent)
    assert second <= 0.75 * first
    assert house.replica.learned.learned() == []


async def test_input_and_output_together_lower_the_output() -> None:
    """The output figure gives way before any message does, if what is left is of use and the setting allows."""
    body = chat_body(agent_session(11, 250), max_tokens=2_500)
    split = {"wording": "vllm", "own": 5_000, "told": 16_000}
    for lower, kept in (("last", True), ("never", False)):
        house = House(lower=lower, **split)
        answer = await house.ask(body)
        assert await read_whole(answer) == b'{"ok":true}'
        first, last = (json.loads(sent) for _, sent, _ in (house.sent[0], house.sent[-1]))
        assert (last["messages"] == first["messages"]) is kept, lower
        assert (last["max_tokens"] < 2_500) is kept
        assert last["max_tokens"] >= 1_000


CAP = (
    b'{"error":{"message":"max_tokens is too large: 9000. This model supports at most 4096 completion tokens, '
    b'whereas you provided 9000.","type":"invalid_request_error","param":"max_tokens","code":"invalid_value"}}'
)


@pytest.mark.parametrize(("lower", "calls"), [("last", 1), ("never", 1), ("first", 2)])
async def test_a_cap_of_the_output(lower: str, calls: int) -> None:
    """An answer longer than the model gives is the client's to correct, unless figures may be lowered first."""
    house = House(COMPRESS, BIG, own=40_000, lower=lower)
    house.broken = lambda upstream: ScriptedReply(400, [CAP]) if len(house.sent) == 1 else None
    body = chat_body(agent_session(6, 200), max_tokens=9_000)
    answer = await house.ask(body)
    assert house.route == ["own"] * calls
    if calls == 1:
        assert await read_whole(answer) == CAP
        assert house.sent[0][1] is body
    else:
        assert await read_whole(answer) == b'{"ok":true}'
        assert house.sent[1][1] == body.replace(b"9000", b"4096")
        assert "output" in answer.report.stages
    assert house.replica.learned.learned() == []


@pytest.mark.parametrize("status", [400, 200])
async def test_a_rate_limit_is_passed_on(status: int) -> None:
    """Tokens per minute are no window: nothing is sent again, nothing learned, and no other model asked."""
    error = (
        b'{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 3000, Requested 6012.",'
        b'"type":"tokens","code":"rate_limit_exceeded"}}'
    )
    house = House(COMPRESS, BIG, own=40_000)
    house.broken = lambda upstream: ScriptedReply(429 if status == 400 else 200, [error])
    answer = await house.ask(agent_body(6_000))
    assert await read_whole(answer) == error
    assert house.route == ["own"]
    assert house.replica.learned.learned() == []


async def test_repeated_refusals_without_a_figure_teach() -> None:
    """A provider that never says its limit is believed to have less than it refused: later requests fit at once."""
    bare = b'{"error":{"message":"input is too long","code":"context_length_exceeded"}}'

    class Bare(House):
        """Says only that it was too long."""

        async def send(self, *call: Any) -> Reply:
            reply = await super().send(*call)
            return ScriptedReply(400, [bare]) if reply.status == 400 else reply

    house = Bare(told=16_000, own=5_000)
    retries = []
    for number in range(4):
        request = Request("chat", chat_body(agent_session(18 + number, 300)), TENANT, "r", Options())
        answer = await house.exchange(request)
        assert answer.reply is not None
        assert answer.reply.status == 200
        retries.append(answer.report.retries)
    assert retries[0] >= 1
    assert retries[-1] == 0
    assert [row["how"] for row in house.replica.learned.learned()] in ([], ["worked out"])


async def test_smaller_is_less_and_never_the_same() -> None:
    """Fewer tokens or less output, and never the same bytes."""
    view = (await Replica().plan(chat_body(agent_session(3, 100)), 8192)).view
    tokens, lower = view.tokens, replace(view.edits, lowered_output=5)
    assert is_smaller(replace(view, body=b"b", extension=-1), view, tokens)
    assert not is_smaller(replace(view, extension=-1), view, tokens)
    assert not is_smaller(replace(view, body=b"b"), view, tokens)
    assert is_smaller(replace(view, body=b"b", edits=lower), view, tokens)
    assert not is_smaller(replace(view, body=b"b", edits=lower), replace(view, edits=lower), tokens)

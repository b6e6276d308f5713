"""Plans: what a request's headers, its mode and its window make of it before anything is fitted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.overflow.kinds import Overflow
from proxy.core.request import Mode, Options, Request
from proxy.wiring import windows_status
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import TENANT, DictRecords, Message, Replica, chat_body, message_slices
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, prose
from tests.support.scripted_upstream import (
    WINDOW,
    EngineFixture,
    ScriptedReply,
    accepting_upstream,
    agent_body,
    agent_request,
    read_whole,
    strict_upstream,
    upstream_replying,
)


async def test_what_is_learned_stays_with_its_tenant() -> None:
    """One caller's overflow changes nothing for another."""
    room, upstream = EngineFixture(window=None), strict_upstream(window=4000)
    await room.ask(agent_body(6000), upstream)
    plan = await room.plan(Request("chat", agent_body(6000), TENANT, "r2", Options()))
    assert room.engine.report(plan).window == 4000
    plan = await room.plan(Request("chat", agent_body(6000), b"o" * 32, "r2", Options()))
    assert room.engine.report(plan).reason == "unknown-window"


@pytest.mark.parametrize("mode", ["off", "observe"])
@pytest.mark.parametrize("wanted", ["configured", "by the request"])
async def test_other_modes_change_nothing(mode: Mode, wanted: str) -> None:
    """Off and observe send the client's own bytes and hand back the provider's own error, once."""
    room = EngineFixture(mode=mode if wanted == "configured" else "on")
    upstream = strict_upstream(window=4000)
    body = agent_body(12_000)
    options: dict[str, Any] = {} if wanted == "configured" else {"mode": mode}
    answer = await room.ask(body, upstream, **options)
    assert len(upstream.bodies) == 1
    assert upstream.bodies[0] is body
    assert answer.reply is not None
    assert answer.reply.status == 400
    assert answer.report.observed is (mode == "observe")
    if mode == "observe":
        assert answer.report.tokens_after is not None
        assert answer.report.tokens_after < request_tokens(json.loads(body))


async def test_observing_leaves_no_trace_in_what_is_sent_later() -> None:
    """A conversation that was only observed, even asked to compact, is compacted later as if nobody had looked."""
    room, messages = EngineFixture(), agent_session(34, 300)
    upstream, other = strict_upstream(window=10**9), strict_upstream(window=WINDOW)
    events = []
    for end in range(24, len(messages) + 1, 2):
        answer = await room.ask(chat_body(messages[:end]), upstream, mode="observe", compact_now=end == 24)
        events.append(answer.report.event)
        assert answer.report.reason == "would_compact"
    assert 1 <= sum(events) <= 3
    await room.ask(chat_body(messages), other)
    assert other.bodies[0] == (await EngineFixture().plan(Request("chat", chat_body(messages), TENANT, "r"))).view.body
    assert all(json.loads(body)["messages"] == messages[: 24 + 2 * at] for at, body in enumerate(upstream.bodies))


async def test_observing_says_what_would_be_refused() -> None:
    """What could not be brought inside the window passes, and the report says that it would not."""
    upstream = strict_upstream(window=10**9)
    body = chat_body([{"role": "system", "content": prose(1, 9000)}, {"role": "user", "content": "hi"}])
    answer = await EngineFixture(mode="observe").ask(body, upstream)
    assert upstream.bodies == [body]
    assert answer.report.reason == "would_refuse"
    assert answer.error is None


@pytest.mark.parametrize(("wanted", "held"), [(4000, 4000), (50_000, WINDOW)])
async def test_the_window_header_only_lowers(wanted: int, held: int) -> None:
    """A caller may ask for less than the model's window, never for more."""
    upstream = strict_upstream(window=held)
    answer = await EngineFixture().ask(agent_body(12_000), upstream, window=wanted)
    assert answer.report.window == held
    assert answer.report.source == ("request" if wanted < WINDOW else "configured")
    assert answer.report.retries == 0
    assert await read_whole(answer) == b'{"ok":true}'


async def test_compact_now_compacts_what_would_fit() -> None:
    """With the header a conversation above the low mark is compacted under the high one, once, and stays so."""
    room, upstream = EngineFixture(), strict_upstream(window=WINDOW)
    messages = agent_session(14, 300)
    plain = await EngineFixture().ask(chat_body(messages), upstream)
    assert plain.report.outcome == "verbatim"
    answer = await room.ask(chat_body(messages), upstream, compact_now=True)
    assert answer.report.outcome == "compacted"
    assert answer.report.event
    later = await room.ask(chat_body([*messages, *agent_round(99, 20)]), upstream)
    assert message_slices(upstream.bodies[-1])[: len(message_slices(upstream.bodies[-2]))] == message_slices(
        upstream.bodies[-2]
    )
    assert not later.report.event


def quiet_session(share: float) -> list[Message]:
    """The longest session of small rounds that takes at most *share* of the window."""
    rounds = next(n for n in range(1, 200) if request_tokens({"messages": agent_session(n, 40)}) > share * WINDOW)
    return agent_session(rounds - 1, 40)


@pytest.mark.parametrize(("wanted", "least", "most"), [(None, 0.12, 0.21), (0.12, 0.05, 0.13)])
async def test_compact_now_acts_below_the_low_mark(wanted: float | None, least: float, most: float) -> None:
    """Asked for, a conversation below the low mark goes down to half of it, or to the share named, and stays so."""
    room, upstream = EngineFixture(), strict_upstream(window=WINDOW)
    messages = quiet_session(0.38)
    answer = await room.ask(chat_body(messages), upstream, compact_now=True, compact_to=wanted)
    sent = request_tokens(json.loads(upstream.bodies[0]))
    assert (answer.report.outcome, answer.report.reason) == ("compacted", "")
    assert answer.report.stages == ("fold",)
    assert least * WINDOW <= sent <= most * WINDOW
    later = await room.ask(chat_body([*messages, *agent_round(99, 20)]), upstream)
    assert message_slices(upstream.bodies[-1])[: len(message_slices(upstream.bodies[0]))] == message_slices(
        upstream.bodies[0]
    )
    assert not later.report.event


@pytest.mark.parametrize("share", [0.05, 0.19])
async def test_compact_now_says_that_there_is_nothing_to_fold(share: float) -> None:
    """A conversation that a compaction would hardly make smaller goes as it came, and the outcome says why."""
    upstream = strict_upstream(window=WINDOW)
    body = chat_body(quiet_session(share))
    answer = await EngineFixture().ask(body, upstream, compact_now=True)
    assert upstream.bodies == [body]
    assert (answer.report.outcome, answer.report.reason) == ("verbatim", "nothing_to_fold")
    assert not answer.report.event


async def test_compact_now_cuts_nothing_short_that_fits() -> None:
    """One huge message or result under the high mark cannot be folded, and is not clipped either."""
    task = [{"role": "user", "content": prose(1, 3_600)}]
    fresh = [*agent_session(1, 10), *agent_round(5, 3_600)]
    for messages in (task, fresh):
        upstream, body = strict_upstream(window=WINDOW), chat_body(messages)
        assert 0.4 * WINDOW < request_tokens(json.loads(body)) < 0.8 * WINDOW
        answer = await EngineFixture().ask(body, upstream, compact_now=True)
        assert not {"clip", "truncate", "drop"}.intersection(answer.report.stages)
        assert answer.report.outcome == "compacted" or upstream.bodies == [body]


async def test_a_refusal_is_never_sent() -> None:
    """What cannot be brought inside the window is answered here, with nothing paid for."""
    upstream = strict_upstream(window=WINDOW)
    body = chat_body([{"role": "system", "content": prose(1, 9000)}, {"role": "user", "content": "hi"}])
    answer = await EngineFixture().ask(body, upstream)
    assert upstream.bodies == []
    assert answer.error is not None
    assert answer.error.status == 400
    assert (answer.report.outcome, answer.report.reason) == ("refused", "context_length_exceeded")


async def test_a_small_body_is_bounded_and_not_counted() -> None:
    """A body whose bytes are under the low mark is sent as it is, with bounds for figures."""
    upstream = strict_upstream(window=WINDOW)
    body = chat_body([{"role": "user", "content": "hi"}], tools=AGENT_TOOLS)
    answer = await EngineFixture().ask(body, upstream)
    assert upstream.bodies[0] is body
    assert answer.report.bounded
    assert answer.report.tokens_after is not None
    assert answer.report.tokens_after >= request_tokens(json.loads(body))
    assert upstream.names == ["stub"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}],
        [{"type": "file", "file": {"file_id": "f-1"}}],
        [{"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}],
    ],
)
async def test_media_is_never_bounded_by_its_bytes(content: list[Message]) -> None:
    """A part that weighs more than its bytes say is counted."""
    answer = await EngineFixture().ask(
        chat_body([{"role": "user", "content": content}]), strict_upstream(window=WINDOW)
    )
    assert not answer.report.bounded


async def test_the_client_names_its_conversation() -> None:
    """The own header wins over the client's session, that over the body's, that over the chain; views do not follow."""
    room, upstream = EngineFixture(), accepting_upstream()
    body = agent_request("messages", 40, metadata={"user_id": '{"session_id":"s-9"}'})

    async def named(agent_body: str = "", own: str = "") -> str:
        request = Request("messages", body, TENANT, "r1", Options(conversation=own), session=agent_body, epoch=2)
        answer = await room.exchange(request, upstream)
        assert answer.report.epoch == 2
        return answer.report.conversation

    names = [await named("s-1", "mine"), await named("s-1"), await named(), await named("s-9"), await named("s-1")]
    assert names[2] == names[3]
    assert names[1] == names[4]
    assert len(set(names)) == 3
    assert len(set(upstream.bodies[1:])) == 1


async def test_a_learned_window_is_said_to_be_learned() -> None:
    """Once an overflow stated the window of a route, reports and what people are shown name that as its source."""
    room, upstream = EngineFixture(window=None), strict_upstream(window=4000)
    first = await room.ask(agent_body(6200), upstream, project="apollo", task_size="small")
    assert (first.report.window, first.report.source) == (4000, "learned")
    assert (first.report.project, first.report.task_size) == ("apollo", "small")
    shown = windows_status(room.catalogue, room.engine.learned, 0.0)
    assert [(each["route"], each["context_window"]) for each in shown["learned"]] == [("stub,gpt-4o-mini", 4000)]
    assert [(each["model"], each["source"]) for each in shown["models"]] == [("gpt-4o-mini", "unknown")]


@pytest.mark.parametrize(("stated", "refused"), [(None, False), (4000, True)])
async def test_a_window_that_was_worked_out_refuses_nothing(stated: int | None, refused: bool) -> None:
    """What cannot shrink is refused by a window that the provider stated; by one that was guessed it is still sent."""
    room, upstream = EngineFixture(window=None), upstream_replying(ScriptedReply(200, [b'{"ok":true}']))
    route = (await room.plan(Request("chat", agent_body(100), TENANT, "r0"))).view.known.route
    for _ in range(2):
        room.replica.learned.learn_refusal(route, TENANT, Overflow("input", limit=stated), 4400)
    body = chat_body([{"role": "system", "content": prose(1, 6000)}, {"role": "user", "content": "Hello"}])
    answer = await room.ask(body, upstream)
    assert (answer.error is not None, len(upstream.bodies)) == (refused, 0 if refused else 1)


async def test_a_wish_is_granted_below_the_low_mark() -> None:
    """What was wished for over the API folds the next request under the low mark, once."""
    replica, body = Replica(), chat_body(quiet_session(0.38))
    first = await replica.plan(body, WINDOW)
    assert first.report.outcome == "verbatim"
    assert first.view is not None
    assert first.view.layout is not None, "it is known from half of the low mark on"
    assert isinstance(replica.book, DictRecords)
    replica.book.requested.add((TENANT, first.view.measured.root_hash))
    wished = await replica.plan(body, WINDOW)
    assert wished.report.event
    assert (wished.tokens or 0) <= 0.24 * WINDOW
    again = await replica.plan(body, WINDOW)
    assert again.body == wished.body
    assert not again.report.event

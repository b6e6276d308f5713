"""Recall over real HTTP: one answer for the client, whatever it took to get it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from proxy.features.deferred_tools.search import NAME as TOOLS_NAME
from proxy.features.recall.tool import NAME
from proxy.server_tools.merger import NOT_RUN
from proxy.server_tools.session import LAST, MOST_CALLS, TOO_MANY
from tests.features.deferred_tools.test_feature import LOOK as FIND
from tests.features.deferred_tools.test_feature import USE, WANTED, many_tools
from tests.stub import Answer, Call, Rules, Seen, Stub, chat, messages, responses
from tests.support.answer_parser import parse_answer
from tests.support.api_formats import tools_of
from tests.support.recall_fixtures import LOOK, READ, SAID, WINDOW, StartRecall, read_answer, request
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, log
from tests.support.server_tool_fixtures import KEYS, WORDING, both, every, model_answering

API_FORMATS: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses}


def shown(server: Stub) -> str:
    """The results of the tool in the newest request."""
    return json.dumps(server.seen[-1].messages[-1], ensure_ascii=False)


@every
@both
@pytest.mark.slow
async def test_what_left_the_view_is_found_and_answered_from(start_recall: StartRecall, api: str, stream: bool) -> None:
    """The tool shows the original words, the model goes on from them, and the client gets one answer."""
    server, proxy = await start_recall(
        api, Answer("Let me look.", (LOOK,), reasoning="Hm."), Answer("It is kingfisher.")
    )
    answer = await proxy.ask(api, request(api, stream))
    answered = read_answer(api, answer, stream)
    assert answered.text.replace("\n", "") == "Let me look.It is kingfisher."
    assert answered.calls == []
    first, second = server.seen
    assert (first.verdict, second.verdict) == ("ok", "ok"), second.why
    assert SAID not in first.body.decode()
    assert SAID in shown(server)
    assert second.slices[: len(first.slices)] == first.slices, "the first prompt is the second's prefix"
    assert {**first.parsed, "messages": 0, "input": 0} == {**second.parsed, "messages": 0, "input": 0}
    name = "completion_tokens" if api == "chat" else "output_tokens"
    usage = API_FORMATS[api].usage(second.tokens, answered.usage[name], 0)
    total = sum(value for key, value in usage.items() if key in ("prompt_tokens", "input_tokens"))
    mine = answered.usage.get("prompt_tokens", answered.usage.get("input_tokens", 0))
    assert mine + answered.usage.get("cache_read_input_tokens", 0) == total
    (report,) = proxy.reports
    assert report.recalls == 1
    spent = first.tokens + second.tokens
    assert spent < report.recall_tokens < spent + 100
    assert answer.headers.get("x-ullage-recall-tokens") == (None if stream else str(report.recall_tokens))
    assert "recall" in answer.headers["x-ullage-stages"]


@every
@both
@pytest.mark.slow
async def test_calls_beside_a_recall_are_made_again(start_recall: StartRecall, api: str, stream: bool) -> None:
    """The client's tools are called once, by the generation that has read the results."""
    again = Call("run", '{"command": "ls"}')
    server, proxy = await start_recall(api, Answer("Both.", (READ, LOOK)), Answer("", (again,)))
    answered = read_answer(api, await proxy.ask(api, request(api, stream)), stream)
    assert [(name, json.loads(arguments)) for name, arguments in answered.calls] == [("run", {"command": "ls"})]
    assert server.seen[1].verdict == "ok"
    assert server.seen[1].body.decode().count(NOT_RUN) == 1


@every
@pytest.mark.slow
async def test_of_many_calls_at_once_some_are_answered(start_recall: StartRecall, api: str) -> None:
    """Each is a walk over the history, so the others get the answer that they were too many; the generation goes on."""
    server, proxy = await start_recall(api, Answer("All.", (LOOK,) * (MOST_CALLS + 3)), Answer("It is kingfisher."))
    answered = read_answer(api, await proxy.ask(api, request(api, True)), True)
    assert answered.text.endswith("It is kingfisher.")
    assert server.seen[1].verdict == "ok"
    assert server.seen[1].body.decode().count(TOO_MANY) == 3


@every
@both
@pytest.mark.slow
async def test_three_generations_and_no_more(start_recall: StartRecall, api: str, stream: bool) -> None:
    """The second result names itself the last; later recalls are removed, other calls stay."""
    one, two = Answer("One.", (LOOK, LOOK)), Answer("Two.", (LOOK,))
    server, proxy = await start_recall(api, one, two, Answer("Three.", (LOOK, READ)))
    answer = await proxy.ask(api, request(api, stream))
    answered = read_answer(api, answer, stream)
    assert answered.text.split() == ["One.", "Two.", "Three."] or answered.text == "One.Two.Three."
    assert [name for name, _ in answered.calls] == ["read_file"]
    assert [seen.verdict for seen in server.seen] == ["ok"] * 3
    assert LAST not in server.seen[1].body.decode()
    assert LAST in server.seen[2].body.decode()
    assert proxy.reports[0].recalls == 2
    assert proxy.reports[0].recall_tokens > sum(seen.tokens for seen in server.seen)
    assert server.seen[2].slices[: len(server.seen[1].slices)] == server.seen[1].slices


@every
async def test_the_tool_is_not_there_where_it_may_not_be(start_recall: StartRecall, api: str) -> None:
    """Switched off, with a tool of the same name or with a choice that is made, a request never hears of it."""
    server, proxy = await start_recall(api, Answer("Yes."))
    own = request(api, False)
    tool = own["tools"][0].get("function", own["tools"][0])
    tool["name"] = NAME
    await proxy.ask(api, own)
    await proxy.ask(api, request(api, False, tool_choice={"type": "none"} if api == "messages" else "none"))
    assert server.seen[0].tools.count(NAME) == 1
    assert server.seen[1].tools.count(NAME) == 0
    assert [NAME in json.dumps(seen.messages) for seen in server.seen] == [False, False]
    assert all("recall" not in report.stages and "fold" in report.stages for report in proxy.reports)


@every
async def test_a_clients_own_tool_of_the_name_is_called_as_ever(start_recall: StartRecall, api: str) -> None:
    """A call of a client's tool that happens to have the name reaches the client."""
    _, proxy = await start_recall(api, Answer("", (LOOK,)))
    own = request(api, False)
    own["tools"][0].get("function", own["tools"][0])["name"] = NAME
    answer = await proxy.ask(api, own)
    assert parse_answer(api, answer.content, stream=False).calls[0][0] == NAME


@every
@both
@pytest.mark.slow
async def test_switched_off_nothing_is_added(start_recall: StartRecall, api: str, stream: bool) -> None:
    """Without the setting, a compacted request has the client's tools and no others."""
    server, proxy = await start_recall(api, Answer("Yes."), enabled=False)
    read_answer(api, await proxy.ask(api, request(api, stream)), stream)
    assert NAME.encode() not in server.seen[0].body


@every
@both
@pytest.mark.slow
async def test_an_overflow_of_a_later_generation_is_recovered(
    start_recall: StartRecall, api: str, stream: bool
) -> None:
    """A provider that finds the second prompt too long gets a smaller one; the client sees only the answer."""
    server, proxy = await start_recall(api, Answer())
    answers = iter([Answer("Let me look.", (LOOK,)), Answer("It is kingfisher.")])

    def script(seen: Seen) -> Answer:
        server.rules = Rules(window=seen.tokens - 40, wording=WORDING[api])
        return next(answers)

    server.script = script
    answer = await proxy.ask(api, request(api, stream))
    answered = read_answer(api, answer, stream)
    assert "It is kingfisher." in answered.text
    verdicts = [seen.verdict for seen in server.seen]
    assert verdicts[:2] == ["ok", "overflow"]
    assert verdicts[-1] == "ok"
    assert server.seen[-1].tokens < server.seen[1].tokens
    assert proxy.reports[0].retries == len(verdicts) - 2 > 0
    assert proxy.reports[0].overflows == len(verdicts) - 2


@every
@pytest.mark.slow
async def test_every_prompt_fits_in_every_generation(start_recall: StartRecall, api: str) -> None:
    """Whatever the model asks for, nothing that goes upstream is larger than the window allows."""
    calls = (
        Call(NAME, json.dumps({"limit": 10})),
        Call(NAME, json.dumps({"item": 6, "limit": 10})),
        Call(NAME, json.dumps({"query": "took", "limit": 10})),
    )
    server, proxy = await start_recall(api, Answer("", calls), Answer("", calls), Answer("Done."))
    for maximum in (64, 1500, 4000):
        name = "max_output_tokens" if api == "responses" else "max_tokens"
        server.script = model_answering(Answer("", calls), Answer("", calls), Answer("Done."))
        read_answer(api, await proxy.ask(api, request(api, False, **{name: maximum})), False)
    assert len(server.seen) == 9
    assert all(seen.verdict == "ok" for seen in server.seen)


@every
@both
@pytest.mark.slow
async def test_a_request_that_is_only_observed_is_left_alone(start_recall: StartRecall, api: str, stream: bool) -> None:
    """If nothing may be changed there is no tool, and a call of that name goes to the client."""
    server, proxy = await start_recall(api, Answer("I read on.", (READ,)))
    server.rules = Rules(window=4 * WINDOW, wording=WORDING[api])
    answer = await proxy.ask(api, request(api, stream), **{"x-ullage-mode": "observe"})
    read_answer(api, answer, stream)
    assert NAME.encode() not in server.seen[0].body
    assert answer.headers["x-ullage-outcome"] == "verbatim;would_compact"


async def test_the_next_turn_knows_nothing_of_it(start_recall: StartRecall) -> None:
    """The client does not hold the exchange: its next request is compacted as if there had been none."""
    server, proxy = await start_recall("messages", Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    body = request("messages", False)
    answered = read_answer("messages", await proxy.ask("messages", body), False)
    server.script = model_answering(Answer("Fine."))
    later = {**body, "messages": [*body["messages"], *answered.items, {"role": "user", "content": "Thanks. And now?"}]}
    read_answer("messages", await proxy.ask("messages", later), False)
    before = server.seen[0].slices
    assert server.seen[-1].verdict == "ok"
    assert server.seen[-1].slices[: len(before)] == before
    assert all(KEYS[name] == server.seen[-1].header(name) for name in KEYS)


@every
@pytest.mark.slow
async def test_a_long_session_with_recalls_stays_valid_and_fits(start_recall: StartRecall, api: str) -> None:
    """An agent that looks things up again and again, alone and beside its tools, sends nothing too big or wrong."""
    from tests.support.sdk_clients import SDK_CLIENTS  # not above: three SDKs take two seconds

    server, proxy = await start_recall(api, Answer())
    pick = random.Random(0)
    looks = [
        {"query": "took merge"},
        {"query": "src/gateway"},
        {"item": 9, "offset": 200},
        {},
        {"limit": 10},
        {"item": -1},
    ]

    def script(seen: Seen) -> Answer:
        calls = [Call("read_file", json.dumps({"path": f"src/{len(server.seen)}.py"}))]
        if NAME in seen.tools and pick.random() < 0.4:
            look = Call(NAME, json.dumps(pick.choice(looks)))
            calls = [look] if pick.random() < 0.3 else pick.choice([[look, *calls], [*calls, look]])
        return Answer(pick.choice(["", "I read on."]), tuple(calls), reasoning=pick.choice(["", "Hm."]))

    server.script = script
    async with SDK_CLIENTS[api](proxy.url) as sdk:
        items, more = sdk.opening(agent_session(0, 0))
        members = {"model": "gpt-4o-mini", **sdk.options({"tools": AGENT_TOOLS, "max_tokens": 300}), **more}
        for at in range(40):
            answer = await sdk.ask(members, items, stream=at % 2 == 1)
            assert NAME not in json.dumps(answer)
            calls = sdk.calls(answer)
            texts = [log(at, pick.randrange(50, 700)) for _ in calls]
            items += answer
            items += sdk.results(calls, texts) if calls else [{"role": "user", "content": f"Go on with {at}."}]
    assert [(seen.verdict, seen.why) for seen in server.seen if seen.verdict != "ok"] == []
    assert sum(report.recalls for report in proxy.reports) > 8


@every
@both
async def test_two_server_tools_answer_in_one_generation(start_recall: StartRecall, api: str, stream: bool) -> None:
    """A compacted session with too many tools: the model reads what left its view, finds a tool, and calls that."""
    both_on = {"recall": {"enabled": True, "max_tokens": 600}, "deferred_tools": {"enabled": True, "max_tokens": 900}}
    server, proxy = await start_recall(api, Answer("", (LOOK, FIND)), Answer("", (USE,)), compression=both_on)
    body = request(api, stream)
    body["tools"] = [*body["tools"], *tools_of(many_tools(), api)]
    answered = read_answer(api, await proxy.ask(api, body), stream)
    assert [name for name, *_ in answered.calls] == [WANTED]
    assert [seen.verdict for seen in server.seen] == ["ok", "ok"], server.seen[-1].why
    assert {NAME, TOOLS_NAME} < {*server.seen[0].tools}
    assert WANTED not in server.seen[0].tools
    assert server.seen[1].tools == [*server.seen[0].tools, *server.seen[1].tools[len(server.seen[0].tools) :]]
    assert SAID in server.seen[1].body.decode()
    assert proxy.reports[0].recalls == 1
    assert proxy.faults == []

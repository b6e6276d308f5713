"""Recall over real HTTP: one answer for the client, whatever it took to get it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.core.recall.search import LAST
from proxy.core.recall.tool import NAME
from tests.conftest import StartStub
from tests.harness import until
from tests.recalls import APIS, KEYS, LOOK, PATHS, READ, SAID, WINDOW, Front, asked, front, recalling
from tests.streams import Heard, heard
from tests.stub import Answer, Call, Fault, Rules, Seen, Stub, chat, messages, responses
from tests.stub.faults import NO_FAULT, rate_limited

WIRES: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses}
WORDING = {"chat": "openai", "messages": "anthropic", "responses": "openai"}

House = Callable[..., Awaitable[tuple[Stub, Front]]]

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
every = pytest.mark.parametrize("api", APIS)


@pytest.fixture
async def house(stub: StartStub, tmp_path: Path) -> AsyncIterator[House]:
    """Starts an upstream whose model gives the answers, and a proxy in front of it."""
    opened: list[Any] = []

    async def start(api: str, *answers: Answer, **options: Any) -> tuple[Stub, Front]:
        server = await stub(window=WINDOW, wording=WORDING[api])
        server.script = recalling(*answers)
        opened.append(front(server, tmp_path, **options))
        return server, await opened[-1].__aenter__()

    yield start
    for each in opened:
        await each.__aexit__(None, None, None)


def request(api: str, stream: bool, **members: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"stream": True} if stream else {}
    more |= {"stream_options": {"include_usage": True}} if stream and api == "chat" else {}
    return asked(api, **more, **members)


def said(api: str, answer: httpx.Response, stream: bool) -> Heard:
    """The answer as the client has it: a valid one in which nothing tells of the tool."""
    assert answer.status_code == 200, answer.text
    assert NAME not in answer.text
    return heard(api, answer.content, stream=stream)


def shown(server: Stub) -> str:
    """What the tool showed in the newest request."""
    return json.dumps(server.seen[-1].messages[-1], ensure_ascii=False)


@every
@both
async def test_what_left_the_view_is_found_and_answered_from(house: House, api: str, stream: bool) -> None:
    """The tool shows the original words, the model goes on from them, and the client gets one answer."""
    server, door = await house(api, Answer("Let me look.", (LOOK,), reasoning="Hm."), Answer("It is kingfisher."))
    answer = await door.ask(api, request(api, stream))
    told = said(api, answer, stream)
    assert told.text.replace("\n", "") == "Let me look.It is kingfisher."
    assert told.calls == []
    first, second = server.seen
    assert (first.verdict, second.verdict) == ("ok", "ok"), second.why
    assert SAID not in first.body.decode()
    assert SAID in shown(server)
    assert second.slices[: len(first.slices)] == first.slices, "the first prompt is the second's prefix"
    assert {**first.parsed, "messages": 0, "input": 0} == {**second.parsed, "messages": 0, "input": 0}
    usage = WIRES[api].usage(second.tokens, told.usage["completion_tokens" if api == "chat" else "output_tokens"], 0)
    total = sum(value for key, value in usage.items() if key in ("prompt_tokens", "input_tokens"))
    mine = told.usage.get("prompt_tokens", told.usage.get("input_tokens", 0))
    assert mine + told.usage.get("cache_read_input_tokens", 0) == total
    (report,) = door.reports
    assert report.recalls == 1
    spent = first.tokens + second.tokens
    assert spent < report.recall_tokens < spent + 100
    assert answer.headers.get("x-ullage-recall-tokens") == (None if stream else str(report.recall_tokens))
    assert "recall" in answer.headers["x-ullage-stages"]


@every
@both
async def test_calls_beside_a_recall_are_made_again(house: House, api: str, stream: bool) -> None:
    """The client's tools are called once, by the generation that has read what it asked for."""
    again = Call("run", '{"command": "ls"}')
    server, door = await house(api, Answer("Both.", (READ, LOOK)), Answer("", (again,)))
    told = said(api, await door.ask(api, request(api, stream)), stream)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == [("run", {"command": "ls"})]
    assert "src/next.py" not in json.dumps(server.seen[1].messages[-2:])
    assert server.seen[1].verdict == "ok"


@every
@both
async def test_three_generations_and_no_more(house: House, api: str, stream: bool) -> None:
    """The second look is told to be the last; what is called all the same is taken out, other calls stay."""
    one, two = Answer("One.", (LOOK, LOOK)), Answer("Two.", (LOOK,))
    server, door = await house(api, one, two, Answer("Three.", (LOOK, READ)))
    answer = await door.ask(api, request(api, stream))
    told = said(api, answer, stream)
    assert told.text.split() == ["One.", "Two.", "Three."] or told.text == "One.Two.Three."
    assert [name for name, _ in told.calls] == ["read_file"]
    assert [seen.verdict for seen in server.seen] == ["ok"] * 3
    assert LAST not in server.seen[1].body.decode()
    assert LAST in server.seen[2].body.decode()
    assert door.reports[0].recalls == 2
    assert door.reports[0].recall_tokens > sum(seen.tokens for seen in server.seen)
    assert server.seen[2].slices[: len(server.seen[1].slices)] == server.seen[1].slices


@every
@both
async def test_an_answer_without_a_recall_is_the_upstreams_own(house: House, api: str, stream: bool) -> None:
    """Where the tool is offered and not called, every byte of the answer is the upstream's."""
    server, door = await house(api, Answer("I read on.", (READ,), reasoning="Hm."))
    answer = await door.ask(api, request(api, stream))
    async with Stub(server.rules) as other:
        other.script = server.script
        direct = await door.client.post(f"{other.url}{PATHS[api]}", content=server.seen[0].body)
    assert answer.content == direct.content
    assert NAME in server.seen[0].tools
    assert (door.reports[0].recalls, door.reports[0].recall_tokens) == (0, 0)
    assert "x-ullage-recall-tokens" not in answer.headers


@every
async def test_the_tool_is_not_there_where_it_may_not_be(house: House, api: str) -> None:
    """Switched off, with a tool of the same name or with a choice that is made, a request never hears of it."""
    server, door = await house(api, Answer("Yes."))
    own = request(api, False)
    tool = own["tools"][0].get("function", own["tools"][0])
    tool["name"] = NAME
    await door.ask(api, own)
    await door.ask(api, request(api, False, tool_choice={"type": "none"} if api == "messages" else "none"))
    assert server.seen[0].tools.count(NAME) == 1
    assert server.seen[1].tools.count(NAME) == 0
    assert [NAME in json.dumps(seen.messages) for seen in server.seen] == [False, False]
    assert all("recall" not in report.stages and "fold" in report.stages for report in door.reports)


@every
async def test_a_clients_own_tool_of_the_name_is_called_as_ever(house: House, api: str) -> None:
    """A call of a client's tool that happens to have the name reaches the client."""
    _, door = await house(api, Answer("", (LOOK,)))
    own = request(api, False)
    own["tools"][0].get("function", own["tools"][0])["name"] = NAME
    answer = await door.ask(api, own)
    assert heard(api, answer.content, stream=False).calls[0][0] == NAME


@every
@both
async def test_switched_off_nothing_is_added(house: House, api: str, stream: bool) -> None:
    """Without the setting, a compacted request has the client's tools and no others."""
    server, door = await house(api, Answer("Yes."), enabled=False)
    said(api, await door.ask(api, request(api, stream)), stream)
    assert NAME.encode() not in server.seen[0].body


@every
@both
async def test_an_error_of_a_later_generation_is_told(house: House, api: str, stream: bool) -> None:
    """A whole answer is the provider's error as it came; a stream that began ends with an error event."""
    server, door = await house(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(rate_limited("7"))
    body = request(api, stream)
    if not stream:
        answer = await door.ask(api, body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["message"] == "Rate limit reached for requests"
        return
    text = await broken(door, api, body)
    assert "Let me look." in text
    assert NAME not in text
    last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
    assert "Rate limit reached" in last
    assert ("rate_limit_error" in last) is (api == "messages")
    await until(lambda: len(door.reports) == 1)
    assert door.reports[0].reason == "recall_failed"


async def broken(door: Front, api: str, body: dict[str, Any]) -> str:
    """What comes of a stream that is broken off."""
    text = ""
    async with door.client.stream("POST", PATHS[api], json=body) as answer:
        try:
            async for piece in answer.aiter_text():
                text += piece
        except httpx.RemoteProtocolError:
            return text
    raise AssertionError("the stream came to a regular end")


@every
async def test_a_connection_that_breaks_later_ends_the_stream(house: House, api: str) -> None:
    """An upstream that goes away in the second generation is told as in the first."""
    server, door = await house(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(Fault(cut="mid_body", after=2))
    text = await broken(door, api, request(api, True))
    assert "upstream" in text.splitlines()[-2]
    assert NAME not in text


@every
@both
async def test_an_overflow_of_a_later_generation_is_recovered(house: House, api: str, stream: bool) -> None:
    """A provider that finds the second prompt too long gets a smaller one; the client sees only the answer."""
    server, door = await house(api, Answer())
    answers = iter([Answer("Let me look.", (LOOK,)), Answer("It is kingfisher.")])

    def script(seen: Seen) -> Answer:
        server.rules = Rules(window=seen.tokens - 40, wording=WORDING[api])
        return next(answers)

    server.script = script
    answer = await door.ask(api, request(api, stream))
    told = said(api, answer, stream)
    assert "It is kingfisher." in told.text
    verdicts = [seen.verdict for seen in server.seen]
    assert verdicts[:2] == ["ok", "overflow"]
    assert verdicts[-1] == "ok"
    assert server.seen[-1].tokens < server.seen[1].tokens
    assert door.reports[0].retries == len(verdicts) - 2 > 0
    assert door.reports[0].overflows == len(verdicts) - 2


@every
async def test_a_client_that_leaves_ends_what_is_under_way(house: House, api: str) -> None:
    """Whoever leaves while the model is asked again leaves no call behind."""
    server, door = await house(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(Fault(hang=True))
    async with door.client.stream("POST", PATHS[api], json=request(api, True)) as answer:
        async for piece in answer.aiter_text():
            if "Let me look." in piece:
                break
        await until(lambda: len(server.seen) == 2)
    await until(lambda: server.seen[1].aborted_at is not None)
    await until(lambda: len(door.reports) == 1)
    assert door.reports[0].reason == "client_left"


@every
@both
async def test_compressed_answers_are_read(house: House, api: str, stream: bool) -> None:
    """An upstream that compresses its answers is understood all the same."""
    server, door = await house(api, Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.fail(Fault(gzip=True), 2)
    told = said(api, await door.ask(api, request(api, stream)), stream)
    assert told.text.endswith("It is kingfisher.")


@both
async def test_a_stream_without_its_last_event_is_an_end_too(house: House, stream: bool) -> None:
    """A server that ends a stream by closing it has its calls answered as well."""
    server, door = await house("chat", Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.fail(Fault(no_done=True))
    told = said("chat", await door.ask("chat", request("chat", stream)), stream)
    assert told.text.endswith("It is kingfisher.")


@every
async def test_every_prompt_fits_however_often_it_is_asked(house: House, api: str) -> None:
    """Whatever the model asks for, nothing that goes upstream is larger than the window allows."""
    calls = (
        Call(NAME, json.dumps({"limit": 10})),
        Call(NAME, json.dumps({"item": 6, "limit": 10})),
        Call(NAME, json.dumps({"query": "took", "limit": 10})),
    )
    server, door = await house(api, Answer("", calls), Answer("", calls), Answer("Done."))
    for maximum in (64, 1500, 4000):
        name = "max_output_tokens" if api == "responses" else "max_tokens"
        server.script = recalling(Answer("", calls), Answer("", calls), Answer("Done."))
        said(api, await door.ask(api, request(api, False, **{name: maximum})), False)
    assert len(server.seen) == 9
    assert all(seen.verdict == "ok" for seen in server.seen)


async def test_the_next_turn_knows_nothing_of_it(house: House) -> None:
    """The client does not hold the exchange: its next request is compacted as if there had been none."""
    server, door = await house("messages", Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    body = request("messages", False)
    told = said("messages", await door.ask("messages", body), False)
    server.script = recalling(Answer("Fine."))
    later = {**body, "messages": [*body["messages"], *told.items, {"role": "user", "content": "Thanks. And now?"}]}
    said("messages", await door.ask("messages", later), False)
    before = server.seen[0].slices
    assert server.seen[-1].verdict == "ok"
    assert server.seen[-1].slices[: len(before)] == before
    assert all(KEYS[name] == server.seen[-1].header(name) for name in KEYS)

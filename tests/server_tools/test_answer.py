"""One answer out of several generations, over real HTTP: bytes, errors, broken connections, clients that leave."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import Any

import httpx
import pytest

from proxy.features.recall.tool import NAME
from proxy.server_tools import answer
from proxy.tasks import Tasks
from tests.stub import Answer, Fault, Stub
from tests.stub.faults import NO_FAULT, SSE, error, rate_limited
from tests.support.proxy_process import until
from tests.support.recall_fixtures import LOOK, READ, StartRecall, read_answer, request
from tests.support.server_tool_fixtures import PATHS, ProxyInProcess, both, every, model_answering


@every
@both
@pytest.mark.slow
async def test_an_answer_without_a_recall_is_relayed(start_recall: StartRecall, api: str, stream: bool) -> None:
    """If the tool is offered and not called, every byte of the answer is the upstream's."""
    server, proxy = await start_recall(api, Answer("I read on.", (READ,), reasoning="Hm."))
    answer = await proxy.ask(api, request(api, stream))
    async with Stub(server.rules) as other:
        other.script = server.script
        direct = await proxy.client.post(f"{other.url}{PATHS[api]}", content=server.seen[0].body)
    assert answer.content == direct.content
    assert NAME in server.seen[0].tools
    assert (proxy.reports[0].recalls, proxy.reports[0].recall_tokens) == (0, 0)
    assert "x-ullage-recall-tokens" not in answer.headers


@every
@both
@pytest.mark.slow
async def test_an_error_of_a_later_generation_reaches_the_client(
    start_recall: StartRecall, api: str, stream: bool
) -> None:
    """A whole answer is the provider's error as it came; a stream that began ends with an error event."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(rate_limited("7"))
    body = request(api, stream)
    if not stream:
        answer = await proxy.ask(api, body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["message"] == "Rate limit reached for requests"
        return
    text = await broken(proxy, api, body)
    assert "Let me look." in text
    assert NAME not in text
    last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
    assert "Rate limit reached" in last
    assert ("rate_limit_error" in last) is (api == "messages")
    await until(lambda: len(proxy.reports) == 1)
    assert proxy.reports[0].reason == "server_tool_failed"


async def broken(proxy: ProxyInProcess, api: str, body: dict[str, Any]) -> str:
    """The bytes of a stream that is broken off."""
    text = ""
    async with proxy.client.stream("POST", PATHS[api], json=body) as answer:
        try:
            async for piece in answer.aiter_text():
                text += piece
        except httpx.RemoteProtocolError:
            return text
    raise AssertionError("the stream came to a regular end")


@every
async def test_a_connection_that_breaks_later_ends_the_stream(start_recall: StartRecall, api: str) -> None:
    """An upstream that goes away in the second generation gives the same error as in the first."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(Fault(cut="mid_body", after=2))
    text = await broken(proxy, api, request(api, True))
    assert "upstream" in text.splitlines()[-2]
    assert NAME not in text


@every
@pytest.mark.slow
async def test_a_client_that_leaves_ends_what_is_under_way(start_recall: StartRecall, api: str) -> None:
    """A client that leaves during the second generation leaves no call behind."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)))
    server.fail(NO_FAULT)
    server.fail(Fault(hang=True))
    async with proxy.client.stream("POST", PATHS[api], json=request(api, True)) as answer:
        async for piece in answer.aiter_text():
            if "Let me look." in piece:
                break
        await until(lambda: len(server.seen) == 2)
    await until(lambda: server.seen[1].aborted_at is not None)
    await until(lambda: len(proxy.reports) == 1)
    assert proxy.reports[0].reason == "client_left"


@every
@both
async def test_compressed_answers_are_read(start_recall: StartRecall, api: str, stream: bool) -> None:
    """An upstream that compresses its answers is understood all the same."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.fail(Fault(gzip=True), 2)
    answered = read_answer(api, await proxy.ask(api, request(api, stream)), stream)
    assert answered.text.endswith("It is kingfisher.")


@both
async def test_a_stream_without_its_last_event_is_an_end_too(start_recall: StartRecall, stream: bool) -> None:
    """A server that ends a stream by closing it has its calls answered as well."""
    server, proxy = await start_recall("chat", Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.fail(Fault(no_done=True))
    answered = read_answer("chat", await proxy.ask("chat", request("chat", stream)), stream)
    assert answered.text.endswith("It is kingfisher.")


@every
@both
@pytest.mark.slow
async def test_an_overflow_that_states_nothing_is_answered_with_something_smaller(
    start_recall: StartRecall, api: str, stream: bool
) -> None:
    """After an overflow without a figure, results or view are made smaller, and the same call is answered."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.fail(NO_FAULT)
    server.fail(error(400, "too long", "context_length_exceeded"))
    answered = read_answer(api, await proxy.ask(api, request(api, stream)), stream)
    assert answered.text.endswith("It is kingfisher.")
    _, second, third = server.seen
    assert len(third.body) < len(second.body)
    assert third.verdict == "ok"
    assert third.slices[-1].startswith(second.slices[-1][:30])
    assert NAME.encode() in third.slices[-2]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
async def test_a_long_stream_is_whole_or_broken_off(
    start_recall: StartRecall, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """An answer that is too large to read ends with an error; a plain stream is never too large."""
    monkeypatch.setattr(answer, "MOST_BYTES", 4_096)
    server, proxy = await start_recall("chat", Answer("Yes."))
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"%b"}}]}\n\n'
    stream = b"".join(event % (b"%d" % at * 300) for at in range(40)) + b"data: [DONE]\n\n"
    coding = (("content-encoding", "gzip"),) if packed else ()
    server.fail(Fault(body=gzip.compress(stream) if packed else stream, headers=(*SSE, *coding)))
    if packed:
        assert "decoded to the end" in await broken(proxy, "chat", request("chat", True))
    else:
        assert (await proxy.ask("chat", request("chat", True))).content == stream


async def test_a_stream_is_known_without_its_name(start_recall: StartRecall) -> None:
    """A stream without its content type is read as one if the client requested a stream."""
    server, proxy = await start_recall("chat", Answer("Yes."))
    stream = b"".join(
        [
            b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"I look."}}]}\n\n',
            b'data: {"id":"x","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"',
            NAME.encode(),
            b'","arguments":"{}"}}]}}]}\n\n',
            b"data: [DONE]\n\n",
        ]
    )
    server.fail(Fault(body=stream, headers=(("content-type", "text/plain"),)))
    answer = await proxy.ask("chat", request("chat", True))
    assert NAME not in answer.text
    assert "Yes." in answer.text


@every
async def test_the_first_prompts_usage_is_learned(start_recall: StartRecall, api: str) -> None:
    """The provider's count of the measured prompt corrects ours; counts of later prompts do not."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)), Answer("It is kingfisher."))
    server.rules = replace(server.rules, factor=1.1)
    await proxy.ask(api, request(api, False))
    server.script = model_answering(Answer("Fine."))
    later = await proxy.ask(api, request(api, False))
    assert abs(int(later.headers["x-ullage-tokens"]) - server.seen[-1].tokens) <= server.seen[-1].tokens // 16


@every
async def test_an_overflow_again_makes_the_view_smaller_too(start_recall: StartRecall, api: str) -> None:
    """If smaller results are not enough, the view is made smaller as well, and the recall is still answered."""
    server, proxy = await start_recall(
        api,
        Answer("Let me look.", (LOOK,)),
        Answer("It is kingfisher."),
        compression={"recall": {"enabled": True, "max_tokens": 200}},
    )
    server.fail(NO_FAULT)
    server.fail(error(400, "too long", "context_length_exceeded"), 2)
    answered = read_answer(api, await proxy.ask(api, request(api, False)), False)
    assert answered.text.endswith("It is kingfisher.")
    sizes = [len(seen.body) for seen in server.seen]
    assert sizes[1] > sizes[2] > sizes[3] < sizes[0]
    assert server.seen[3].verdict == "ok"
    assert NAME.encode() in server.seen[3].slices[-2]


@every
@pytest.mark.slow
async def test_a_client_that_leaves_before_a_whole_answer_ends_the_call(start_recall: StartRecall, api: str) -> None:
    """Whoever does not wait for an answer that is no stream leaves no call behind either."""
    server, proxy = await start_recall(api, Answer("Let me look.", (LOOK,)))
    server.fail(Fault(trickle=0.2))
    tasks = Tasks(lambda name, error: None)
    tasks.spawn(proxy.ask(api, request(api, False)), "a client without patience")
    await until(lambda: len(server.seen) == 1)
    await tasks.finish(0.3)  # some of the answer has come by then, and much of it has not
    await until(lambda: server.seen[0].aborted_at is not None)
    await until(lambda: len(proxy.reports) == 1)
    assert proxy.reports[0].reason == "client_left"


async def test_usage_that_was_not_requested_stays_hidden(start_recall: StartRecall) -> None:
    """If the proxy requests a stream's usage by itself, every generation's is counted and none is passed on."""
    server, proxy = await start_recall("chat", Answer("Let me look.", (LOOK,)), Answer("It is so."), usage=True)
    body = {key: value for key, value in request("chat", True).items() if key != "stream_options"}
    answered = read_answer("chat", await proxy.ask("chat", body), True)
    assert answered.usage == {}
    (report,) = proxy.reports
    assert report.usage.input_tokens == server.seen[1].tokens
    assert report.recall_tokens > server.seen[0].tokens + server.seen[1].tokens

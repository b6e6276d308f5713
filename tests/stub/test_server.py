"""The strict upstream itself, driven over real connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.conftest import StartStub
from tests.stub import Answer, Call, Fault, Stub
from tests.stub.faults import error, events, rate_limited, redirect
from tests.support.proxy_process import Client, until

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HELLO: Any = [{"role": "user", "content": "Hello there."}]


async def post(stub: Stub, body: Any, path: str = "/v1/chat/completions") -> tuple[int, bytes, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(stub.root + path, data=data, allow_redirects=False) as reply,
    ):
        return reply.status, await reply.read(), {k.lower(): v for k, v in reply.headers.items()}


@pytest.mark.slow
async def test_answers_the_real_client_with_its_own_count(stub: StartStub) -> None:
    """A small chat is answered, and usage carries the exact number of tokens."""
    server = await stub()
    async with Client(server.url) as client:
        reply = await client.chat.completions.create(model="m", messages=HELLO)
    # 3 for the frame, 1 for "user", 3 for "Hello there.", 3 for the reply.
    assert reply.usage is not None
    assert (reply.choices[0].message.content, reply.usage.prompt_tokens) == ("Understood.", 10)
    assert [seen.verdict for seen in server.seen] == ["ok"]


@pytest.mark.slow
async def test_streams_text_and_parallel_calls(stub: StartStub) -> None:
    """A scripted answer with two calls comes back whole through the real client's stream."""
    server = await stub()
    server.queue(Answer("Let me look.", (Call("look", '{"a": 1}'), Call("look", '{"b": 2}', "mine"))))
    text, arguments, usage = "", ["", ""], None
    async with Client(server.url) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    arguments[call.index] += call.function.arguments or ""
    assert (text, arguments) == ("Let me look.", ['{"a": 1}', '{"b": 2}'])
    assert usage is not None
    assert usage.prompt_tokens == server.seen[0].tokens


@pytest.mark.parametrize(
    ("wording", "says"),
    [
        ("openai", "maximum context length is 64 tokens"),
        ("anthropic", "prompt is too long: "),
        ("vllm", "in the completion)"),
        ("llamacpp", '"n_ctx": 64'),
    ],
)
async def test_refuses_what_does_not_fit(stub: StartStub, wording: str, says: str) -> None:
    """Input plus output above the window is a 400 in the chosen provider's words."""
    server = await stub(window=64, wording=wording)
    status, body, _ = await post(server, {"model": "m", "messages": [{"role": "user", "content": "word " * 80}]})
    assert status == 400
    assert says in body.decode()
    assert server.seen[0].verdict == "overflow"


async def test_counts_the_output_figure_against_the_window(stub: StartStub) -> None:
    """The same input fits or not by the request's own ``max_tokens``."""
    server = await stub(window=64)
    fits = await post(server, {"model": "m", "messages": HELLO, "max_tokens": 54})
    over = await post(server, {"model": "m", "messages": HELLO, "max_completion_tokens": 55})
    assert (fits[0], over[0]) == (200, 400)
    assert json.loads(over[1])["error"]["code"] == "context_length_exceeded"


async def test_reports_an_overflow_inside_a_stream(stub: StartStub) -> None:
    """With that switch a stream that does not fit begins with 200 and carries the error as an event."""
    server = await stub(window=20, overflow_in_stream=True)
    status, body, _ = await post(server, {"model": "m", "messages": HELLO * 4, "stream": True})
    assert status == 200
    assert body.startswith(b'data: {"error"')


@pytest.mark.slow
async def test_refuses_broken_pairs(stub: StartStub) -> None:
    """Orphan results, unanswered calls and repeated ids are each a 400 that the client can read."""
    from openai import BadRequestError

    call: Any = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": "a", "content": "x"}
    server = await stub()
    broken = ([*HELLO, result], [*HELLO, asked], [*HELLO, asked, *HELLO, result], [*HELLO, asked, result, result])
    async with Client(server.url) as client:
        for messages in broken:
            with pytest.raises(BadRequestError):
                await client.chat.completions.create(model="m", messages=messages)
        await client.chat.completions.create(model="m", messages=[*HELLO, asked, result, asked, result])
    assert [seen.verdict for seen in server.seen] == ["invalid"] * 4 + ["ok"]


async def test_plays_a_prompt_cache(stub: StartStub) -> None:
    """Cached tokens are those of the messages an earlier request began with, and of nothing else."""
    server = await stub()
    first: dict[str, Any] = {"model": "m", "messages": HELLO}
    await post(server, first)
    await post(server, {**first, "messages": [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]})
    await post(server, {**first, "messages": [{"role": "user", "content": "Other."}, *HELLO]})
    assert server.seen[1].cached == server.seen[0].tokens
    assert server.seen[2].cached <= 3


async def test_alternation_and_single_system_are_switches(stub: StartStub) -> None:
    """Strict templates refuse two users in a row and a system message that is not the first."""
    strict = await stub(alternation=True, one_leading_system=True)
    plain = await stub()
    two = {"model": "m", "messages": HELLO * 2}
    late = {"model": "m", "messages": [*HELLO, {"role": "system", "content": "Be brief."}]}
    assert [(await post(strict, body))[0] for body in (two, late)] == [400, 400]
    assert [(await post(plain, body))[0] for body in (two, late)] == [200, 200]


async def test_echoes_other_paths(stub: StartStub) -> None:
    """Any other path says what came: method, path, query and the body's digest."""
    server = await stub()
    status, body, _ = await post(server, b"\x00\xff raw", "/v1/audio/speech?voice=a")
    echo = json.loads(body)
    assert (status, echo["path"], echo["query"], echo["size"]) == (200, "/v1/audio/speech", "voice=a", 6)


async def test_faults_hit_the_next_requests_in_order(stub: StartStub) -> None:
    """Each fault hits one request, in the order given, and then the stub is well again."""
    server = await stub()
    server.fail(rate_limited("7"))
    server.fail(redirect("http://127.0.0.1:9/elsewhere"))
    server.fail(error(503))
    server.fail(events(b'data: {"error":{"message":"x"}}\n\n', b"data: tru"))
    server.fail(Fault(gzip=True))
    body = {"model": "m", "messages": HELLO}
    replies = [await post(server, body) for _ in range(6)]
    assert [status for status, _, _ in replies] == [429, 307, 503, 200, 200, 200]
    assert replies[0][2]["retry-after"] == "7"
    assert replies[1][2]["location"].endswith("/elsewhere")
    assert replies[3][1].endswith(b"data: tru")
    assert json.loads(gzip.decompress(replies[4][1]))["object"] == "chat.completion"


@pytest.mark.parametrize("cut", ["before_headers", "after_headers", "mid_body"])
async def test_breaks_connections(stub: StartStub, cut: Any) -> None:
    """A connection breaks where the fault says, and that is not taken for a client that left."""
    server = await stub()
    server.fail(Fault(cut=cut))
    with pytest.raises(aiohttp.ClientError):
        await post(server, {"model": "m", "messages": HELLO, "stream": True})
    await asyncio.sleep(0.05)
    assert server.seen[0].aborted_at is None


async def test_notes_when_a_client_leaves(stub: StartStub) -> None:
    """A client that goes away while the stub hangs is recorded with the time."""
    server = await stub()
    server.fail(Fault(hang=True))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await post(server, {"model": "m", "messages": HELLO})
    left = time.monotonic()
    await until(lambda: server.seen[0].aborted_at is not None)
    assert abs((server.seen[0].aborted_at or 0.0) - left) < 2


async def test_paces_chunks(stub: StartStub) -> None:
    """A gap between chunks stretches the stream by at least the number of gaps."""
    server = await stub()
    server.queue(Answer("abcdef", piece=1))
    server.fail(Fault(gap=0.02))
    before = time.monotonic()
    _, body, _ = await post(server, {"model": "m", "messages": HELLO, "stream": True})
    assert time.monotonic() - before > 0.02 * 6
    assert body.endswith(b"data: [DONE]\n\n")

"""What fits passes through a running proxy as if there were none: bytes, headers, chunks, and a client's leaving."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Fault
from tests.stub.faults import JSON, SSE, events
from tests.stub.tokens import request_tokens
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Client, Proxy, until
from tests.support.recorded_conversations import read_all
from tests.support.sample_conversations import chat_turn

ABORTED_WITHIN = 2.0
"""Seconds; the proxy needs a few milliseconds, the machine may be busy."""
WORDS = "word " * 700
"""About 700 tokens and 3,500 bytes: above the low mark of the window below by its bytes, within it by its tokens."""
COUNTED = {"x-ullage-window": "2048"}

ODD = {
    "whitespace": b' \r\n\t{ "model" :\t"m" ,\n "messages" : [ { "role":"user" , "content" : "%s" } ]  } \n ',
    "lone_surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud83d %s \\udc00"}]}',
    "escapes": b'{"model":"m","messages":[{"role":"user","content":"\\u0000\\u00e9\\/\\ud83d\\ude00 %s"}]}',
    "not_a_number": b'{"model":"m","logit_bias":{"1":NaN,"2":-Infinity},"messages":[{"role":"user","content":"%s"}]}',
    "duplicates": b'{"x":1,"model":"m","x":2,"messages":[{"role":"user","content":"%s","y":1,"y":2}],"x":3}',
    "big_integers": b'{"model":"m","seed":18446744073709551615,"z":123456789012345678901234567890,'
    b'"messages":[{"role":"user","content":"%s"}]}',
    "long_fractions": b'{"model":"m","temperature":0.10000000000000000001,"top_p":1e-2,'
    b'"messages":[{"role":"user","content":"%s"}]}',
    "deep_unknown": b'{"model":"m","d":' + b"[" * 60 + b"]" * 60 + b',"messages":[{"role":"user","content":"%s"}]}',
    "unknown_role_and_parts": b'{"model":"m","messages":[{"role":"narrator","content":[{"type":"hologram","text":"%s"}]'
    b"}]}",
    "utf8": '{"model":"m","messages":[{"role":"user","content":"漢字 ëñ 🙂 %s"}],"ключ":"значение"}'.encode(),
    "unpaired_result": b'{"model":"m","messages":[{"role":"user","content":"%s"},'
    b'{"role":"tool","tool_call_id":"nobody","content":"x"}]}',
}  # fmt: skip


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client that adds as little as it can."""
    async with loopback_client() as client:
        yield client


async def post(
    web: httpx.AsyncClient, front: Proxy, body: bytes, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """The answer to a chat request of exactly these bytes."""
    named = {"content-type": "application/json", **(headers or {})}
    return await web.post(f"{front.url}/chat/completions", content=body, headers=named)


@pytest.mark.shared("transcripts")
async def test_recorded_conversations_that_fit_leave_byte_for_byte(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Every recorded conversation that fits, counted or bounded by its bytes, reaches the upstream as it was sent."""
    server = await stub(window=10_000_000, pairs=False)
    front = await proxy(server.url, window=8_000_000)
    recordings, counted = read_all(), 0
    for recording in recordings:
        body = recording.body(len(recording.messages), "gpt-4o-mini")
        # The second window is one that a count must decide about.
        for window in ("8000000", str(max(2048, int(recording.size * 1.4) + 600))):
            answer = await post(web, front, body, {"x-ullage-window": window})
            assert server.seen[-1].body == body, f"{recording.name} in {window}"
            assert answer.headers["x-ullage-outcome"] == "verbatim", f"{recording.name} of {recording.size} in {window}"
        counted += not answer.headers["x-ullage-tokens"].startswith("<")
    assert counted > 0.8 * len(recordings), "hardly any was counted: the second window decides nothing"


@pytest.mark.parametrize("size", ["small", "counted"])
async def test_odd_bodies_leave_byte_for_byte(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, size: str
) -> None:
    """Whatever JSON a client writes, and however, the upstream gets those bytes, whether or not they were counted."""
    server = await stub(window=100_000)
    front = await proxy(server.url, window=100_000)
    for label, text in ODD.items():
        body = text.replace(b"%s", WORDS.encode() if size == "counted" else b"hello")
        answer = await post(web, front, body, COUNTED)
        assert server.seen, f"{label}: {answer.text}"
        assert server.seen.pop().body == body, label
        assert answer.headers["x-ullage-outcome"] == "verbatim", label
        assert size == "small" or not answer.headers["x-ullage-tokens"].startswith("<"), label


async def test_a_body_that_is_no_chat_request_is_refused_readably_or_passed(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """What cannot be read gets a 400 in OpenAI's shape: the proxy's own, or the upstream's for the same bytes."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"messages": []}', b'{"model": 5}', b'"x"', b"[" * 90_000):
        server.forget()
        answer = await post(web, front, body)
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]["message"]
        assert [seen.body for seen in server.seen] in ([], [body])


async def test_a_repeated_key_that_decides_is_refused(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Two readers may choose different ones of a repeated ``messages`` or ``model``: nobody gets to."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    for key in (b'"messages":[{"role":"user","content":"a"}]', b'"model":"m"'):
        body = b'{"model":"m","messages":[{"role":"user","content":"b"}],' + key + b"}"
        answer = await post(web, front, body)
        assert answer.status_code == 400
    assert server.seen == []


async def test_headers_go_both_ways(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """End-to-end headers pass in both directions; hop-by-hop ones and the proxy's own do not."""
    server = await stub()
    answered = (("x-request-id", "req_1"), ("openai-processing-ms", "12"), ("x-ratelimit-limit-requests", "10"))
    server.fail(Fault(status=200, headers=JSON + answered, body=b"{}"))
    front = await proxy(server.url, window=8192)
    sent = {
        "authorization": "Bearer sk-mine", "openai-organization": "org-1", "user-agent": "odd/1.0", "accept": "x/y",
        "accept-encoding": "identity", "idempotency-key": "k1", "x-stainless-lang": "python", "cookie": "a=b",
        "x-ullage-project": "secret-project", "x-ullage-conversation": "c", "te": "trailers", "x-other": "z",
    }  # fmt: skip
    answer = await post(web, front, b'{"model":"m","messages":[]}', sent)
    assert {name: answer.headers[name] for name, _ in answered} == dict(answered)
    arrived = {name.lower(): value for name, value in server.seen[0].headers}
    gone = {"te", "x-ullage-project", "x-ullage-conversation"}
    assert {name: value for name, value in arrived.items() if name in sent} == {
        name: value for name, value in sent.items() if name not in gone
    }
    assert arrived.keys() - sent.keys() == {"host", "content-length", "content-type"}


async def test_every_route_passes_with_and_without_its_prefix(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Any method, path, query and body of any other route arrives as it was sent, with or without ``/v1``."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    body = bytes(range(256)) * 40
    for method, path in [
        ("POST", "/embeddings"), ("POST", "/completions"), ("POST", "/responses/r1/cancel"),
        ("POST", "/messages/batches"),
        ("POST", "/audio/speech"), ("GET", "/models"), ("GET", "/files/f%2F1/content?x=%20&y="), ("DELETE", "/files/x"),
        ("PATCH", "/odd"), ("PUT", "/vector_stores/v/files"),
    ]:  # fmt: skip
        for prefix in ("/v1", ""):
            sent = b"" if method == "GET" else body
            answer = await web.request(method, front.root + prefix + path, content=sent)
            assert answer.status_code == 200
            seen = server.seen.pop()
            where, _, query = path.partition("?")
            # Without the prefix only paths that are known to stand below it are completed.
            assert (seen.method, seen.path.removeprefix("/v1"), seen.query) == (method, where, query)
            assert seen.body == sent


async def test_the_real_client_uses_other_routes(stub: StartStub, proxy: StartProxy) -> None:
    """Models, embeddings and file uploads work through the real client, their bytes unchanged."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    web = Client(front.url)
    async with web as client:
        assert [model.id async for model in client.models.list()] == ["gpt-4o-mini"]
        embedded = await client.embeddings.create(model="e", input="text", encoding_format="float")
        assert embedded.data[0].embedding == [0.25, -0.5, 0.125]
        assert server.seen[-1].body == web.bodies[-1]
        await client.files.create(file=("a.jsonl", b'{"a": 1}\n' * 100_000), purpose="batch")
        assert server.seen[-1].body == web.bodies[-1]
        assert server.seen[-1].header("content-type").startswith("multipart/form-data")


async def test_a_large_upload_streams(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """An upload far larger than any limit of managed bodies passes without being held in memory."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    block = bytes(range(256)) * 4096
    status = Path(f"/proc/{front.pid}/status")

    def resident() -> int:
        if not status.exists():
            return 0
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

    # A request that is counted first: the vocabulary, too, takes its memory at some time.
    await post(web, front, json.dumps({"model": "m", "messages": chat_turn(1, 1500)[:1]}).encode())
    before = resident()

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(96):
            yield block

    answer = await web.post(f"{front.url}/files", content=blocks())
    assert answer.json()["sha256"] == hashlib.sha256(block * 96).hexdigest()
    assert resident() - before < 48 * 1024, "kilobytes: the upload was held"


STREAMS = {
    "plain": b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n',
    "windows_lines": b'event: x\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\ndata: [DONE]\r\n\r\n',
    "comments": b': ping\n\n: ping\n\nid: 7\nretry: 10\ndata: {"choices":[]}\n\ndata: [DONE]\n\n',
    "no_end": b'data: {"choices":[{"delta":{"content":"half',
    "not_json": b"data: {{{\n\ndata: \xff\xfe\n\nnothing\n\n",
    "empty": b"",
    "error_event": b'data: {"error":{"message":"The server had an error.","code":"server_error"}}\n\n',
}


@pytest.mark.parametrize("held", [False, True], ids=["small", "watched"])
async def test_streams_pass_byte_for_byte(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, held: bool
) -> None:
    """The client gets the bytes of a stream as the upstream sent them, also where its opening is watched."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    # More than half of the window's budget: an overflow inside the 200 is possible, so the opening is looked at.
    content = chat_turn(1, 5000)[0]["content"] if held else "hello"
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}).encode()
    for label, stream in STREAMS.items():
        server.fail(events(stream))
        answer = await post(web, front, body)
        assert answer.content == stream, label
        assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("held", [False, True], ids=["small", "watched"])
async def test_a_chunk_is_seen_before_the_next_is_sent(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, held: bool
) -> None:
    """A stream's chunks arrive as they are sent, long before its end."""
    server = await stub()
    server.queue(Answer("abcdefgh", piece=1))
    server.fail(Fault(gap=0.2))
    front = await proxy(server.url, window=8192)
    content = chat_turn(1, 5000)[0]["content"] if held else "hello"
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}
    seen = 0
    async with web.stream("POST", f"{front.url}/chat/completions", json=asked) as answer:
        async for chunk in answer.aiter_raw():
            if b'"content":"a"' in chunk:
                assert server.seen[0].answered_at is None
                assert b'"content":"c"' not in chunk
                seen += 1
    assert seen == 1


LEAVING: dict[str, tuple[bool, Fault, int]] = {
    "whole_before_any_byte": (False, Fault(hang=True), 10),
    "stream_before_any_byte": (True, Fault(hang=True), 10),
    "mid_stream": (True, Fault(gap=0.2), 10),
    "whole_while_trickling": (False, Fault(trickle=0.1), 10),
    "stream_before_any_byte_watched": (True, Fault(hang=True), 5000),
    "held_preamble": (True, Fault(gap=60.0), 5000),
}


async def test_a_client_that_leaves_ends_the_upstream_call(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Whenever a client goes, the upstream's connection goes too, at once, and the proxy works on."""
    server = await stub()
    front = await proxy(server.url, window=8192)
    for moment, (stream, fault, tokens) in LEAVING.items():
        server.forget()
        server.queue(Answer("x" * 400, piece=1))
        server.fail(fault)
        asked = {"model": "m", "stream": stream, "messages": chat_turn(1, tokens)[:1]}
        call = asyncio.ensure_future(web.post(f"{front.url}/chat/completions", json=asked))
        await until(lambda: bool(server.seen))
        await asyncio.sleep(0.5)
        left = time.monotonic()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: server.seen[0].aborted_at is not None)
        assert (server.seen[0].aborted_at or 0.0) - left < ABORTED_WITHIN, moment
    answer = await post(web, front, b'{"model": "m", "messages": [{"role": "user", "content": "Hello."}]}')
    assert answer.status_code == 200


async def test_a_client_that_leaves_an_upload_ends_it(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """A client that goes in the middle of a relayed call ends it upstream as well."""
    server = await stub()
    server.fail(Fault(hang=True))
    front = await proxy(server.url, window=8192)
    call = asyncio.ensure_future(web.post(f"{front.url}/files", files={"file": io.BytesIO(bytes(3_000_000))}))
    await until(lambda: bool(server.seen))
    left = time.monotonic()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: server.seen[0].aborted_at is not None)
    assert (server.seen[0].aborted_at or 0.0) - left < ABORTED_WITHIN


async def test_a_compressed_stream_passes_compressed(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """A stream in a content coding is not unpacked on its way."""
    server = await stub()
    packed = b"\x1f\x8b not really packed \x00\xff" * 50
    server.fail(Fault(status=200, headers=(*SSE, ("content-encoding", "gzip")), body=packed))
    front = await proxy(server.url, window=8192)
    asked = {"model": "m", "stream": True, "messages": [chat_turn(1, 5000)[0]]}
    async with web.stream("POST", f"{front.url}/chat/completions", json=asked) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert b"".join([chunk async for chunk in answer.aiter_raw()]) == packed


def test_the_words_are_what_the_tests_need() -> None:
    """The odd bodies above are bounded when small and counted when large, in the window they are sent with."""
    assert len(WORDS) > 0.4 * (2048 - 256)
    assert request_tokens({"messages": [{"role": "user", "content": WORDS}]}) < 0.8 * (2048 - 256)

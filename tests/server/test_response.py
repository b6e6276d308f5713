"""Answers byte for byte, as a client receives them."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.sse import NewestEvent, StreamEnd
from proxy.core.apis.usage import UsageTap
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import NO_USAGE, Usage
from proxy.engine.include_usage import UsageHider
from proxy.server import ServerConfig
from proxy.server.response import ReplyObserver
from tests.support.engine_fixtures import classifier
from tests.support.server_fixture import chunk, eventually, raw_answer, running_server


async def test_an_answer_comes_back_byte_for_byte_with_its_headers_in_order():
    """Status, end-to-end headers (repeated, in order and spelling) and body are the upstream's; ours are added."""
    async with running_server() as at:
        at.stage.reply = raw_answer(
            b'\x00\xff{"a": 1.10}',
            "Content-Type: application/json",
            "X-RateLimit-Remaining: 3",
            "Set-Cookie: a=1; Path=/",
            "set-cookie: b=2",
            "retry-after-ms: 7",
            "Keep-Alive: timeout=5",
            "X-Hop: gone",
            "Connection: X-Hop",
            status="429 Too Many Requests",
        )
        got = await at.chat()
        assert got.line == "HTTP/1.1 429 Too Many Requests"
        assert got.body == b'\x00\xff{"a": 1.10}'
        assert got.headers == [
            ("Content-Type", "application/json"),
            ("X-RateLimit-Remaining", "3"),
            ("Set-Cookie", "a=1; Path=/"),
            ("set-cookie", "b=2"),
            ("retry-after-ms", "7"),
            ("Content-Length", "13"),
            ("x-ullage-outcome", "verbatim"),
        ]


async def test_a_chunk_is_seen_before_the_next_one_is_sent():
    """A stream passes chunk by chunk: the upstream sends the next only after the client has seen the last."""
    async with running_server() as at:
        seen = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(5):
                text = b"data: %d\n\n" % number
                writer.write(b"%x\r\n%b\r\n" % (len(text), text))
                await asyncio.wait_for(seen.wait(), 60)
                seen.clear()
            writer.write(b"0\r\n\r\n")

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert b"transfer-encoding: chunked" in head
        for number in range(5):
            assert await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 60) == b"9\r\ndata: %d\n\n\r\n" % number
            seen.set()
        assert await asyncio.wait_for(reader.readexactly(5), 60) == b"0\r\n\r\n"
        writer.close()
        assert await eventually(lambda: at.reports)
        assert at.reports[0].stream


async def test_head_and_bodyless_answers():
    """HEAD keeps the content-length of the body it does not have; 204 and 304 have none."""
    async with running_server() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
        reader, writer = await at.connect()
        writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 1234\r\n" in head
        assert b"chunked" not in head
        at.stage.reply = b"HTTP/1.1 204 No Content\r\n\r\n"
        writer.write(b"DELETE /v1/files/x HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204")
        assert b"chunked" not in head
        writer.close()


async def test_http_1_0_gets_no_chunks():
    """A client of HTTP/1.0 reads a body of unknown length to the end of the connection."""
    async with running_server() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        got = await asyncio.wait_for(reader.read(), 60)
        assert got.endswith(b"\r\n\r\nabc")
        assert b"chunked" not in got
        writer.close()


async def test_pipelined_requests_are_answered_in_order():
    """Several requests sent at once on one connection get their answers one after the other."""
    async with running_server() as at:
        reader, writer = await at.connect()
        one = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        writer.write(one * 5)
        for _ in range(5):
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"{}"
        writer.close()
        assert len(at.stage.heard) == 5


POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_errors_speak_the_callers_api():
    """A refusal on the Messages route has Anthropic's shape, elsewhere OpenAI's."""
    async with running_server() as at:
        double = ("x-api-key: a", "x-api-key: b")
        got = await at.ask("POST", "/v1/messages", b"{}", *double)
        assert b'"type": "error"' in got.body
        got = await at.ask("POST", "/v1/embeddings", b"{}", *double)
        assert got.body.startswith(b'{"error"')
        assert at.stage.heard == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (b"/v1/messages", b'event: error\ndata: {"type": "error", "error": {'),
        (b"/v1/responses", b'event: error\ndata: {"type": "error", "code": "upstream_stream_error"'),
        (b"/v1/chat/completions", b'\n\ndata: {"error": {'),
    ],
)
async def test_the_error_event_speaks_the_streams_api(path, words):
    """Each API's clients get the error event they know."""
    async with running_server() as at:

        async def script(heard, reader, writer):
            writer.write(SSE + chunk(b"data: 1"))
            await writer.drain()
            writer.close()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % path)
        assert words in await asyncio.wait_for(reader.read(), 60)
        writer.close()


LISTED = ServerConfig("up", origins=frozenset({"https://app.test"}))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 200),
        (("Origin: http://proxy.test",), 200),
        (("Origin: http://proxy.test", "Sec-Fetch-Site: same-origin"), 200),
        (("Origin: https://app.test", "Sec-Fetch-Site: cross-site"), 200),
        (("Origin: https://evil.test",), 403),
        (("Origin: null",), 403),
        (("Origin: https://app.test.evil.test",), 403),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-origin",), 200),
        (("Sec-Fetch-Site: none",), 200),
        (("Origin: http://proxy.test", "Sec-Fetch-Site: cross-site"), 403),
    ],
)
async def test_which_web_origins_may_call(headers, status):
    """Pages of other sites are refused unless listed; programs and the proxy's own pages are not."""
    async with running_server(LISTED) as at:
        got = await at.chat(b"{}", *headers)
        assert got.line.split()[1] == str(status)
        assert len(at.stage.heard) == (status == 200)
        allowed = got.all("access-control-allow-origin")
        assert allowed == (["https://app.test"] if headers and headers[0].endswith("//app.test") else [])


async def test_a_preflight_of_a_listed_origin_is_answered_here():
    """The browser's question is answered without a key and without the upstream."""
    async with running_server(LISTED) as at:
        ask = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-a")
        got = await at.ask("OPTIONS", "/v1/chat/completions", b"", "Origin: https://app.test", *ask)
        assert got.line == "HTTP/1.1 204 No Content"
        assert got.all("access-control-allow-headers") == ["authorization,x-a"]
        assert got.all("access-control-allow-methods") == ["POST"]
        got = await at.ask("OPTIONS", "/v1/chat/completions", b"", "Origin: https://evil.test", *ask)
        assert got.line == "HTTP/1.1 403 Forbidden"
        assert at.stage.heard == []


async def test_an_answer_to_a_listed_page_carries_our_permission_and_not_the_upstreams():
    """The upstream's headers about origins are replaced: it does not know who may call here."""
    async with running_server(LISTED) as at:
        at.stage.reply = raw_answer(b"{}", "Access-Control-Allow-Origin: *", "X-Kept: 1")
        got = await at.chat(b"{}", "Origin: https://app.test")
        assert got.all("access-control-allow-origin") == ["https://app.test"]
        assert got.all("vary") == ["origin"]
        assert got.all("x-kept") == ["1"]


WORD = b'data: {"choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
LATE = b'data: {"error":{"message":"prompt is too long","code":"context_length_exceeded"}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = WORD + USAGE + WORD + LATE + DONE


def chunks(points: list[int]) -> list[bytes]:
    """The stream, cut at *points*."""
    edges = [0, *sorted(point % len(STREAM) for point in points), len(STREAM)]
    return [STREAM[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 1000), max_size=10))
def test_usage_is_read_and_hidden_if_it_was_not_requested(points: list[int]) -> None:
    """However the stream is cut, the client gets all but the usage, which is noted, as is a late overflow."""
    faults: list[Exception] = []
    ending = LateOverflowDetector(classifier())
    observer = ReplyObserver("", UsageHider(), ending, faults.append, is_events=True, watches_end=False)
    passed = b"".join([*map(observer.feed, chunks(points)), observer.finish()[0]])
    assert passed == STREAM.replace(USAGE, b"")
    assert observer.usage == Usage(7, 2)
    assert ending.overflow is not None
    assert faults == []


@pytest.mark.parametrize("part", [UsageTap, UsageHider, LateOverflowDetector])
@given(points=st.lists(st.integers(0, 1000), max_size=10), good=st.integers(0, 10))
def test_a_part_that_fails_is_dropped_and_reported_once(part: type, points: list[int], good: int) -> None:
    """Wherever one part fails, every byte goes on in order, and there is one report."""
    faults: list[Exception] = []
    observer = ReplyObserver(
        "", UsageHider(), LateOverflowDetector(classifier()), faults.append, is_events=True, watches_end=False
    )
    passed: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        for at, chunk in enumerate([*chunks(points), b""]):
            if at == good:
                patch.setattr(part, "feed", lambda *_: 1 // 0)
            passed.append(observer.feed(chunk))
    passed.append(observer.finish()[0])
    failed = good <= len(chunks(points))
    assert len(faults) == failed
    assert b"".join(passed).replace(USAGE, b"") == STREAM.replace(USAGE, b"")
    assert not failed or observer.usage == NO_USAGE


@pytest.mark.parametrize("part", [UsageTap, NewestEvent, StreamEnd])
def test_a_part_that_cannot_be_made_is_done_without(part: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted, everything passes."""
    monkeypatch.setattr(part, "__init__", lambda *_: 1 // 0)
    faults: list[Exception] = []
    observer = ReplyObserver("", None, None, faults.append, is_events=True, watches_end=True)
    assert observer.feed(STREAM) + observer.finish()[0] == STREAM
    assert (observer.usage, observer.has_final_event, len(faults)) == (NO_USAGE, False, 1)


@pytest.mark.parametrize("question", ["is_cut", "is_final"])
def test_a_question_at_the_end_that_fails_costs_no_answer(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream counts as one that nobody watched."""
    monkeypatch.setattr(NewestEvent, question, property(lambda _: 1 // 0))
    faults: list[Exception] = []
    observer = ReplyObserver("", None, None, faults.append, is_events=True, watches_end=True)
    assert observer.feed(STREAM) == STREAM
    assert observer.finish() == (b"", True)
    assert not observer.has_final_event
    assert len(faults) == 1

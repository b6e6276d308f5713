import asyncio
import json
import os

import pytest

from proxy.core.report import Usage
from proxy.server.handler import named_model
from proxy.telemetry.logs import Logs
from tests.server.house import answer, eventually, house

CHAT = b'{"model": "m",  "messages":[{"role":"user","content":"\\ud83d h\xc3\xa9"}], "x": 1.10}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/openai/v1/chat/completions"])
async def test_a_managed_body_reaches_the_engine_and_the_upstream_byte_for_byte(path):
    """Every spelling of the chat route is managed, and the engine's bytes are what the upstream gets."""
    async with house() as at:
        got = await at.ask("POST", path + "?x=%2F&y", CHAT)
        assert got.line == "HTTP/1.1 200 OK"
        assert [request.body for request in at.engine.seen] == [CHAT]
        assert at.stage.heard[0].body == CHAT
        assert at.stage.heard[0].line == "POST /v1/chat/completions?x=%2F&y HTTP/1.1"
        assert [(report.api, report.status, report.outcome) for report in at.reports] == [("chat", 200, "verbatim")]


async def test_an_answer_comes_back_byte_for_byte_with_its_headers_in_order():
    """Status, end-to-end headers (repeated, in order and spelling) and body are the upstream's; ours are added."""
    async with house() as at:
        at.stage.reply = answer(
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


REQUEST_HEADERS = [
    ("User-Agent: raw/1", "User-Agent: raw/1"),
    ("Authorization: Bearer client", "Authorization: Bearer client"),
    ("X-Api-Key: client", "X-Api-Key: client"),
    ("Accept-Encoding: br;q=0.5, gzip", "Accept-Encoding: br;q=0.5, gzip"),
    ("OpenAI-Beta: a", "OpenAI-Beta: a"),
    ("X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.1"),
    ("Cookie: session=1", "Cookie: session=1"),
    ("TE: trailers", None),
    ("Keep-Alive: timeout=5", None),
    ("Proxy-Authorization: Basic eA==", None),
    ("Proxy-Connection: keep-alive", None),
    ("Upgrade: h2c", None),
    ("HTTP2-Settings: AAM", None),
    ("Trailer: x", None),
    ("X-Ullage-Project: secret", None),
    ("X-Ullage-Anything: secret", None),
]


@pytest.mark.parametrize(("sent", "arrives"), REQUEST_HEADERS)
async def test_which_request_headers_are_forwarded(sent, arrives):
    """End-to-end headers arrive as they were spelled; hop-by-hop ones and our own do not."""
    async with house() as at:
        assert (await at.chat(CHAT, sent)).line.startswith("HTTP/1.1 200")
        heard = at.stage.heard[0]
        if arrives is None:
            assert heard.all(sent.partition(":")[0]) == []
        else:
            assert arrives in [f"{key}: {value}" for key, value in heard.headers]


async def test_nothing_is_added_and_repeated_headers_keep_their_order():
    """The upstream sees the client's headers, Host and Content-Length rewritten, and not one more."""
    async with house() as at:
        await at.ask("POST", "/v1/embeddings", b"{}", "B: 1", "a: 2", "b: 3", "Connection: c, close", "C: 4")
        heard = at.stage.heard[0]
        assert heard.headers == [
            ("Host", f"127.0.0.1:{at.stage.port}"), ("B", "1"), ("a", "2"), ("B", "3"), ("Content-Length", "2"),
        ]  # fmt: skip


async def test_a_client_cannot_use_connection_to_strip_its_credential():
    """Credentials named by ``Connection`` are forwarded all the same."""
    async with house() as at:
        await at.chat(CHAT, "Authorization: Bearer k", "Connection: authorization")
        assert at.stage.heard[0].all("authorization") == ["Bearer k"]


@pytest.mark.parametrize(
    ("method", "path", "arrives"),
    [
        ("GET", "/v1/models", "/v1/models"),
        ("GET", "/models?limit=5", "/v1/models?limit=5"),
        ("DELETE", "/v1/files/a%2Fb%20c?x=%C3%A9&&y=+", "/v1/files/a%2Fb%20c?x=%C3%A9&&y=+"),
        ("GET", "/v1/models/org//m%2f..%2e", "/v1/models/org//m%2f..%2e"),
        ("PATCH", "/tokenize", "/tokenize"),
        ("POST", "/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("GET", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "//evil.test/v1/x", "//evil.test/v1/x"),
        ("GET", "http://evil.test/v1/models", "/v1/models"),
    ],
)
async def test_other_paths_are_relayed_verbatim(method, path, arrives):
    """Any method and path that is not ours reaches the upstream's own host, percent-encoding untouched."""
    async with house() as at:
        got = await at.ask(method, path)
        assert got.line == "HTTP/1.1 200 OK"
        assert at.stage.heard[0].line == f"{method} {arrives} HTTP/1.1"
        assert at.reports[0].api == "relay"


async def test_a_chunk_is_seen_before_the_next_one_is_sent():
    """A stream passes chunk by chunk: the upstream sends the next only after the client has seen the last."""
    async with house() as at:
        seen = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(5):
                text = b"data: %d\n\n" % number
                writer.write(b"%x\r\n%b\r\n" % (len(text), text))
                await asyncio.wait_for(seen.wait(), 5)
                seen.clear()
            writer.write(b"0\r\n\r\n")

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b"transfer-encoding: chunked" in head
        for number in range(5):
            assert await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5) == b"9\r\ndata: %d\n\n\r\n" % number
            seen.set()
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"0\r\n\r\n"
        writer.close()
        assert await eventually(lambda: at.reports)
        assert at.reports[0].stream


async def test_a_compressed_answer_passes_compressed():
    """Bytes in a content coding are not touched, and the header that names it stays."""
    import gzip

    body = gzip.compress(b'{"usage": {"prompt_tokens": 11, "completion_tokens": 3}}')
    async with house() as at:
        at.stage.reply = answer(body, "Content-Encoding: gzip", "Content-Type: application/json")
        got = await at.chat()
        assert got.body == body
        assert got.all("content-encoding") == ["gzip"]
        assert await eventually(lambda: at.reports)
        assert at.reports[0].usage == Usage(11, 3, None)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary Redirect"])
async def test_redirects_are_answers(status):
    """A redirect reaches the client as it is; nothing is sent to where it points."""
    async with house() as at, house() as other:
        where = f"Location: http://127.0.0.1:{other.stage.port}/steal"
        at.stage.reply = answer(b"", where, status=status)
        got = await at.chat(CHAT, "Authorization: Bearer secret")
        assert got.line == f"HTTP/1.1 {status}"
        assert got.all("location") == [where.split(": ")[1]]
        assert other.stage.connections == 0


async def test_cookies_of_one_caller_never_reach_another():
    """What an upstream sets is given to its caller and sent by nobody else."""
    async with house(base="/v1") as at:
        at.stage.reply = answer(b"{}", "Set-Cookie: who=first; Path=/; Domain=localhost", "Set-Cookie: s=1")
        await at.chat()
        await at.chat()
        assert [heard.all("cookie") for heard in at.stage.heard] == [[], []]


async def test_head_and_bodyless_answers():
    """HEAD keeps the content-length of the body it does not have; 204 and 304 have none."""
    async with house() as at:
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
    async with house() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.endswith(b"\r\n\r\nabc")
        assert b"chunked" not in got
        writer.close()


async def test_pipelined_requests_are_answered_in_order():
    """Several requests sent at once on one connection get their answers one after the other."""
    async with house() as at:
        reader, writer = await at.connect()
        one = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        writer.write(one * 5)
        for _ in range(5):
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"{}"
        writer.close()
        assert len(at.stage.heard) == 5


async def test_a_websocket_on_responses_is_refused_readably():
    """An upgrade on the Responses route gets 426; clients fall back to plain requests."""
    async with house() as at:
        got = await at.ask(
            "GET", "/v1/responses", b"", "Connection: Upgrade", "Upgrade: websocket",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13",
        )  # fmt: skip
        assert got.line == "HTTP/1.1 426 Upgrade Required"
        assert at.stage.heard == []


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-ullage-mode", "loud"),
        ("x-ullage-window", "0"),
        ("x-ullage-window", "1e3"),
        ("x-ullage-window", "9" * 5000),
        ("x-ullage-task-size", "xxl"),
        ("x-ullage-compact", "later"),
        ("x-ullage-project", "p" * 300),
    ],
)
async def test_a_bad_option_is_named(header, value):
    """A wrong x-ullage value is a 400 that names the header, and nothing is sent upstream."""
    async with house() as at:
        got = await at.chat(CHAT, f"{header}: {value}")
        assert got.line == "HTTP/1.1 400 Bad Request"
        assert header.encode() in got.body
        assert got.all("x-ullage-outcome") == ["refused;invalid_request"]
        assert at.stage.heard == []
        assert [(report.outcome, report.status) for report in at.reports] == [("refused", 400)]


async def test_good_options_reach_the_engine():
    """What the caller asks for in headers is what the engine is told."""
    async with house() as at:
        await at.chat(
            CHAT, "X-Ullage-Mode: observe", "X-Ullage-Window: 4096", "X-Ullage-Compact: now",
            "X-Ullage-Task-Size: tiny", "X-Ullage-Conversation: c1", "X-Ullage-Project: p1",
        )  # fmt: skip
        wishes = at.engine.seen[0].options
        assert (wishes.mode, wishes.window, wishes.compact_now) == ("observe", 4096, True)
        assert (wishes.task_size, wishes.conversation, wishes.project) == ("tiny", "c1", "p1")


async def test_errors_speak_the_callers_api():
    """A refusal on the Messages route has Anthropic's shape, elsewhere OpenAI's."""
    async with house() as at:
        double = ("x-api-key: a", "x-api-key: b")
        got = await at.ask("POST", "/v1/messages", b"{}", *double)
        assert b'"type": "error"' in got.body
        got = await at.ask("POST", "/v1/embeddings", b"{}", *double)
        assert got.body.startswith(b'{"error"')
        assert at.stage.heard == []


@pytest.mark.parametrize(
    ("body", "complete", "model"),
    [
        (b'{"messages": [], "model": "gpt"}', True, "gpt"),
        (b'{"model": 5}', True, ""),
        (b"[1]", True, ""),
        (b"\xff", True, ""),
        (b' {"model" : "gpt", "messages": [', False, "gpt"),
        (b'{"messages": [{"model": "no"}', False, ""),
    ],
)
def test_the_model_a_relayed_body_names(body, complete, model):
    """A JSON body's model is found; of a part of a body only a leading one, never a nested one."""
    assert named_model(body, complete=complete) == model


async def test_a_bug_costs_one_request_and_is_logged_by_type_and_place(tmp_path):
    """An unexpected exception is a 500, one log line with type and frames but no content, and is reported."""
    log = tmp_path / "log"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    logs = Logs("info", "json", handle)
    logs.adopt_libraries()

    async def broken(request, send):
        raise KeyError("CANARY " + request.body.decode())

    try:
        async with house() as at:
            working, at.engine.exchange = at.engine.exchange, broken
            got = await at.chat(b'{"model": "CANARY"}', "Authorization: Bearer CANARY")
            assert got.line == "HTTP/1.1 500 Internal Server Error"
            assert json.loads(got.body)["error"]["code"] == "internal_error"
            at.engine.exchange = working
            assert (await at.chat()).line == "HTTP/1.1 200 OK"
    finally:
        logs.close()
        os.close(handle)
    assert [(report.status, report.outcome, report.reason) for report in at.reports] == [
        (500, "refused", "internal_error"),
        (200, "verbatim", ""),
    ]
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    assert (line["error"], line["level"], line["logger"]) == ("KeyError", "error", "proxy.server.handler")
    assert line["frames"][-1].endswith(" broken")
    assert "proxy/server/handler.py" in line["frames"][0]
    assert "CANARY" not in log.read_text()


async def test_an_upstream_that_talks_nonsense_is_reported_with_its_name_and_the_model():
    """A call that gets no HTTP for an answer is a 502, reported with the model and upstream it was meant for."""
    async with house() as at:
        at.stage.reply = b"nonsense\r\n\r\n"
        got = await at.chat(b'{"messages": [], "model": "m1"}')
        assert got.line == "HTTP/1.1 502 Bad Gateway"
        assert [(report.model, report.upstream, report.reason) for report in at.reports] == [
            ("m1", "up", "upstream_unreachable")
        ]

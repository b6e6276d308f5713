import json
import os

import pytest

from proxy.core.report import Usage
from proxy.server.request import named_model
from proxy.tasks import Faults
from proxy.telemetry.logs import Logs
from tests.support.server_fixture import eventually, raw_answer, running_server

CHAT = b'{"model": "m",  "messages":[{"role":"user","content":"\\ud83d h\xc3\xa9"}], "x": 1.10}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/openai/v1/chat/completions"])
async def test_a_managed_body_reaches_the_engine_and_the_upstream_byte_for_byte(path):
    """Every spelling of the chat route is managed, and the engine's bytes are what the upstream gets."""
    async with running_server() as at:
        got = await at.ask("POST", path + "?x=%2F&y", CHAT)
        assert got.line == "HTTP/1.1 200 OK"
        assert [request.body for request in at.engine.seen] == [CHAT]
        assert at.stage.heard[0].body == CHAT
        assert at.stage.heard[0].line == "POST /v1/chat/completions?x=%2F&y HTTP/1.1"
        assert [(report.api, report.status, report.outcome) for report in at.reports] == [("chat", 200, "verbatim")]


@pytest.mark.parametrize(
    ("method", "path", "arrives"),
    [
        ("GET", "/v1/models", "/v1/models"),
        ("GET", "/models?limit=5", "/v1/models?limit=5"),
        ("DELETE", "/v1/files/a%2Fb%20c?x=%C3%A9&&y=+", "/v1/files/a%2Fb%20c?x=%C3%A9&&y=+"),
        ("GET", "/v1/models/org//m%2f..%2e", "/v1/models/org//m%2f..%2e"),
        ("PATCH", "/tokenize", "/tokenize"),
        ("POST", "/v1/messages/batches?beta=true", "/v1/messages/batches?beta=true"),
        ("GET", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "//evil.test/v1/x", "//evil.test/v1/x"),
        ("GET", "http://evil.test/v1/models", "/v1/models"),
    ],
)
async def test_other_paths_are_relayed_verbatim(method, path, arrives):
    """Any method and path that is not ours reaches the upstream's own host, percent-encoding untouched."""
    async with running_server() as at:
        got = await at.ask(method, path)
        assert got.line == "HTTP/1.1 200 OK"
        assert at.stage.heard[0].line == f"{method} {arrives} HTTP/1.1"
        assert at.reports[0].api == "relay"


async def test_a_compressed_answer_passes_compressed():
    """Bytes in a content coding are not touched, and the header that names it stays."""
    import gzip

    body = gzip.compress(b'{"usage": {"prompt_tokens": 11, "completion_tokens": 3}}')
    async with running_server() as at:
        at.stage.reply = raw_answer(body, "Content-Encoding: gzip", "Content-Type: application/json")
        got = await at.chat()
        assert got.body == body
        assert got.all("content-encoding") == ["gzip"]
        assert await eventually(lambda: at.reports)
        assert at.reports[0].usage == Usage(11, 3, None)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary Redirect"])
async def test_redirects_are_answers(status):
    """A redirect reaches the client as it is; nothing is sent to where it points."""
    async with running_server() as at, running_server() as other:
        where = f"Location: http://127.0.0.1:{other.stage.port}/steal"
        at.stage.reply = raw_answer(b"", where, status=status)
        got = await at.chat(CHAT, "Authorization: Bearer secret")
        assert got.line == f"HTTP/1.1 {status}"
        assert got.all("location") == [where.split(": ")[1]]
        assert other.stage.connections == 0


async def test_cookies_of_one_caller_never_reach_another():
    """A cookie that an upstream sets goes to its caller, and no other caller sends it."""
    async with running_server(base="/v1") as at:
        at.stage.reply = raw_answer(b"{}", "Set-Cookie: who=first; Path=/; Domain=localhost", "Set-Cookie: s=1")
        await at.chat()
        await at.chat()
        assert [heard.all("cookie") for heard in at.stage.heard] == [[], []]


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

    async def broken(request):
        raise KeyError("CANARY " + request.body.decode())

    try:
        async with running_server() as at:
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
    async with running_server() as at:
        at.stage.reply = b"nonsense\r\n\r\n"
        got = await at.chat(b'{"messages": [], "model": "m1"}')
        assert got.line == "HTTP/1.1 502 Bad Gateway"
        assert [(report.model, report.upstream, report.reason) for report in at.reports] == [
            ("m1", "up", "upstream_unreachable")
        ]


async def test_a_refusal_whose_headers_fail_is_an_answer_all_the_same(monkeypatch):
    """The last thing that is written needs nothing that may fail: status and error come, the outcome says the rest."""
    faults = []

    def fail(report):
        raise ZeroDivisionError

    monkeypatch.setattr("proxy.server.response.response_headers", fail)
    noticed = Faults(lambda phase, name, fault: faults.append((phase, type(fault))))
    async with running_server(faults=noticed) as at:
        got = await at.chat(CHAT, "x-ullage-mode: sideways")
        assert got.line == "HTTP/1.1 400 Bad Request"
        assert json.loads(got.body)["error"]["code"] == "invalid_request"
        assert got.all("x-ullage-outcome") == ["refused;internal_error"]
    assert faults == [("answer", ZeroDivisionError)]

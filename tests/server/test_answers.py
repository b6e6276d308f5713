"""What the proxy says in its own words."""

import asyncio

import pytest

from proxy.server.answers import target
from tests.support.server_fixture import chunk, house

POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


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
    ("path", "words"),
    [
        (b"/v1/messages", b'event: error\ndata: {"type": "error", "error": {'),
        (b"/v1/responses", b'event: error\ndata: {"type": "error", "code": "upstream_stream_error"'),
        (b"/v1/chat/completions", b'\n\ndata: {"error": {'),
    ],
)
async def test_the_error_event_speaks_the_streams_api(path, words):
    """Each API's clients get the error event they know."""
    async with house() as at:

        async def script(heard, reader, writer):
            writer.write(SSE + chunk(b"data: 1"))
            await writer.drain()
            writer.close()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST % path)
        assert words in await asyncio.wait_for(reader.read(), 5)
        writer.close()


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("/v1/x?a=b://c", "/v1/x?a=b://c"),
        ("//host/x", "//host/x"),
        ("http://host/v1/x?y", "/v1/x?y"),
        ("http://host", "/"),
        ("*", "*"),
        ("host:443", "host:443"),
    ],
)
def test_a_request_lines_target_is_its_path(raw, path):
    """Path and query stay byte for byte; of an absolute URL only scheme and host are taken off."""
    assert target(raw) == path

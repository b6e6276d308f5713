"""A 404 of the upstream's: explained by the upstream if it says why, else here."""

from __future__ import annotations

import gzip

import pytest

from tests.support.server_fixture import chunk, raw_answer, running_server


@pytest.mark.parametrize(
    ("path", "kind", "is_ours"),
    [
        ("/v1/v1/chat/completions", "application/json", True),
        ("/api/chat/completions", "application/json", True),
        ("/foo", "text/html", True),
        ("/foo", "application/json", False),
        ("/v1/nothing", "application/json", False),
    ],
)
async def test_an_unknown_path_is_distinguished_from_the_upstreams_own(path, kind, is_ours):
    """A client with a wrong base URL reads what it ends in; an answer of the upstream's own routes passes."""
    async with running_server() as at:
        at.stage.reply = raw_answer(b'{"detail": "Not Found"}', f"Content-Type: {kind}", status="404 Not Found")
        got = await at.ask("POST", path, b"{}")
        assert got.line == "HTTP/1.1 404 Not Found"
        assert (b"base URLs end in one /v1" in got.body) == is_ours


ROUTE = "/api/v1/chat/completions"
NOT_FOUND = b'{"error": {"message": "The model `m` does not exist", "type": "x", "code": "model_not_found"}}'
OF_APIS = [
    NOT_FOUND,
    b'{"error": "model \'m\' not found"}',
    b'[{"error": {"code": 404, "message": "models/m is not found", "status": "NOT_FOUND"}}]',
    b'{"object": "error", "message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}',
    b'{"type": "error", "error": {"type": "not_found_error", "message": "model: m"}}',
    b'{"detail": "Model m is not loaded"}',
]
OF_ROUTERS = [
    b'{"detail": "Not Found"}',
    b'{"detail":"Method Not Allowed"}',
    b'{"message": "Not found."}',
    b'{"timestamp": "2026-01-01", "status": 404, "error": "Not Found", "path": "/api/v1/chat/completions"}',
    b"{}",
    b"[]",
    b'"Not Found"',
    b"not JSON",
    b"",
]


@pytest.mark.parametrize("path", [ROUTE, "/v1/v1/messages", "/anthropic/v1/v1/embeddings"])
@pytest.mark.parametrize(("body", "is_ours"), [*((body, False) for body in OF_APIS), *((b, True) for b in OF_ROUTERS)])
async def test_what_an_api_says_reaches_the_client(path, body, is_ours):
    """An API's own words about a model come through byte for byte; a router's, which say nothing, are replaced."""
    async with running_server() as at:
        at.stage.reply = raw_answer(body, "Content-Type: application/json", status="404 Not Found")
        got = await at.ask("POST", path, b'{"model": "m"}')
        assert got.line == "HTTP/1.1 404 Not Found"
        assert (b"base URLs end in one /v1" in got.body) == is_ours
        assert (got.body == body) != is_ours


async def test_compressed_and_long_and_chunked_errors_come_through():
    """However an API's error is sent, all of its bytes arrive."""
    async with running_server() as at:
        kind = "Content-Type: application/json"
        zipped = gzip.compress(NOT_FOUND)
        at.stage.reply = raw_answer(zipped, kind, "Content-Encoding: gzip", status="404 Not Found")
        assert (await at.ask("POST", ROUTE, b"{}")).body == zipped
        long = b'{"error": {"message": "' + b"x" * 300_000 + b'"}}'
        at.stage.reply = raw_answer(long, kind, status="404 Not Found")
        assert (await at.ask("POST", "/v1/v1/embeddings", b"{}")).body == long
        head = f"HTTP/1.1 404 Not Found\r\n{kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        at.stage.reply = head + chunk(NOT_FOUND[:9]) + chunk(NOT_FOUND[9:]) + b"0\r\n\r\n"
        assert (await at.ask("POST", ROUTE, b"{}")).body == NOT_FOUND

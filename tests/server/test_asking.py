"""What a managed request asks of the engine: its path, its headers, its body without a content-encoding."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from proxy.core.errors import InvalidRequest
from proxy.core.request import Request
from proxy.server.asking import read_request
from proxy.server.body import BodyBytes, BodyReader
from proxy.server.config import Limits
from proxy.server.request import RequestHeaders, read_headers

BODY = b'{"model": "m", "messages": []}'


def intake(*fields: tuple[str, str]) -> RequestHeaders:
    """Headers as they come in."""
    return read_headers([(name.encode(), value.encode()) for name, value in fields])


async def asked(body: bytes, headers: RequestHeaders, path: str = "/v1/chat/completions") -> Request:
    """The request that is read."""
    reader = BodyReader(asyncio.StreamReader(), len(body), Limits(), BodyBytes(10**6), b"t")  # type: ignore[arg-type]
    plain = Request("chat", body, b"t" * 32, "r1")
    return await read_request(plain, path, headers, reader, Limits())


async def test_headers_and_path_say_how_it_is_meant() -> None:
    """Wishes, the session and the model of the path are read; what goes on is kept as the origin."""
    headers = intake(("x-ullage-mode", "observe"), ("user-agent", "x"), ("content-type", "application/json"))
    request = await asked(BODY, headers, "/openai/deployments/gpt-5/chat/completions?api-version=1")
    assert (request.body, request.options.mode, request.path_model) == (BODY, "observe", "gpt-5")
    assert request.origin is not None
    assert request.origin.path_qs.endswith("api-version=1")
    assert ("user-agent", "x") in request.origin.headers


async def test_a_content_encoding_is_taken_off_with_its_header() -> None:
    """The engine gets plain JSON; a body that is not what its header says is refused, and its header stays."""
    headers = intake(("content-encoding", "gzip"))
    request = await asked(gzip.compress(BODY), headers)
    assert request.body == BODY
    assert headers.forward == []
    broken = intake(("content-encoding", "gzip"))
    with pytest.raises(InvalidRequest):
        await asked(BODY, broken)
    assert [name for name, _ in broken.forward] == ["content-encoding"]


async def test_a_wish_that_cannot_be_is_refused() -> None:
    """What is wrong in a header of ours is said, not passed over."""
    with pytest.raises(InvalidRequest):
        await asked(BODY, intake(("x-ullage-mode", "sometimes")))

import gzip

import httpx
import pytest

from proxy.upstream import Timeouts
from proxy.upstream.litellm_transport import CALL, LARGEST_ERROR, Broken, Call, Transport
from tests.support.server_fixture import ScriptedServer, listening, raw_answer


async def posted(reply, timeouts=None):
    """The result of one request over the transport, and its call."""
    stage = ScriptedServer(reply=reply)
    call = Call(timeouts or Timeouts())
    CALL.set(call)
    async with listening(stage) as port, httpx.AsyncClient(transport=Transport(), trust_env=False) as client:
        got = await client.post(f"http://127.0.0.1:{port}/v1/messages", json={})
    return got, call


async def test_a_refusal_is_kept_readable():
    """The body of an error is in the call, decoded, and what LiteLLM reads is the same text."""
    body = gzip.compress(b'{"error":"no"}')
    got, call = await posted(raw_answer(body, "Content-Encoding: gzip", "Retry-After: 3", status="429 Slow down"))
    assert (call.status, call.error, got.text) == (429, b'{"error":"no"}', '{"error":"no"}')
    assert ("retry-after", "3") in call.headers
    assert got.headers["retry-after"] == "3"


async def test_an_endless_refusal_ends():
    """No more of an error is read than could be one."""
    _, call = await posted(raw_answer(b"x" * (LARGEST_ERROR * 3), status="500 Oops"))
    assert LARGEST_ERROR < len(call.error) < LARGEST_ERROR * 2


async def test_a_success_is_not_touched():
    """An answer's body goes through as it comes."""
    got, call = await posted(raw_answer(gzip.compress(b"fine"), "Content-Encoding: gzip"))
    assert (got.text, call.status, call.error, call.broken) == ("fine", 200, b"", None)


async def test_a_break_is_no_error_that_is_tried_again():
    """A connection that breaks raises an error of its own, and the call has the cause."""
    with pytest.raises(Broken) as caught:
        await posted(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", Timeouts(1.0, 0.2, 0.2))
    assert not isinstance(caught.value, (httpx.RemoteProtocolError, httpx.ConnectError))
    assert isinstance(CALL.get().broken, httpx.TransportError)


async def test_the_calls_own_patience_counts():
    """Whatever timeout the request was made with, the call's own is used."""

    async def script(heard, reader, writer):
        await reader.read()

    stage, call = ScriptedServer(script=script), Call(Timeouts(1.0, 0.2, 0.1))
    CALL.set(call)
    async with listening(stage) as port, httpx.AsyncClient(transport=Transport(), timeout=None) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"http://127.0.0.1:{port}/", json={})
    assert isinstance(call.broken, httpx.ReadTimeout)

"""Answers as messages of a WebSocket: what is no event, and what never ends."""

import contextlib

import pytest

from proxy.server import Limits, ServerConfig
from tests.server.test_responses_socket import answers, connected, events, turn
from tests.support.server_fixture import raw_answer, running_server


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b"\xff"])
async def test_an_answer_that_is_no_json_is_an_error(body):
    """A page of a gateway is no event: each message is JSON whatever the upstream sends."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(raw_answer(body, "Content-Type: text/html"), events("r1"))
        assert [one["type"] for one in await turn(socket, model="m", input="a")] == ["error"]
        assert (await turn(socket, model="m", input="a"))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(("kind", "start"), [("application/json", b'{"id": "'), ("text/event-stream", b"data: ")])
async def test_an_answer_that_never_makes_a_message_is_given_up(kind, start):
    """One message is in memory until it is complete: an event without an end, or a body, filled it for an hour."""

    async def endless(heard, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n%b" % (kind.encode(), start))
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()

    async with running_server(ServerConfig("up", limits=Limits(body=10_000))) as at, connected(at) as socket:
        at.stage.script = endless
        assert [one["type"] for one in await turn(socket, model="m", input="a")] == ["error"]
        at.stage.script = answers(events("r1"))
        assert (await turn(socket, model="m", input="a"))[-1]["type"] == "response.completed"

"""Where aiohttp's client would add, copy or linger."""

import asyncio

import pytest

from proxy.core.errors import UpstreamUnreachable
from proxy.pipe import Pipe
from proxy.upstream.aiohttp_patches import BytesBody, FailingProtocol
from tests.support.server_fixture import eventually, raw_answer
from tests.support.upstream_fixture import ScriptedConnection, read_body, read_into


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_bytes_go_and_come_unchanged(size):
    """Bodies of any size, empty ones too, are the same bytes at the other end, and the connection is reused."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with ScriptedConnection() as wire:
        wire.stage.reply = raw_answer(data)
        for _ in range(2):
            reply = await wire.send(data)
            assert await read_body(reply) == data
            reply.close()
        assert [heard.body for heard in wire.stage.heard] == [data, data]
        assert wire.stage.connections == 1


async def test_a_reply_that_was_not_read_costs_its_connection_and_nothing_else():
    """Closing an unread answer ends its connection; the next request is served on a new one."""
    async with ScriptedConnection() as wire:
        wire.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
        (await wire.send()).close()
        assert await eventually(wire.stage.ended.is_set)
        wire.stage.reply = raw_answer(b"ok")
        assert await read_body(await wire.send()) == b"ok"
        assert wire.stage.connections == 2


@pytest.mark.parametrize("cut", range(0, 60, 3))
async def test_a_stream_cut_anywhere_gives_all_its_bytes_and_then_fails(cut):
    """Every byte that came before a break is handed out first."""
    text = b"".join(b"5\r\nab%dcd\r\n" % number for number in range(6))[:cut]
    async with ScriptedConnection() as wire:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + text)
            await writer.drain()
            writer.close()

        wire.stage.script = script
        reply = await wire.send()
        got: list[bytes] = []
        with pytest.raises(UpstreamUnreachable):
            await read_into(got, reply)
        plain = b"".join(b"ab%dcd" % number for number in range(6))
        whole, rest = divmod(cut, 10)
        assert b"".join(got) == plain[: whole * 5 + min(5, max(0, rest - 3))]
        reply.close()


def test_a_body_of_bytes_knows_its_size_and_text():
    """A body held in memory says how long it is and what it is, whatever its size."""
    body = BytesBody("é".encode() * 3)
    assert (body.size, body.decode()) == (6, "ééé")


async def test_a_tunnel_whose_connection_fails_is_at_its_end():
    """A failure of an upgraded connection is its end like any other: what came is read, then nothing."""
    protocol = FailingProtocol(asyncio.get_running_loop())
    pipe = Pipe(protocol)
    protocol.set_parser(pipe, pipe)
    protocol.data_received(b"last words")
    protocol.set_exception(ConnectionResetError())
    protocol.connection_lost(ConnectionResetError())
    assert await pipe.next() == b"last words"
    assert await pipe.next() == b""

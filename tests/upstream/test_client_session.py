"""The classes under aiohttp's client: bodies in memory, and connections whose failure reaches their readers."""

import asyncio

from proxy.pipe import Pipe
from proxy.upstream.client_session import BytesBody, FailingProtocol


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

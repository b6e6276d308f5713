"""WebSockets (https://www.rfc-editor.org/rfc/rfc6455): relays one byte for byte in both directions, without reading it.

``handshake`` and ``frame`` are for ``responses_socket`` and ``message_writer``, which answer a WebSocket themselves.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final, cast

from aiohttp.http import WS_KEY

from proxy.core.errors import InvalidRequest, UpstreamUnreachable
from proxy.engine.ports import Tunnel, Upgradable
from proxy.pipe import Pipe
from proxy.server.incoming import IncomingRequest
from proxy.server.response import ClientLeft, ResponseWriter

SWITCHING = 101
"""The status of an upgraded connection (https://www.rfc-editor.org/rfc/rfc9110#section-15.2.2)."""

TEXT, CLOSE, PONG = 0x81, 0x88, 0x8A
"""First bytes of whole frames: https://www.rfc-editor.org/rfc/rfc6455#section-5.2"""

_VERSION: Final = "13"

_MASKED: Final = 0x80
_HEADS: Final = {126: 4, 127: 10}
_KEY: Final = 4
"""The bit of a masked frame, bytes of its head by the size in its second byte, and those of the key behind the head."""


async def relay(request: IncomingRequest, out: ResponseWriter, reply: Upgradable) -> None:
    """Answer 101 as the upstream did, then pass bytes on until either side ends. Raises ``ClientLeft``."""
    tunnel = reply.tunnel()
    try:
        out.switch([*reply.headers, ("Connection", "Upgrade"), ("Upgrade", "websocket")])
        protocol = cast("Any", request.protocol)
        client = Pipe(protocol)
        protocol.set_parser(client)
        down = asyncio.ensure_future(_down(tunnel, out))
        up = asyncio.ensure_future(_up(client, tunnel))
        try:
            done, _ = await asyncio.wait({down, up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Both have ended before either connection is closed, so that none writes to a closed one.
            down.cancel()
            up.cancel()
            await asyncio.wait({down, up})
        for ended in done:
            ended.result()
    finally:
        tunnel.close()
        out.break_off()


async def _down(tunnel: Tunnel, out: ResponseWriter) -> None:
    while chunk := await tunnel.next_chunk():
        if out.write(chunk):
            await out.drain()


async def _up(client: Pipe, tunnel: Tunnel) -> None:
    while chunk := await client.next():
        try:
            await tunnel.write(chunk)
        except ConnectionError as error:
            raise UpstreamUnreachable("", "it closed the WebSocket") from error
    raise ClientLeft


def frame(first: int, payload: bytes) -> bytes:
    """Return a frame of the server, which is never masked; *first* is its first byte.

    https://www.rfc-editor.org/rfc/rfc6455#section-5.2
    """
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", first, size) + payload
    if size < 2**16:
        return struct.pack("!BBH", first, 126, size) + payload
    return struct.pack("!BBQ", first, 127, size) + payload


class FrameHeads:
    """Follows the frames of a client by their heads, to see that each of them is masked.

    https://www.rfc-editor.org/rfc/rfc6455#section-5.1
    """

    __slots__ = ("_left", "_rest")

    def __init__(self) -> None:
        self._left = 0
        self._rest = b""

    def are_masked(self, data: bytes) -> bool:
        """Follow *data*. Return False if a frame in it is not masked."""
        if self._rest:
            data = self._rest + data
        at, end = self._left, len(data)
        while at + 1 < end:
            second = data[at + 1]
            if not second & _MASKED:
                return False
            size = second & ~_MASKED
            head = _HEADS.get(size, 2)
            if at + head > end:
                break
            if head > 2:
                size = int.from_bytes(data[at + 2 : at + head])
            at += head + _KEY + size
        self._rest, self._left = data[at:], max(0, at - end)
        return True


def handshake(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the fields of the 101 that answers an upgrade with *headers*. Raises ``InvalidRequest``.

    No extension is accepted: a compressed history would have to be inflated under limits of its own.
    """
    key = headers.get("sec-websocket-key", "")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    if not is_key or headers.get("sec-websocket-version") != _VERSION:
        raise InvalidRequest("This is not a WebSocket handshake of version 13 (RFC 6455).")
    # SHA-1 is prescribed and protects nothing: https://www.rfc-editor.org/rfc/rfc6455#section-4.2.2
    proof = base64.b64encode(hashlib.sha1(key.encode() + WS_KEY, usedforsecurity=False).digest()).decode()
    return [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Accept", proof)]

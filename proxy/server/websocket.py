"""Relays WebSockets (https://www.rfc-editor.org/rfc/rfc6455) byte for byte, both ways, without reading them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from proxy.core.errors import UpstreamUnreachable
from proxy.engine.ports import Tunnel, Upgradable
from proxy.pipe import Pipe
from proxy.server.incoming import IncomingRequest
from proxy.server.response import ClientLeft, ResponseWriter

SWITCHING = 101
"""The status of an upgraded connection (https://www.rfc-editor.org/rfc/rfc9110#section-15.2.2)."""


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

"""WebSockets through the proxy: raw bytes at both ends, and a real client with a real server."""

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from proxy.server import ServerConfig
from tests.support.server_fixture import eventually, running_server

RELAYED = ServerConfig(default_upstream="up", websockets="relay")
UPGRADE = (
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Extensions: permessage-deflate",
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\n"
)


async def open_socket(at, path, *headers):
    """A raw client connection that requests a WebSocket."""
    reader, writer = await at.connect()
    writer.write("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *UPGRADE, *headers]).encode() + b"\r\n\r\n")
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=gpt-realtime"])
async def test_bytes_pass_both_ways_as_they_are(path):
    """After the upstream's 101 every byte of either side reaches the other, in order, frames unread."""
    got = bytearray()

    async def script(heard, reader, writer):
        writer.write(SWITCHED + b"\x81\x05first")
        while data := await reader.read(65536):
            got.extend(data)
            writer.write(data[::-1])
        writer.close()

    async with running_server(RELAYED) as at:
        at.stage.script = script
        reader, writer = await open_socket(at, path, "Authorization: Bearer sk-mine")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"Sec-WebSocket-Accept: x\r\n" in head
        assert b"close" not in head
        assert await reader.readexactly(7) == b"\x81\x05first"
        writer.write(b"\x82\x00\xff raw")
        assert await reader.readexactly(7) == b"war \xff\x00\x82"
        heard = at.stage.heard[0]
        assert heard.line == f"GET {path} HTTP/1.1"
        assert heard.all("sec-websocket-extensions") == ["permessage-deflate"]
        assert heard.all("authorization") == ["Bearer sk-mine"]
        assert [value.lower() for value in heard.all("upgrade")] == ["websocket"]
        writer.close()
        assert await eventually(at.stage.ended.is_set)
        assert bytes(got) == b"\x82\x00\xff raw"
        assert await eventually(lambda: [report.status for report in at.reports] == [101])


async def test_the_upstreams_end_ends_the_client():
    """When the upstream closes, the client sees the end after the last byte."""

    async def script(heard, reader, writer):
        writer.write(SWITCHED + b"bye")
        await writer.drain()
        writer.close()

    async with running_server() as at:
        at.stage.script = script
        reader, _ = await open_socket(at, "/v1/realtime")
        await reader.readuntil(b"\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 60) == b"bye"


async def test_a_slow_reader_holds_the_other_side_back():
    """Bytes that one side does not read are not buffered without end: the other waits, and all of it arrives later."""
    total, sent = 64 * 2**20, 0

    async def script(heard, reader, writer):
        nonlocal sent
        writer.write(SWITCHED)
        while sent < total:
            writer.write(b"x" * 2**16)
            sent += 2**16
            await writer.drain()
        writer.close()

    async with running_server() as at:
        at.stage.script = script
        reader, _ = await open_socket(at, "/v1/realtime")
        await reader.readuntil(b"\r\n\r\n")
        seen = -1
        while seen != sent:  # until it stands still
            seen = sent
            await asyncio.sleep(0.2)
        assert seen < total
        received = 0
        while data := await asyncio.wait_for(reader.read(2**20), 60):
            received += len(data)
        assert received == total


async def test_a_refused_upgrade_on_responses_is_426():
    """An upstream without WebSockets on the Responses route: clients get 426 and fall back to HTTP at once."""
    async with running_server(RELAYED) as at:
        got = await at.ask("GET", "/v1/responses", b"", *UPGRADE)
        assert got.line == "HTTP/1.1 426 Upgrade Required"
        assert len(at.stage.heard) == 1


async def test_a_refused_upgrade_elsewhere_is_the_upstreams_own_answer():
    """On other routes what the upstream says instead of 101 goes to the client as it is."""
    async with running_server() as at:
        got = await at.ask("GET", "/v1/realtime", b"", *UPGRADE)
        assert (got.line, got.body) == ("HTTP/1.1 200 OK", b"{}")


async def test_websockets_of_the_responses_route_can_be_refused():
    """With ``websockets`` off an upgrade on the Responses route is 426 without asking the upstream."""
    async with running_server(ServerConfig(default_upstream="up", websockets="refuse")) as at:
        got = await at.ask("GET", "/v1/responses", b"", *UPGRADE)
        assert got.line == "HTTP/1.1 426 Upgrade Required"
        assert at.stage.heard == []


async def test_shared_keys_keep_stored_responses_apart():
    """Behind shared access keys a Responses WebSocket, which reads stored history, is refused; realtime is not."""
    config = replace(RELAYED, access_keys=("team",))
    async with running_server(config, api_key="sk-upstream") as at:
        key = "Authorization: Bearer team"
        assert (await at.ask("GET", "/v1/responses", b"", *UPGRADE, key)).line == "HTTP/1.1 403 Forbidden"
        assert at.stage.heard == []
        assert (await at.ask("GET", "/v1/realtime", b"", *UPGRADE, key)).line == "HTTP/1.1 200 OK"
        assert at.stage.heard[0].all("authorization") == ["Bearer sk-upstream"]


async def test_a_drain_ends_open_sockets():
    """When the proxy goes away a WebSocket that stays open is ended, and the drain does not hang."""

    async def script(heard, reader, writer):
        writer.write(SWITCHED)
        await reader.read()

    async with running_server() as at:
        at.stage.script = script
        reader, _ = await open_socket(at, "/v1/realtime")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(at.server.drain(0), 60)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 60)


async def test_a_real_client_talks_to_a_real_server():
    """aiohttp's client and server exchange compressed text and binary messages and a close code through the proxy."""

    async def echo(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data.upper())
            else:
                await socket.send_bytes(message.data)
                await socket.close(code=4000)
        return socket

    application = web.Application()
    application.router.add_get("/v1/realtime", echo)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    async def forward(heard, reader, writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        lines = [heard.line, *(f"{name}: {value}" for name, value in heard.headers)]
        server_writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")

        async def pump(source, sink):
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        try:
            await asyncio.gather(pump(server_reader, writer), pump(reader, server_writer))
        finally:
            server_writer.transport.abort()

    try:
        async with running_server() as at, aiohttp.ClientSession() as session:
            at.stage.script = forward
            async with session.ws_connect(f"http://127.0.0.1:{at.port}/v1/realtime", compress=15) as socket:
                await socket.send_str("hello " * 50_000)
                assert await socket.receive_str() == "HELLO " * 50_000
                await socket.send_bytes(b"\x00\x01")
                assert await socket.receive_bytes() == b"\x00\x01"
                assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
                assert socket.close_code == 4000
    finally:
        await runner.cleanup()

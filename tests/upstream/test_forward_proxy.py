"""Upstreams behind a forward proxy, a real one of a few lines."""

import asyncio
import base64
import ssl

import pytest

from proxy.core.errors import UpstreamUnreachable
from proxy.upstream import Target, Timeouts, Upstreams
from tests.support.certificates import self_signed
from tests.support.server_fixture import ScriptedServer, listening, raw_answer
from tests.support.upstream_fixture import read_body


class ForwardProxy:
    """Opens tunnels and forwards whole URLs; ``heads`` are those of the requests that it got.

    With *refuses*, a status line's end, it does neither; with *hangs* it says nothing at all.
    """

    def __init__(self, refuses=b"", *, hangs=False):
        self.heads = []
        self.port = 0
        self._refuses = refuses
        self._hangs = hangs

    async def serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        method, address, _ = head.split(b"\r\n")[0].split(b" ")
        if self._hangs:
            await reader.read()
            return
        if self._refuses:
            writer.write(b"HTTP/1.1 " + self._refuses + b"\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        if method == b"CONNECT":
            host, _, port = address.decode().rpartition(":")
        else:
            host, _, port = address.decode().split("/")[2].rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            upstream_writer.write(head)
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))


async def pump(reader, writer):
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A server's context; its certificate is trusted by connections that are opened from now on."""
    path = self_signed(tmp_path)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=path))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    return context


async def send_all(upstream):
    """The bodies of the answers to a POST in memory, a second one, a GET, and a body that is streamed."""

    async def streamed():
        yield b"{}"

    bodies = []
    for method, body in (("POST", b"{}"), ("POST", b"{}"), ("GET", None), ("POST", streamed())):
        headers = [("Authorization", "Bearer client")]
        bodies.append(await read_body(await upstream.send("up", method, "/v1/x", headers, body)))
    return bodies


async def test_an_upstream_with_tls_is_reached_through_a_tunnel(certificate):
    """The forward proxy sees the address and its own credentials, and no byte of a request."""
    stage, forward = ScriptedServer(), ForwardProxy()
    stage.reply = raw_answer(b"hello")
    server = await asyncio.start_server(stage.serve, "127.0.0.1", 0, ssl=certificate)
    port = server.sockets[0].getsockname()[1]
    async with listening(forward) as proxy_port:
        target = Target("up", f"https://127.0.0.1:{port}/v1", proxy=f"http://me:secret@127.0.0.1:{proxy_port}")
        upstream = Upstreams([target])
        assert await send_all(upstream) == [b"hello"] * 4
        await upstream.close()
    server.close()
    credentials = b"Basic " + base64.b64encode(b"me:secret")
    assert 2 <= len(forward.heads) <= 3
    for head in forward.heads:
        assert head.startswith(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n" % port)
        assert credentials in head
        assert b"client" not in head
    assert len(stage.heard) == 4
    assert "proxy-authorization" not in repr(stage.heard).lower()


async def test_an_upstream_without_tls_is_named_in_whole_urls():
    """Without TLS there is no tunnel: the proxy gets the request itself, and forwards it."""
    stage, forward = ScriptedServer(), ForwardProxy()
    stage.reply = raw_answer(b"hello")
    async with listening(stage) as port, listening(forward) as proxy_port:
        target = Target("up", f"http://127.0.0.1:{port}/v1", proxy=f"http://me:secret@127.0.0.1:{proxy_port}")
        upstream = Upstreams([target])
        assert await send_all(upstream) == [b"hello"] * 4
        await upstream.close()
    assert forward.heads
    for head in forward.heads:
        assert b" http://127.0.0.1:%d/v1/x HTTP/1.1\r\n" % port in head
        assert b"Proxy-Authorization: Basic " in head


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_proxy_that_refuses_is_named(method):
    """What it answered is in the error; no credential is."""
    forward = ForwardProxy(b"407 Proxy Authentication Required")
    async with listening(forward) as proxy_port:
        upstream = Upstreams([Target("up", "https://127.0.0.1:1/v1", proxy=f"http://me:secret@127.0.0.1:{proxy_port}")])
        with pytest.raises(UpstreamUnreachable, match="its forward proxy answered 407") as caught:
            await upstream.send("up", method, "/v1/x", [], b"{}")
        assert "secret" not in str(caught.value)
        await upstream.close()


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_proxy_that_is_not_there_is_named(method, monkeypatch):
    """An error about a connection says that it was not the upstream's."""
    monkeypatch.setattr("proxy.upstream.direct._CONNECT_PAUSES", ())
    upstream = Upstreams([Target("up", "https://127.0.0.1:2/v1", proxy="http://127.0.0.1:1")])
    with pytest.raises(UpstreamUnreachable, match=r"127.0.0.1:1 failed .*, its forward proxy"):
        await upstream.send("up", method, "/v1/x", [], b"{}")
    await upstream.close()


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_proxy_that_does_not_answer_is_waited_for_as_long_as_for_a_connection(method):
    """The time to connect is for all of its steps, and the error says so."""

    async with listening(ForwardProxy(hangs=True)) as proxy_port:
        target = Target(
            "up", "https://127.0.0.1:1/v1", timeouts=Timeouts(connect=0.2), proxy=f"http://127.0.0.1:{proxy_port}"
        )
        upstream = Upstreams([target])
        with pytest.raises(UpstreamUnreachable, match=r"no connection within 0\.2 s"):
            await asyncio.wait_for(upstream.send("up", method, "/v1/x", [], b"{}"), 60)
        await upstream.close()

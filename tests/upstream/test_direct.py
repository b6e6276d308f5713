import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from proxy.core.errors import Overloaded, RequestTimeout, UpstreamTimeout, UpstreamUnreachable
from proxy.settings import servers
from proxy.upstream import DirectUpstream, Target, Timeouts
from tests.support.file_descriptors import few_descriptors
from tests.support.server_fixture import ScriptedServer, eventually, listening, raw_answer
from tests.support.upstream_fixture import ScriptedConnection, read_body, read_into


def self_signed(folder):
    """The path of a file with a key and a certificate nobody trusts, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8
    path = folder / "both.pem"
    path.write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()) + certificate.public_bytes(pem))
    return path


async def test_a_cancelled_read_loses_nothing():
    """Bytes that arrive after a read was cancelled are given to the next one."""
    async with ScriptedConnection() as wire:
        go = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
            await go.wait()
            writer.write(b"def")

        wire.stage.script = script
        reply = await wire.send()
        assert await reply.next_chunk() == b"abc"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reply.next_chunk(), 0.05)
        go.set()
        assert await read_body(reply) == b"def"


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/v1", "http://no-such-host.invalid/v1"])
async def test_an_upstream_that_is_not_there_is_named(url):
    """A closed port or an unknown host is ``UpstreamUnreachable`` that says which upstream and why."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        upstream = DirectUpstream([Target("gone", url.format(port=taken.getsockname()[1]))])
        with pytest.raises(UpstreamUnreachable, match="'gone'") as caught:
            await upstream.send("gone", "POST", "/v1/x", [], b"{}")
        assert ("resolve" in caught.value.cause) == ("invalid" in url)
        await upstream.close()


async def test_a_connection_that_was_refused_is_tried_again():
    """An upstream that comes up a moment later gets the request, once."""
    stage = ScriptedServer()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    upstream = DirectUpstream([Target("up", f"http://127.0.0.1:{port}")])
    sending = asyncio.ensure_future(upstream.send("up", "POST", "/v1/x", [], b"{}"))
    await asyncio.sleep(0.02)
    server = await asyncio.start_server(stage.serve, "127.0.0.1", port)
    reply = await sending
    assert reply.status == 200
    assert len(stage.heard) == 1
    await upstream.close()
    assert await eventually(stage.ended.is_set)
    server.close()


async def test_tls_that_cannot_be_verified_is_refused(tmp_path):
    """A server without a trusted certificate gets no request."""
    stage = ScriptedServer()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(self_signed(tmp_path))
    server = await asyncio.start_server(stage.serve, "127.0.0.1", 0, ssl=context)
    upstream = DirectUpstream([Target("up", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
    with pytest.raises(UpstreamUnreachable, match="TLS"):
        await upstream.send("up", "POST", "/v1/x", [("Authorization", "Bearer k")], b"{}")
    assert stage.heard == []
    await upstream.close()
    server.close()


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_request_that_may_have_arrived_is_not_repeated(method):
    """When the connection breaks after the request was sent, it is not sent again."""
    async with ScriptedConnection() as wire:
        wire.stage.reply = raw_answer(b"first")
        await read_body(await wire.send())

        async def script(heard, reader, writer):
            writer.close()

        wire.stage.script = script
        with pytest.raises(UpstreamUnreachable, match="before it answered"):
            await wire.send(method=method)
        assert len(wire.stage.heard) == 2


async def test_an_answer_that_is_not_http():
    """Rubbish instead of an answer is the upstream's failure, not a crash."""
    async with ScriptedConnection() as wire:
        wire.stage.reply = b"SSH-2.0-x\r\n\r\n"
        with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
            await wire.send()


async def test_silence_before_and_inside_an_answer():
    """The wait for the head and the pause inside a body have their own limits."""
    async with ScriptedConnection(Timeouts(first_byte=0.1)) as wire:

        async def script(heard, reader, writer):
            await reader.read()

        wire.stage.script = script
        with pytest.raises(UpstreamTimeout):
            await wire.send()
    async with ScriptedConnection(Timeouts(idle=0.1)) as wire:
        wire.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
        reply = await wire.send()
        assert await reply.next_chunk() == b"abc"
        with pytest.raises(UpstreamTimeout):
            await reply.next_chunk()
        reply.close()


async def test_a_slow_head_does_not_use_up_the_body_s_pause():
    """A head that takes longer than the pause allowed inside a body is waited for."""
    async with ScriptedConnection(Timeouts(first_byte=5, idle=0.1)) as wire:

        async def script(heard, reader, writer):
            await asyncio.sleep(0.3)
            writer.write(raw_answer(b"late"))

        wire.stage.script = script
        assert await read_body(await wire.send()) == b"late"


async def test_the_error_of_a_streamed_body_is_what_the_caller_gets():
    """When the source of a body fails, that failure comes out, and the upstream sees no complete request."""

    async def source():
        yield b"half"
        raise RequestTimeout("The request body stopped coming.")

    async with ScriptedConnection() as wire:
        with pytest.raises(RequestTimeout):
            await wire.send(source(), headers=[("Content-Length", "8")])
        assert wire.stage.heard == []


async def test_the_targets_headers_win_and_a_forward_proxy_is_used():
    """Configured headers replace the client's; with a forward proxy the request goes there, whole URL first."""
    async with ScriptedConnection(headers={"X-Org": "ours"}) as wire:
        await read_body(await wire.send(headers=[("x-org", "theirs"), ("X-Other", "1")]))
        heard = wire.stage.heard[0]
        assert (heard.all("x-org"), heard.all("x-other")) == (["ours"], ["1"])
        via = DirectUpstream([Target("up", "http://upstream.invalid", proxy=f"http://127.0.0.1:{wire.stage.port}")])
        await read_body(await via.send("up", "GET", "/v1/models", [], None))
        assert wire.stage.heard[1].line == "GET http://upstream.invalid/v1/models HTTP/1.1"
        await via.close()


def test_a_target_never_shows_its_key():
    """Printing a target shows neither its key nor its headers."""
    assert "secret" not in repr(Target("up", "http://h", "secret", headers={"x": "secret"}))


async def test_nothing_is_sent_once_it_is_closed():
    """A call that comes after the end is told so like any that cannot be made."""
    async with ScriptedConnection() as wire:
        await wire.upstream.close()
        with pytest.raises(UpstreamUnreachable, match="shut down"):
            await wire.send()
        assert wire.stage.connections == 0


async def test_an_answer_that_never_ends_is_a_timeout():
    """Comments keep a connection alive, but not for ever: the whole answer has a time, too."""
    async with ScriptedConnection(Timeouts(idle=5, total=0.3)) as wire:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while not writer.transport.is_closing():
                writer.write(b": still here\n\n")
                await asyncio.sleep(0.01)

        wire.stage.script = script
        reply = await wire.send()
        parts = []
        with pytest.raises(UpstreamTimeout, match="did not end"):
            await asyncio.wait_for(read_into(parts, reply), 10)
        assert set(b"".join(parts).split(b"\n\n")) == {b": still here", b""}
        reply.close()
        assert await eventually(wire.stage.ended.is_set)


async def test_protocols_are_switched_only_if_asked_for():
    """A 101 to a plain request is no answer; to a request for a WebSocket it is one."""
    async with ScriptedConnection() as wire:
        wire.stage.reply = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nsmuggled"
        with pytest.raises(UpstreamUnreachable, match="switched protocols"):
            await wire.send()
        assert await eventually(wire.stage.ended.is_set)
        reply = await wire.upstream.upgrade("up", "/v1/realtime", [])
        assert reply.status == 101
        reply.tunnel().close()


async def test_headers_of_another_ullage_are_left_out():
    """What an upstream says under our own name does not pass: beside ours nobody could tell which is true."""
    async with ScriptedConnection() as wire:
        wire.stage.reply = raw_answer(b"{}", "X-Ullage-Outcome: compacted", "x-ullage-pressure: 9", "X-Other: 1")
        reply = await wire.send()
        assert [name.lower() for name, _ in reply.headers] == ["x-other", "content-length"]
        assert await read_body(reply) == b"{}"


async def test_an_idle_connection_is_kept_as_long_as_its_upstream_says():
    """A connection is used again at once, and no longer after the time set for its own upstream; 0 keeps none."""
    stage = ScriptedServer()
    async with listening(stage) as port:
        url = f"http://127.0.0.1:{port}"
        times = {"none": 0.0, "short": 0.3, "long": 60.0}
        upstream = DirectUpstream([Target(name, url, timeouts=Timeouts(keep_alive=s)) for name, s in times.items()])

        async def opened(name):
            before = stage.connections
            await read_body(await upstream.send(name, "POST", "/v1/x", [], b"{}"))
            return stage.connections - before

        assert [await opened("none"), await opened("none")] == [1, 1]
        assert [await opened(name) for name in ("short", "short", "long", "long")] == [1, 0, 1, 0]
        await asyncio.sleep(0.5)
        assert [await opened("short"), await opened("long")] == [1, 0]
        await upstream.close()


def test_connections_are_given_up_before_servers_close_them():
    """uvicorn and Node.js close after 5 s: a request sent at that moment would fail."""
    configured = servers.Upstream.model_validate({"name": "a", "base_url": "http://h"}).timeouts
    assert configured.keep_alive == Timeouts().keep_alive == 4


async def test_a_connection_for_which_no_descriptor_is_left_is_our_own_failure():
    """Without a file descriptor the caller is told to come back, it is counted, and the upstream is not blamed."""
    async with ScriptedConnection() as wire:
        with few_descriptors(0), pytest.raises(Overloaded, match="open files"):
            await asyncio.wait_for(wire.send(), 5)
        assert wire.upstream.without_descriptor == 3
        assert await read_body(await wire.send()) == b"{}"

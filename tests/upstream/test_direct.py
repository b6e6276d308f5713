import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from proxy.core.errors import RequestTimeout, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import DirectUpstream, Target, Timeouts
from tests.server.house import Stage, answer, eventually, listening


class Wire:
    """A stage and an upstream that points at it, for one test."""

    def __init__(self, timeouts=None, **target):
        self.stage = Stage()
        self.target = {"timeouts": timeouts or Timeouts(), **target}

    async def __aenter__(self):
        self.listening = listening(self.stage)
        port = await self.listening.__aenter__()
        self.upstream = DirectUpstream([Target("up", f"http://127.0.0.1:{port}", **self.target)])
        return self

    async def __aexit__(self, *failure):
        await self.upstream.close()
        await self.listening.__aexit__(*failure)

    async def send(self, body=b"{}", method="POST", path="/v1/x", headers=()):
        return await self.upstream.send("up", method, path, headers, body)


async def read_into(parts, reply):
    while chunk := await reply.next_chunk():
        parts.append(chunk)


async def body_of(reply):
    parts = []
    await read_into(parts, reply)
    return b"".join(parts)


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


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_bytes_go_and_come_unchanged(size):
    """Bodies of any size, empty ones too, are the same bytes at the other end, and the connection is reused."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with Wire() as wire:
        wire.stage.reply = answer(data)
        for _ in range(2):
            reply = await wire.send(data)
            assert await body_of(reply) == data
            reply.close()
        assert [heard.body for heard in wire.stage.heard] == [data, data]
        assert wire.stage.connections == 1


async def test_a_reply_that_was_not_read_costs_its_connection_and_nothing_else():
    """Closing an unread answer ends its connection; the next request is served on a new one."""
    async with Wire() as wire:
        wire.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
        (await wire.send()).close()
        assert await eventually(wire.stage.ended.is_set)
        wire.stage.reply = answer(b"ok")
        assert await body_of(await wire.send()) == b"ok"
        assert wire.stage.connections == 2


async def test_a_cancelled_read_loses_nothing():
    """Bytes that arrive after a read was cancelled are given to the next one."""
    async with Wire() as wire:
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
        assert await body_of(reply) == b"def"


@pytest.mark.parametrize("cut", range(0, 60, 3))
async def test_a_stream_cut_anywhere_gives_all_its_bytes_and_then_fails(cut):
    """Every byte that came before a break is handed out first."""
    text = b"".join(b"5\r\nab%dcd\r\n" % number for number in range(6))[:cut]
    async with Wire() as wire:

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
    stage = Stage()
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
    stage = Stage()
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
    async with Wire() as wire:
        wire.stage.reply = answer(b"first")
        await body_of(await wire.send())

        async def script(heard, reader, writer):
            writer.close()

        wire.stage.script = script
        with pytest.raises(UpstreamUnreachable, match="before it answered"):
            await wire.send(method=method)
        assert len(wire.stage.heard) == 2


async def test_an_answer_that_is_not_http():
    """Rubbish instead of an answer is the upstream's failure, not a crash."""
    async with Wire() as wire:
        wire.stage.reply = b"SSH-2.0-x\r\n\r\n"
        with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
            await wire.send()


async def test_silence_before_and_inside_an_answer():
    """The wait for the head and the pause inside a body have their own limits."""
    async with Wire(Timeouts(first_byte=0.1)) as wire:

        async def script(heard, reader, writer):
            await reader.read()

        wire.stage.script = script
        with pytest.raises(UpstreamTimeout):
            await wire.send()
    async with Wire(Timeouts(idle=0.1)) as wire:
        wire.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
        reply = await wire.send()
        assert await reply.next_chunk() == b"abc"
        with pytest.raises(UpstreamTimeout):
            await reply.next_chunk()
        reply.close()


async def test_a_slow_head_does_not_use_up_the_body_s_pause():
    """A head that takes longer than the pause allowed inside a body is waited for."""
    async with Wire(Timeouts(first_byte=5, idle=0.1)) as wire:

        async def script(heard, reader, writer):
            await asyncio.sleep(0.3)
            writer.write(answer(b"late"))

        wire.stage.script = script
        assert await body_of(await wire.send()) == b"late"


async def test_the_error_of_a_streamed_body_is_what_the_caller_gets():
    """When the source of a body fails, that failure comes out, and the upstream sees no complete request."""

    async def source():
        yield b"half"
        raise RequestTimeout("The request body stopped coming.")

    async with Wire() as wire:
        with pytest.raises(RequestTimeout):
            await wire.send(source(), headers=[("Content-Length", "8")])
        assert wire.stage.heard == []


async def test_the_targets_headers_win_and_a_forward_proxy_is_used():
    """Configured headers replace the client's; with a forward proxy the request goes there, whole URL first."""
    async with Wire(headers={"X-Org": "ours"}) as wire:
        await body_of(await wire.send(headers=[("x-org", "theirs"), ("X-Other", "1")]))
        heard = wire.stage.heard[0]
        assert (heard.all("x-org"), heard.all("x-other")) == (["ours"], ["1"])
        via = DirectUpstream([Target("up", "http://upstream.invalid", proxy=f"http://127.0.0.1:{wire.stage.port}")])
        await body_of(await via.send("up", "GET", "/v1/models", [], None))
        assert wire.stage.heard[1].line == "GET http://upstream.invalid/v1/models HTTP/1.1"
        await via.close()


def test_a_target_never_shows_its_key():
    """Printing a target shows neither its key nor its headers."""
    assert "secret" not in repr(Target("up", "http://h", "secret", headers={"x": "secret"}))

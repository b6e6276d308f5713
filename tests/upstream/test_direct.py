import asyncio
import gzip
import socket
import ssl

import pytest

from proxy.core.errors import NotFound, Overloaded, RequestTimeout, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import NO_HEADERS, EndToEnd
from proxy.settings import upstreams
from proxy.tasks import Tasks
from proxy.upstream import Bridge, Bridged, Target, Timeouts, Upstreams
from tests.support.certificates import self_signed
from tests.support.file_descriptors import few_descriptors
from tests.support.ports import free_port
from tests.support.server_fixture import ScriptedServer, eventually, listening, raw_answer
from tests.support.upstream_fixture import ScriptedConnection, read_body, read_into


async def test_a_cancelled_read_loses_nothing():
    """Bytes that arrive after a read was cancelled are given to the next one."""
    async with ScriptedConnection() as scripted:
        go = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
            await go.wait()
            writer.write(b"def")

        scripted.stage.script = script
        reply = await scripted.send()
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
        upstream = Upstreams([Target("gone", url.format(port=taken.getsockname()[1]))])
        with pytest.raises(UpstreamUnreachable, match="'gone'") as caught:
            await upstream.send("gone", "POST", "/v1/x", [], b"{}")
        assert ("resolve" in caught.value.cause) == ("invalid" in url)
        await upstream.close()


async def test_a_connection_that_was_refused_is_tried_again(monkeypatch):
    """An upstream that comes up a moment later gets the request, once."""
    monkeypatch.setattr(
        "proxy.upstream.direct._CONNECT_PAUSES", (0.05, *[0.2] * 100)
    )  # the moment may be long on a busy machine
    stage, port = ScriptedServer(), free_port()
    upstream = Upstreams([Target("up", f"http://127.0.0.1:{port}")])
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
    upstream = Upstreams([Target("up", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
    with pytest.raises(UpstreamUnreachable, match=r"TLS.*not trusted \(self.signed certificate.*SSL_CERT_FILE"):
        await upstream.send("up", "POST", "/v1/x", [("Authorization", "Bearer k")], b"{}")
    assert stage.heard == []
    await upstream.close()
    server.close()


async def test_a_server_that_speaks_no_tls_is_named_as_such():
    """The reason of a failed handshake is in the error: a wrong scheme in the base URL looks so."""

    async def answer_in_plain(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer_in_plain, "127.0.0.1", 0)
    upstream = Upstreams([Target("up", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
    with pytest.raises(UpstreamUnreachable, match=r"TLS connection could not be made \((?:wrong version|record)"):
        await upstream.send("up", "POST", "/v1/x", [], b"{}")
    await upstream.close()
    server.close()


@pytest.mark.parametrize("method", ["POST", "PATCH"])
@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "x-compress,chunked"])
async def test_a_transfer_coding_that_was_not_requested_is_no_answer(method, coding):
    """The header ends here, so that its client would take the coded bytes for the body."""
    async with ScriptedConnection() as scripted:
        body = gzip.compress(b"{}")
        head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {coding}\r\n\r\n".encode()
        scripted.stage.reply = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
            await scripted.send(method=method)
        scripted.stage.reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Identity, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        assert await read_body(await scripted.send(method=method)) == b"{}"


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_request_that_may_have_arrived_is_not_repeated(method):
    """When the connection breaks after the request was sent, it is not sent again."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = raw_answer(b"first")
        await read_body(await scripted.send())

        async def script(heard, reader, writer):
            writer.close()

        scripted.stage.script = script
        with pytest.raises(UpstreamUnreachable, match="before it answered"):
            await scripted.send(method=method)
        assert len(scripted.stage.heard) == 2


async def test_an_answer_that_is_not_http():
    """Rubbish instead of an answer is the upstream's failure, not a crash."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = b"SSH-2.0-x\r\n\r\n"
        with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
            await scripted.send()


async def test_silence_before_and_inside_an_answer():
    """The wait for the head and the pause inside a body have their own limits."""
    async with ScriptedConnection(Timeouts(first_byte=0.1)) as scripted:

        async def script(heard, reader, writer):
            await reader.read()

        scripted.stage.script = script
        with pytest.raises(UpstreamTimeout):
            await scripted.send()
    async with ScriptedConnection(Timeouts(idle=0.1)) as scripted:
        scripted.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
        reply = await scripted.send()
        assert await reply.next_chunk() == b"abc"
        with pytest.raises(UpstreamTimeout):
            await reply.next_chunk()
        reply.close()


async def test_a_slow_head_does_not_use_up_the_body_s_pause():
    """A head that takes longer than the pause allowed inside a body is waited for."""
    async with ScriptedConnection(Timeouts(first_byte=5, idle=0.1)) as scripted:

        async def script(heard, reader, writer):
            await asyncio.sleep(0.3)
            writer.write(raw_answer(b"late"))

        scripted.stage.script = script
        assert await read_body(await scripted.send()) == b"late"


async def test_the_error_of_a_streamed_body_is_what_the_caller_gets():
    """When the source of a body fails, that failure comes out, and the upstream sees no complete request."""

    async def source():
        yield b"half"
        raise RequestTimeout("The request body stopped coming.")

    async with ScriptedConnection() as scripted:
        with pytest.raises(RequestTimeout):
            await scripted.send(source(), headers=[("Content-Length", "8")])
        assert scripted.stage.heard == []


async def test_the_targets_headers_win():
    """Configured headers replace the client's; others go on."""
    async with ScriptedConnection(headers={"X-Org": "ours"}) as scripted:
        await read_body(await scripted.send(headers=[("x-org", "theirs"), ("X-Other", "1")]))
        heard = scripted.stage.heard[0]
        assert (heard.all("x-org"), heard.all("x-other")) == (["ours"], ["1"])


def test_a_target_never_shows_its_key():
    """Printing a target shows neither its key nor its headers."""
    assert "secret" not in repr(Target("up", "http://h", "secret", headers={"x": "secret"}))


async def test_nothing_is_sent_once_it_is_closed():
    """A call after ``close`` fails like any that cannot be made."""
    async with ScriptedConnection() as scripted:
        await scripted.upstream.close()
        with pytest.raises(UpstreamUnreachable, match="shut down"):
            await scripted.send()
        assert scripted.stage.connections == 0


async def test_an_answer_that_never_ends_is_a_timeout():
    """Comments keep a connection alive, but not for ever: the whole answer has a time, too."""
    async with ScriptedConnection(Timeouts(idle=5, total=0.3)) as scripted:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while not writer.transport.is_closing():
                writer.write(b": still here\n\n")
                await asyncio.sleep(0.01)

        scripted.stage.script = script
        reply = await scripted.send()
        parts = []
        with pytest.raises(UpstreamTimeout, match="did not end"):
            await asyncio.wait_for(read_into(parts, reply), 60)
        assert set(b"".join(parts).split(b"\n\n")) == {b": still here", b""}
        reply.close()
        assert await eventually(scripted.stage.ended.is_set)


async def test_protocols_are_switched_only_if_requested():
    """A 101 to a plain request is no answer; to a request for a WebSocket it is one."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = (
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nsmuggled"
        )
        with pytest.raises(UpstreamUnreachable, match="switched protocols"):
            await scripted.send()
        assert await eventually(scripted.stage.ended.is_set)
        reply = await scripted.upstream.upgrade("up", "/v1/realtime", [])
        assert reply.status == 101
        reply.tunnel().close()


async def test_headers_of_another_ullage_are_left_out():
    """An upstream's headers under our own name are removed: beside ours it would be unclear which are true."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = raw_answer(b"{}", "X-Ullage-Outcome: compacted", "x-ullage-pressure: 9", "X-Other: 1")
        reply = await scripted.send()
        assert [name.lower() for name, _ in reply.headers] == ["x-other", "content-length"]
        assert await read_body(reply) == b"{}"


async def test_an_idle_connection_is_kept_as_long_as_its_upstream_says():
    """A connection is used again at once, and no longer after the time set for its own upstream; 0 keeps none."""
    stage = ScriptedServer()
    async with listening(stage) as port:
        url = f"http://127.0.0.1:{port}"
        times = {"none": 0.0, "short": 0.3, "long": 60.0}
        upstream = Upstreams([Target(name, url, timeouts=Timeouts(keep_alive=s)) for name, s in times.items()])

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
    configured = upstreams.Upstream.model_validate({"name": "a", "base_url": "http://h"}).timeouts
    assert configured.keep_alive == Timeouts().keep_alive == 4


async def test_a_connection_for_which_no_descriptor_is_left_is_our_own_failure():
    """Without a file descriptor the caller gets a 503, which is counted, and the upstream is not blamed."""
    async with ScriptedConnection() as scripted:
        with few_descriptors(0), pytest.raises(Overloaded, match="open files"):
            await asyncio.wait_for(scripted.send(), 60)
        assert scripted.upstream.without_descriptor == 3
        assert await read_body(await scripted.send()) == b"{}"


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_bytes_go_and_come_unchanged(size):
    """Bodies of any size, empty ones too, are the same bytes at the other end, and the connection is reused."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = raw_answer(data)
        for _ in range(2):
            reply = await scripted.send(data)
            assert await read_body(reply) == data
            reply.close()
        assert [heard.body for heard in scripted.stage.heard] == [data, data]
        assert scripted.stage.connections == 1


async def test_a_reply_that_was_not_read_costs_its_connection_and_nothing_else():
    """Closing an unread answer ends its connection; the next request is served on a new one."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
        (await scripted.send()).close()
        assert await eventually(scripted.stage.ended.is_set)
        scripted.stage.reply = raw_answer(b"ok")
        assert await read_body(await scripted.send()) == b"ok"
        assert scripted.stage.connections == 2


@pytest.mark.parametrize("cut", range(0, 60, 3))
async def test_a_stream_cut_anywhere_gives_all_its_bytes_and_then_fails(cut):
    """Every byte that came before a break is handed out first."""
    text = b"".join(b"5\r\nab%dcd\r\n" % number for number in range(6))[:cut]
    async with ScriptedConnection() as scripted:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + text)
            await writer.drain()
            writer.close()

        scripted.stage.script = script
        reply = await scripted.send()
        got: list[bytes] = []
        with pytest.raises(UpstreamUnreachable):
            await read_into(got, reply)
        plain = b"".join(b"ab%dcd" % number for number in range(6))
        whole, rest = divmod(cut, 10)
        assert b"".join(got) == plain[: whole * 5 + min(5, max(0, rest - 3))]
        reply.close()


class Both:
    """An upstream that speaks for itself, one that is bridged, and one that is both, all on one stage."""

    async def __aenter__(self):
        self.stage = ScriptedServer()
        self.listening = listening(self.stage)
        base = f"http://127.0.0.1:{await self.listening.__aenter__()}"
        self.tasks = Tasks(lambda name, error: None)
        targets = [Target("straight", f"{base}/v1"), Target("both", f"{base}/v1")]
        bridged = [Bridged("bridged", "gemini", base), Bridged("both", "anthropic", base)]
        self.upstreams = Upstreams(targets, Bridge(bridged, self.tasks.spawn))
        return self

    async def __aexit__(self, *failure):
        await self.upstreams.close()
        await self.tasks.finish(1.0)
        await self.listening.__aexit__(*failure)


async def test_each_upstream_is_named_once():
    """All names, those of the direct ones first; only those answer more than chat completions."""
    async with Both() as both:
        assert both.upstreams.names == ("straight", "both", "bridged")
        assert [both.upstreams.speaks(name) for name in both.upstreams.names] == [True, True, False]


@pytest.mark.parametrize(
    ("target", "method", "path"),
    [
        ("straight", "POST", "/v1/chat/completions"),
        ("straight", "GET", "/v1/models"),
        ("both", "POST", "/v1/messages?beta=true"),
        ("both", "GET", "/v1/models"),
    ],
)
async def test_what_an_upstream_understands_goes_straight(target, method, path):
    """Bytes arrive as they were sent."""
    async with Both() as both:
        body = b'{ "model" : "m" }' if method == "POST" else None
        await read_body(await both.upstreams.send(target, method, path, [("x-api-key", "k")], body))
        (heard,) = both.stage.heard
        assert (heard.line, heard.body) == (f"{method} {path} HTTP/1.1", body or b"")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings"), ("POST", "/v1/messages"), ("GET", "/v1/chat/completions")]
)
async def test_what_a_provider_has_not_is_not_found(method, path):
    """A bridged upstream answers chat completions; anything else says so and is not sent."""
    async with Both() as both:
        with pytest.raises(NotFound, match="'bridged'"):
            await both.upstreams.send("bridged", method, path, [("x-api-key", "k")], b"{}")
        with pytest.raises(NotFound, match="'bridged'"):
            await both.upstreams.upgrade("bridged", "/v1/realtime", [])
        assert both.stage.heard == []


async def test_litellm_is_loaded_only_for_bridged_upstreams():
    """Without bridged upstreams warming up does nothing."""
    upstreams = Upstreams([], bridge := Bridge([], lambda work, name: None))
    await upstreams.warm()
    assert bridge._loading is None
    await upstreams.close()


async def test_added_headers_win():
    """A header added for a model replaces the client's."""
    async with Both() as both:
        sent = [("X-Tier", "mine"), ("x-api-key", "k")]
        await read_body(await both.upstreams.send("straight", "POST", "/v1/x", sent, b"{}", {"x-tier": "flex"}))
        assert both.stage.heard[0].all("x-tier") == ["flex"]


async def test_a_prepared_head_is_for_one_target_path_and_set_of_headers():
    """Whatever differs from the request before is sent, also behind a reload, which makes new targets."""
    headers = EndToEnd([("Authorization", "Bearer a"), ("X-A", "1")])
    async with ScriptedConnection() as plain, ScriptedConnection(api_key="own") as keyed:

        async def sent(scripted, path="/v1/x", headers=headers, added=NO_HEADERS):
            await read_body(await scripted.upstream.send("up", "POST", path, headers, b"{}", added))
            heard = scripted.stage.heard[-1]
            return heard.line.split()[1], heard.all("authorization"), heard.all("x-a"), heard.all("content-length")

        for _ in range(2):
            assert await sent(plain) == ("/v1/x", ["Bearer a"], ["1"], ["2"])
            assert await sent(plain, "/v1/y") == ("/v1/y", ["Bearer a"], ["1"], ["2"])
            assert await sent(keyed) == ("/v1/x", ["Bearer own"], ["1"], ["2"])
            assert await sent(plain, "/v1/y?key=b") == ("/v1/y?key=b", ["Bearer a"], ["1"], ["2"])
            assert await sent(plain, added={"x-a": "2"}) == ("/v1/x", ["Bearer a"], ["2"], ["2"])
        changed = EndToEnd([("Authorization", "Bearer b"), ("X-A", "1")])
        assert await sent(plain, headers=changed) == ("/v1/x", ["Bearer b"], ["1"], ["2"])
        assert await sent(plain) == ("/v1/x", ["Bearer a"], ["1"], ["2"])


async def test_a_key_in_a_query_is_not_prepared():
    """What holds it is forgotten with its request."""
    headers = EndToEnd([("X-A", "1")])
    async with ScriptedConnection() as scripted:
        await read_body(await scripted.upstream.send("up", "POST", "/v1/x?key=secret", headers, b"{}"))
        assert headers.prepared is None
        await read_body(await scripted.upstream.send("up", "POST", "/v1/x", headers, b"{}"))
        assert b"POST /v1/x HTTP/1.1" in headers.prepared.head

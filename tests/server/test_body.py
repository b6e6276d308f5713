import asyncio
import gzip
import zlib

import pytest

from proxy.server import Limits, ServerConfig
from proxy.server.body import renamed
from tests.support.server_fixture import eventually, running_server

SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, in_flight_bytes=300_000))


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b'{"a": 1}', mtime=0)),
        ("x-gzip", gzip.compress(b'{"a"', mtime=0) + gzip.compress(b": 1}", mtime=0)),
        ("deflate", zlib.compress(b'{"a": 1}')),
        ("deflate", zlib.compress(b'{"a": 1}', wbits=-15)),
        ("identity", b'{"a": 1}'),
    ],
)
async def test_a_compressed_body_is_read_and_sent_on_inflated(encoding, packed):
    """The engine and the upstream get the plain body, and no header claims otherwise."""
    async with running_server() as at:
        assert (await at.chat(packed, f"Content-Encoding: {encoding}")).line == "HTTP/1.1 200 OK"
        assert at.engine.seen[0].body == b'{"a": 1}'
        heard = at.stage.heard[0]
        assert (heard.body, heard.all("content-encoding")) == (b'{"a": 1}', [])


@pytest.mark.parametrize(
    ("encoding", "packed", "status"),
    [
        ("br", b"x", 415),
        ("zstd", b"x", 415),
        ("gzip, gzip", gzip.compress(b"{}", mtime=0), 415),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b"{}" * 100, mtime=0)[:-9], 400),
        ("deflate", b"\xff\xff\xff", 400),
        ("gzip", gzip.compress(bytes(100_001)), 413),
        ("gzip", gzip.compress(bytes(50_000_000)), 413),
        ("deflate", zlib.compress(bytes(50_000_000)), 413),
    ],
)
async def test_bodies_that_cannot_be_inflated_are_refused_readably(encoding, packed, status):
    """Unknown codings, broken data and bombs each get their status, and the upstream hears nothing."""
    async with running_server(SMALL) as at:
        got = await at.chat(packed, f"Content-Encoding: {encoding}")
        assert got.line.split()[1] == str(status)
        assert got.body.startswith(b'{"error"')
        assert at.stage.heard == []


async def test_a_declared_body_that_is_too_large_is_refused_before_it_is_sent():
    """413 comes at once, even for a client that waits for permission to send."""
    async with running_server(SMALL) as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n%b\r\n"
        for extra in (b"", b"Expect: 100-continue\r\n"):
            got = await asyncio.wait_for(at.raw(head % extra), 5)
            assert got.line.split()[1] == "413"
            assert got.all("connection") == ["close"]


async def test_a_flood_of_chunks_is_refused():
    """A body of unknown length is read up to the limit and no further."""
    async with running_server(SMALL) as at:
        chunks = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await at.raw(head + chunks * 11)).line.split()[1] == "413"
        assert (await at.raw(head + chunks * 9 + b"0\r\n\r\n")).line.split()[1] == "200"
        assert len(at.engine.seen[0].body) == 90_000


async def test_a_body_that_trickles_is_given_up():
    """A body slower than the floor speed is a 408."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3))) as at:
        got = await at.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert got.line.split()[1] == "408"
        assert b"request_timeout" in got.body


async def test_a_body_that_stops_is_given_up_however_much_came():
    """Bytes that came fast buy no more than one pause: a body that stops in its middle is a 408, too."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3, body_rate=1))) as at:
        for framing, body in (
            (b"Content-Length: 60000000", b"x" * 50_000),
            (b"Transfer-Encoding: chunked", b"2\r\n{}"),
        ):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n"
            got = await asyncio.wait_for(at.raw(head + body), 5)
            assert got.line.split()[1] == "408"
        assert await eventually(lambda: at.server.in_flight == 0)
        assert at.stage.heard == []


async def test_a_body_below_the_floor_speed_is_given_up_though_it_never_pauses():
    """A byte every now and then is no progress: without it a few bytes a minute would keep megabytes in memory."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3, body_rate=2**20))) as at:
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        trickle = asyncio.ensure_future(trickled(writer))
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).split()[1] == b"408"
        trickle.cancel()


async def test_an_upload_that_stops_is_given_up_at_both_ends():
    """A relayed upload is under the same rule: the client gets a 408 and the upstream's connection ends."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3))) as at:
        kind = b"Content-Type: multipart/form-data; boundary=x"
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\n" + kind + b"\r\nContent-Length: 60000000\r\n\r\n"
        got = await asyncio.wait_for(at.raw(head + b"x" * 50_000), 5)
        assert got.line.split()[1] == "408"
        assert await asyncio.wait_for(at.stage.ended.wait(), 5)
        assert await eventually(lambda: at.server.in_flight == 0)


@pytest.mark.slow
async def test_an_upload_slower_than_a_managed_body_may_be_arrives():
    """A body that is not read whole may come at the speed of a telephone line."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=1.0, body_rate=2**30, upload_rate=1))) as at:
        reader, writer = await at.connect()
        kind = b"Content-Type: multipart/form-data; boundary=x"
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\n" + kind + b"\r\nContent-Length: 40\r\n\r\n")
        for _ in range(40):
            await asyncio.sleep(0.05)
            writer.write(b"x")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)) == b"HTTP/1.1 200 OK\r\n"
        assert at.stage.heard[0].body == b"x" * 40


async def trickled(writer):
    """Write a byte every 50 ms."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.05)


async def test_a_slow_body_within_its_allowance_is_read():
    """A body that comes in pieces, but fast enough, is served."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        for byte in (b"{", b" ", b" ", b"}"):
            await asyncio.sleep(0.05)
            writer.write(byte)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)) == b"HTTP/1.1 200 OK\r\n"
        assert at.engine.seen[0].body == b"{  }"
        writer.close()


async def test_expect_is_answered_here():
    """A client that waits for permission gets it from the proxy, without the upstream."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)) == b"HTTP/1.1 200 OK\r\n"
        assert at.stage.heard[0].all("expect") == []
        writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upload_passes_while_it_arrives(chunked):
    """A relayed body reaches the upstream piece by piece, before the client has sent all of it."""
    async with running_server() as at:
        pieces: asyncio.Queue = asyncio.Queue()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            while data := await reader.read(2**20):
                pieces.put_nowait(data)
                if data.endswith((b"LAST", b"0\r\n\r\n")):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        at.stage.serve = serve
        reader, writer = await at.connect()
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 8"
        kind = b"Content-Type: multipart/form-data; boundary=x"
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\n" + kind + b"\r\n" + framing + b"\r\n\r\n")
        writer.write(b"4\r\nHALF\r\n" if chunked else b"HALF")
        assert b"HALF" in await asyncio.wait_for(pieces.get(), 5)
        writer.write(b"4\r\nLAST\r\n0\r\n\r\n" if chunked else b"LAST")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_a_large_upload_arrives_whole_whatever_the_body_limit():
    """Relayed bodies have no limit: 5 MB arrive byte for byte through a proxy that manages at most 100 KB."""
    body = bytes(range(256)) * 20_000
    async with running_server(SMALL) as at:
        got = await at.ask("POST", "/v1/files", body, "Content-Type: application/octet-stream")
        assert got.line.split()[1] == "200"
        assert at.stage.heard[0].body == body
        got = await at.ask("POST", "/v1/batches", b'{"x": "' + body[:50_000] + b'"}', "Content-Type: application/json")
        assert at.stage.heard[1].body == b'{"x": "' + body[:50_000] + b'"}'


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_may_unfold_a_hundredfold_and_no_further(encoding):
    """The ratio of what a body unfolds to is bounded, and the refusal names the setting; little is let pass."""
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    head = f"Content-Encoding: {encoding}"
    async with running_server(ServerConfig("up")) as at:
        assert (await at.chat(pack(b" " * 60_000), head)).line.split()[1] == "200"
        got = await at.chat(pack(b" " * 4_000_000), head)
        assert got.line.split()[1] == "413"
        assert b"server.limits.inflation" in got.body
        assert len(at.stage.heard) == 1
    async with running_server(ServerConfig("up", limits=Limits(inflation=2_000))) as at:
        assert (await at.chat(pack(b" " * 4_000_000), head)).line.split()[1] == "200"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"model":"fast","input":"fast"}', b'{"model":"own","input":"fast"}'),
        (b' {"input" : {"model":"fast"} , "model" : "fast" }\n', b' {"input" : {"model":"fast"} , "model" : "own" }\n'),
        ('{"input":"é","m\\u006fdel":"fast","ü":1.10}'.encode(), '{"input":"é","m\\u006fdel":"own","ü":1.10}'.encode()),
        (b'{"model":"a","model":"fast"}', b'{"model":"a","model":"own"}'),
    ],
)
def test_only_the_name_changes(body: bytes, found: bytes) -> None:
    """The top-level member is exchanged, wherever it stands and however it is spelled."""
    assert renamed(body, "own") == found


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input":1}', b"\xff", b"[" * 100_000])
def test_what_has_no_name_stays(body: bytes) -> None:
    """A body that is no object, or names no model, is passed as it is."""
    assert renamed(body, "own") is body

"""Heads: the size of a request, and when a head is the same again. Bodies: their limits, pace and deadlines."""

import asyncio

import pytest
from aiohttp import HttpVersion
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.server import Limits, ServerConfig
from proxy.server.access import Caller
from proxy.server.incoming import IncomingRequest, repeated_head
from proxy.server.request import read_headers, read_path
from tests.support.server_fixture import eventually, running_server

SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, in_flight_bytes=300_000))
CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\ncontent-LENGTH:  5\r\nX-Api-Key: k\r\n\r\n"


def request_with(*fields):
    """A request with header *fields*, parsed."""
    headers = CIMultiDictProxy(CIMultiDict([(name.decode(), value.decode()) for name, value in fields]))
    return IncomingRequest(None, "POST", CHAT, HttpVersion(1, 1), headers, fields, True, EMPTY_PAYLOAD, 5)


def test_a_head_without_exactly_one_length_is_not_remembered():
    """Nor is one of which the parser read another length."""
    length = (b"Content-Length", b"5")
    for head, fields in (
        (HEAD, ()),
        (HEAD, (length, length)),
        (HEAD, ((b"Content-Length", b"6"),)),
        (HEAD.replace(b"LENGTH", b"LENGT"), (length,)),
    ):
        assert repeated_head(head, request_with(*fields)) is None


def test_a_repeated_head_may_differ_in_its_content_length_only():
    """Every other byte of a head is compared."""
    head = repeated_head(HEAD, request_with((b"Content-Length", b"5")))
    assert head.match(HEAD + b"12345") == (len(HEAD), 5)
    assert head.match(HEAD.replace(b"5", b"770") + b"{") == (len(HEAD) + 2, 770)
    for other in (
        HEAD.replace(b"LENGTH", b"length"),
        HEAD.replace(b"Api-Key: k", b"Api-Key: K"),
        HEAD.replace(b"POST", b"PUT"),
        HEAD.replace(b"Host: a", b"Host: b"),
        HEAD[:-2] + b"X: y\r\n\r\n",
        HEAD.replace(b"X-Api-Key: k\r\n", b""),
        HEAD.replace(b"5\r", b"5 \r"),
        HEAD.replace(b"5\r", b"5,5\r"),
        HEAD.replace(b"5\r", b"\r"),
        HEAD.replace(b"5\r", b"1" * 13 + b"\r"),
        HEAD.replace(b"5\r", b"\xb2\r"),
        HEAD[:-1],
        HEAD[:60],
        b"",
    ):
        assert head.match(other) is None


def test_whose_head_may_repeat():
    """A caller's on a managed route, unless it is a browser's or its headers change on their way."""
    fields = ((b"Host", b"a"), (b"Content-Length", b"5"), (b"X-Api-Key", b"k"))
    managed, relayed = read_path("POST", CHAT), read_path("POST", "/v1/embeddings")
    assert Caller(read_headers(fields), managed).may_repeat
    assert not Caller(read_headers(fields), relayed).may_repeat
    for more in ((b"Content-Encoding", b"gzip"), (b"Origin", b"null"), (b"Upgrade", b"x"), (b"Expect", b"x")):
        assert not Caller(read_headers((*fields, more)), managed).may_repeat


async def test_a_declared_body_that_is_too_large_is_refused_before_it_is_sent():
    """413 comes at once, even for a client that waits for permission to send."""
    async with running_server(SMALL) as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n%b\r\n"
        for extra in (b"", b"Expect: 100-continue\r\n"):
            got = await asyncio.wait_for(at.raw(head % extra), 60)
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
            got = await asyncio.wait_for(at.raw(head + body), 60)
            assert got.line.split()[1] == "408"
        assert await eventually(lambda: at.server.in_flight == 0)
        assert at.stage.heard == []


async def test_a_body_below_the_floor_speed_is_given_up_though_it_never_pauses():
    """A byte every now and then is no progress: without it a few bytes a minute would keep megabytes in memory."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3, body_rate=2**20))) as at:
        reader, writer = await at.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        trickle = asyncio.ensure_future(trickled(writer))
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)).split()[1] == b"408"
        trickle.cancel()


async def test_an_upload_that_stops_is_given_up_at_both_ends():
    """A relayed upload is under the same rule: the client gets a 408 and the upstream's connection ends."""
    async with running_server(ServerConfig("up", limits=Limits(body_pause=0.3))) as at:
        kind = b"Content-Type: multipart/form-data; boundary=x"
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\n" + kind + b"\r\nContent-Length: 60000000\r\n\r\n"
        got = await asyncio.wait_for(at.raw(head + b"x" * 50_000), 60)
        assert got.line.split()[1] == "408"
        assert await asyncio.wait_for(at.stage.ended.wait(), 60)
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
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)) == b"HTTP/1.1 200 OK\r\n"
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
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)) == b"HTTP/1.1 200 OK\r\n"
        assert at.engine.seen[0].body == b"{  }"
        writer.close()


async def test_expect_is_answered_here():
    """A client that waits for permission gets it from the proxy, without the upstream."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)) == b"HTTP/1.1 200 OK\r\n"
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
        assert b"HALF" in await asyncio.wait_for(pieces.get(), 60)
        writer.write(b"4\r\nLAST\r\n0\r\n\r\n" if chunked else b"LAST")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)) == b"HTTP/1.1 200 OK\r\n"
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

"""The pool against servers that misbehave, and the private names of aiohttp that it uses."""

import asyncio
import inspect

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpResponseParser

from proxy.core.errors import UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import Target, Timeouts, Upstreams, pooled_response
from proxy.upstream.connection_pool import READ_BUFFER
from tests.support.server_fixture import chunk, eventually, raw_answer
from tests.support.upstream_fixture import ScriptedConnection, read_body, read_into

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def pool_of(scripted):
    """The pool of a scripted connection's upstream."""
    return scripted.upstream._targets["up"].pool


def writes(*parts, close=False, reset=False):
    """A script that writes *parts* one after the other, and then ends the connection if it is asked to."""

    async def script(heard, reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if reset:
            # With nothing left to send, SO_LINGER 0 makes the close a reset.
            sock = writer.get_extra_info("socket")
            sock.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
        if close or reset:
            writer.transport.abort()

    return script


def test_the_names_of_aiohttp_that_are_used():
    """This minor version of aiohttp is the one whose private names are known, and it has them."""
    assert aiohttp.__version__.startswith("3.14.")
    assert HttpResponseParser.__module__ == "aiohttp._http_parser"
    assert {"_reading_paused", "_parser", "transport"} <= set(BaseProtocol.__slots__)
    assert list(inspect.signature(BaseProtocol.resume_reading).parameters) == ["self", "resume_parser"]
    assert list(inspect.signature(aiohttp.TCPConnector.connect).parameters) == ["self", "req", "traces", "timeout"]


@pytest.mark.parametrize("pieces", [[], [b"one"], [b"one", b"two", b"three"]])
async def test_a_buffer_is_emptied_as_its_reader_does(pieces):
    """What is taken at once, and what is left of a reader's state but for the ends of chunks, is as it does it."""
    loop = asyncio.get_running_loop()
    taken, read = (aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop) for _ in range(2))
    for piece in pieces:
        for reader in (taken, read):
            reader.begin_http_chunk_receiving()
            reader.feed_data(piece)
            reader.end_http_chunk_receiving()
    assert pooled_response.take_all(taken) == read.read_nowait() == b"".join(pieces)
    others = set(aiohttp.StreamReader.__slots__) - {"_http_chunk_splits", "_protocol", "_timer"}
    assert {name: getattr(taken, name) for name in others} == {name: getattr(read, name) for name in others}
    taken.begin_http_chunk_receiving()
    taken.feed_data(b"more")
    taken.end_http_chunk_receiving()
    assert pooled_response.take_all(taken) == b"more"


async def test_a_handler_keeps_what_came_before_the_request():
    """aiohttp's protocol holds bytes for which there is no parser yet."""
    handler = ResponseHandler(asyncio.get_running_loop())
    handler.data_received(b"early")
    assert handler._tail == b"early"


async def test_what_is_written():
    """The request's line, ``Host`` first, the caller's headers in their order and spelling, then the length."""
    async with ScriptedConnection() as scripted:
        headers = [("X-B", "1"), ("x-a", "2"), ("Content-Length", "9")]
        await read_body(await scripted.send(b"{}", path="/v1/x?a=%2f", headers=headers))
        (heard,) = scripted.stage.heard
        assert heard.line == "POST /v1/x?a=%2f HTTP/1.1"
        host = ("Host", f"127.0.0.1:{scripted.stage.port}")
        assert heard.headers == [host, ("X-B", "1"), ("x-a", "2"), ("Content-Length", "2")]


async def test_headers_cannot_be_smuggled_in():
    """A line break inside a header's value sends nothing."""
    async with ScriptedConnection() as scripted:
        with pytest.raises(UpstreamUnreachable):
            await scripted.send(headers=[("x-a", "1\r\nx-b: 2")])
        assert scripted.stage.connections == 0


async def test_many_requests_use_one_connection():
    """One connection carries one exchange after the other, with bodies of each framing."""
    answers = [raw_answer(b"sized"), CHUNKED + chunk(b"chunked") + b"0\r\nTrailer: 1\r\n\r\n", raw_answer(b"")]
    answers.append(b"HTTP/1.1 204 No Content\r\n\r\n")
    async with ScriptedConnection() as scripted:
        bodies = []
        for answer in answers * 2:
            scripted.stage.reply = answer
            bodies.append(await read_body(await scripted.send()))
        assert bodies == [b"sized", b"chunked", b"", b""] * 2
        assert scripted.stage.connections == 1


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNKED + chunk(b"{}") + b"0\r\n\r", b"\n"),
        (CHUNKED + chunk(b"{}") + b"0\r\n", b"\r\n"),
        (CHUNKED + chunk(b"{}"), b"0\r\nX: 1\r\n", b"\r\n"),
        (raw_answer()[:-6], raw_answer()[-6:]),
        (raw_answer()[:20], raw_answer()[20:-1], b"}"),
    ],
)
async def test_an_answer_in_pieces_leaves_a_connection_that_is_used_again(parts):
    """However an answer is cut, nothing stands behind it."""
    async with ScriptedConnection() as scripted:
        for _ in range(2):
            scripted.stage.script = writes(*parts)
            assert await read_body(await scripted.send()) == b"{}"
            await asyncio.sleep(0.02)
        assert scripted.stage.connections == 1


@pytest.mark.parametrize("framing", ["sized", "chunked", "closed"])
async def test_chunks_are_poured_as_they_arrive(framing):
    """A sink gets every chunk at once, whatever the framing; then nothing is left to read."""
    texts = [b"a", b"b" * 300_000, b"c"]
    heads = {
        "sized": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % sum(map(len, texts)),
        "chunked": CHUNKED,
        "closed": b"HTTP/1.1 200 OK\r\n\r\n",
    }
    parts = [chunk(text) for text in texts] if framing == "chunked" else list(texts)
    if framing == "chunked":
        parts.append(b"0\r\n\r\n")
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(heads[framing], *parts, close=framing == "closed")
        reply = await scripted.send()
        got = []
        await asyncio.wait_for(reply.pour(lambda chunk: bool(got.append(chunk))), 60)
        assert b"".join(got) == b"".join(texts)
        assert (got[0], got[-1]) == (b"a", b"c")
        assert await reply.next_chunk() == b""
        assert len(pool_of(scripted).idle) == (framing != "closed")


@pytest.mark.parametrize("piece", [7, 5_000, 300_000])
@pytest.mark.parametrize("framing", ["sized", "chunked", "closed"])
@pytest.mark.slow
async def test_a_burst_that_pauses_the_connection_is_poured_whole_and_in_order(framing, piece):
    """Taking bytes lets a paused parser go on, and what it had then broke the answer."""
    whole = b"".join(b"%07d" % number for number in range(300_000))
    pieces = [whole[at : at + piece] for at in range(0, len(whole), piece)]
    head, burst = b"HTTP/1.1 200 OK\r\n\r\n", whole
    if framing == "sized":
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 + len(whole))
    if framing == "chunked":
        head, burst = CHUNKED, b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    first = chunk(b"-") if framing == "chunked" else b"-"
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(head + first, burst, close=framing == "closed")
        reply = await scripted.send()
        got = []
        await asyncio.wait_for(reply.pour(lambda chunk: bool(got.append(chunk))), 60)
        while more := await asyncio.wait_for(reply.next_chunk(), 60):
            got.append(more)
        assert b"".join(got) == b"-" + whole


async def test_the_end_of_a_burst_is_poured_without_waiting_for_more():
    """What a paused parser still had is not left for the next bytes, which may come minutes later."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(CHUNKED + chunk(b"x" * 150_000) * 4)
        reply = await scripted.send()
        await asyncio.sleep(0.05)
        got = []
        pouring = asyncio.ensure_future(reply.pour(lambda chunk: bool(got.append(chunk))))
        assert await eventually(lambda: sum(map(len, got)) == 600_000)
        pouring.cancel()


async def test_what_is_here_already_is_poured_first():
    """Chunks that came before the sink, and all of an answer that is complete, are not lost."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(CHUNKED + chunk(b"a") + chunk(b"b"), chunk(b"c") + b"0\r\n\r\n")
        reply = await scripted.send()
        got = []
        await reply.pour(lambda chunk: bool(got.append(chunk)))
        assert b"".join(got) == b"abc"
        scripted.stage.script = None
        reply = await scripted.send()
        await reply.pour(lambda chunk: bool(got.append(chunk)))
        assert b"".join(got) == b"abc{}"


async def test_a_sink_that_is_full_gets_no_more():
    """Pouring stops at its word and can go on; what came meanwhile waits."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(CHUNKED, *(chunk(b"%d" % number) for number in range(6)), b"0\r\n\r\n")
        reply = await scripted.send()
        got, times = [], 0
        while sum(map(len, got)) < 6:
            before = len(got)
            await asyncio.wait_for(reply.pour(lambda chunk: not got.append(chunk)), 60)
            assert len(got) == before + 1
            times += 1
            await asyncio.sleep(0.015)
        assert times > 1
        assert b"".join(got) == b"012345"


async def test_the_end_of_pouring():
    """A sink's error is raised to who pours; a reset, silence and too long an answer are left to ``next_chunk``."""
    async with ScriptedConnection(Timeouts(idle=0.3, total=0.6)) as scripted:

        def fails(chunk):
            raise KeyError(chunk)

        scripted.stage.script = writes(CHUNKED, chunk(b"a"))
        reply = await scripted.send()
        with pytest.raises(KeyError):
            await asyncio.wait_for(reply.pour(fails), 60)
        reply.close()
        scripted.stage.script = writes(CHUNKED, chunk(b"a"), reset=True)
        reply = await scripted.send()
        await asyncio.wait_for(reply.pour(lambda chunk: False), 60)
        with pytest.raises(UpstreamUnreachable):
            await reply.next_chunk()
        scripted.stage.script = writes(CHUNKED, chunk(b"a"))
        reply = await scripted.send()
        await asyncio.wait_for(reply.pour(lambda chunk: False), 60)
        with pytest.raises(UpstreamTimeout):
            await reply.next_chunk()
        scripted.stage.script = writes(CHUNKED, *[chunk(b"a")] * 100)
        reply = await scripted.send()
        await asyncio.wait_for(reply.pour(lambda chunk: False), 60)
        with pytest.raises(UpstreamTimeout, match="did not end"):
            await reply.next_chunk()


async def warm(scripted, reply):
    """Answer with *reply* twice. Return whether the second answer went past the parser."""
    scripted.stage.reply = reply
    await read_body(await scripted.send())
    again = await scripted.send()
    got = [await again.next_chunk()]
    await again.pour(lambda chunk: bool(got.append(chunk)))
    assert b"".join(got) in reply
    return again._response.known is not None


async def test_an_answer_whose_head_is_known_goes_past_the_parser():
    """Its body and headers are its own, whatever its length."""
    async with ScriptedConnection() as scripted:
        assert await warm(scripted, raw_answer(b"{}", "Content-Type: a", "X-Name: 1"))
        for body in (b"[1, 2, 3]", b"", b"[4, 5, 6]", b"{}"):
            scripted.stage.reply = raw_answer(body, "Content-Type: a", "X-Name: 1")
            reply = await scripted.send()
            assert reply._response.known is not None
            assert await read_body(reply) == body
            length = str(len(body))
            assert reply.headers == [("Content-Type", "a"), ("X-Name", "1"), ("Content-Length", length)]
            assert (reply.status, reply.header("content-length"), reply.header("x-name")) == (200, length, "1")
            assert not reply.close_delimited
        assert scripted.stage.connections == 1


@pytest.mark.parametrize(
    "other",
    [
        raw_answer(b"{}", "X-Name: 2"),
        raw_answer(b"{}", "x-Name: 1"),
        raw_answer(b"{}", "X-Name: 1", "X-More: 1"),
        raw_answer(b"{}", "X-Name: 1", status="201 Created"),
    ],
)
async def test_a_head_that_differs_in_one_byte_is_parsed(other):
    """No header of an earlier answer is taken for one of this."""
    async with ScriptedConnection() as scripted:
        assert await warm(scripted, raw_answer(b"{}", "X-Name: 1"))
        scripted.stage.reply = other
        reply = await scripted.send()
        assert reply._response.known is None
        async with ScriptedConnection() as fresh:
            fresh.stage.reply = other
            parsed = await fresh.send()
        assert (reply.status, reply.headers) == (parsed.status, parsed.headers)
        assert await read_body(reply) == b"{}"


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + chunk(b"{}") + b"0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
        raw_answer(b"{}", "X: " + "x" * 5000),
        raw_answer(b"{}", "Upgrade: h2c"),
    ],
)
async def test_a_head_that_says_more_than_a_length_is_always_parsed(answer):
    """So is a long one."""
    async with ScriptedConnection() as scripted:
        assert not await warm(scripted, answer)
        assert not await warm(scripted, answer)


@pytest.mark.parametrize(
    "parts", [(raw_answer()[:-1], b"}"), (raw_answer()[:30], raw_answer()[30:]), (raw_answer()[:-2], b"{}")]
)
async def test_an_answer_in_pieces_is_parsed_although_its_head_is_known(parts):
    """The connection is used again."""
    async with ScriptedConnection() as scripted:
        assert await warm(scripted, raw_answer())
        for script in (writes(*parts), None):
            scripted.stage.script = script
            assert await read_body(await scripted.send()) == b"{}"
        assert scripted.stage.connections == 1


@pytest.mark.parametrize("more", [b"HTTP/1.1 2", raw_answer(b"[]"), b"\r\n"])
async def test_what_stands_behind_an_answer_with_a_known_head_is_not_the_next_one(more):
    """The next request goes over another connection."""
    async with ScriptedConnection() as scripted:
        assert await warm(scripted, raw_answer())
        scripted.stage.script = writes(raw_answer() + more)
        assert await read_body(await scripted.send()) == b"{}"
        scripted.stage.script = None
        scripted.stage.reply = raw_answer(b"[1]")
        assert await read_body(await scripted.send()) == b"[1]"
        assert scripted.stage.connections == 2


async def test_heads_that_always_differ_are_not_remembered_for_long():
    """Most providers put a date or a name into each: then none is compared any more."""
    async with ScriptedConnection() as scripted:
        for number in range(5):
            scripted.stage.reply = raw_answer(b"{}", f"X-Request-Id: {number}")
            await read_body(await scripted.send())
        assert not await warm(scripted, raw_answer())
        assert scripted.stage.connections == 1


async def test_two_at_once_use_two_connections():
    """A connection carries one exchange at a time; afterwards both are kept."""
    async with ScriptedConnection() as scripted:
        for _ in range(2):
            replies = await asyncio.gather(*(scripted.send() for _ in range(5)))
            assert [await read_body(reply) for reply in replies] == [b"{}"] * 5
        assert scripted.stage.connections == 5
        assert len(pool_of(scripted).idle) == 5


@pytest.mark.parametrize(
    "parts",
    [
        (raw_answer(b"{}", "Connection: close"),),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",),
        (raw_answer() + raw_answer(b"[]"),),
        (raw_answer() + b"HTTP/1.1 100 Continue\r\n\r\n",),
        (raw_answer(), raw_answer(b"[]")),
        (raw_answer(), b"x"),
        (raw_answer() + b"HTTP/1.1 200 OK\r\nConte",),
        (raw_answer() + b"H",),
        (raw_answer()[:-5], raw_answer()[-5:] + b"H"),
        (raw_answer()[:-1], b"}HTTP"),
        (raw_answer()[:30], raw_answer()[30:] + b"HTTP/1.1 2"),
        (CHUNKED + chunk(b"{}") + b"0\r\n\r\nHTTP/1.1 2",),
        (CHUNKED + chunk(b"{}"), b"0\r\n\r", b"\nH"),
        (CHUNKED + chunk(b"{}"), b"0\r\n\r\nH"),
        (CHUNKED + chunk(b"{}") + b"0\r\nX: 1\r\n\r\nHT",),
    ],
)
async def test_a_connection_that_may_not_be_used_again(parts):
    """After ``Connection: close``, HTTP/1.0 or more bytes than one answer's, the next request has a new connection."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(*parts)
        assert await read_body(await scripted.send()) == b"{}"
        assert await eventually(lambda: not pool_of(scripted)._connections)
        scripted.stage.script = None
        scripted.stage.reply = raw_answer(b"mine")
        assert await read_body(await scripted.send()) == b"mine"
        assert scripted.stage.connections == 2


@pytest.mark.parametrize("excess", [b"\n\n", b"}}", b"<!-- served by a gateway -->\r\n\r\n", b"HTTP/9.9 oops\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_what_follows_a_whole_answer_does_not_spoil_it(excess, size):
    """However the bytes come; the next request has a new connection."""
    raw = raw_answer(b'{"a":1}') + excess
    async with ScriptedConnection() as scripted:
        for parts in ((raw,), (raw[:-size], raw[-size:]), (raw[: -len(excess) - size], raw[-len(excess) - size :])):
            scripted.stage.script = writes(*parts)
            reply = await scripted.send()
            assert (reply.status, await read_body(reply)) == (200, b'{"a":1}')
            await eventually(lambda: not pool_of(scripted)._connections)
        assert scripted.stage.connections == 3


async def test_interim_answers_are_passed_over():
    """1xx answers come before the answer, in the same bytes or before them."""
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with ScriptedConnection() as scripted:
        for parts in ((early + raw_answer(b"a"),), (early, early, raw_answer(b"a"))):
            scripted.stage.script = writes(*parts)
            reply = await scripted.send()
            assert (reply.status, await read_body(reply)) == (200, b"a")
        assert scripted.stage.connections == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_that_announces_one(status):
    """The length in a 304 is that of another answer's body: nothing is waited for, and the next answer is whole."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = f"HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\n".encode()
        reply = await scripted.send()
        assert await asyncio.wait_for(read_body(reply), 60) == b""
        scripted.stage.reply = raw_answer(b"next")
        assert await read_body(await scripted.send()) == b"next"


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: 1\r\n", b"HTTP/1", b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("reused", [False, True])
async def test_an_end_before_the_head_is_complete(head, ending, reused):
    """A connection that ends before an answer is an error, new or kept, and the request is not sent again."""
    async with ScriptedConnection() as scripted:
        if reused:
            await read_body(await scripted.send())
        scripted.stage.script = writes(head, **{ending: True})
        with pytest.raises(UpstreamUnreachable, match="before it answered"):
            await scripted.send()
        assert len(scripted.stage.heard) == 1 + reused


@pytest.mark.parametrize("framing", [b"", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_reset_inside_a_body(framing):
    """A body that a reset cut short fails after its last byte, whatever its framing."""
    text = chunk(b"abc") if b"chunked" in framing else b"abc"
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n" + text, reset=True)
        reply = await scripted.send()
        got = []
        with pytest.raises(UpstreamUnreachable, match="before the answer was complete"):
            await read_into(got, reply)
        assert b"".join(got) == b"abc"


async def test_a_body_that_the_connection_s_end_completes():
    """A body without framing ends with its connection."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", close=True)
        reply = await scripted.send()
        assert reply.close_delimited
        assert await read_body(reply) == b"abcdef"
        reply.close()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**16 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: \0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1_001,
    ],
)
async def test_heads_that_are_no_http(rubbish):
    """Invalid and oversized heads are the upstream's failure, and end the connection."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = rubbish
        with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
            await scripted.send()
        assert await eventually(scripted.stage.ended.is_set)


async def test_framing_that_breaks_inside_a_body():
    """The bytes before broken framing come first, then the failure."""
    async with ScriptedConnection() as scripted:
        scripted.stage.script = writes(CHUNKED + chunk(b"abc"), b"zz\r\n")
        reply = await scripted.send()
        got = []
        with pytest.raises(UpstreamUnreachable, match="before the answer was complete"):
            await read_into(got, reply)
        assert got == [b"abc"]
        assert await eventually(scripted.stage.ended.is_set)


async def answer_before_the_request(greeting):
    """The outcome of a request to a server that sends *greeting* as soon as it is connected."""

    async def greet(reader, writer):
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstreams([Target("up", f"http://127.0.0.1:{port}")])
    try:
        return await asyncio.wait_for(read_body(await upstream.send("up", "POST", "/v1/x", [], b"{}")), 60)
    finally:
        await upstream.close()
        server.close()


async def test_a_server_that_speaks_first():
    """Bytes that came before the request are its answer, if they are one."""
    assert await answer_before_the_request(raw_answer(b"full", status="503 Busy")) == b"full"
    with pytest.raises(UpstreamUnreachable, match="not valid HTTP"):
        await answer_before_the_request(b"220 mail.example ESMTP\r\n")


async def test_an_answer_before_the_request_is_read():
    """An early answer is given out while the request is still being written; that connection carries no other."""
    async with ScriptedConnection() as scripted:
        served = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw_answer(b"no", status="413 Too Large"))
            await served.wait()
            writer.close()

        scripted.stage.serve = serve
        reply = await asyncio.wait_for(scripted.send(b"x" * 30_000_000), 60)
        assert (reply.status, await read_body(reply)) == (413, b"no")
        assert not pool_of(scripted).idle
        served.set()


async def test_the_wait_for_the_head_begins_when_the_request_is_written():
    """A slow upload is not a slow answer."""
    async with ScriptedConnection(Timeouts(first_byte=0.3)) as scripted:

        async def serve(reader, writer):
            writer.transport.pause_reading()
            await asyncio.sleep(0.8)
            writer.transport.resume_reading()
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(30_000_000)
            writer.write(raw_answer(b"late"))
            writer.close()

        scripted.stage.serve = serve
        assert await read_body(await scripted.send(b"x" * 30_000_000)) == b"late"


async def test_a_slow_reader_holds_the_upstream_back():
    """What nobody reads stays with the upstream, its silence is not counted, and every byte arrives in the end."""
    data = bytes(range(256)) * 2**16
    async with ScriptedConnection(Timeouts(idle=0.2)) as scripted:
        scripted.stage.reply = raw_answer(data)
        reply = await scripted.send()
        await asyncio.sleep(0.6)
        assert reply._response.content._size < 8 * READ_BUFFER
        assert await read_body(reply) == data
        scripted.stage.reply = raw_answer(b"next")
        assert await read_body(await scripted.send()) == b"next"
        assert scripted.stage.connections == 1


async def test_many_small_chunks_that_pause_leave_the_connection_in_order():
    """A pause after the last chunks of one answer does not halt the next."""
    small = CHUNKED + chunk(b"x") * 20_000 + b"0\r\n\r\n"
    async with ScriptedConnection() as scripted:
        for _ in range(3):
            scripted.stage.reply = small
            reply = await scripted.send()
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(read_body(reply), 60) == b"x" * 20_000
            scripted.stage.reply = CHUNKED + chunk(b"next") + b"0\r\n\r\n"
            assert await asyncio.wait_for(read_body(await scripted.send()), 60) == b"next"


async def test_an_old_reply_cannot_touch_the_next_exchange():
    """Closing a reply that was complete leaves the connection to whoever has it now."""
    async with ScriptedConnection() as scripted:
        first = await scripted.send()
        await read_body(first)
        go = asyncio.Event()

        async def script(heard, reader, writer):
            await go.wait()
            writer.write(raw_answer(b"second"))

        scripted.stage.script = script
        second = asyncio.ensure_future(scripted.send())
        await asyncio.sleep(0.05)
        first.close()
        go.set()
        assert await read_body(await second) == b"second"
        assert scripted.stage.connections == 1


async def test_a_cancelled_request_ends_its_connection():
    """A caller that gives up before the head resets the connection, and the next request has another."""
    async with ScriptedConnection() as scripted:

        async def script(heard, reader, writer):
            await reader.read()

        scripted.stage.script = script
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scripted.send(), 0.1)
        assert await eventually(scripted.stage.ended.is_set)
        scripted.stage.script = None
        assert await read_body(await scripted.send()) == b"{}"
        assert scripted.stage.connections == 2


async def test_idle_connections_are_closed_and_the_watch_ends():
    """Idle connections are closed after their time, without another request; then no timer is left."""
    async with ScriptedConnection(Timeouts(keep_alive=0.1)) as scripted:
        await read_body(await scripted.send())
        assert len(pool_of(scripted).idle) == 1
        assert await eventually(scripted.stage.ended.is_set)
        assert await eventually(lambda: not pool_of(scripted)._connections)
        assert await eventually(lambda: pool_of(scripted)._timer is None)


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 102 Processing\r\n\r\n"])
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_head_that_comes_in_drops_is_not_waited_for_without_end(interim, method):
    """Bytes of a head, and answers before the answer, extend the wait for it, but not without end."""
    limits = Timeouts(first_byte=0.3 if method == "POST" and not interim else 60, total=0.9)
    async with ScriptedConnection(limits) as scripted:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nX: " if not interim else b"")
            while not reader.at_eof():
                writer.write(interim or b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

        scripted.stage.script = script
        body = b"{}" if method == "POST" else None
        with pytest.raises(UpstreamTimeout):
            await asyncio.wait_for(scripted.send(body, method), 60)
        assert await eventually(scripted.stage.ended.is_set)


async def test_an_interim_answer_extends_the_wait_for_the_answer():
    """A server that works for long and says so is waited for."""
    async with ScriptedConnection(Timeouts(first_byte=0.5)) as scripted:

        async def script(heard, reader, writer):
            for _ in range(8):
                await asyncio.sleep(0.1)
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            writer.write(raw_answer(b"done"))

        scripted.stage.script = script
        assert await read_body(await scripted.send()) == b"done"


async def test_a_body_that_goes_silent():
    """Silence inside a body is a timeout after its last byte; single bytes in time are none."""
    async with ScriptedConnection(Timeouts(idle=0.3)) as scripted:

        async def script(heard, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
            for _ in range(6):
                await asyncio.sleep(0.1)
                writer.write(b"x")
            await reader.read()

        scripted.stage.script = script
        reply = await scripted.send()
        got = []
        with pytest.raises(UpstreamTimeout):
            await asyncio.wait_for(read_into(got, reply), 60)
        assert b"".join(got) == b"x" * 6
        assert await eventually(scripted.stage.ended.is_set)


async def test_closing_breaks_what_is_under_way():
    """At the end a waiting request and an unfinished body fail, even one that its connection's end would complete."""
    async with ScriptedConnection() as scripted:
        scripted.stage.reply = b"HTTP/1.1 200 OK\r\n\r\nabc"
        reply = await scripted.send()

        async def script(heard, reader, writer):
            await reader.read()

        scripted.stage.script = script
        waiting = asyncio.ensure_future(scripted.send())
        await asyncio.sleep(0.05)
        await asyncio.wait_for(scripted.upstream.close(), 60)
        with pytest.raises(UpstreamUnreachable):
            await waiting
        with pytest.raises(UpstreamUnreachable):
            await read_into([], reply)
        assert not pool_of(scripted)._connections

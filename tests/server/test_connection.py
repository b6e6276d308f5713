"""Connections: what is no request, what comes slowly, and heads that come again and go past the parser."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol

from proxy.server import Limits, ServerConfig
from tests.support.server_fixture import eventually, read_request, running_server


async def test_a_body_that_is_not_http_is_a_400():
    """A broken chunk is the client's mistake, and its bytes are not repeated to it."""
    async with running_server() as at:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        got = await at.raw(head + b"SECRET\r\n")
        assert got.line.split()[1] == "400"
        assert b"SECRET" not in got.body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-SECRET : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
        b"SECRET\r\n\r\n",
    ],
)
async def test_requests_that_could_be_read_in_two_ways_are_refused(request_bytes):
    """Ambiguous or malformed requests get a fixed 400 and the connection ends."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(request_bytes)
        got = await asyncio.wait_for(reader.read(), 60)
        assert got.split(b"\r\n")[0] in (b"HTTP/1.0 400 Bad Request", b"HTTP/1.1 400 Bad Request")
        assert b"SECRET" not in got
        writer.close()
        assert at.stage.heard == []


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


def fields(count, size):
    return b"".join(b"X-%d: %b\r\n" % (number, b"a" * size) for number in range(count))


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + fields(5, 30_000) + b"\r\n",
        GET + fields(5, 30_000),
        GET + fields(100, 1) + b"\r\n",
        GET + fields(100, 1) + b"X-more: 1\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused(head):
    """One field, all of them or their number: above a limit the answer is a 431, whether the head ends or not."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(head)
        got = await asyncio.wait_for(reader.read(), 60)
        assert got.split(b" ")[1] == b"431"
        assert b"server.limits.head" in got
        assert b"aaaa" not in got
        assert (at.stage.heard, at.server.refusals) == ([], {"head_too_large": 1})


async def test_a_head_that_is_far_too_large_is_refused_in_order():
    """A client that first sends its whole head, and only then looks for an answer, finds it: nothing is reset."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(GET)
        for _ in range(40):
            writer.write(fields(1, 100_000))
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(0.002)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 431 ")
        writer.write(b"\r\n")
        await asyncio.wait_for(writer.drain(), 60)


@pytest.mark.parametrize(
    ("start", "status"), [(GET, b"431"), (b"", b"431"), (CHUNKED + b"0\r\n", b"400"), (CHUNKED + b"1;ext=", b"400")]
)
async def test_the_unread_part_of_a_request_is_bounded(start, status):
    """Heads, trailers and chunk extensions that never end are refused at the limit, however slowly they come."""
    async with running_server(ServerConfig("up", limits=Limits(head=20_000, header=10_000, fields=1000))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        answered = asyncio.ensure_future(reader.readuntil(b"\r\n"))
        sent = 0
        while not answered.done() and sent < 200_000:
            piece = b"a" * 1000 if b"ext" in start else b"X-%d: %b\r\n" % (sent, b"a" * 1000)
            writer.write(piece if start or sent else GET + piece)
            sent += len(piece)
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(answered, 60)).split()[1] == status
        assert sent < 100_000
        assert at.stage.heard == []


async def test_a_head_counts_anew_for_each_request_and_bodies_do_not_count():
    """A connection may carry any number of heads and bytes of bodies, as long as each head is within the limit."""
    async with running_server(ServerConfig("up", limits=Limits(head=20_000, header=10_000))) as at:
        reader, writer = await at.connect()
        body = b"x" * 100_000
        framed = b"".join(b"3e8\r\n" + b"x" * 1000 + b"\r\n" for _ in range(100)) + b"0\r\nX-Trailer: 1\r\n\r\n"
        post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + fields(15, 1000)
        for _ in range(3):
            for request in (
                post + b"Content-Length: 100000\r\n\r\n" + body,
                post + b"Transfer-Encoding: chunked\r\n\r\n" + framed,
            ):
                for start in range(0, len(request), 7000):
                    writer.write(request[start : start + 7000])
                    await asyncio.sleep(0.001)
                heard = await asyncio.wait_for(read_request(reader), 60)
                assert heard.line == "HTTP/1.1 200 OK"
        assert [len(heard.body) for heard in at.stage.heard] == [100_000] * 6
        assert at.server.refusals == {}


async def test_requests_in_one_go_are_all_answered_in_order():
    """Pipelined requests wait in the socket, not in memory, and none is lost."""
    async with running_server() as at:
        reader, writer = await at.connect()
        for number in range(200):
            writer.write(b"GET /v1/models/m%d HTTP/1.1\r\nHost: x\r\n\r\n" % number)
        for _ in range(200):
            heard = await asyncio.wait_for(read_request(reader), 60)
            assert heard.line == "HTTP/1.1 200 OK"
        assert [heard.line.split()[1] for heard in at.stage.heard] == [f"/v1/models/m{number}" for number in range(200)]


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1/models HTTP/1.1\r\nHos", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_idle_connections_and_trickled_headers_are_cut(start):
    """A connection on which no whole request arrives in time is closed, whether fresh, half sent or used before."""
    async with running_server(ServerConfig("up", limits=Limits(first_request=0.3, keep_alive=0.3))) as at:
        reader, writer = await at.connect()
        writer.write(start)
        got = await asyncio.wait_for(reader.read(), 60)
        assert (got != b"") == start.endswith(b"\r\n\r\n")


async def test_long_headers_up_to_the_limit_pass():
    """A header field of 30 KB goes through, both ways."""
    async with running_server() as at:
        at.stage.reply = b"HTTP/1.1 200 OK\r\nX-Long: " + b"b" * 30_000 + b"\r\nContent-Length: 0\r\n\r\n"
        got = await at.chat(b"{}", "X-Long: " + "a" * 30_000)
        assert got.all("x-long") == ["b" * 30_000]
        assert at.stage.heard[0].all("x-long") == ["a" * 30_000]


def test_the_names_of_aiohttp_that_are_used_exist():
    """They are private: a new minor version may rename them, and then this says so first."""
    used = {
        "_messages",
        "_waiter",
        "_handler_waiter",
        "_request_in_progress",
        "_task_handler",
        "_force_close",
        "_close",
    }
    used |= {"_next_keepalive_close_time", "_keepalive_handle", "_keepalive_timeout", "_lingering_time"}
    used |= {"_payload_parser", "_message_tail", "_max_msg_queue_size", "_msg_queue_resume_size"}
    assert used <= set(web.RequestHandler.__slots__)
    assert {"_parser", "_upgraded", "_reading_paused", "_buffer_paused", "_loop"} <= set(BaseProtocol.__slots__)
    for name in ("_process_keepalive", "_resume_reading_if_drained", "_pause_transport_reading", "_drain_helper"):
        assert callable(getattr(web.RequestHandler, name))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: k\r\nContent-Length: %d\r\nX-Last: 1\r\n\r\n"


def chat(text, head=HEAD):
    """A request whose body holds *text*."""
    body = b'{"model":"m","x":"%b"}' % text
    return head % len(body) + body


async def answered(reader):
    """The status of the next answer."""
    heard = await asyncio.wait_for(read_request(reader), 60)
    return heard.line.split()[1]


def bodies(at):
    return [heard.body for heard in at.stage.heard]


def went_past_the_parser(at, first, second):
    """True if the head of one request was known from the other: both have the very same headers."""
    seen = at.engine.seen
    return seen[first].origin.headers is seen[second].origin.headers


async def test_a_head_that_comes_again_goes_past_the_parser():
    """Only the length may differ. Each body arrives as it was sent; a long one goes through the parser all the same."""
    async with running_server() as at:
        reader, writer = await at.connect()
        texts = [b"a", b"b" * 500, b"", b"c" * 300_000, b"c" * 1_300_000, b"d" * 9]
        for text in texts:
            writer.write(chat(text))
            assert await answered(reader) == "200"
        writer.write(HEAD % 0)
        assert await answered(reader) == "200"
        assert bodies(at) == [*(chat(text).partition(b"\r\n\r\n")[2] for text in texts), b""]
        known = [went_past_the_parser(at, number - 1, number) for number in range(1, 7)]
        assert known == [True, True, True, False, True, True]


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("cut", [1, 30, 60, 90, 103, 104, 105, 110, 400, 639])
async def test_a_request_in_two_pieces_is_read_as_one(cut, warm):
    """Wherever it is cut, in its head or its body, known or not; and so is the one behind it."""
    async with running_server() as at:
        reader, writer = await at.connect()
        request = chat(b"z" * 512)
        for _ in range(warm):
            writer.write(chat(b"warm"))
            assert await answered(reader) == "200"
        writer.write(request[:cut])
        await asyncio.sleep(0.02)
        writer.write(request[cut:])
        assert await answered(reader) == "200"
        writer.write(chat(b"next"))
        assert await answered(reader) == "200"
        assert bodies(at)[warm:] == [request.partition(b"\r\n\r\n")[2], b'{"model":"m","x":"next"}']
        assert went_past_the_parser(at, -2, -1) == (cut >= request.index(b"{"))


@pytest.mark.parametrize("step", [1, 50, 170, 1000])
async def test_requests_that_do_not_wait_are_answered_in_order(step):
    """Behind a known head comes whatever comes: the same one, another, a chunked body, a GET."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(chat(b"first"))
        assert await answered(reader) == "200"
        other = chat(b"other", HEAD.replace(b"X-Last: 1", b"X-Last: 2"))
        text = b'{"model":"m","x":"chunked"}'
        chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
        get = b"GET /v1/models/m HTTP/1.1\r\nHost: x\r\n\r\n"
        sent = b"".join([chat(b"one"), chat(b"two"), other, chunked, chat(b"three"), get, chat(b"four")])
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            if step > 1:
                await asyncio.sleep(0.001)
        assert [await answered(reader) for _ in range(7)] == ["200"] * 7
        words = [b"first", b"one", b"two", b"other", b"chunked", b"three", b"", b"four"]
        assert [body.partition(b'"x":"')[2][:-2] for body in bodies(at)] == words


@pytest.mark.parametrize("digits", [b"+2", b" 2", b"2 ", b"0x2", b"2, 2", b"-2", b"", b"1" * 13, b"\xb2"])
async def test_a_length_that_is_no_plain_number_is_the_parsers(digits):
    """A known head with a strange length is answered as if it were the first one on its connection."""
    head = HEAD.replace(b"%d", b"%b")
    statuses = []
    async with running_server() as at:
        for warm in (False, True):
            reader, writer = await at.connect()
            if warm:
                writer.write(chat(b"a"))
                assert await answered(reader) == "200"
            writer.write(head % digits + b"{}")
            statuses.append(await answered(reader))
    assert statuses[0] == statuses[1]
    assert statuses[0] in ("200", "400", "413")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n",
        b"PUT /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
    ],
)
async def test_other_heads_come_again_as_well(head):
    """What may not go past the parser, or need not, is answered the second and third time as the first time."""
    async with running_server() as at:
        reader, writer = await at.connect()
        for number in range(3):
            fields, _, body = chat(b"%d" % number, head).partition(b"\r\n\r\n")
            writer.write(fields + b"\r\n\r\n")
            if b"Expect" in head:
                assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            got = await asyncio.wait_for(read_request(reader), 60)
            assert got.line.split()[1] == "200"
            assert (got.all("connection") == ["keep-alive"]) == (b"HTTP/1.0" in head)
        assert bodies(at) == [b'{"model":"m","x":"%d"}' % number for number in range(3)]


@pytest.mark.slow
async def test_the_limits_hold_for_a_known_head():
    """A body that is too large is refused by its length, one that stops coming after a while."""
    async with running_server(ServerConfig("up", limits=Limits(body=1000, body_pause=0.2))) as at:
        for sent, status in ((HEAD % 5000, "413"), (HEAD % 500 + b"{", "408")):
            reader, writer = await at.connect()
            writer.write(chat(b"a"))
            assert await answered(reader) == "200"
            writer.write(sent)
            assert await answered(reader) == status
            assert await asyncio.wait_for(reader.read(), 60) == b""
        assert len(at.stage.heard) == 2
        assert at.server.in_flight == 0


async def test_a_client_that_leaves_in_the_middle_of_a_body_is_forgotten():
    """Its request never reaches the engine, and is reported once."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(chat(b"a"))
        assert await answered(reader) == "200"
        writer.write(HEAD % 500 + b"{")
        assert await eventually(lambda: at.server.in_flight == 1)
        writer.close()
        assert await eventually(lambda: at.server.in_flight == 0)
        assert [report.reason for report in at.reports] == ["", "client_left"]
        assert len(at.engine.seen) == 1


async def test_an_upload_faster_than_it_is_read_is_paused():
    """A body above the buffer pauses the connection and goes on, past the parser as through it."""
    async with running_server(ServerConfig("up", limits=Limits(in_flight=1))) as at:
        reader, writer = await at.connect()
        for size in (10, 3_000_000, 10):
            request = chat(b"u" * size)
            writer.write(request[:2_000])
            await asyncio.sleep(0.01)
            writer.write(request[2_000:])
            assert await answered(reader) == "200"
            assert bodies(at)[-1] == request.partition(b"\r\n\r\n")[2]


@pytest.mark.slow
async def test_the_keep_alive_time_does_not_run_while_a_request_is_answered():
    """An answer that takes longer than it arrives on the first request of a connection, and on a repeated one."""
    async with running_server(ServerConfig("up", limits=Limits(first_request=0.5, keep_alive=0.5))) as at:

        async def script(heard, reader, writer):
            await asyncio.sleep(0.7)
            writer.write(at.stage.reply)

        at.stage.script = script
        reader, writer = await at.connect()
        for _ in range(2):
            writer.write(chat(b"a"))
            assert await answered(reader) == "200"
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_requests_behind_an_upgrade_that_was_refused_are_answered():
    """They came in one go with it, and wait until it has its answer."""
    async with running_server(ServerConfig("up", websockets="refuse")) as at:
        reader, writer = await at.connect()
        upgrade = b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        writer.write(upgrade + chat(b"a") + upgrade + chat(b"b"))
        assert [await answered(reader) for _ in range(4)] == ["426", "200", "426", "200"]


async def test_the_end_of_a_connection_ends_nothing_else(caplog):
    """A bug of ours outside of any request closes its connection, and is logged."""
    async with running_server() as at:
        listener = at.server._listener
        reader, writer = await at.connect()
        assert await eventually(lambda: len(listener.connections) == 1)

        async def fails(request):
            raise KeyError("SECRET")

        listener.connections[0].handle = fails
        writer.write(chat(b"a"))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert [record.message for record in caplog.records] == ["connection failed"]
        assert (await at.chat()).line == "HTTP/1.1 200 OK"


async def test_a_fault_in_reading_a_head_ends_its_connection(monkeypatch, caplog):
    """The client is not left waiting for an answer that nothing makes any more."""
    async with running_server() as at:
        reader, writer = await at.connect()
        with monkeypatch.context() as faulty:
            faulty.setattr("proxy.server.connection.parsed_request", None)
            writer.write(chat(b"a"))
            assert await asyncio.wait_for(reader.read(), 60) == b""
        assert [record.message for record in caplog.records] == ["connection failed"]
        assert (await at.chat()).line == "HTTP/1.1 200 OK"


async def test_a_head_is_never_taken_for_that_of_another_request():
    """Heads that arrive while others are answered are not mixed up with theirs."""
    async with running_server() as at:
        may_go_on = asyncio.Event()

        async def script(heard, reader, writer):
            await may_go_on.wait()
            writer.write(at.stage.reply)

        at.stage.script = script
        reader, writer = await at.connect()
        kinds = [b"POST /v1/chat/completions", b"POST /v1/messages", b"POST /v1/embeddings"]
        heads = [HEAD.replace(kinds[0], kind).replace(b"Key: k", b"Key: k%d" % at) for at, kind in enumerate(kinds)]
        for head in heads:
            writer.write(chat(b"a", head))
            await asyncio.sleep(0.05)
        may_go_on.set()
        assert [await answered(reader) for _ in heads] == ["200"] * 3
        for head in reversed(heads):
            writer.write(chat(b"b", head))
            assert await answered(reader) == "200"
        lines = [(heard.line.split()[1], heard.all("x-api-key")[0]) for heard in at.stage.heard]
        assert lines[:3] == lines[:2:-1]
        assert len(set(lines)) == 3


async def test_what_a_header_quotes_is_no_request():
    """Behind a body past the parser, a part of a head may be as long as the request that was parsed before."""
    async with running_server() as at:
        reader, writer = await at.connect()
        first, second = chat(b"first"), chat(b"second")
        writer.write(first)
        assert await answered(reader) == "200"
        writer.write(second[:-5])
        await asyncio.sleep(0.005)
        writer.write(second[-5:] + b"POST /v1/embeddings HTTP/1.1\r\nX-Quote: ".ljust(len(first), b"-"))
        assert await answered(reader) == "200"
        writer.write(chat(b"quoted"))
        assert await answered(reader) == "200"
        assert [heard.line.split()[1] for heard in at.stage.heard][2:] == ["/v1/embeddings"]


async def test_the_answer_to_a_body_that_nobody_wants_arrives():
    """What still comes of it is read for a while: closing at once would reset the connection."""
    async with running_server(ServerConfig("up", limits=Limits(body=1000))) as at:
        reader, writer = await at.connect()
        writer.write(HEAD % 400_000)
        for _ in range(4):
            await asyncio.sleep(0.05)
            writer.write(b" " * 100_000)
        assert await answered(reader) == "413"
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_nothing_is_left_of_an_upload_whose_client_leaves():
    """Neither the call of the upstream nor the task that reads the body."""
    async with running_server() as at:
        at.stage.script = lambda heard, reader, writer: reader.read()
        before = len(asyncio.all_tasks())
        _, writer = await at.connect()
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\na")
        assert await eventually(lambda: at.server.in_flight == 1)
        await asyncio.sleep(0.1)
        writer.close()
        assert await eventually(lambda: len(asyncio.all_tasks()) == before)


@pytest.mark.slow
async def test_a_body_that_is_expected_keeps_its_connection_open():
    """Neither the keep-alive time nor the wish to close idle connections ends one whose body is arriving."""
    async with running_server(ServerConfig("up", limits=Limits(first_request=1.0, keep_alive=1.0))) as at:
        reader, writer = await at.connect()
        writer.write(chat(b"a"))
        assert await answered(reader) == "200"
        writer.write(HEAD % 2 + b"{")
        assert await eventually(lambda: at.server.in_flight == 1)
        await asyncio.sleep(1.2)
        at.server._listener.end_idle()
        writer.write(b"}")
        assert await answered(reader) == "200"


@pytest.mark.parametrize("pause", [0.0, 0.005, 0.05])
async def test_a_body_that_is_expected_goes_to_the_handler_that_takes_over(pause):
    """Another handler takes over while a body behind a known head arrives: the request is answered, and the next."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(chat(b"a"))
        assert await answered(reader) == "200"
        writer.write(HEAD % 2 + b"{")
        await asyncio.sleep(0.002 + pause)
        at.server._listener.answer_with(at.server._handler)
        writer.write(b"}")
        async with asyncio.timeout(60):
            assert await answered(reader) == "200"
            writer.write(chat(b"b"))
            assert await answered(reader) == "200"
        assert bodies(at) == [b'{"model":"m","x":"a"}', b"{}", b'{"model":"m","x":"b"}']


async def test_a_client_that_leaves_while_its_body_is_expected_leaves_nothing(caplog):
    """The connection ends in the time in which the rest is waited for without a task."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(chat(b"a"))
        assert await answered(reader) == "200"
        writer.write(HEAD % 500 + b"{")
        await asyncio.sleep(0.005)
        writer.transport.abort()
        assert await eventually(lambda: at.server.in_flight == 0)
        assert len(at.engine.seen) == 1
        assert (await at.chat()).line == "HTTP/1.1 200 OK"
    assert caplog.records == []


@pytest.mark.slow
async def test_a_connection_in_use_is_kept_for_longer_than_one_that_brings_nothing():
    """A balancer reuses a connection a while after its answer; one without any request is given up before."""
    async with running_server(ServerConfig("up", limits=Limits(first_request=0.3, keep_alive=30.0))) as at:
        used, writer = await at.connect()
        unused, _ = await at.connect()
        writer.write(chat(b"a"))
        assert await answered(used) == "200"
        assert await asyncio.wait_for(unused.read(), 60) == b""
        await asyncio.sleep(0.6)
        writer.write(chat(b"b"))
        assert await answered(used) == "200"

"""The Responses API over a WebSocket: real frames in, requests to the engine, events of their answers out."""

import asyncio
import contextlib
import itertools
import json

import aiohttp
import pytest
from aiohttp import WSMsgType

from proxy.server import Limits, ServerConfig
from proxy.tasks import Faults
from tests.support.server_fixture import eventually, raw_answer, running_server

KEY = {"Authorization": "Bearer sk-mine", "x-ullage-project": "p"}


def events(name, *output, last="response.completed"):
    """A stream of one response with these items of output; without *last* it ends before the response."""
    objects = [{"type": "response.created", "response": {"id": name, "output": []}}]
    objects += [
        {"type": "response.output_item.done", "output_index": at, "item": item} for at, item in enumerate(output)
    ]
    if last:
        objects.append({"type": last, "response": {"id": name, "output": output, "usage": {"input_tokens": 5}}})
    body = b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in objects)
    return raw_answer(body, "Content-Type: text/event-stream")


def text(name):
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": name}],
        "id": f"m{name}",
    }


def answers(*streams):
    """A script that answers one request after the other."""
    left = iter(streams)

    async def script(heard, reader, writer):
        writer.write(next(left))

    return script


@contextlib.asynccontextmanager
async def connected(at, headers=KEY, path="/v1/responses", **options):
    """A client's socket."""
    url = f"http://127.0.0.1:{at.port}{path}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers, **options) as socket:
        yield socket


async def turn(socket, **members):
    """Send one message and return the messages of its answer."""
    await socket.send_str(json.dumps({"type": "response.create", **members}))
    got = []
    while not got or got[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
        got.append(await asyncio.wait_for(socket.receive_json(), 60))
    return got


def inputs(at):
    """The input of each request that reached the upstream."""
    return [json.loads(heard.body)["input"] for heard in at.stage.heard]


async def test_each_message_is_a_whole_request():
    """What continues the newest response is sent with its items before it; the events are the upstream's own."""
    first, second = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1", text("1")), events("r2", text("2")))
        got = await turn(socket, model="m", input=[first], store=False, tools=[])
        assert [one["type"] for one in got] == [
            "response.created",
            "response.output_item.done",
            "response.completed",
        ]
        await turn(socket, model="m", input=[second], previous_response_id="r1", store=False)
        assert inputs(at) == [[first], [first, text("1"), second]]
        sent = json.loads(at.stage.heard[1].body)
        assert sent == {"model": "m", "input": inputs(at)[1], "store": False, "stream": True}
        assert at.stage.heard[0].line == "POST /v1/responses HTTP/1.1"
        assert at.stage.heard[0].all("authorization") == ["Bearer sk-mine"]
        assert at.stage.heard[0].all("content-type") == ["application/json"]
        assert not [name for name, _ in at.stage.heard[0].headers if name.lower().startswith(("sec-", "upgrade"))]
        assert [request.options.project for request in at.engine.seen] == ["p", "p"]
        assert await eventually(lambda: [report.api for report in at.reports] == ["responses", "responses"])
    assert [report.usage.input_tokens for report in at.reports[:2]] == [5, 5]
    assert await eventually(lambda: [(report.status, report.reason) for report in at.reports[2:]] == [(101, "")])


@pytest.mark.parametrize("path", ["/v1/responses/", "/v1//responses", "/api/v1/responses", "/openai/responses"])
async def test_a_socket_is_managed_however_its_path_is_spelled(path):
    """What is managed as a POST is managed as a socket, too."""
    async with running_server() as at, connected(at, path=path) as socket:
        at.stage.script = answers(events("r1", text("1")))
        assert (await turn(socket, model="m", input=[]))[-1]["type"] == "response.completed"
        assert [request.api for request in at.engine.seen] == ["responses"]


@pytest.mark.parametrize("output", [(), (text("1"),)])
async def test_a_stream_that_ends_too_early_is_an_error(output):
    """The end of a stream shows an HTTP client that it was cut; on a socket a message has to."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1", *output, last=""), events("r2", last="response.failed"), events("r3"))
        assert (await turn(socket, model="m", input=[]))[-1]["error"]["code"] == "upstream_stream_error"
        assert [one["type"] for one in await turn(socket, model="m", input=[])] == [
            "response.created",
            "response.failed",
        ]
        assert (await turn(socket, model="m", input=[]))[-1]["type"] == "response.completed"


@pytest.mark.parametrize("name", ["model", "input"])
async def test_a_member_twice_is_refused(name):
    """As in a body: parsers disagree on which one counts."""
    async with running_server() as at, connected(at) as socket:
        message = '{"type": "response.create", "model": "m", "input": [], "NAME": "x"}'
        await socket.send_str(message.replace("NAME", name))
        got = await asyncio.wait_for(socket.receive_json(), 60)
        assert (got["type"], got["status"], at.stage.heard) == ("error", 400, [])


async def test_a_warm_up_is_stored_and_not_sent():
    """A message that wants no answer has a response all the same, which the next one continues."""
    async with running_server() as at, connected(at) as socket:
        got = await turn(socket, model="m", input=[{"role": "user", "content": "a"}], generate=False)
        assert [one["type"] for one in got] == ["response.created", "response.completed"]
        assert (got[1]["response"]["output"], got[1]["response"]["status"]) == ([], "completed")
        assert at.stage.heard == []
        at.stage.script = answers(events("r1"))
        await turn(socket, model="m", input="b", previous_response_id=got[1]["response"]["id"])
        assert inputs(at) == [[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]]


async def test_a_response_that_is_not_known_here_is_left_to_the_upstream():
    """An older response may be stored by the upstream: the message goes on as it is."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1"), events("r2"))
        await turn(socket, model="m", input="a")
        await turn(socket, model="m", input="b", previous_response_id="r0")
        sent = json.loads(at.stage.heard[1].body)
        assert sent["previous_response_id"] == "r0"
        assert sent["input"] == [{"role": "user", "content": "b"}]


async def test_an_error_is_a_message_and_the_conversation_goes_on():
    """A refusal of the upstream has its status and error; the response before it can still be continued."""
    error = {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded", "param": None}
    refused = raw_answer(
        json.dumps({"error": error}).encode(), "Content-Type: application/json", status="429 Too Many Requests"
    )
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1", text("1")), refused, raw_answer(b"<html>", status="502 x"), events("r2"))
        await turn(socket, model="m", input="a")
        assert (await turn(socket, model="m", input="b", previous_response_id="r1")) == [
            {"type": "error", "status": 429, "error": error}
        ]
        assert (await turn(socket, model="m", input="b", previous_response_id="r1"))[0]["status"] == 502
        await turn(socket, model="m", input="b", previous_response_id="r1")
        assert len(inputs(at)[-1]) == 3


@pytest.mark.parametrize(
    ("place", "reports"),
    [
        ("responses_socket._read", ["request"]),
        ("responses_socket.ResponsesSocket._items_of", ["request"]),
        ("responses_socket.ResponsesSocket._body_of", ["request"]),
        ("responses_socket.ResponsesSocket._store", ["after"]),
        ("responses_socket._lasting", ["after"]),
        ("message_writer.MessageWriter._add", ["answer"]),
        ("message_writer.copied", ["answer"]),
    ],
)
async def test_a_fault_of_ours_costs_a_message_at_most(place, reports, monkeypatch):
    """The socket stays open, the fault is reported, and an answer that has come reaches the client all the same."""
    faults = []
    with monkeypatch.context() as broken:

        def fail(*_):
            raise ZeroDivisionError

        noticed = Faults(lambda phase, name, fault: faults.append((phase, bool(name), type(fault))))
        async with running_server(faults=noticed) as at, connected(at) as socket:
            at.stage.script = answers(*(events(f"r{number}", text("1")) for number in range(3)))
            broken.setattr(f"proxy.server.{place}", fail)
            got = await turn(socket, model="m", input=[{"role": "user", "content": "a"}])
            if reports == ["request"]:
                assert [(one["type"], one["status"], one["error"]["code"]) for one in got] == [
                    ("error", 500, "internal_error")
                ]
            else:
                assert got[-1]["type"] == "response.completed"
            assert await eventually(lambda: faults == [(phase, True, ZeroDivisionError) for phase in reports])
            broken.undo()
            again = await turn(socket, model="m", input=[{"role": "user", "content": "b"}])
            name = again[-1]["response"]["id"]
            await turn(socket, model="m", input=[{"role": "user", "content": "c"}], previous_response_id=name)
            assert len(inputs(at)[-1]) == 3


async def test_a_stream_that_breaks_is_an_error_and_the_socket_stays_open():
    """The client learns that the answer is incomplete, and sends its next message on the same socket."""
    cut = raw_answer(b"", "Content-Type: text/event-stream").replace(b"Content-Length: 0", b"Content-Length: 999")

    async def script(heard, reader, writer):
        if len(at.stage.heard) > 1:
            writer.write(events("r1"))
            return
        writer.write(cut + b'data: {"type":"response.created","response":{"id":"r0"}}\n\n')
        await writer.drain()
        writer.close()

    async with running_server() as at, connected(at) as socket:
        at.stage.script = script
        got = await turn(socket, model="m", input="a")
        assert [one["type"] for one in got] == ["response.created", "error"]
        assert (await turn(socket, model="m", input="a"))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    "message", ["", "[]", "{", '{"type":"session.update"}', '{"type":"response.create","input":1}']
)
async def test_what_is_no_request_is_refused_by_a_message(message):
    """A message that cannot be read costs nothing but itself."""
    async with running_server() as at, connected(at) as socket:
        await socket.send_str(message)
        got = await asyncio.wait_for(socket.receive_json(), 60)
        assert (got["type"], got["status"], got["error"]["type"]) == ("error", 400, "invalid_request_error")
        at.stage.script = answers(events("r1"))
        assert (await turn(socket, model="m", input="a"))[-1]["type"] == "response.completed"


async def test_reasoning_that_was_not_stored_is_not_sent_again():
    """Without ``store`` the upstream knows reasoning only by what stands in the item itself."""
    bare, sealed = {"type": "reasoning", "id": "1", "summary": []}, {"type": "reasoning", "encrypted_content": "x"}
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(*(events(f"r{number}", bare, sealed, text("1")) for number in range(3)))
        await turn(socket, model="m", input=[], store=False)
        await turn(socket, model="m", input=[], store=False, previous_response_id="r0")
        assert inputs(at)[1] == [sealed, text("1")]
        await turn(socket, model="m", input=[])
        at.stage.script = answers(events("r9"))
        await turn(socket, model="m", input=[], previous_response_id="r2")
        assert inputs(at)[3] == [bare, sealed, text("1")]


async def test_pings_are_answered_while_an_answer_is_under_way():
    """A client that checks the connection during a long answer sees that it lives."""
    go = asyncio.Event()

    async def script(heard, reader, writer):
        await go.wait()
        writer.write(events("r1"))

    async with running_server() as at, connected(at) as socket:
        at.stage.script = script
        await socket.send_str('{"type":"response.create","model":"m","input":"a"}')
        assert await eventually(lambda: at.stage.heard)
        writer = socket._writer
        await writer.send_frame(b"are you there", WSMsgType.PING)
        await socket.send_str('{"type":"response.create","model":"m","input":"b"}')
        go.set()
        for _ in range(4):
            assert (await asyncio.wait_for(socket.receive_json(), 60))["type"].startswith("response.c")
        assert [one[0]["content"] for one in inputs(at)] == ["a", "b"]


async def test_a_client_that_closes_ends_the_request_under_way():
    """Nothing is paid for an answer that has no reader."""
    async with running_server() as at:

        async def script(heard, reader, writer):
            await reader.read()

        at.stage.script = script
        async with connected(at) as socket:
            await socket.send_str('{"type":"response.create","model":"m","input":"a"}')
            assert await eventually(lambda: at.server.in_flight == 1)
            await socket.close()
        assert await eventually(lambda: at.server.in_flight == 0)
        assert await eventually(at.stage.ended.is_set)
        assert await eventually(lambda: {"client_left"} <= {report.reason for report in at.reports})


async def test_a_process_that_ends_says_so_to_idle_sockets():
    """A client that waits learns by a close frame that the process is going away, not by a lost connection."""
    async with running_server() as at, connected(at) as fresh, connected(at) as used:
        at.stage.reply = events("r1")
        await turn(used, model="m", input="a")
        await asyncio.wait_for(at.server.close(), 60)
        for socket in (fresh, used):
            closed = await asyncio.wait_for(socket.receive(), 60)
            assert (closed.type, closed.data) == (WSMsgType.CLOSE, 1001)


async def test_an_idle_socket_is_no_request_and_a_drain_refuses_its_next_message():
    """A process that ends does not wait for a quiet socket; what comes over it then is refused, and it is closed."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1"))
        await turn(socket, model="m", input="a")
        assert at.server.in_flight == 0
        await asyncio.wait_for(at.server.drain(5), 60)
        got = await turn(socket, model="m", input="b")
        assert (got[0]["type"], got[0]["status"]) == ("error", 503)
        closed = await asyncio.wait_for(socket.receive(), 60)
        assert (closed.type, closed.data) == (WSMsgType.CLOSE, 1012)


async def test_messages_that_wait_when_a_drain_begins_are_refused_before_the_socket_is_closed():
    """The answer under way ends, and each message behind it gets an error that says it can be sent again."""
    go = asyncio.Event()

    async def script(heard, reader, writer):
        await go.wait()
        writer.write(events("r1"))

    async with running_server() as at, connected(at, autoping=False) as socket:
        at.stage.script = script
        for members in ({"input": "a"}, {"input": "b"}, {"input": "c"}, {"generate": False}):
            await socket.send_str(json.dumps({"type": "response.create", "model": "m", **members}))
        await socket.ping()
        assert (await asyncio.wait_for(socket.receive(), 60)).type is WSMsgType.PONG  # the messages before have arrived
        assert await eventually(lambda: at.stage.heard)
        drain = asyncio.ensure_future(at.server.drain(60))
        assert await eventually(lambda: at.server._drain.draining)
        go.set()
        got = [await asyncio.wait_for(socket.receive_json(), 60) for _ in range(6)]
        closed = await asyncio.wait_for(socket.receive(), 60)
        await drain
    assert [(one["type"], one.get("status")) for one in got] == [
        ("response.created", None),
        ("response.completed", None),
        ("error", 503),
        ("error", 503),
        ("response.created", None),  # of the warm-up, which calls no model
        ("response.completed", None),
    ]
    assert (closed.type, closed.data) == (WSMsgType.CLOSE, 1012)
    assert len(at.stage.heard) == 1


async def test_frames_that_break_the_protocol_and_binary_ones_close_the_socket():
    """Each with the code that says why."""
    async with running_server(ServerConfig("up", limits=Limits(body=1000))) as at:
        async with connected(at) as socket:
            await socket.send_bytes(b"x")
            assert (await asyncio.wait_for(socket.receive(), 60)).data == 1003
        async with connected(at) as socket:
            await socket.send_str("x" * 2000)
            assert (await asyncio.wait_for(socket.receive(), 60)).data == 1009


async def test_a_handshake_that_is_none_is_refused():
    """Neither another version nor a key that proves nothing gets a socket."""
    upgrade = ("Connection: Upgrade", "Upgrade: websocket")
    async with running_server() as at:
        for fields in ((), ("Sec-WebSocket-Version: 13",), ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")):
            assert (await at.ask("GET", "/v1/responses", b"", *upgrade, *fields)).line == "HTTP/1.1 400 Bad Request"


async def test_a_conversation_without_memory_is_forgotten():
    """What is stored counts against the caller's share of memory; above it the next message stands alone."""
    limits = Limits(body=3000, in_flight_bytes=4000)
    async with running_server(ServerConfig("up", limits=limits)) as at, connected(at) as socket:
        at.stage.script = answers(events("r1", text("x" * 4000)), events("r2"))
        await turn(socket, model="m", input="a")
        await turn(socket, model="m", input="b", previous_response_id="r1")
        assert inputs(at)[1] == [{"role": "user", "content": "b"}]


async def test_what_the_upstream_stores_before_a_response_is_continued_with_it():
    """A response that followed one of the upstream is not all there is: its successors name that one, too."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1", text("1")), events("r2"), events("r3"))
        await turn(socket, model="m", input="a", previous_response_id="r0")
        await turn(socket, model="m", input="b", previous_response_id="r1")
        await turn(socket, model="m", input="c", previous_response_id="r2")
        bodies = [json.loads(heard.body) for heard in at.stage.heard]
    a, b, c = ({"role": "user", "content": name} for name in "abc")
    assert [body["previous_response_id"] for body in bodies] == ["r0", "r0", "r0"]
    assert [body["input"] for body in bodies] == [[a], [a, text("1"), b], [a, text("1"), b, c]]


async def test_a_warm_up_that_continues_a_response_of_the_upstream_is_continued_with_it():
    """The input that was stored here does not replace what it follows."""
    async with running_server() as at, connected(at) as socket:
        got = await turn(socket, model="m", input="a", previous_response_id="r0", generate=False)
        at.stage.script = answers(events("r1"))
        await turn(socket, model="m", input="b", previous_response_id=got[1]["response"]["id"])
        assert json.loads(at.stage.heard[0].body)["previous_response_id"] == "r0"
        assert [item["content"] for item in inputs(at)[0]] == ["a", "b"]


@pytest.mark.parametrize("item", [{"type": 1}, {"type": None}, 7, {"type": "reasoning", "encrypted_content": {}}])
async def test_an_item_that_is_none_of_the_api_does_not_end_the_socket(item):
    """What an upstream answers beyond the API is its client's, and goes back to it as it came."""
    async with running_server() as at, connected(at) as socket:
        at.stage.script = answers(events("r1", item), events("r2"))
        await turn(socket, model="m", input="a", store=False)
        await turn(socket, model="m", input="b", previous_response_id="r1", store=False)
        assert inputs(at)[1][1] == item


@pytest.mark.slow
async def test_pings_of_a_client_that_reads_nothing_do_not_fill_memory():
    """Their answers wait for a reader only until the connection is full."""
    async with running_server() as at:
        at.stage.script = answers(events("r1"))
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(f"http://127.0.0.1:{at.port}/v1/responses", headers=KEY)
            socket._response.connection.transport.pause_reading()
            for _ in range(400):
                for _ in range(500):
                    socket._writer.transport.write(masked(0x89, b"x" * 125))
                await socket._writer.protocol._drain_helper()
            await socket.send_str('{"type":"response.create","model":"m","input":"a"}')
            assert await eventually(lambda: at.stage.heard)
            (connection,) = at.server._listener.connections
            waiting = connection.transport.get_write_buffer_size()
            socket._response.connection.transport.abort()
    assert waiting < 2**20


def masked(first, payload):
    """A frame of a client; it is masked with zeros."""
    return bytes([first, 0x80 | len(payload)]) + bytes(4) + payload


async def test_messages_that_never_end_are_counted_as_their_senders():
    """What arrived of a message is in memory, whole or not: above the caller's share its socket is closed."""
    limits = Limits(body=10_000, in_flight_bytes=12_000)
    async with running_server(ServerConfig("up", limits=limits)) as at, connected(at) as one, connected(at) as two:
        fragment = b"\x01" + bytes([0x80 | 126]) + (7000).to_bytes(2, "big") + bytes(4) + b" " * 7000
        one._writer.transport.write(fragment)
        assert await eventually(lambda: at.server._drain.body_bytes.total >= 7000)
        two._writer.transport.write(fragment)
        assert (await asyncio.wait_for(two.receive(), 5)).data == 1013
        assert not one.closed
    assert await eventually(lambda: at.server._drain.body_bytes.total == 0)


async def test_what_an_answer_adds_to_a_conversation_is_counted_as_it_comes():
    """Items that do not fit into the caller's share reach the client, and the response is not stored."""
    limits = Limits(body=10_000, in_flight_bytes=20_000)
    seen = []

    async def slow(heard, reader, writer):
        head, *parts = events("r1", *(text(f"{at}" * 3000) for at in range(9))).split(b"\n\n")
        writer.write(head + b"\n\n")
        for part in parts[:-1]:
            writer.write(part + b"\n\n")
            await writer.drain()
            await asyncio.sleep(0.01)
            seen.append(at.server._drain.body_bytes.total)
        writer.close()

    async with running_server(ServerConfig("up", limits=limits)) as at, connected(at) as socket:
        at.stage.script = slow
        got = await turn(socket, model="m", input="a")
        assert [one["type"] for one in got].count("response.output_item.done") == 9
        assert max(seen) > 9000
        assert max(seen) <= 20_000
        at.stage.script = answers(events("r2", text("2")))
        await turn(socket, model="m", input="b", previous_response_id="r1")
        assert json.loads(at.stage.heard[-1].body)["previous_response_id"] == "r1"
        assert at.server._drain.body_bytes.total < 1000


def frame_head(size, mask):
    """The head of a text frame of *size* bytes, without a key."""
    if size < 126:
        return bytes([0x81, mask | size])
    if size < 2**16:
        return bytes([0x81, mask | 126]) + size.to_bytes(2, "big")
    return bytes([0x81, mask | 127]) + size.to_bytes(8, "big")


@pytest.mark.parametrize("size", [3, 200, 70_000])
@pytest.mark.parametrize("before", [0, 3])
async def test_a_frame_without_a_mask_ends_the_socket(before, size):
    """RFC 6455, section 5.1: the server closes with 1002, wherever in the stream the frame begins."""
    head = frame_head(size, mask=0)
    sent = b"".join(masked(0x89, b"ping") for _ in range(before)) + head + b" " * size
    async with running_server() as at, connected(at) as socket:
        for piece in (sent[:1], sent[1 : len(sent) // 2], sent[len(sent) // 2 :]):
            socket._writer.transport.write(piece)
            await asyncio.sleep(0.02)
        message = await asyncio.wait_for(socket.receive(), 30)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1002)


async def test_masked_frames_in_any_pieces_are_read():
    """Heads of every length are followed however the bytes come."""
    payloads = [
        json.dumps({"type": "response.create", "model": "m", "input": "a" * size}).encode() for size in (1, 300, 70_000)
    ]
    async with running_server() as at, connected(at) as socket:
        for number, payload in enumerate(payloads):
            at.stage.script = answers(events(f"r{number}"))
            sent = frame_head(len(payload), mask=0x80) + bytes(4) + payload
            cuts = (0, 1, 2, 3, 5, 9, 11, 13, 15, len(sent))
            for begin, end in itertools.pairwise(cuts):
                socket._writer.transport.write(sent[begin:end])
                await asyncio.sleep(0.005)
            while (await asyncio.wait_for(socket.receive_json(), 30))["type"] != "response.completed":
                pass

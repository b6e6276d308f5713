"""Health, metrics, and how a process goes away."""

import asyncio
import json
import socket

import pytest

from tests.support.server_fixture import eventually, raw_answer, running_server

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_draining_lets_running_requests_finish_and_refuses_new_ones():
    """Once draining: unready, idle connections closed, new requests get 503, the running one completes."""
    async with running_server() as at:
        go = asyncio.Event()

        async def script(heard, reader, writer):
            writer.write(SSE + b"3\r\none\r\n")
            await go.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

        idle_reader, idle = await at.connect()
        idle.write(POST)
        await asyncio.wait_for(idle_reader.readuntil(b"{}"), 60)
        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST)
        await asyncio.wait_for(reader.readuntil(b"one\r\n"), 60)
        drained = asyncio.ensure_future(at.server.drain(5))
        assert await asyncio.wait_for(idle_reader.read(), 60) == b""
        got = await at.ask("GET", "/health/ready")
        assert (got.line.split()[1], json.loads(got.body)) == ("503", {"status": "draining"})
        assert (await at.ask("GET", "/health/live")).line.split()[1] == "200"
        got = await at.chat()
        assert (got.line.split()[1], got.all("connection"), got.all("retry-after")) == ("503", ["close"], ["1"])
        assert not drained.done()
        go.set()
        assert await asyncio.wait_for(reader.read(), 60) == b"3\r\ntwo\r\n0\r\n\r\n"
        await asyncio.wait_for(drained, 60)
        assert at.server.in_flight == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_connection_in_use_is_not_cut_by_a_drain(begun):
    """An answer that begins during the drain says that it is the last; behind an earlier one comes a readable 503."""
    async with running_server() as at:
        arrived, go = asyncio.Event(), asyncio.Event()

        async def script(heard, reader, writer):
            if begun:
                writer.write(SSE + b"3\r\none\r\n")
            arrived.set()
            await go.wait()
            writer.write(b"0\r\n\r\n" if begun else raw_answer())

        at.stage.script = script
        used_reader, used = await at.connect()
        used.write(POST.replace(b"POST /v1/chat/completions", b"GET /health/live"))
        await asyncio.wait_for(used_reader.readuntil(b"}"), 60)
        reader, writer = await at.connect()
        writer.write(POST)
        await asyncio.wait_for(arrived.wait(), 60)
        if begun:
            await asyncio.wait_for(reader.readuntil(b"one\r\n"), 60)
        drained = asyncio.ensure_future(at.server.drain(60))
        await asyncio.sleep(0.01)
        used.write(POST)
        assert (await asyncio.wait_for(used_reader.read(), 60)).startswith(b"HTTP/1.1 503")
        go.set()
        if begun:
            await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
            writer.write(POST)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 503" if begun else b"HTTP/1.1 200")
        assert b"\r\nconnection: close\r\n" in answer
        await asyncio.wait_for(drained, 60)


async def test_what_is_sent_while_a_connection_is_closed_is_not_reset():
    """An idle connection ends in order: a client that sends at that moment sees an end and no reset."""
    async with running_server() as at:
        reader, writer = await at.connect()
        writer.write(POST)
        await asyncio.wait_for(reader.readuntil(b"{}"), 60)
        at.server._listener.end_idle()
        writer.write(POST)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert len(at.stage.heard) == 1


async def test_connections_that_wait_at_the_end_are_answered():
    """What the system accepted before the port was closed gets a readable 503, and no reset."""
    async with running_server() as at:
        waiting = [socket.create_connection(("127.0.0.1", at.port)) for _ in range(30)]
        for connection in waiting[:-1]:
            connection.sendall(POST)
        await asyncio.wait_for(at.server.drain(5), 60)
        silent = waiting.pop()
        late = socket.create_connection(("127.0.0.1", at.port))
        ended = asyncio.ensure_future(at.server.stop_listening())
        await asyncio.sleep(0)
        late.sendall(POST)
        await asyncio.wait_for(ended, 60)
        await at.server.close()
        for connection in (*waiting, late):
            connection.settimeout(60)
            answer = b"".join(iter(lambda at_end=connection: at_end.recv(65_536), b""))
            assert answer.startswith(b"HTTP/1.1 503"), answer
            connection.close()
        assert silent.recv(1) == b"", "a connection without a request is closed, not waited for"
        silent.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", at.port))


async def test_what_outlives_the_drain_is_cut_with_a_word():
    """A stream gets an error event and no end, a request without an answer a 503; both upstream calls end."""
    async with running_server() as at:

        async def script(heard, reader, writer):
            if b"stream" in heard.body:
                writer.write(SSE + b"9\r\ndata: 1\n\n\r\n")
            await reader.read()

        at.stage.script = script
        reader, writer = await at.connect()
        writer.write(POST.replace(b"h: 2", b"h: 8").replace(b"{}", b'"stream"'))
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n\r\n"), 60)
        waiting, other = await at.connect()
        other.write(POST)
        assert await eventually(lambda: len(at.stage.heard) == 2)
        await asyncio.wait_for(at.server.drain(0.1), 60)
        text = await asyncio.wait_for(reader.read(), 60)
        assert b"server_shutting_down" in text
        assert not text.endswith(b"0\r\n\r\n")
        text = await asyncio.wait_for(waiting.read(), 60)
        assert text.startswith(b"HTTP/1.1 503")
        assert await eventually(at.stage.ended.is_set)
        writer.close()
        other.close()
        assert [report.reason for report in at.reports] == ["server_shutting_down"] * 2


@pytest.mark.slow
async def test_the_openai_client_streams_through():
    """The real client reads a stream to its end, and its usage is noted."""
    from openai import AsyncOpenAI

    events = [b'{"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"hi"}}]}']
    events.append(b'{"id":"1","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":5,')
    events[-1] += b'"completion_tokens":1,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":4}}}'
    body = b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])
    async with running_server(base="") as at:
        at.stage.reply = raw_answer(body, "Content-Type: text/event-stream")
        async with AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{at.port}", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.content == "hi"
        assert at.stage.heard[0].line == "POST /v1/chat/completions HTTP/1.1"
        assert await eventually(lambda: at.reports)
        usage = at.reports[0].usage
        assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (5, 1, 4)

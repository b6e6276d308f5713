"""Usage asked for on a client's behalf: one member more on the way up, one event less on the way down."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.include_usage import UsageHider, requesting_usage
from proxy.server import ServerConfig
from tests.support.linear_time import is_linear
from tests.support.server_fixture import RawMessage, ScriptedServer, chunk, running_server

MEMBER = b'"stream_options":{"include_usage":true}'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"stream":true,"messages":[]}', b"{" + MEMBER + b',"stream":true,"messages":[]}'),
        (b' \n{ "stream" : true }', b" \n{" + MEMBER + b', "stream" : true }'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,' + MEMBER + b"}"),
        (b'{"stream_options" : {} ,"stream":true}', b'{"stream_options" : {"include_usage":true} ,"stream":true}'),
        (
            b'{"stream":true,"stream_options":{ "x":1}}',
            b'{"stream":true,"stream_options":{"include_usage":true,"x":1}}',
        ),
        (
            b'{"messages":[{"content":"\\"stream_options\\""}],"stream":true}',
            b"{" + MEMBER + b',"messages":[{"content":"\\"stream_options\\""}],"stream":true}',
        ),
    ],
)
def test_what_is_added(body: bytes, expected: bytes) -> None:
    """The member is added at the front, or inside the options that are there; the rest stays as it was."""
    assert requesting_usage(body) == expected
    assert requesting_usage(expected) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[]}',
        b'{"stream":false}',
        b'{"stream":null}',
        b'{"stream":true,"stream_options":{"include_usage":true}}',
        b'{"stream":true,"stream_options":{"include_usage":false}}',
        b'{"stream":true,"stream_options":5}',
        b'{"stream":true,"stream_option\\u0073":{}}',
        b'{"stream":true,"stream_options":{},"x":{"stream_options":{}}}',
        b"[]",
        b"",
        b"{",
    ],
)
def test_what_is_left_alone(body: bytes) -> None:
    """A request that does not stream, that says what it wants, or that is unclear goes up as it is."""
    assert requesting_usage(body) is None


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4), st.booleans())
def test_only_one_member_changes(members: dict[str, Any], spaced: bool) -> None:
    """Whatever else a body holds, it holds afterwards."""
    members = {**members, "stream": True}
    changed = requesting_usage(json.dumps(members, separators=None if spaced else (",", ":")).encode())
    assert changed is not None
    assert json.loads(changed) == {**members, "stream_options": {"include_usage": True}}


EVENTS = st.sampled_from(
    [
        (TEXT, True),
        (USAGE, False),
        (DONE, True),
        (USAGE.replace(b"\n", b"\r\n"), False),
        (TEXT.replace(b"\n", b"\r\n"), True),
        (b": ping\n\n", True),
        (b"event: x\n" + USAGE, False),
        (b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}\n\n', True),
        (b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}\n\n', True),
        (b'data: {"choices":[],"usage":{"prompt_tokens":1}\n\n', True),
        (b'data: {"choices":[],\ndata: "usage":{}}\n\n', True),
        (b'data: {"usage":"x","choices":5}\n\n', True),
        (b"data: " + b"x" * 70_000 + b'"usage" "choices"\n\n', True),
        (b"\n\n", True),
    ]
)


@given(
    st.lists(EVENTS, max_size=8),
    st.sampled_from([b"", b"data: torn", b'data: {"choices":[],"usage":{']),
    st.lists(st.integers(0, 100_000), max_size=8),
)
def test_only_the_one_event_goes(events: list[tuple[bytes, bool]], torn: bytes, cuts: list[int]) -> None:
    """However a stream is cut into pieces, everything but the event of usage goes on byte for byte."""
    data = b"".join(event for event, _ in events) + torn
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    hider = UsageHider()
    passed = b"".join(hider.feed(data[start:end]) for start, end in itertools.pairwise(edges)) + hider.pending
    assert passed == b"".join(event for event, stays in events if stays) + torn


def test_every_single_cut() -> None:
    """Bytes one by one give what the whole gives; a complete event is never held back."""
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        text, usage = TEXT.replace(b"\n\n", end), USAGE.replace(b"\n\n", end)
        for cut in range(len(text + usage + text)):
            hider = UsageHider()
            data = text + usage + text
            assert hider.feed(data[:cut]) + hider.feed(data[cut:]) == text + text
        hider = UsageHider()
        assert b"".join(hider.feed(bytes([byte])) for byte in text + usage + text) == text + text


CONFIG = ServerConfig(default_upstream="up", usage_upstreams=frozenset({"up"}))
STREAM = b'{"model":"m","stream":true,"messages":[]}'


def head(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "Content-Type: text/event-stream", *headers]).encode() + b"\r\n\r\n"


async def streamed(stage: ScriptedServer, *pieces: bytes) -> None:
    """Let *stage* answer with *pieces*, each a chunk of its own."""
    stage.reply = head("Transfer-Encoding: chunked") + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"


@pytest.mark.parametrize("sized", [False, True])
async def test_a_client_that_did_not_ask(sized: bool) -> None:
    """The upstream is asked, the client sees all but the event, and the usage is noted."""
    async with running_server(CONFIG) as home:
        data = TEXT + USAGE + DONE
        await streamed(home.stage, TEXT + USAGE[:9], USAGE[9:30], USAGE[30:] + DONE)
        if sized:
            home.stage.reply = head(f"Content-Length: {len(data)}") + data
        got = await home.chat(STREAM, "Accept-Encoding: gzip")
        assert body_of(got) == TEXT + DONE
        assert home.stage.heard[0].body == b"{" + MEMBER + b"," + STREAM[1:]
        assert home.stage.heard[0].all("accept-encoding") == ["identity"]
        assert home.reports[-1].usage.input_tokens == 7


@pytest.mark.parametrize("asks", [True, False])
async def test_a_client_that_decided(asks: bool) -> None:
    """A client that asked for usage, or said it wants none, gets and sends every byte as without the setting."""
    body = (
        b'{"model":"m","stream":true,"messages":[],"stream_options":{"include_usage":%s}}' % json.dumps(asks).encode()
    )
    async with running_server(CONFIG) as home:
        await streamed(home.stage, TEXT, USAGE, DONE)
        got = await home.chat(body, "Accept-Encoding: gzip")
        assert body_of(got) == TEXT + USAGE + DONE
        assert home.stage.heard[0].body == body
        assert home.stage.heard[0].all("accept-encoding") == ["gzip"]


async def test_it_is_off_unless_configured() -> None:
    """Without the setting nothing is added and nothing is taken."""
    async with running_server() as home:
        await streamed(home.stage, TEXT, USAGE, DONE)
        got = await home.chat(STREAM)
        assert body_of(got) == TEXT + USAGE + DONE
        assert home.stage.heard[0].body == STREAM


async def test_what_cannot_be_read_passes() -> None:
    """A compressed answer, or one that is no stream, passes as it came."""
    async with running_server(CONFIG) as home:
        data = gzip.compress(TEXT + USAGE + DONE)
        home.stage.reply = head("Content-Encoding: gzip", f"Content-Length: {len(data)}") + data
        assert (await home.chat(STREAM)).body == data
        home.stage.reply = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        assert (await home.chat(STREAM)).body == b"{}"


def body_of(got: RawMessage) -> bytes:
    assert not got.all("content-length")
    return got.body


def test_hiding_costs_no_more_per_byte_the_longer_an_event_is() -> None:
    """An event that comes in small pieces is looked through in time that grows with it and no faster."""

    def work(length: int) -> None:
        hider = UsageHider()
        assert sum(len(hider.feed(b"xxxx")) for _ in range(length // 4)) + len(hider.pending) == length

    assert is_linear(work, 15_000)

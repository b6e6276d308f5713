import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.sse import EventCutter, NewestEvent, StreamEnd, data_of
from tests.support.linear_time import is_linear

ENDS = ("\n\n", "\r\n\r\n", "\r\r")


@given(
    st.lists(st.sampled_from(["data: a", "event: x\ndata: {}", ": ping", "data: b\ndata: c", "id: 1\r\ndata: d"])),
    st.sampled_from(ENDS),
    st.integers(1, 9),
)
def test_events_are_cut_apart_alike_in_any_chunking(events: list[str], end: str, size: int) -> None:
    """With any chunking, events are returned whole and in order, and no byte is lost."""
    stream = "".join(event + end for event in events).encode() + b"data: rest"
    splitter, found = EventCutter(), []
    for at in range(0, len(stream), size):
        found += splitter.feed(stream[at : at + size])
    assert found == [(event + end).encode() for event in events]
    assert splitter.pending_size == len(b"data: rest")
    assert splitter.flush() == b"data: rest"
    assert splitter.flush() == b""


@pytest.mark.slow
def test_a_long_event_costs_no_more_per_byte_than_a_short_one() -> None:
    """An event that comes in many pieces is cut in time that grows with it and no faster."""

    def one_event(size: int) -> None:
        events = EventCutter()
        for _ in range(size // 1000):
            assert not events.feed(b"x" * 1000)
        assert len(events.feed(b"\n\n")) == 1

    def many_events(size: int) -> None:
        assert len(EventCutter().feed(b":\n\n" * (size // 3))) == size // 3

    assert is_linear(one_event, 10_000_000)
    assert is_linear(many_events, 300_000)


DONE = [
    b"data: [DONE]\n\n",
    b"data: 1\r\n\r\ndata:[DONE]\r\n\r\n",
    b"event: message_stop\ndata: {}\n\n",
    b'data: {"type": "response.incomplete", "response": {}}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"candidates": [{"finishReason": "STOP"}]}\n\n',
    b"event: error\ndata: overloaded\n\n",
]

OPEN = [
    b"",
    b": keep-alive\n\n" * 50,
    b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\ndata: [DONE]\\n \\"finish_reason\\":\\"stop\\""}}]}\n\n',
    b'event: content_block_delta\ndata: {"delta":{"text":"event: message_stop"}}\n\n',
]


def done(data, size):
    end = StreamEnd()
    for at in range(0, len(data), size):
        end.feed(data[at : at + size])
    return end.done


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_last_event_of_every_api_is_seen_however_it_is_cut(size):
    """The last event of each API is recognised in any chunking; a model's text that resembles it is not."""
    assert [done(data, size) for data in DONE] == [True] * len(DONE)
    assert [done(b": long before\n\n" * 100 + data, size) for data in DONE] == [True] * len(DONE)
    assert [done(data, size) for data in OPEN] == [False] * len(OPEN)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"event: x\ndata: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": comment\n\n", b""),
    ],
)
def test_the_data_of_an_event_is_found(event: bytes, data: bytes) -> None:
    """Data lines are joined; what is no data is not."""
    assert data_of(event) == data


FINAL = [
    b"data: [DONE]\n\n",
    b"data: 1\r\n\r\ndata:[DONE]\r\n\r\n",
    b"data: [DONE]",
    b"event: message_stop\ndata: {}\n\n",
    b'data: {"type": "response.incomplete", "response": {"text": "' + b"x" * 5000 + b'"}}\n\n',
    b'data: {"candidates": [{"finishReason": "STOP"}]}\n\n',
    b'event: error\ndata: {"message": "overloaded"}\n\n',
]
FOLLOWED = [
    b"",
    b": keep-alive\n\n",
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\ndata: [DONE]"}}]}\n\n',
    b'data: {"candidates": [{"finishReason": "STOP"}]}\n\ndata: {"candidates": []}\n\n',
    b"data: [DO",
    b"event: message_stop\n",
    b'data: {"type": "response.completed", "response": {"text": "' + b"x" * 5000,
]


def newest(data, size):
    event = NewestEvent()
    for at in range(0, len(data), size):
        event.feed(data[at : at + size])
    return event


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_final_event_is_recognised_however_it_is_cut(size):
    """The event that nothing follows is recognised in any chunking, and only if it is the newest, and whole."""
    assert [newest(data, size).is_final for data in FINAL] == [True] * len(FINAL)
    assert [newest(b": long before\n\n" * 100 + data, size).is_final for data in FINAL] == [True] * len(FINAL)
    assert [newest(data, size).is_final for data in FOLLOWED] == [False] * len(FOLLOWED)
    assert [newest(data, size).is_cut for data in FOLLOWED] == [False] * 5 + [True] * 3


def test_of_a_long_event_little_is_stored():
    """However long an event is, and wherever it is cut, at most 16 chunks are stored, of the newest event only."""
    assert sum(map(len, newest(b"data: " + b"x" * 100_000, 100)._chunks)) <= 17 * 100
    for times in range(1, 40):
        stream = newest(b": x\n\n" * times + b"data: [DONE]\n\n", 1)
        assert sum(map(len, stream._chunks)) <= 16 + 15
        assert stream.is_final

import pytest

from proxy.server.stream_end import StreamEnd

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
    """What each API sends last is seen in any chunking; a model's text that reads like it is not."""
    assert [done(data, size) for data in DONE] == [True] * len(DONE)
    assert [done(b": long before\n\n" * 100 + data, size) for data in DONE] == [True] * len(DONE)
    assert [done(data, size) for data in OPEN] == [False] * len(OPEN)

"""A canned upstream that costs next to nothing: one answer for every body, or a paced stream.

``python -m tests.bench.mock PORT [SECONDS]``: whole answers come after so many seconds, at once by default.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import cast

from uvloop import run

CHUNKS, GAP = 100, 0.01
"""Events of a stream and the seconds between two of them."""

_USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "word " * 80}, "finish_reason": "stop"}
_BODY = json.dumps(
    {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [_CHOICE], "usage": _USAGE}
).encode()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
WHOLE = _HEAD % len(_BODY) + _BODY
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DELTA = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
EVENT = b"data: " + json.dumps({"id": "c-1", "object": "chat.completion.chunk", "choices": [_DELTA]}).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Mock(asyncio.Protocol):
    """One connection: reads requests with a content length, answers each at once, or *after* so many seconds."""

    def __init__(self, after: float = 0.0) -> None:
        self._after = after
        self._data = bytearray()
        self._need = -1
        self._start = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._one():
            pass

    def _one(self) -> bool:
        if self._need < 0:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self._data[:end]).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._start, self._need = end + 4, end + 4 + int(length or 0)
        if len(self._data) < self._need:
            return False
        streams = self._data.find(b'"stream": true', self._start, self._start + 200) > 0
        del self._data[: self._need]
        self._need = -1
        if streams:
            self._transport.write(STREAM)
            self._stream(CHUNKS)
        elif self._after:
            asyncio.get_running_loop().call_later(self._after, self._whole)
        else:
            self._transport.write(WHOLE)
        return bool(self._data)

    def _whole(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(WHOLE)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_chunk(EVENT))
            asyncio.get_running_loop().call_later(GAP, self._stream, left - 1)
        else:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(port: int, after: float) -> None:
    """Answer on *port* until the process is ended."""
    server = await asyncio.get_running_loop().create_server(partial(Mock, after), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))

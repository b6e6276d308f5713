"""A canned upstream that costs next to nothing: one answer for every body, or a paced stream.

``python -m tests.bench.mock PORT [SECONDS [GAP]]``: whole answers come after so many seconds, at once by default; the
events of a stream come *GAP* seconds apart. The usage it reports fits the body, if its model is one of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from functools import partial
from typing import cast

from uvloop import run

from tests.bench.bodies import BYTES_A_TOKEN

CHUNKS, GAP = 100, 0.01
"""Events of a stream and the seconds between two of them."""

COMPLETION_TOKENS = 80
UNKNOWN_USAGE = 9
"""Tokens of a prompt for another model. They fit no body, so that nothing is learned from them."""

_USAGE = {"prompt_tokens": -1, "completion_tokens": COMPLETION_TOKENS, "total_tokens": -2}
_TEXT = (
    "## Pending\n- The cause is to be found and removed.\n\n## State\n- Several files were read one after the "
    "other, and their contents noted.\n- No change was made so far, since nothing explained what was seen.\n\n"
    "## In progress\n- The next file is being read; the search goes on from there until the cause is known."
)
"""An answer that is a summary as well: one that is requested is written, and not requested again."""
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
_BODY = json.dumps(
    {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [_CHOICE], "usage": _USAGE}
).encode()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DELTA = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
EVENT = b"data: " + json.dumps({"id": "c-1", "object": "chat.completion.chunk", "choices": [_DELTA]}).encode() + b"\n\n"
_LAST = json.dumps({"id": "c-1", "object": "chat.completion.chunk", "choices": [], "usage": _USAGE}).encode()
_MODEL = re.compile(rb'"model": ?"([^"]*)"')
_HEAD_OF_BODY = 200
"""Bytes in which the members before the messages stand."""


def prompt_tokens(body: bytes | bytearray) -> int:
    """The tokens of *body*, by its size and model."""
    model = _MODEL.search(body, 0, _HEAD_OF_BODY)
    bytes_a_token = BYTES_A_TOKEN.get(model[1].decode()) if model else None
    return round(len(body) / bytes_a_token) if bytes_a_token else UNKNOWN_USAGE


def _with_usage(template: bytes, tokens: int) -> bytes:
    """*template* with the usage of a prompt of *tokens*."""
    filled = template.replace(b": -1", b": %d" % tokens)
    return filled.replace(b": -2", b": %d" % (tokens + COMPLETION_TOKENS))


def whole(tokens: int) -> bytes:
    """A whole answer to a prompt of *tokens*."""
    body = _with_usage(_BODY, tokens)
    return _HEAD % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Mock(asyncio.Protocol):
    """One connection: reads requests with a content length, answers each at once, or *after* so many seconds."""

    def __init__(self, after: float = 0.0, gap: float = GAP) -> None:
        self._after = after
        self._gap = gap
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
        body = self._data[self._start : self._need]
        del self._data[: self._need]
        self._need = -1
        self._answer(body)
        return bool(self._data)

    def _answer(self, body: bytearray) -> None:
        tokens = prompt_tokens(body)
        if body.find(b'"stream": true', 0, _HEAD_OF_BODY) > 0:
            usage = b"data: " + _with_usage(_LAST, tokens) + b"\n\n" if b'"include_usage"' in body else b""
            self._transport.write(STREAM)
            self._stream(CHUNKS, usage)
        elif self._after:
            asyncio.get_running_loop().call_later(self._after, self._whole, tokens)
        else:
            self._transport.write(whole(tokens))

    def _whole(self, tokens: int) -> None:
        if not self._transport.is_closing():
            self._transport.write(whole(tokens))

    def _stream(self, left: int, usage: bytes) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_chunk(EVENT))
            asyncio.get_running_loop().call_later(self._gap, self._stream, left - 1, usage)
            return
        if usage:
            self._transport.write(_chunk(usage))
        self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(port: int, after: float, gap: float) -> None:
    """Answer on *port* until the process is ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Mock, after, gap), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """Serve as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("after", type=float, nargs="?", default=0.0)
    parser.add_argument("gap", type=float, nargs="?", default=GAP)
    given = parser.parse_args()
    run(serve(given.port, given.after, given.gap))


if __name__ == "__main__":
    main()

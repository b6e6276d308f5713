"""Requests usage in streams whose client did not, reads it, and removes it from the answer.

The request gets one member, ``stream_options.include_usage``, and the answer loses the one event that this adds. Every
other byte passes unchanged. https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Final

import msgspec

from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.apis.sse import EventCutter, data_of

_MEMBER: Final = b'"stream_options"'
_REQUESTED: Final = b'"include_usage":true'

_LONGEST: Final = 64 * 2**10
"""Bytes above which an event passes at once: an event with nothing but usage has a few hundred."""


class _Options(msgspec.Struct):
    include_usage: msgspec.Raw = msgspec.Raw()


class _Streaming(msgspec.Struct):
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw()


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: msgspec.Raw


_STREAMING: Final = msgspec.json.Decoder(_Streaming)
_OPTIONS: Final = msgspec.json.Decoder(_Options | None)
_CHUNK: Final = msgspec.json.Decoder(_Chunk)


def requesting_usage(body: bytes) -> bytes | None:
    """Return *body* with usage requested; None if it does not stream, states ``include_usage``, or cannot be read."""
    if not body.lstrip().startswith(b"{"):
        return None
    try:
        streaming = _STREAMING.decode(body)
        own = bytes(streaming.stream_options)
        options = None
        if own:
            options = _OPTIONS.decode(own)
    except UNREADABLE:
        return None
    if not streaming.stream or (options is not None and bytes(options.include_usage)):
        return None
    if not own:
        at = body.index(b"{") + 1
        return body[:at] + _MEMBER + b":{" + _REQUESTED + b"}," + body[at:]
    at = body.find(own, body.find(_MEMBER) + len(_MEMBER))
    if body.count(_MEMBER) != 1 or body[body.find(_MEMBER) + len(_MEMBER) : at].strip(b" \t\r\n") != b":":
        return None  # the member is escaped or occurs elsewhere, too: its place is not certain
    rest = b"}"
    if options is not None:
        rest = own.lstrip(b"{ \t\r\n")
    if not rest.startswith(b"}"):
        rest = b"," + rest
    return body[:at] + b"{" + _REQUESTED + rest + body[at + len(own) :]


class UsageHider:
    """Removes the event that has only usage from a stream, in any chunking."""

    __slots__ = ("_events", "_open")

    def __init__(self) -> None:
        self._events = EventCutter()
        self._open = False  # True in the middle of an event that is too long to be the one with usage

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client: every complete event but the one with usage."""
        passed: list[bytes] = []
        for event in self._events.feed(chunk):
            if self._open or not _is_usage(event):
                passed.append(event)
            self._open = False
        if self._open or self._events.pending_size > _LONGEST:
            self._open = True
            rest = self._events.flush()
            begun = rest.rstrip(b"\r\n")
            passed.append(begun)
            self._events.feed(rest[len(begun) :])  # line ends that may be the beginning of the event's end
        return b"".join(passed)

    @property
    def pending(self) -> bytes:
        """The bytes of an event that is not complete: they are left if the stream ends without the event's end."""
        return self._events.pending


def _is_usage(event: bytes) -> bool:
    """True if *event* holds usage and no choices."""
    if b'"usage"' not in event or b'"choices"' not in event:
        return False
    data = data_of(event)
    if b"\n" in data:
        return False  # several lines of data: no provider sends its usage like that
    try:
        chunk = _CHUNK.decode(data)
    except UNREADABLE:
        return False
    return not chunk.choices and bytes(chunk.usage).startswith(b"{")

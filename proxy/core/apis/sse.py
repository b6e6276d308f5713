"""Server-sent events: cuts a stream of bytes into events, reads their data, and recognises the end of a stream.

Theory of operation
===================

The format is https://html.spec.whatwg.org/multipage/server-sent-events.html. An event is a few lines, ``data: ...``
among them, and a blank line ends it. What comes over a connection is cut anywhere: a chunk can hold half an event, ten
of them, or the second half of a line end.

``EventCutter`` returns complete events, byte for byte, each with the blank line that ends it. Joined, its events and
its pending bytes are exactly the bytes it was fed, so that a stream passes through it unchanged. It never reads an
event: the meaning of its data (``data_of``) belongs to the modules of the APIs.

      state     chunk completes            returns                     next
      empty     no event                   nothing                     pending
      empty     events, nothing behind     these events                empty
      empty     events, then a beginning   these events                pending
      pending   no event                   nothing                     pending
      pending   events, nothing behind     these events                empty
      pending   events, then a beginning   these events                pending
      any       flush(): the stream ended  the incomplete event        empty

Line ends are LF, CR LF or CR; the format allows all three, and a blank line is two of one kind. (It also allows mixed
ones, as in LF CR LF. They are not recognised: an event that ends so is returned together with the next one.) The
longest end has four bytes. So if a chunk arrives while an event is pending, the search starts three bytes before the
new bytes: an end may have begun there. No other byte is read twice. The pending bytes are one ``bytearray`` that grows
in place: joining it to every chunk would make a long event cost the square of its length.

The caller bounds the pending bytes. It reads ``pending_size`` after each chunk and gives up on an event that is too
long; ``pending`` are the bytes that a failure in between would lose.

``StreamEnd`` answers another question about the same bytes: did the model finish, or did the connection break? It
searches for the event that each API sends last, without cutting: a reply whose usage is not needed is never cut.

      state     chunk (with the end of the one before)              next
      open      holds no last event                                 open
      open      holds a last event, an error, or a finish reason    done
      done      anything                                            done

Between chunks it stores the last 96 bytes, more than any of the patterns can match.

``NewestEvent`` answers the question for a stream that breaks, or ends in the middle of an event: is its newest event
whole, and is it one that nothing follows? Most streams do not break, so a chunk is only stored, in the place of those
before it once they end an event. The events are read when the answer is wanted. Of an event in many chunks its
beginning and its end are stored.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from proxy.core.apis.json_steps import UNREADABLE

_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END: Final = 4
"""Bytes of the longest of these ends."""


class EventCutter:
    """Cuts a stream into its events, each with the blank line that ends it. Feed it bytes in any chunking."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that *chunk* completes."""
        if not self._pending:
            events, end = _cut(chunk, 0)
            self._pending += chunk[end:]
            return events
        # Only new bytes can complete an event, but its end may have begun before them.
        start = max(0, len(self._pending) - _LONGEST_END + 1)
        self._pending += chunk
        events, end = _cut(self._pending, start)
        del self._pending[:end]
        return events

    @property
    def pending_size(self) -> int:
        """The number of bytes of the event that has not ended."""
        return len(self._pending)

    @property
    def pending(self) -> bytes:
        """The bytes of the event that has not ended."""
        return bytes(self._pending)

    def flush(self) -> bytes:
        """Return the bytes of an event that never ended, and drop them."""
        pending = bytes(self._pending)
        self._pending.clear()
        return pending


def data_of(event: bytes) -> bytes:
    """Return the data of a whole event; empty if it has none, like a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _cut(data: bytes | bytearray, start: int) -> tuple[list[bytes], int]:
    """Return the events in *data*, and the index behind the last of them. None of them ends before *start*."""
    events, at = [], 0
    for end in _END.finditer(data, start):
        events.append(bytes(data[at : end.end()]))
        at = end.end()
    return events, at


# The last event of each API: https://platform.openai.com/docs/api-reference/chat-streaming (``[DONE]``, which some
# servers omit after the ``finish_reason``), https://docs.anthropic.com/en/docs/build-with-claude/streaming
# (``message_stop``), https://platform.openai.com/docs/api-reference/responses-streaming. Inside a JSON string quotes
# and line ends are escaped, so no text of a model matches.
_LAST: Final = rb"(?:message_stop|response\.(?:completed|incomplete|failed|cancelled)|error)"
_COLON: Final = rb"\s{0,8}:\s{0,8}"
_FINAL: Final = (
    rb"[\r\n](?:data: ?\[DONE\]|event: ?" + _LAST + rb"[\r\n]"
    rb'|data: ?\{\s{0,8}"(?:type"' + _COLON + rb'"' + _LAST + rb'"|error"' + _COLON + rb"))"
)
_DONE: Final = re.compile(_FINAL + rb'|"finish_?[rR]eason"' + _COLON + rb'"')
# Behind the finish reason of one choice in Chat Completions there may be other choices, and ``[DONE]`` is missing.
_FOLLOWED_BY_NOTHING: Final = re.compile(_FINAL + rb'|"finishReason"' + _COLON + rb'"')
_LONGEST: Final = 96
"""Bytes that are searched again with the next chunk: more than any match has."""


class StreamEnd:
    """Watches a stream for the event that ends it; ``done`` is true from then on. Feed it bytes in any chunking."""

    __slots__ = ("_tail", "done")

    def __init__(self) -> None:
        self.done = False
        self._tail = b"\n"  # the first line has none before it

    def feed(self, chunk: bytes) -> None:
        """Search *chunk* for the end of the stream."""
        if self.done:
            return
        data = self._tail + chunk
        self.done = _DONE.search(data) is not None
        self._tail = data[-_LONGEST:]


_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MOST_CHUNKS: Final = 16
"""Chunks of one event that are stored; then only its beginning and its end are. One has a quarter of a MiB at most."""


class NewestEvent:
    """The newest event of a stream. Feed it bytes in any chunking."""

    __slots__ = ("_chunks", "_is_whole")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._is_whole = False

    def feed(self, chunk: bytes) -> None:
        """Store *chunk*, and drop those before it if they end an event."""
        if self._is_whole:
            self._chunks.clear()
        self._chunks.append(chunk)
        self._is_whole = chunk.endswith(_ENDS)
        if len(self._chunks) > _MOST_CHUNKS:
            self._shorten()

    @property
    def is_cut(self) -> bool:
        """True if the stream stops in the middle of an event.

        One without the blank line at its end is whole if its data are: some servers omit it.
        """
        _, rest = self._split()
        if not rest.strip() or rest.startswith(b":"):
            return False
        data = data_of(rest).strip()
        if data == b"[DONE]":
            return False
        try:
            msgspec.json.decode(data)
        except UNREADABLE:
            return True
        return False

    @property
    def is_final(self) -> bool:
        """True if the event is whole, and one that nothing follows: what broke behind it was complete."""
        if self.is_cut:
            return False
        events, rest = self._split()
        newest = [event for event in (*events, rest) if data_of(event)]
        return bool(newest) and _FOLLOWED_BY_NOTHING.search(b"\n" + newest[-1]) is not None

    def _split(self) -> tuple[list[bytes], bytes]:
        """Return the whole events that are stored, and the bytes behind them."""
        data = b"".join(self._chunks)
        events, end = _cut(data, 0)
        return events, data[end:]

    def _shorten(self) -> None:
        data = b"".join(self._chunks)
        # An end among the last bytes is that of the newest event itself.
        rest = data[max(0, *(data.rfind(end, 0, -_LONGEST_END) for end in _ENDS)) :]
        if len(rest) > 2 * _LONGEST:
            rest = rest[:_LONGEST] + rest[-_LONGEST:]
        self._chunks = [rest]

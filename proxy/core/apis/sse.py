"""Server-sent events, cut out of a stream that comes in any chunking. Every byte is looked at once."""

from __future__ import annotations

import re
from typing import Final

_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END: Final = 4


class EventCutter:
    """Cuts a stream into its events, each with the blank line that ends it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()  # grows in place: joining what came of a long event to each chunk would be quadratic

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that *chunk* completes."""
        if not self._rest:
            found, at = _cut(chunk, 0)
            self._rest += chunk[at:]
            return found
        # Only what is new can complete an event, but its end may have begun before.
        near = max(0, len(self._rest) - _LONGEST_END + 1)
        self._rest += chunk
        found, at = _cut(self._rest, near)
        del self._rest[:at]
        return found

    @property
    def pending_size(self) -> int:
        """Bytes that came of an event that has not ended."""
        return len(self._rest)

    @property
    def pending(self) -> bytes:
        """What came of an event that has not ended."""
        return bytes(self._rest)

    def flush(self) -> bytes:
        """What came of an event that never ended."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def _cut(data: bytes | bytearray, near: int) -> tuple[list[bytes], int]:
    """The events in *data*, whose first ends behind *near*, and where the last of them ends."""
    found, at = [], 0
    for end in _END.finditer(data, near):
        found.append(bytes(data[at : end.end()]))
        at = end.end()
    return found, at


# What each API sends last: https://platform.openai.com/docs/api-reference/chat-streaming (``[DONE]``, which some
# servers leave out behind the ``finish_reason``), https://docs.anthropic.com/en/docs/build-with-claude/streaming
# (``message_stop``), https://platform.openai.com/docs/api-reference/responses-streaming. Inside a JSON string quotes
# and line ends are escaped, so no text that a model writes looks like this.
_LAST: Final = rb"(?:message_stop|response\.(?:completed|incomplete|failed|cancelled)|error)"
_COLON: Final = rb"\s{0,8}:\s{0,8}"
_DONE: Final = re.compile(
    rb"[\r\n](?:data: ?\[DONE\]|event: ?" + _LAST + rb"[\r\n]"
    rb'|data: ?\{\s{0,8}"(?:type"' + _COLON + rb'"' + _LAST + rb'"|error"' + _COLON + rb"))"
    rb'|"finish_?[rR]eason"' + _COLON + rb'"'
)
_LONGEST: Final = 96
"""More bytes than any match has."""


class StreamEnd:
    """Watches a stream of events for what says that it is done. Feed it bytes in any chunking."""

    __slots__ = ("_tail", "done")

    def __init__(self) -> None:
        self.done = False
        self._tail = b"\n"  # the first line has none before it

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*."""
        if self.done:
            return
        data = self._tail + chunk
        self.done = _DONE.search(data) is not None
        self._tail = data[-_LONGEST:]

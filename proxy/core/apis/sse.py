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
    def begun(self) -> int:
        """Bytes that came of an event that has not ended."""
        return len(self._rest)

    @property
    def pending(self) -> bytes:
        """What came of an event that has not ended."""
        return bytes(self._rest)

    def rest(self) -> bytes:
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

"""One direction of an upgraded connection: a bounded buffer between the side that sends and the side that receives.

A module of its own because ``server`` and ``upstream`` both use it and do not import each other.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

MAX_BUFFERED: Final = 2**17
"""Bytes above which the source is paused until the buffer has been read."""


class Source(Protocol):
    """A connection whose reading can be paused: asyncio's transports, and aiohttp's protocols."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Continue reading."""


class Pipe:
    """A buffer with a parser's interface: aiohttp's protocols give it the bytes of an upgraded connection."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._ended = False
        self._paused = False
        self._changed = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Buffer *data*. Return, as a parser of an unfinished message does, False and no remaining bytes."""
        self._chunks.append(bytes(data))
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED and not self._paused:
            self._paused = True
            self._source.pause_reading()
        self._changed.set()
        return False, b""

    def feed_eof(self) -> None:
        """End the data: the connection was closed."""
        self._ended = True
        self._changed.set()

    async def next(self) -> bytes:
        """Return the buffered bytes as soon as there are some; empty at the end of the connection."""
        while not self._chunks:
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        data, self._chunks, self._buffered = b"".join(self._chunks), [], 0
        if self._paused:
            self._paused = False
            self._source.resume_reading()
        return data

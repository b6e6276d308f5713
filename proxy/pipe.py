"""One direction of an upgraded connection: its bytes are passed on as they come.

A module of its own because ``server`` and ``upstream`` both use it and do not import each other.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

MOST_BUFFERED: Final = 2**17
"""Bytes buffered at most; then nothing more is read from the source until they have been taken."""


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
        self._news = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Buffer *data*. The result says that the message goes on and that no bytes are left over."""
        self._chunks.append(bytes(data))
        self._buffered += len(data)
        if self._buffered > MOST_BUFFERED and not self._paused:
            self._paused = True
            self._source.pause_reading()
        self._news.set()
        return False, b""

    def feed_eof(self) -> None:
        """Note that the connection has ended."""
        self._ended = True
        self._news.set()

    async def next(self) -> bytes:
        """Return the buffered bytes, waiting for some; empty at the end of the connection."""
        while not self._chunks:
            if self._ended:
                return b""
            self._news.clear()
            await self._news.wait()
        data, self._chunks, self._buffered = b"".join(self._chunks), [], 0
        if self._paused:
            self._paused = False
            self._source.resume_reading()
        return data

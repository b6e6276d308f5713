"""One direction of a connection whose bytes are passed on as they come."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

HELD: Final = 2**17
"""Bytes that may wait to be passed on; then nothing more is read from where they come."""


class Source(Protocol):
    """A connection that can be told to wait."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Go on reading."""


class Pipe:
    """Takes the raw bytes of an upgraded connection, as aiohttp's protocols hand them to a parser."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chunks: list[bytes] = []
        self._held = 0
        self._ended = False
        self._paused = False
        self._news = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take *data*. Never the end: only the connection's own end is one."""
        self._chunks.append(bytes(data))
        self._held += len(data)
        if self._held > HELD and not self._paused:
            self._paused = True
            self._source.pause_reading()
        self._news.set()
        return False, b""

    def feed_eof(self) -> None:
        """The connection has ended."""
        self._ended = True
        self._news.set()

    async def next(self) -> bytes:
        """What has come; empty at the end."""
        while not self._chunks:
            if self._ended:
                return b""
            self._news.clear()
            await self._news.wait()
        data, self._chunks, self._held = b"".join(self._chunks), [], 0
        if self._paused:
            self._paused = False
            self._source.resume_reading()
        return data

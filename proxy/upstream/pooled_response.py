"""An answer of the pool, the heads of answers that may come again, and two looks into aiohttp's ``StreamReader``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

if TYPE_CHECKING:
    from proxy.upstream.connection_pool import PooledConnection

Sink = Callable[[bytes], bool]
"""Takes a chunk; returns True if no more can be taken for now."""

_NO_HEADERS: Final[CIMultiDictProxy[str]] = CIMultiDictProxy(CIMultiDict())


class KnownHead(msgspec.Struct, eq=False):
    """The head of an answer that may come again with another ``length`` of the body: what the parser made of it.

    ``before`` and ``after`` are its bytes around the digits of that length, which its headers have as well.
    ``end_to_end`` is what a ``DirectReply`` made of them.
    """

    before: bytes
    after: bytes
    status: int
    headers: CIMultiDictProxy[str]
    raw_headers: tuple[tuple[bytes, bytes], ...]
    length: int
    end_to_end: tuple[list[tuple[str, str]], bool] | None = None


class PooledResponse(msgspec.Struct, eq=False):
    """An answer, with what ``DirectReply`` reads of aiohttp's responses.

    ``connection`` is None once the exchange is over, ``status`` is 0 until the head is complete. ``error``, if set,
    ended the exchange before that. ``whole`` is the body of an answer that went past the parser, whose head is
    ``known``; then ``content`` is empty.
    """

    method: ClassVar = "POST"
    connection: PooledConnection | None
    answered: asyncio.Future[None]
    status: int = 0
    headers: CIMultiDictProxy[str] = _NO_HEADERS
    raw_headers: tuple[tuple[bytes, bytes], ...] = ()
    content: aiohttp.StreamReader = aiohttp.EMPTY_PAYLOAD
    error: Exception | None = None
    sink: Sink | None = None
    poured: asyncio.Future[None] | None = None
    until: float = 0.0
    known: KnownHead | None = None
    whole: bytes = b""

    async def pour(self, sink: Sink, until: float) -> None:
        """Give *sink* each chunk as it arrives, up to the loop's time *until*.

        Return once it was True, or what comes is no chunk but the end or an error. Raises what *sink* raises.
        """
        content = self.content
        while content.exception() is None and (chunk := content.read_nowait()):
            if sink(chunk):
                return
        if self.connection is None or content.exception() is not None:
            return
        self.sink, self.until = sink, until
        self.poured = asyncio.get_running_loop().create_future()
        try:
            await self.poured
        finally:
            self.sink = self.poured = None

    def flow(self, now: float) -> None:
        """Give the sink what has arrived; let the caller of ``pour`` go on if that was the last it gets."""
        sink, poured = self.sink, self.poured
        if sink is None or poured is None or poured.done():
            return
        content = self.content
        self.sink = None  # taking bytes lets a paused connection go on, which calls this again
        try:
            may_go_on = now <= self.until
            while may_go_on and content._size and content.exception() is None:
                may_go_on = not sink(take_all(content))
            if may_go_on and content.exception() is None and not content.is_eof():
                self.sink = sink
                return
        except Exception as error:  # noqa: BLE001 - a callback has no caller that could handle it: the task has
            poured.set_exception(error)
        else:
            poured.set_result(None)

    def close(self) -> None:
        """Reset the connection if the exchange is still under way."""
        if self.connection is not None:
            self.connection.end(aiohttp.ClientConnectionError("the answer was given up"))


def take_all(content: aiohttp.StreamReader) -> bytes:
    """Take what has arrived out of *content*: its ``read_nowait`` in a third of the steps, for each event of a stream.

    https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/streams.py
    """
    if content._buffer_offset or content._protocol._reading_paused:
        return content.read_nowait()
    data = b"".join(content._buffer)
    content._buffer.clear()
    content._size = 0
    content._cursor += len(data)
    if content._http_chunk_splits:
        content._http_chunk_splits.clear()  # only ``readchunk`` looks at them
    return data


def remaining(content: aiohttp.StreamReader) -> bytes:
    """Return the bytes that are left in a failed stream, and empty it.

    Its public readers raise the failure before they return these bytes, which are then lost
    (https://github.com/aio-libs/aiohttp/issues/3026).
    """
    parts = list(content._buffer)
    if parts and content._buffer_offset:
        parts[0] = parts[0][content._buffer_offset :]
    content._buffer.clear()
    content._buffer_offset = 0
    return b"".join(parts)

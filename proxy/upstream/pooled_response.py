"""An answer of the pool, a head that may be repeated, and two functions that read aiohttp's ``StreamReader`` directly.

Private members of ``StreamReader`` are used here, those of aiohttp's minor version that ``pyproject.toml`` pins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Final

import aiohttp
import msgspec
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict, CIMultiDictProxy

Sink = Callable[[bytes], bool]
"""Takes a chunk; returns True if no more can be taken for now."""

_NO_HEADERS: Final[CIMultiDictProxy[str]] = CIMultiDictProxy(CIMultiDict())


class KnownHead(msgspec.Struct, eq=False):
    """The parsed head of an answer, to recognise one that is equal but for the ``length`` of its body.

    ``before`` and ``after`` are its bytes around the digits of that length, which its headers have as well.
    ``end_to_end`` caches the end-to-end headers that ``DirectReply`` reads from it.
    """

    before: bytes
    after: bytes
    status: int
    headers: CIMultiDictProxy[str]
    raw_headers: tuple[tuple[bytes, bytes], ...]
    length: int
    end_to_end: tuple[list[tuple[str, str]], bool] | None = None


class PooledResponse(msgspec.Struct, eq=False):
    """An answer, with the members of aiohttp's responses that ``DirectReply`` reads.

    ``connection`` is None once the exchange is over; ``end_exchange`` resets it (``PooledConnection.end``). ``status``
    is 0 until the head is complete, and ``answered`` is done then. ``error``, if set, ended the exchange before that.
    An answer with a ``known`` head bypassed the parser: ``whole`` is its body, ``content`` is empty.
    """

    method: ClassVar = "POST"
    connection: BaseProtocol | None
    end_exchange: Callable[[Exception], None]
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
        """Pass each chunk to *sink* as it arrives, up to the loop's time *until*.

        Return when *sink* has returned True, or at the end of the body or an error. Raises what *sink* raises.
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
        """Pass what has arrived to the sink; wake the caller of ``pour`` if the sink gets no more."""
        sink, poured = self.sink, self.poured
        if sink is None or poured is None or poured.done():
            return
        content = self.content
        self.sink = None  # reading may resume a paused connection, which calls this method again
        try:
            may_go_on = now <= self.until
            while may_go_on and content._size and content.exception() is None:
                may_go_on = not sink(take_all(content))
            if may_go_on and content.exception() is None and not content.is_eof():
                self.sink = sink
                return
        except Exception as error:  # noqa: BLE001 - the loop calls this and could not handle it; the task can
            poured.set_exception(error)
        else:
            poured.set_result(None)

    def close(self) -> None:
        """Reset the connection if the exchange is still under way."""
        if self.connection is not None:
            self.end_exchange(aiohttp.ClientConnectionError("the answer was given up"))


def take_all(content: aiohttp.StreamReader) -> bytes:
    """Return the bytes that have arrived in *content*, and empty it.

    It does what ``read_nowait`` does in a third of the steps, since it runs for each event of a stream:
    https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/streams.py
    """
    # A chunk that was read in part, or a paused connection that has to be resumed: left to the public method.
    if content._buffer_offset or content._protocol._reading_paused:
        return content.read_nowait()
    data = b"".join(content._buffer)
    content._buffer.clear()
    content._size = 0
    content._cursor += len(data)
    if content._http_chunk_splits:
        content._http_chunk_splits.clear()  # only ``readchunk`` uses them
    return data


def remaining(content: aiohttp.StreamReader) -> bytes:
    """Return the bytes that are left in a failed stream, and empty it.

    aiohttp's public readers raise the failure instead, so that these bytes would be lost:
    https://github.com/aio-libs/aiohttp/issues/3026
    """
    parts = list(content._buffer)
    if parts and content._buffer_offset:
        parts[0] = parts[0][content._buffer_offset :]
    content._buffer.clear()
    content._buffer_offset = 0
    return b"".join(parts)

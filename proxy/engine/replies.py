"""Replies without an upstream's connection: one whose body was read to its end, and an answer of our own.

``next_before`` and ``read_up_to`` read any reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy.engine.ports import Reply


class DrainedReply:
    """A reply whose body was read to its end: only its head is left, to be passed on verbatim."""

    close_delimited = False
    pour = None

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._reply.status

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The end-to-end headers as they came."""
        return self._reply.headers

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return self._reply.header(name)

    async def next_chunk(self) -> bytes:
        """Return no bytes: the body was read before."""
        return b""

    def close(self) -> None:
        """Do nothing: there is no transfer any more."""


class LocalReply:
    """An answer of our own, with status 200."""

    close_delimited = False
    pour = None
    status = 200

    def __init__(self, body: bytes, kind: str = "application/json") -> None:
        self._body = body
        self.headers: Sequence[tuple[str, str]] = (("content-type", kind), ("content-length", str(len(body))))

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return header_in(self.headers, name)

    async def next_chunk(self) -> bytes:
        """Return the whole body at the first call, then no bytes."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Do nothing: there is no transfer."""


def header_in(headers: Sequence[tuple[str, str]], name: str) -> str:
    """Return the first of *headers* called *name* (any case); empty if there is none."""
    return next((value for key, value in headers if key.lower() == name.lower()), "")


async def next_before(reply: Reply, deadline: float | None) -> bytes | None:
    """Return the next bytes of *reply*; None if none arrive before *deadline* (seconds of the loop's clock)."""
    try:
        async with asyncio.timeout_at(deadline):
            return await reply.next_chunk()
    except TimeoutError:
        return None


async def read_up_to(reply: Reply, chunks: list[bytes], most: int, deadline: float | None = None) -> bool:
    """Add the rest of *reply* to *chunks* until they have more than *most* bytes; return True if that was all of it.

    What has not arrived before *deadline* (seconds of the loop's clock) is not waited for.
    """
    size = sum(map(len, chunks))
    while size <= most:
        chunk = await next_before(reply, deadline)
        if not chunk:
            return chunk is not None
        chunks.append(chunk)
        size += len(chunk)
    return False

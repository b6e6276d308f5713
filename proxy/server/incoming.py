"""A client's request as it arrives: its head, parsed or known from the request before it, and its body as it comes."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec
from aiohttp import HttpVersion, StreamReader, web
from aiohttp.streams import EMPTY_PAYLOAD
from msgspec import structs
from multidict import CIMultiDictProxy

RawHeaders = tuple[tuple[bytes, bytes], ...]

_LONGEST_HEAD: Final = 4096
"""Bytes of a head that is remembered, at most: each open connection may have one."""

_MOST_DIGITS: Final = 12
"""Digits of a Content-Length that is read here; far more than any limit of bodies has."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,%d})[ \t]*(?=\r\n)" % _MOST_DIGITS, re.IGNORECASE)
_OTHER_FRAMING: Final = re.compile(rb"\r\n(?:transfer-encoding|upgrade|expect)[ \t]*:", re.IGNORECASE)
"""Fields by which more than Content-Length says where a request ends, or whether its body comes at all.

https://www.rfc-editor.org/rfc/rfc9112#section-6.3
"""


class IncomingRequest(msgspec.Struct):
    """A request whose head is complete.

    ``content`` is its body as it arrives, or ``body`` is all of it, if that came past the parser with its head.
    ``raw_path`` is the target of the request line. ``content_length`` is the declared length of the body; that in
    ``headers`` and ``raw_headers`` is the one of the first request with this head.

    A Struct, since every request makes one and it is built in C.
    """

    protocol: web.RequestHandler
    method: str
    raw_path: str
    version: HttpVersion
    headers: CIMultiDictProxy[str]
    raw_headers: RawHeaders
    keep_alive: bool
    content: StreamReader
    content_length: int | None
    body: bytes | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection, or None once it is lost."""
        return self.protocol.transport


def read_head(data: bytes) -> tuple[bytes, int]:
    """Return the head with which *data* begins, and the bytes of the whole request.

    The head is empty if it is not complete, is long, or if its request may end elsewhere than Content-Length says.
    """
    end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD) + 4
    head = data[:end]
    if end < 4 or _OTHER_FRAMING.search(head):
        return b"", 0
    length = _LENGTH.search(head)
    if length is None:
        return head, end
    return head, end + int(length[1])


class RepeatedHead:
    """A head that may come again on its connection, byte for byte but for the length of the body.

    A client sends the same head all day, and parsing it anew gives the same fields anew. Only the digits of its
    Content-Length may differ; a head in which anything else does goes to the parser. ``request`` is the first request
    with this head, without its body.
    """

    __slots__ = ("_after", "_before", "request")

    def __init__(self, request: IncomingRequest, before: bytes, after: bytes) -> None:
        """*before* and *after* are the bytes of the head around the digits."""
        self.request = structs.replace(request, content=EMPTY_PAYLOAD)
        self._before = before
        self._after = after

    def match(self, data: bytes) -> tuple[int, int] | None:
        """Return where the body begins in *data* and its length, or None if *data* begins with another head."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        end = data.find(b"\r", len(before), len(before) + _MOST_DIGITS + 1)
        digits = data[len(before) : max(0, end)]
        # With spaces behind the digits they belong to ``after``: then it is no match, and the parser reads it.
        if not digits.isdigit() or not data.startswith(after, end):
            return None
        return end + len(after), int(digits)


def repeated_head(head: bytes, request: IncomingRequest) -> RepeatedHead | None:
    """Return *head*, one from ``read_head`` of which *request* was parsed, or None if it has not one Content-Length."""
    length = _LENGTH.search(head)
    if length is None or request.headers.getall("Content-Length", []) != [length[1].decode()]:
        return None
    return RepeatedHead(request, head[: length.start(1)], head[length.end(1) :])

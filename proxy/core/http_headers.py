"""Heads of HTTP messages: names of headers, in lower case, in one list for all rooms; and heads that come again.

A peer sends the same head all day but for the digits of its Content-Length, and parsing it anew gives the same fields
anew. So a head that was parsed once need not be parsed again: the connection that had it compares what surrounds these
digits. A head in which any other byte differs, or whose message may end elsewhere than Content-Length says, goes to the
parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

HeadersOf = Callable[[str], Mapping[str, str]]
"""Takes the name that a client uses for a model; returns the headers configured for it."""


def no_headers(model: str) -> Mapping[str, str]:
    """Return no headers, whatever the *model*."""
    del model
    return MappingProxyType({})


OWN_PREFIX: Final = "x-ullage-"
"""The beginning of the names of Ullage's own headers; they never go to an upstream."""

CREDENTIAL_ORDER: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which callers send a key: OpenAI's, Anthropic's, Azure's and Google's.

The order must never change: a tenant's digest depends on it, and with another digest tenants lose their conversations.
"""

CREDENTIALS: Final = frozenset(CREDENTIAL_ORDER)

PERSONAL: Final = CREDENTIALS | {"cookie", "openai-organization", "openai-project"}
"""Headers that identify a client; they are not sent to a server that the client did not choose."""

HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers for a single connection (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)."""

WRITTEN_ANEW: Final = frozenset({"content-length", "host"})
"""Headers of a request that depend on its receiver and its encoding: each sender writes its own."""


class EndToEnd(tuple[tuple[str, str], ...]):
    """A client's end-to-end headers, in order and spelling. They come again with each request that has the same head.

    ``prepared`` is what the upstream that they were last sent to made of them. It lives as long as they do: a key in
    it stays in memory no longer than in them.
    """

    prepared: Any = None


# Heads that come again.

LONGEST_HEAD: Final = 4096
"""Bytes of a head that is remembered, at most: each open connection may have one."""

MOST_DIGITS: Final = 12
"""Digits of a Content-Length that is read here; far more than any limit of bodies has."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,%d})[ \t]*(?=\r\n)" % MOST_DIGITS, re.IGNORECASE)
_OTHER_FRAMING: Final = re.compile(rb"\r\n(?:transfer-encoding|upgrade|expect)[ \t]*:", re.IGNORECASE)
"""Fields by which more than Content-Length says where a message ends, or whether its body comes at all.

https://www.rfc-editor.org/rfc/rfc9112#section-6.3
"""


def read_head(data: bytes) -> tuple[bytes, int]:
    """Return the head with which *data* begins, and the bytes of the whole message.

    The head is empty if it is not complete, is long, or if its message may end elsewhere than Content-Length.
    """
    end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4
    head = data[:end]
    if end < 4 or _OTHER_FRAMING.search(head):
        return b"", 0
    length = _LENGTH.search(head)
    if length is None:
        return head, end
    return head, end + int(length[1])


def around_length(head: bytes, lengths: list[str]) -> tuple[bytes, bytes] | None:
    """Return what stands in *head*, one from ``read_head``, before and behind the digits of its Content-Length.

    None if it has not one: *lengths* are those parsed.
    """
    length = _LENGTH.search(head)
    if length is None or lengths != [length[1].decode()]:
        return None
    return head[: length.start(1)], head[length.end(1) :]

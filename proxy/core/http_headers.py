"""Names of HTTP headers, in lower case, in one list for all rooms; and repeated heads.

A peer repeats the same head on a connection, but for the digits of its Content-Length, and parsing it again gives the
same fields again. So the connection compares what surrounds these digits with the head that it parsed once, and reads
the length only. A head in which another byte differs goes to the parser; so does one whose message may not end where
Content-Length says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

HeadersOf = Callable[[str], Mapping[str, str]]
"""Takes the name that a client uses for a model; returns the headers configured for it."""

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
"""An empty mapping that every caller may share."""


def no_headers(model: str) -> Mapping[str, str]:
    """Return no headers, whatever the *model*."""
    del model
    return NO_HEADERS


OWN_PREFIX: Final = "x-ullage-"
"""The beginning of the names of Ullage's own headers; they never go to an upstream."""

CREDENTIAL_ORDER: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which callers send a key: OpenAI's, Anthropic's, Azure's and Google's.

https://platform.openai.com/docs/api-reference, https://platform.claude.com/docs/en/api/overview,
https://learn.microsoft.com/en-us/azure/ai-services/openai/reference, https://ai.google.dev/gemini-api/docs/api-key

The order must never change: a tenant's digest depends on it, and with another digest tenants lose their conversations.
"""

CREDENTIALS: Final = frozenset(CREDENTIAL_ORDER)

PERSONAL: Final = CREDENTIALS | {"cookie", "openai-organization", "openai-project"}
"""Headers that identify a client; they are not sent to a server that the client did not choose."""

HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers for a single connection (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)."""

REWRITTEN: Final = frozenset({"content-length", "host"})
"""Headers of a request that depend on its receiver and its encoding: each sender writes its own."""


class EndToEnd(tuple[tuple[str, str], ...]):
    """A client's end-to-end headers, in order and spelling: one object for all requests with the same head.

    ``prepared`` caches the request head that the last upstream made of them. It is an attribute and no entry of a
    cache, so that a key in it leaves the memory together with the headers.
    """

    prepared: Any = None


# Repeated heads.

LONGEST_HEAD: Final = 4096
"""Bytes of the longest head that is remembered: each open connection may have one."""

MOST_DIGITS: Final = 12
"""Digits of the longest Content-Length that is read here, far above the limit of bodies."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,%d})[ \t]*(?=\r\n)" % MOST_DIGITS, re.IGNORECASE)
_OTHER_FRAMING: Final = re.compile(rb"\r\n(?:transfer-encoding|upgrade|expect)[ \t]*:", re.IGNORECASE)
"""Fields by which a message may end elsewhere than Content-Length says, or its body may not come at all.

https://www.rfc-editor.org/rfc/rfc9112#section-6.3
"""


def read_head(data: bytes) -> tuple[bytes, int]:
    """Return the head with which *data* begins, and the number of bytes of the whole message.

    The head is empty if it is not complete or too long, or if its message may end elsewhere than Content-Length says.
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
    """Return the bytes of *head*, one from ``read_head``, before and behind the digits of its Content-Length.

    *lengths* are the values of Content-Length that the parser read; None if it is not exactly the one found here.
    """
    length = _LENGTH.search(head)
    if length is None or lengths != [length[1].decode()]:
        return None
    return head[: length.start(1)], head[length.end(1) :]

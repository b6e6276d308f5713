"""Heads of HTTP messages that come again on a connection, byte for byte but for the digits of their Content-Length.

A peer sends the same head all day, and parsing it anew gives the same fields anew. So a head that was parsed once need
not be parsed again: ``SizedHead`` compares it, and says where the body is. Only the digits may differ. A head in which
any other byte does, or that may end its message elsewhere than Content-Length says, goes to the parser.
"""

from __future__ import annotations

import re
from typing import Final

_LONGEST_HEAD: Final = 4096
"""Bytes of a head that is remembered, at most: each open connection may have one."""

_MOST_DIGITS: Final = 12
"""Digits of a Content-Length that is read here; far more than any limit of bodies has."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,%d})[ \t]*(?=\r\n)" % _MOST_DIGITS, re.IGNORECASE)
_OTHER_FRAMING: Final = re.compile(rb"\r\n(?:transfer-encoding|upgrade|expect)[ \t]*:", re.IGNORECASE)
"""Fields by which more than Content-Length says where a message ends, or whether its body comes at all.

https://www.rfc-editor.org/rfc/rfc9112#section-6.3
"""


def read_head(data: bytes) -> tuple[bytes, int]:
    """Return the head with which *data* begins, and the bytes of the whole message.

    The head is empty if it is not complete, is long, or if its message may end elsewhere than Content-Length.
    """
    end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD) + 4
    head = data[:end]
    if end < 4 or _OTHER_FRAMING.search(head):
        return b"", 0
    length = _LENGTH.search(head)
    if length is None:
        return head, end
    return head, end + int(length[1])


class SizedHead:
    """A head that may come again on its connection with another length of the body."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        """*before* and *after* are the bytes of the head around the digits."""
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


def sized_head(head: bytes, lengths: list[str]) -> SizedHead | None:
    """Return *head*, one from ``read_head``, or None if it has not one Content-Length: *lengths* are those parsed."""
    length = _LENGTH.search(head)
    if length is None or lengths != [length[1].decode()]:
        return None
    return SizedHead(head[: length.start(1)], head[length.end(1) :])

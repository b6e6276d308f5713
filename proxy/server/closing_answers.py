"""Answers to connections that are closed at once: their bytes are no request, or there is no room for them.

They are built once, because a server in trouble sends many of them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from proxy.core.errors import InvalidRequest, Overloaded, UllageError, error_body


class HeadTooLarge(UllageError):
    """The request line and header fields together are too long, or too many.

    https://www.rfc-editor.org/rfc/rfc6585#section-5
    """

    status = 431
    code = "request_header_fields_too_large"
    kind = "invalid_request_error"


def _closing(error: UllageError, fields: bytes = b"") -> bytes:
    """Return a whole answer with *error* and the header *fields*; the connection is closed after it."""
    body = error_body(error, "chat")
    status = HTTPStatus(error.status)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n%b"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, status.phrase.encode(), fields, len(body), body)
    )


def _full(setting: str) -> bytes:
    """Return the answer to a connection for which *setting* leaves no room."""
    error = Overloaded(f"The proxy has as many connections as it may ({setting}). Try again soon.")
    return _closing(error, b"retry-after: 1\r\n")


FULL: Final = _full("server.limits.connections")
OUT_OF_DESCRIPTORS: Final = _full("the limit of open files of its process")

UNREADABLE: Final = _closing(InvalidRequest("This is not a valid HTTP/1.1 request."))
HEAD_TOO_LARGE: Final = _closing(
    HeadTooLarge(
        "The request's header fields are too large or too many "
        "(server.limits.headers bounds one, server.limits.head all of them, server.limits.fields their number)."
    )
)

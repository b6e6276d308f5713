"""Explains a 404 of an upstream for a path that belongs to no API, unless the upstream explains it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from proxy.core.content_encoding import ContentDecoder
from proxy.core.errors import NotFound
from proxy.core.overflow.error_body import parse_body
from proxy.engine.ports import Reply
from proxy.engine.replies import read_up_to
from proxy.server.request import ends_like_route, is_outside_apis

_LONGEST_REASON: Final = 2**16
"""Bytes of an error that are read to learn whether it says why a path is not found."""

_REASONS: Final = ("error", "errors", "detail", "message")
"""Members that say what is wrong, in the errors of APIs and of frameworks."""

_PHRASES: Final = frozenset(status.phrase.lower() for status in HTTPStatus)


async def known_path(path: str, reply: Reply, head: bytes) -> bytes:
    """Return the bytes of *reply* that were read: *head*, or a whole error.

    Raises ``NotFound`` if the upstream does not know *path* either, and its answer does not say why. Paths outside the
    APIs are relayed, since servers have routes of their own (``/tokenize``, ``/api/show``). Most of those that no
    server knows come from a base URL without ``/v1``, or with another path before it.
    """
    if reply.status not in (404, 405) or not is_outside_apis(path):
        return head
    if "json" in reply.header("content-type").lower():
        if not ends_like_route(path):
            return head
        chunks = [head]
        if not await read_up_to(reply, chunks, _LONGEST_REASON):
            return b"".join(chunks)
        head = b"".join(chunks)
        if _has_reason(ContentDecoder(reply.header("content-encoding"), _LONGEST_REASON).feed(head)):
            return head
    reply.close()
    raise NotFound("Neither this proxy nor the upstream knows this path: base URLs end in one /v1.")


def _has_reason(body: bytes) -> bool:
    """True if the error in *body* says more than its status, as an API does and a framework's router does not.

    FastAPI's is ``{"detail": "Not Found"}``: https://fastapi.tiangolo.com/tutorial/handling-errors/
    """
    value = parse_body(body)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return False
    reasons = [str(value[name]).strip(" .").lower() for name in _REASONS if value.get(name)]
    return any(reason not in _PHRASES for reason in reasons)

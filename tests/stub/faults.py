"""Misbehaviour on demand: one frozen value says what goes wrong with one request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Literal

Headers = tuple[tuple[str, str], ...]
Cut = Literal["", "before_headers", "after_headers", "mid_body"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request; every figure of time is in seconds.

    With a ``status`` or a ``body`` the stub answers exactly that instead of judging the request. ``raw`` goes onto the
    socket as it is, and the connection is closed behind it. Everything else disturbs the ordinary answer: ``delay``
    before the first byte, ``gap`` between two chunks, ``gate`` behind the first chunk until it is set, ``trickle``
    between two bytes, ``hang`` before any byte for ever, ``cut`` breaks the connection (``mid_body`` after ``after``
    chunks), ``gzip`` compresses whatever the client accepts, ``no_done`` ends a stream cleanly without its last event.
    """

    status: int | None = None
    headers: Headers = ()
    body: bytes | None = None
    raw: bytes | None = None
    delay: float = 0.0
    gap: float = 0.0
    gate: asyncio.Event | None = None
    trickle: float = 0.0
    hang: bool = False
    cut: Cut = ""
    after: int = 1
    gzip: bool = False
    no_done: bool = False

    @property
    def replaces(self) -> bool:
        """True if the stub's ordinary answer is not given at all."""
        return self.status is not None or self.body is not None or self.raw is not None


NO_FAULT = Fault()
JSON: Headers = (("content-type", "application/json"),)
SSE: Headers = (("content-type", "text/event-stream"),)


def error(status: int, message: str = "The server had an error.", code: str = "server_error") -> Fault:
    """An ordinary provider error in OpenAI's shape."""
    body = json.dumps({"error": {"message": message, "type": code, "param": None, "code": code}}).encode()
    return Fault(status=status, headers=JSON, body=body)


def rate_limited(retry_after: str = "1") -> Fault:
    """A 429 with the headers providers send along."""
    body = error(429, "Rate limit reached for requests", "rate_limit_exceeded").body
    headers = (
        ("retry-after", retry_after),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", "1s"),
    )
    return Fault(status=429, headers=JSON + headers, body=body)


def redirect(location: str, status: int = 307) -> Fault:
    """A redirect to *location*, which a proxy that holds a key must not follow."""
    return Fault(status=status, headers=(("location", location),), body=b"")


def events(*payloads: bytes) -> Fault:
    """A 200 stream of exactly these bytes: errors inside a 200, garbage, half an event."""
    return Fault(status=200, headers=SSE, body=b"".join(payloads))

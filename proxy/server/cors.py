"""Answers for pages of listed web origins."""

from __future__ import annotations

from typing import Final

from aiohttp import web

_ASKED: Final = "access-control-request-method"


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks for permission instead of making its request."""
    return request.method == "OPTIONS" and _ASKED in request.headers


def answer_headers(origin: str) -> list[tuple[str, str]]:
    """What lets a page of *origin* read the answer and its headers."""
    return [
        ("access-control-allow-origin", origin),
        ("access-control-expose-headers", "*"),
        ("vary", "origin"),
    ]


def preflight_headers(request: web.BaseRequest) -> list[tuple[str, str]]:
    """Permission for the method and headers that were asked for, for ten minutes."""
    headers = [("access-control-allow-methods", request.headers[_ASKED]), ("access-control-max-age", "600")]
    wanted = request.headers.get("access-control-request-headers")
    if wanted:
        headers.append(("access-control-allow-headers", wanted))
    return headers

"""Declares server tools in a request before it is planned, so that its views have them from the first one on.

A tool that is only of use in compacted views is added to those (``Feature.addition``), and costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from proxy.core.apis.envelope import splice
from proxy.core.decisions import Addition, MeasuredRequest
from proxy.core.errors import InvalidRequest
from proxy.core.models import COMPRESS
from proxy.core.request import Request
from proxy.engine.features import Planning
from proxy.engine.reading import Reader
from proxy.server_tools.tool import added_tokens, has_tools, may_offer

ENDLESS: Final = 2**40
"""The window that a request is measured in if its model's is unknown; nothing is declared then."""

WINDOW_PART: Final = 16
"""A tool may take at most one token in so many of the window."""


async def declare(
    request: Request, engine: Planning, reader: Reader, tools: Mapping[str, Mapping[str, str]], stage: str
) -> Request:
    """Return *request* with *tools*, by name the declaration for each API, behind the client's own.

    Return *request* itself unless all of them may be offered: the client sends tools of its own, the model may call
    any, and every answer will be read here. It is not if the window is unknown, as a fallback's may be. *stage* names
    the change.
    """
    if engine.run.request.purpose not in ("answer", "count") or engine.mode_of(request) != "on":
        return request
    try:
        measured = await engine.measure(request, ENDLESS)
    except InvalidRequest:
        return request  # what cannot be read may still be relayed
    envelope, known = measured.parsed.envelope, measured.known
    if known.window is None or known.route.steps != (COMPRESS,) or measured.client_compaction:
        return request
    if not has_tools(envelope) or not all(may_offer(request.api, envelope, name) for name in tools):
        return request
    declarations = [by_api[request.api] for by_api in tools.values()]
    tokens = sum(added_tokens(reader, request.api, envelope, known.route, declaration) for declaration in declarations)
    if tokens * WINDOW_PART > known.window * len(tools):
        return request
    return _declared(request, measured, tuple(tools), ",".join(declarations), stage)


def _declared(
    request: Request, measured: MeasuredRequest, names: tuple[str, ...], declarations: str, stage: str
) -> Request:
    """Return *request* with the *declarations* of server tools called *names*."""
    parsed = measured.parsed
    at = len(parsed.body[: parsed.scan.start].decode())
    array = Addition(declarations).added_to(parsed.envelope.value("tools"))
    body = splice(parsed.envelope, at, parsed.body[parsed.scan.start : parsed.scan.end], {"tools": array})
    server_tools = (*request.server_tools, *((name, ()) for name in names))
    prepared = (*request.prepared, stage)
    return structs.replace(request, body=body, prepared=prepared, server_tools=server_tools)


def is_declared(request: Request, name: str) -> bool:
    """True if the server tool called *name* was declared in *request*."""
    return any(declared == name for declared, _ in request.server_tools)

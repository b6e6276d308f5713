"""Declares server tools in a request before it is planned, so that all of its views have them.

A tool that is useful in compacted views only is added to those (``Feature.addition``), and costs others nothing.
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
"""Tokens of the window against which a request is measured if its model's is unknown; no tool is declared then."""

WINDOW_PART: Final = 16
"""Divisor of the window: the most tokens that one tool's declaration may take."""


async def declare(
    request: Request, engine: Planning, reader: Reader, tools: Mapping[str, Mapping[str, str]], stage: str
) -> Request:
    """Return *request* with *tools* appended to the client's own; each is a declaration by API, under its name.

    Return *request* unchanged unless all of them may be offered: the client sends tools of its own, the model may call
    any of them, and every answer will be read here, which it is not if the window is unknown or a fallback may answer.
    *stage* names the change in reports.
    """
    if engine.run.request.purpose not in ("answer", "count") or engine.mode_of(request) != "on":
        return request
    try:
        measured = await engine.measure(request, ENDLESS)
    except InvalidRequest:
        return request  # a body that we cannot read is relayed as it is
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
    return any(tool == name for tool, _ in request.server_tools)

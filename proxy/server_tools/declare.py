"""Declares server tools in a request before it is planned, so that all of its views have them.

A tool that is useful in compacted views only is added to those (``Feature.addition``), and costs others nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import structs

from proxy.core.apis.envelope import splice
from proxy.core.decisions import API_FORMATS, Addition, MeasuredRequest
from proxy.core.errors import InvalidRequest
from proxy.core.models import COMPRESS
from proxy.core.request import Request
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import Reader
from proxy.server_tools.tool import added_tokens, has_tools, may_offer

ENDLESS: Final = 2**40
"""Tokens of the window against which a request is measured if its model's is unknown; no tool is declared then."""

WINDOW_PART: Final = 16
"""Divisor of the window: the most tokens that one tool's declaration may take."""


def is_any_project(project: str) -> bool:
    """Return True: the tools are for every project."""
    del project
    return True


class DeclareTools(Feature):
    """Declares *tools* in the requests of projects for which *is_for* is true; each is a declaration by API.

    *stage* names the change in reports.
    """

    markers = MappingProxyType(dict.fromkeys(API_FORMATS, (b'"tools"',)))

    def __init__(
        self,
        reader: Reader,
        tools: Mapping[str, Mapping[str, str]],
        stage: str,
        is_for: Callable[[str], bool] = is_any_project,
    ) -> None:
        self._reader = reader
        self._tools = tools
        self._stage = stage
        self._is_for = is_for

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with the tools appended to the client's own; *request* itself if they may not be offered.

        They may be if the client sends tools of its own, if the model may call any of them, and if every answer will be
        read here, which it is not if the window is unknown or a fallback may answer.
        """
        if not self._is_for(request.options.project):
            return request
        if engine.run.request.purpose not in ("answer", "count") or engine.mode_of(request) != "on":
            return request
        try:
            measured = await engine.measure(request, ENDLESS)
        except InvalidRequest:
            return request  # a body that we cannot read is relayed as it is
        if measured.known.route.steps != (COMPRESS,) or measured.client_compaction or not self._fit(measured):
            return request
        declarations = ",".join(by_api[request.api] for by_api in self._tools.values())
        return _declared(request, measured, tuple(self._tools), declarations, self._stage)

    def _fit(self, measured: MeasuredRequest) -> bool:
        """True if all of the tools may be offered beside the client's own, and leave room in a known window."""
        api, envelope, known = measured.request.api, measured.parsed.envelope, measured.known
        if known.window is None or not has_tools(envelope):
            return False
        if not all(may_offer(api, envelope, name) for name in self._tools):
            return False
        declarations = [by_api[api] for by_api in self._tools.values()]
        tokens = sum(added_tokens(self._reader, api, envelope, known.route, text) for text in declarations)
        return tokens * WINDOW_PART <= known.window * len(self._tools)


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

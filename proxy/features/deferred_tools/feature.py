"""Defers the tools of a request that leave its window no room for anything else.

First their descriptions are shortened, as in every oversize array of tools. If they are still too large, three kinds
remain: tools that the conversation has called, tools that the provider runs itself, and the first of the others, up to
half of the tokens that tools may take. (Clients list their own tools before those of MCP servers.) The same array and
history give the same choice on every replica, so the prompt only changes when a deferred tool is called for the first
time. Such a request is planned for a smaller window, so that there is always room for tools that a search adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import structs

from proxy.core.apis.envelope import splice
from proxy.core.apis.json_scan import elements
from proxy.core.conversation import Count
from proxy.core.decisions import API_FORMATS, Addition, MeasuredRequest
from proxy.core.errors import InvalidRequest
from proxy.core.request import Request
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import Reader
from proxy.features.deferred_tools.search import NAME, Tool, ToolSearch, read_tool, reserve, search_tool
from proxy.features.deferred_tools.settings import deferred_tools_settings
from proxy.features.opening import FeatureParts
from proxy.server_tools.declare import ENDLESS
from proxy.server_tools.tool import ServerTool, may_offer
from proxy.tasks import offload

STAGE: Final = "deferred_tools"

LEAST_BODY: Final = 8_192
"""Bytes of a body below which its tools are never too large: some 2,000 tokens, half of a window of 4,096."""

NAMES_PART: Final = 32
"""The names of deferred tools take at most one token in so many of the window."""


class DeferTools(Feature):
    """Defers tools that take more than *share* of the window."""

    markers = MappingProxyType(dict.fromkeys(API_FORMATS, (b'"tools"',)))

    def __init__(self, reader: Reader, share: float, max_tokens: int) -> None:
        """*max_tokens* are those of the tools that one search adds, at most."""
        self._reader = reader
        self._share = share
        self._max_tokens = max_tokens

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with fewer tools and one that searches the others; *request* itself if its tools fit."""
        if len(request.body) < LEAST_BODY or engine.mode_of(request) != "on":
            return request
        try:
            measured = await engine.measure(request, ENDLESS)
        except InvalidRequest:
            return request  # a body that cannot be read may still be relayed
        limit = int(measured.budget.window * self._share)
        if not measured.tools_json or _tools_tokens(measured) <= limit:
            return request
        if not may_offer(request.api, measured.parsed.envelope, NAME):
            return request
        return await offload(len(request.body), self._deferred, measured)

    def _deferred(self, measured: MeasuredRequest) -> Request:
        """Return the request with tools of about half of the tokens that tools may take, and the search tool.

        The window is in the provider's tokens. In tokens of our count it would change with the count factor that is
        learned for the route, and so would the choice of tools and the prompt.
        """
        request, parsed, route = measured.request, measured.parsed, measured.known.route
        array = parsed.envelope.value("tools")
        try:
            tools = [read_tool(array[start:end]) for start, end in elements(array, 0)[0]]
        except (ValueError, RecursionError):
            return request
        count = self._reader.count(route.encoding, route.model)
        items = parsed.body[parsed.scan.start : parsed.scan.end]
        window = measured.known.window or measured.budget.window
        remaining = _remaining(tools, items, int(window * self._share) // 2, count)
        deferred = [tool for tool in tools if tool not in remaining]
        if not deferred:
            return request
        names = [tool.name for tool in deferred]
        # Last: added tools do not change the bytes of those before them.
        search = search_tool(request.api, names, window // NAMES_PART, count)
        tools_json = f"[{','.join(tool.json for tool in remaining)}]"
        at = len(parsed.body[: parsed.scan.start].decode())
        smaller = Addition(search).added_to(tools_json)
        body = splice(parsed.envelope, at, items, {"tools": smaller})
        removed = measured.counts.beside.tools - self._reader.count_tools(route.encoding, route.model)(smaller)
        server_tools = (*request.server_tools, (NAME, tuple(tool.json for tool in deferred)))
        options = structs.replace(request.options, window=window - reserve(window, self._max_tokens))
        prepared = (*request.prepared, STAGE)
        return structs.replace(
            request,
            body=body,
            prepared=prepared,
            tokens_removed=max(0, removed),
            server_tools=server_tools,
            options=options,
        )


def _tools_tokens(measured: MeasuredRequest) -> int:
    """Return the tokens of the tools with shortened descriptions."""
    saved = measured.counts.fixed + measured.addition.tokens - measured.budget.fixed
    return measured.counts.beside.tools - saved


def _remaining(tools: Sequence[Tool], items: bytes, tokens: int, count: Count) -> list[Tool]:
    """Return the *tools* that stay: those that *items* call, those without a name, and the first others.

    The others take at most *tokens*.
    """
    first = set(_first(tools, tokens, count))
    # The name is searched in the bytes, without parsing every call. A name that only a text quotes stays declared, too.
    return [tool for tool in tools if not tool.name or tool in first or f'"{tool.name}"'.encode() in items]


def _first(tools: Iterable[Tool], tokens: int, count: Count) -> Iterable[Tool]:
    """Yield the first *tools* that take at most *tokens* together."""
    for tool in tools:
        tokens -= count(tool.json)
        if tokens < 0:
            return
        yield tool


def open_features(parts: FeatureParts) -> list[Feature | ServerTool]:
    """Return the feature and its tool if it is switched on."""
    settings = deferred_tools_settings(parts.settings)
    if not settings.enabled:
        return []
    return [DeferTools(parts.reader, settings.share, settings.max_tokens), ToolSearch(settings.max_tokens)]

"""The recall tool: offered where a view leaves something out, answered from the request's own history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from proxy.core.apis.envelope import Envelope
from proxy.core.decisions import NO_ADDITION, Addition, CountedView
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.engine.reading import Reader
from proxy.features.recall.pieces import Piece, pieces_of
from proxy.features.recall.search import answer
from proxy.features.recall.tool import NAME, addition
from proxy.offload import offload
from proxy.server_tools.tool import Count, ServerTool, ToolResult, WriteResult, has_tools


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one call: ``tokens``, and ``results`` unless its arguments name another number."""

    results: int = 10
    tokens: int = 4_000


class Recall(ServerTool):
    """Shows the model what left its view."""

    name = NAME

    def __init__(self, reader: Reader, limits: Limits, *, without_tools: bool = True) -> None:
        """*without_tools*: clients that send no tools are offered it, too."""
        self.max_tokens = limits.tokens
        self._reader = reader
        self._results = limits.results
        self._without_tools = without_tools

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """Return the tool and the note on it; nothing if it may not be offered."""
        if not self._without_tools and not has_tools(envelope):
            return NO_ADDITION
        return addition(self._reader, request.api, envelope, route, window)

    def is_offered(self, view: CountedView) -> bool:
        """True if *view* leaves something out and has the tool."""
        return view.edits.addition

    async def begin(self, view: CountedView, calls: Sequence[str]) -> Sequence[WriteResult]:
        """Return what writes a page for each of *calls*."""
        pieces = await offload(len(view.request.body), pieces_of, view)
        return [partial(self._page, arguments, pieces) for arguments in calls]

    def _page(self, arguments: str, pieces: Sequence[Piece], tokens: int, count: Count) -> ToolResult:
        return ToolResult(answer(arguments, pieces, self._results, tokens, count))

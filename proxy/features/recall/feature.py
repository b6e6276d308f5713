"""The recall tool: offered if a view leaves something out, and answered from the request's own history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from proxy.core.apis.envelope import Envelope
from proxy.core.decisions import NO_ADDITION, Addition, CountedView
from proxy.core.errors import StoreUnavailable
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.engine.features import Feature
from proxy.engine.reading import Reader
from proxy.features.opening import FeatureParts, ReadEarlier, open_earlier
from proxy.features.recall.pieces import Piece, earlier_pieces, pieces_of
from proxy.features.recall.search import answer, answer_earlier, is_earlier, read_arguments
from proxy.features.recall.settings import recall_settings
from proxy.features.recall.tool import DECLARATIONS_WITH_SESSIONS, MENTION, NAME, addition
from proxy.server_tools.declare import DeclareTools
from proxy.server_tools.tool import ServerTool, WriteResult, has_tools, is_declared
from proxy.tasks import offload


class Recall(ServerTool):
    """Shows the model items that left its view."""

    name = NAME

    def __init__(
        self,
        reader: Reader,
        *,
        results: int = 10,
        max_tokens: int = 4_000,
        without_tools: bool = True,
        read_earlier: ReadEarlier | None = None,
    ) -> None:
        """A call gets *results* unless its arguments name another number.

        *without_tools*: clients that send no tools are offered it, too. *read_earlier* reads earlier conversations,
        None if they are not searched.
        """
        self.max_tokens = max_tokens
        self._read_earlier = read_earlier
        self._reader = reader
        self._results = results
        self._without_tools = without_tools

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """Return the tool and the note on it; nothing if it may not be offered."""
        if is_declared(request, NAME):
            return Addition(note=MENTION, tokens=self._reader.tokens_of_tools(MENTION, route.encoding, route.model))
        if not self._without_tools and not has_tools(envelope):
            return NO_ADDITION
        return addition(self._reader, request.api, envelope, route, window)

    def is_offered(self, view: CountedView) -> bool:
        """True if *view* has the tool: it leaves something out, or the tool is for earlier conversations, too."""
        return view.edits.addition or is_declared(view.request, NAME)

    async def begin(self, view: CountedView, calls: Sequence[str]) -> Sequence[WriteResult]:
        """Return for each of *calls* a function that writes a page of results."""
        all_arguments = [read_arguments(arguments, self._results) for arguments in calls]
        earlier: list[Piece] | None = None
        if any(map(is_earlier, all_arguments)):
            earlier = await self._earlier(view)
        pieces: Sequence[Piece] = ()
        if earlier is None or not all(map(is_earlier, all_arguments)):
            pieces = await offload(len(view.request.body), pieces_of, view)
        writers: list[WriteResult] = []
        for arguments in all_arguments:
            if earlier is not None and is_earlier(arguments):
                writers.append(partial(answer_earlier, arguments, earlier))
            else:
                writers.append(partial(answer, arguments, pieces))
        return writers

    async def _earlier(self, view: CountedView) -> list[Piece] | None:
        """Return stored pieces of earlier conversations; None if these are not searched, none without the store."""
        if self._read_earlier is None or not is_declared(view.request, NAME):
            return None
        request = view.request
        try:
            items = await self._read_earlier(request.tenant, request.options.project, view.measured.root_hash)
        except StoreUnavailable:
            return []
        return earlier_pieces(items)


def open_features(parts: FeatureParts) -> list[Feature | ServerTool]:
    """Return the tool if it is switched on.

    If it searches earlier conversations, return also the feature that declares it in every request with tools: those
    can be searched at any time, not only if a view leaves something out.
    """
    recall = recall_settings(parts.settings)
    if not recall.enabled:
        return []
    opened: list[Feature | ServerTool] = []
    read_earlier = None
    if recall.sessions:
        opened.append(DeclareTools(parts.reader, {NAME: DECLARATIONS_WITH_SESSIONS}, "recall"))
        read_earlier = open_earlier(parts.store)
    tool = Recall(
        parts.reader,
        results=recall.results,
        max_tokens=recall.max_tokens,
        without_tools=recall.without_tools,
        read_earlier=read_earlier,
    )
    return [*opened, tool]

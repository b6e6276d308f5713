"""``context_management`` of the Messages API for servers that do not know it: done here, and taken out of the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace

from proxy.core.apis import messages
from proxy.core.apis.envelope import Envelope
from proxy.core.apis.json_steps import decode
from proxy.core.decisions import CountedView, FinalDecision, Forward
from proxy.core.models import Route
from proxy.core.planner import LOSSY
from proxy.core.request import Request
from proxy.core.tokens.budget import answer_reserve
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import Reader, Reading
from proxy.features.context_management.clearing import ContextEdits, clear_message, cleared_tool_uses, read_edits
from proxy.offload import offload

MEMBER = "context_management"


class ContextManagement(Feature):
    """Does what requests ask of the servers called *owned*, which cannot. *resolve* gives the route of a model."""

    def __init__(self, reader: Reader, resolve: Callable[[str], Route], owned: Collection[str]) -> None:
        self._reader = reader
        self._resolve = resolve
        self._owned = frozenset(owned)
        if owned:
            self.markers = {messages.API: (MEMBER.encode(),)}

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """*request* after the context edits it asks of a server that cannot do them. Raises ``InvalidRequest``.

        A size from which to compact is no window: nothing is refused, dropped or clipped for its sake.
        """
        if engine.mode_of(request) == "off":
            return request
        edited = await self._edited(request)
        if edited.options.window != request.options.window:
            decision = await engine.plan(edited, "any", dry_run=True)
            if _loses(decision):
                return replace(edited, options=request.options)
        return edited

    async def _edited(self, request: Request) -> Request:
        """*request* as it would be after the edits it asks for, and without asking.

        A size from which to compact becomes its window, if that is smaller.
        """
        located = await self._reader.located(messages, request.tenant, request.body)
        envelope = located.outline
        route = self._resolve(request.path_model or envelope.model)
        if route.upstream not in self._owned or MEMBER not in envelope.fields:
            return request
        wanted = read_edits(json.loads(envelope.value(MEMBER)))
        reading = await self._reader.read(messages, route.encoding, request.tenant, located, route.model)
        body = await offload(reading.load, _edited, reading, wanted)
        return replace(request, body=body, options=replace(request.options, window=_window(request, envelope, wanted)))


def _loses(decision: FinalDecision) -> bool:
    """True if *decision* refuses, or loses what the model is looking at."""
    if not isinstance(decision, Forward):
        return True
    return isinstance(decision.view, CountedView) and not LOSSY.isdisjoint(decision.view.edits.stages)


def _window(request: Request, outline: Envelope, wanted: ContextEdits) -> int | None:
    """The window that holds for *request*, in the provider's tokens; ``None`` where nobody made it smaller."""
    limits = [] if request.options.window is None else [request.options.window]
    if wanted.compact_from is not None:
        limits.append(wanted.compact_from + answer_reserve(outline.requested_output, None, wanted.compact_from))
    return min(limits, default=None)


def _edited(reading: Reading, wanted: ContextEdits) -> bytes:
    raw = [reading.body[start:end] for start, end in reading.scan.spans]
    gone: dict[str, bool] = {}
    if wanted.clearing:
        values = [value if isinstance(value := decode(each), dict) else {} for each in raw]
        for clearing in wanted.clearing:
            gone |= cleared_tool_uses(reading.fixed, reading.items, values, clearing)
        raw = [clear_message(each, value, gone) for each, value in zip(raw, values, strict=True)] if gone else raw
    scan, body = reading.scan, reading.body
    items = b",".join(raw) if gone else body[scan.start : scan.end]
    return _without(reading.outline, len(body[: scan.start].decode()), items)


def _without(outline: Envelope, at: int, items: bytes) -> bytes:
    """The body of *outline* with *items* at character *at*, and without the member that asked for edits."""
    text, gone = outline.text, outline.fields[MEMBER]
    before = [field.end for field in outline.fields.values() if field.end < gone.start]
    if before:
        start, end = max(before), gone.end
    else:
        start, end = text.index("{") + 1, gone.end
        rest = text[end:].lstrip()
        end = len(text) - len(rest) + (1 if rest.startswith(",") else 0)
    if end <= at:
        pieces = [text[:start].encode(), text[end:at].encode(), items, text[at:].encode()]
    else:
        pieces = [text[:at].encode(), items, text[at:start].encode(), text[end:].encode()]
    return b"".join(pieces)

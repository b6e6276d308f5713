"""Applies ``context_management`` of the Messages API for upstreams that do not know it.

The edits are applied to the body, and the member that names them is removed.
https://platform.claude.com/docs/en/build-with-claude/context-editing and
https://platform.claude.com/docs/en/build-with-claude/compaction describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MappingProxyType
from typing import Final

from msgspec import structs

from proxy.core.apis import messages
from proxy.core.apis.envelope import Envelope
from proxy.core.apis.json_steps import as_object, decode, parse
from proxy.core.decisions import CountedView, FinalDecision, Forward
from proxy.core.models import Route
from proxy.core.planner import LOSSY
from proxy.core.request import Request
from proxy.core.tokens.budget import answer_reserve
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import CountedBody, Reader
from proxy.features.context_management.clearing import ContextEdits, clear_message, cleared_tool_uses, read_edits
from proxy.features.context_management.settings import edited_upstreams
from proxy.features.opening import FeatureParts
from proxy.tasks import offload

MEMBER: Final = "context_management"


class ContextManagement(Feature):
    """Applies the edits in requests to the upstreams named in *edited*, which do not know them.

    *resolve* gives the route of a model.
    """

    markers = MappingProxyType({messages.API: (MEMBER.encode(),)})

    def __init__(self, reader: Reader, resolve: Callable[[str], Route], edited: Collection[str]) -> None:
        self._reader = reader
        self._resolve = resolve
        self._edited_upstreams = frozenset(edited)

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* after its context edits. Raises ``InvalidRequest``.

        The trigger of a compaction is no limit like a window: nothing is refused, dropped or clipped because of it.
        """
        if engine.mode_of(request) == "off":
            return request
        edited = await self._edited(request)
        if edited.options.window != request.options.window:
            # A dry run, because only a plan shows if the smaller window can be reached without loss.
            decision = await engine.plan(edited, "any", dry_run=True)
            if _loses(decision):
                return structs.replace(edited, options=request.options)
        return edited

    async def _edited(self, request: Request) -> Request:
        """Return *request* after the edits, and without the member that names them.

        The trigger of a compaction becomes the request's window, if it is smaller.
        """
        located = await self._reader.located(messages, request.tenant, request.body)
        envelope = located.envelope
        route = self._resolve(request.path_model or envelope.model)
        if route.upstream not in self._edited_upstreams or MEMBER not in envelope.fields:
            return request
        edits = read_edits(parse(envelope.value(MEMBER)))
        reading = await self._reader.read(located, route.encoding, route.model)
        body = await offload(len(reading.body), _edited_body, reading, edits)
        options = structs.replace(request.options, window=_window(request, envelope, edits))
        return structs.replace(request, body=body, options=options)


def _loses(decision: FinalDecision) -> bool:
    """True if *decision* refuses the request, or if a lossy stage cuts the newest items."""
    if not isinstance(decision, Forward):
        return True
    return isinstance(decision.view, CountedView) and not LOSSY.isdisjoint(decision.view.edits.stages)


def _window(request: Request, envelope: Envelope, edits: ContextEdits) -> int | None:
    """Return the window of *request* in provider tokens; None if neither it nor an edit makes the model's smaller."""
    windows: list[int] = []
    if request.options.window is not None:
        windows.append(request.options.window)
    if edits.compact_from is not None:
        windows.append(edits.compact_from + answer_reserve(envelope.requested_output, None, edits.compact_from))
    return min(windows, default=None)


def _edited_body(reading: CountedBody, edits: ContextEdits) -> bytes:
    """Return the body after *edits*, and without the member that names them."""
    scan, body = reading.scan, reading.body
    items = body[scan.start : scan.end]
    if edits.clearing:
        raw = [body[start:end] for start, end in scan.spans]
        values = [as_object(decode(item)) for item in raw]
        cleared: dict[str, bool] = {}
        for clearing in edits.clearing:
            cleared |= cleared_tool_uses(reading.counts.fixed, reading.items, values, clearing)
        if cleared:
            messages_after = [clear_message(item, value, cleared) for item, value in zip(raw, values, strict=True)]
            items = b",".join(messages_after)
    return _without_member(reading.envelope, len(body[: scan.start].decode()), items)


def _without_member(envelope: Envelope, position: int, items: bytes) -> bytes:
    """Return the body of *envelope* with *items* at character *position*, and without the member that names the edits.

    The comma before the member is removed with it, or the one behind it if it is the first member.
    """
    text, member = envelope.text, envelope.fields[MEMBER]
    before = [field.end for field in envelope.fields.values() if field.end < member.start]
    if before:
        start, end = max(before), member.end
    else:
        start = text.index("{") + 1
        rest = text[member.end :].lstrip()
        end = len(text) - len(rest)
        if rest.startswith(","):
            end += 1
    if end <= position:
        pieces = [text[:start].encode(), text[end:position].encode(), items, text[position:].encode()]
    else:
        pieces = [text[:position].encode(), items, text[position:start].encode(), text[end:].encode()]
    return b"".join(pieces)


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature if Ullage applies the edits for any configured upstream."""
    names = edited_upstreams(parts.settings)
    if not names:
        return []
    return [ContextManagement(parts.reader, parts.resolve, names)]

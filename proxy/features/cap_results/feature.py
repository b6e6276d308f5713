"""Caps tool results before they are first sent, by fixed limits and not by the room that is left.

Every later request of the conversation has the same capped bytes, so that the provider's prompt cache applies to them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from msgspec import structs

from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_scan import Scan, scan
from proxy.core.compaction.truncate import HEAD_ONLY, is_over, truncate
from proxy.core.decisions import API_FORMATS
from proxy.core.errors import InvalidRequest
from proxy.core.request import Request
from proxy.core.tool_table import ToolMap
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import Reader
from proxy.features.cap_results.settings import ResultLimits, limits_of_results
from proxy.features.opening import FeatureParts
from proxy.tasks import offload

MOST_STEPS: Final = 64
"""Items before a result in which its call is searched; a round is rarely longer."""


class CapResults(Feature):
    """Caps every tool result to *limits*."""

    markers = MappingProxyType(dict.fromkeys(API_FORMATS, (b"tool", b"function")))

    def __init__(self, reader: Reader, limits: ResultLimits) -> None:
        self._reader = reader
        self._limits = limits

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with its tool results capped; *request* itself if none is too big or it cannot be read."""
        if engine.mode_of(request) != "on":
            return request
        return await offload(len(request.body), self._capped, request)

    def _capped(self, request: Request) -> Request:
        api = API_FORMATS[request.api]
        try:
            scanned = scan(request.body, api.LIST, self._reader.most)
            body = cap_results(request.body, scanned, api, self._reader.tools, self._limits)
        except InvalidRequest:
            return request  # a body that cannot be read may still be relayed
        if body is request.body:
            return request
        return structs.replace(request, body=body, prepared=("truncate",))


def cap_results(body: bytes, scanned: Scan, api: ApiFormat, tools: ToolMap, limits: ResultLimits) -> bytes:
    """Return *body* with its tool results within *limits*; *body* itself if they are.

    Results of reads keep their head, all others head and end.
    """
    pieces: list[bytes] = []
    copied = 0
    for index, (start, end) in enumerate(scanned.spans):
        raw = body[start:end]
        # Every line end is an escape of two bytes, so most items need no closer look.
        if len(raw) <= limits.size and raw.count(b"\\n") < limits.lines:
            continue
        capped = _capped_item(body, scanned, index, api, tools, limits)
        if capped is not None:
            pieces += [body[copied:start], capped]
            copied = end
    if not pieces:
        return body
    return b"".join([*pieces, body[copied:]])


def _capped_item(
    body: bytes, scanned: Scan, index: int, api: ApiFormat, tools: ToolMap, limits: ResultLimits
) -> bytes | None:
    """Return an item with its results cut to *limits*; None if it has no result that is too big."""
    raw = body[slice(*scanned.spans[index])]
    item = api.read_item(raw, len)
    if not item.answers:
        return None
    texts = [text for text, _ in api.read_item_text(raw).results]
    if len(texts) != len(item.answers):
        return None
    if not any(is_over(text, *limits) for text in texts):
        return None
    kinds = _call_kinds(body, scanned, index, api, tools)
    cut: list[str] = []
    for call_id, text in zip(item.answers, texts, strict=True):
        keeps_tail = kinds.get(call_id) not in HEAD_ONLY
        cut.append(truncate(text, *limits, tail=keeps_tail))
    return api.with_results(raw, cut, media=True)


def _call_kinds(body: bytes, scanned: Scan, index: int, api: ApiFormat, tools: ToolMap) -> dict[str, str]:
    """Return the kinds of the calls shortly before the item at *index*, by id; of calls with one id the last."""
    for start, end in reversed(scanned.spans[max(0, index - MOST_STEPS) : index]):
        raw = body[start:end]
        ids = api.read_item(raw, len).calls
        if ids:
            calls = zip(ids, api.read_item_text(raw).calls, strict=False)
            return {call_id: tools.call(*call).kind for call_id, call in calls}
    return {}


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature if results are always capped, and not only in a compaction."""
    limits = limits_of_results(parts.settings)
    if limits is None:
        return []
    return [CapResults(parts.reader, limits)]

"""Tool results capped before they are first sent: the same bytes on every later request, whatever the room."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_scan import Scan, scan
from proxy.core.compaction.truncate import HEAD_ONLY, TruncateLimits, is_over, truncate
from proxy.core.decisions import DIALECTS
from proxy.core.errors import InvalidRequest
from proxy.core.request import Request
from proxy.core.tool_table import ToolMap
from proxy.engine.features import Feature, Planning
from proxy.engine.reading import Reader
from proxy.offload import offload

MOST_STEPS = 64
"""Items that are looked back for the call of a result; a round is rarely longer."""


class CapResults(Feature):
    """Caps every tool result to *limits*."""

    markers = MappingProxyType(dict.fromkeys(DIALECTS, (b"tool", b"function")))

    def __init__(self, reader: Reader, limits: TruncateLimits) -> None:
        self._reader = reader
        self._limits = limits

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """*request* with its tool results capped; *request* itself if none is too big or it cannot be read."""
        if engine.mode_of(request) != "on":
            return request
        return await offload(len(request.body), self._capped, request)

    def _capped(self, request: Request) -> Request:
        api_format = DIALECTS[request.api]
        try:
            where = scan(request.body, api_format.LIST, self._reader.most)
            body = cap_results(request.body, where, api_format, self._reader.tools, self._limits)
        except InvalidRequest:
            return request  # what cannot be read may still be relayed
        return request if body is request.body else replace(request, body=body, prepared=("truncate",))


def cap_results(body: bytes, where: Scan, dialect: ApiFormat, tools: ToolMap, limits: TruncateLimits) -> bytes:
    """*body* with its tool results within *limits*; *body* itself where they are.

    What a result becomes depends on it and its call only. Reads keep their head, everything else head and end.
    """
    pieces, done = [], 0
    for index, (start, end) in enumerate(where.spans):
        raw = body[start:end]
        # Every line end is an escape of two bytes: most items need no closer look.
        if len(raw) <= limits.max_bytes and raw.count(b"\\n") < limits.max_lines:
            continue
        smaller = _capped(body, where, index, dialect, tools, limits)
        if smaller is not None:
            pieces += [body[done:start], smaller]
            done = end
    return b"".join([*pieces, body[done:]]) if pieces else body


def _capped(
    body: bytes, where: Scan, index: int, dialect: ApiFormat, tools: ToolMap, limits: TruncateLimits
) -> bytes | None:
    start, end = where.spans[index]
    item = dialect.read_item(body[start:end], len)
    if not item.answers:
        return None
    said = [text for text, _ in dialect.read_entry(body[start:end]).results]
    if len(said) != len(item.answers) or not any(is_over(text, limits.max_lines, limits.max_bytes) for text in said):
        return None
    kinds = _kinds(body, where, index, dialect, tools)
    cut = [
        truncate(text, limits.max_lines, limits.max_bytes, tail=kinds.get(name) not in HEAD_ONLY)
        for name, text in zip(item.answers, said, strict=True)
    ]
    return dialect.replaced(body[start:end], cut, media=True)


def _kinds(body: bytes, where: Scan, index: int, dialect: ApiFormat, tools: ToolMap) -> dict[str, str]:
    """The kinds of the calls shortly before item *index*, by id; of calls with one id the last."""
    found: dict[str, str] = {}
    for start, end in reversed(where.spans[max(0, index - MOST_STEPS) : index]):
        calls = dialect.read_item(body[start:end], len).calls
        if calls:
            named = zip(calls, dialect.read_entry(body[start:end]).calls, strict=False)
            found = {**{name: tools.call(*call).kind for name, call in named}, **found}
            break
    return found

"""Tool results capped before they are first sent: the same bytes on every later request, whatever the room."""

from __future__ import annotations

from proxy.core.compaction.truncate import HEAD_ONLY, TruncateLimits, is_over, truncate
from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.scan import Scan
from proxy.core.conversation.toolmap import ToolMap

MOST_STEPS = 64
"""Items that are looked back for the call of a result; a round is rarely longer."""


def cap_results(body: bytes, where: Scan, dialect: Dialect, tools: ToolMap, limits: TruncateLimits) -> bytes:
    """*body* with its tool results within *limits*; *body* itself where they are.

    What a result becomes depends on it and its call only. Reads keep their head, everything else head and end.
    """
    pieces, done = [], 0
    for index, (start, end) in enumerate(where.spans):
        raw = body[start:end]
        # Every line end is an escape of two bytes: most items need no closer look.
        if len(raw) <= limits.size and raw.count(b"\\n") < limits.lines:
            continue
        smaller = _capped(body, where, index, dialect, tools, limits)
        if smaller is not None:
            pieces += [body[done:start], smaller]
            done = end
    return b"".join([*pieces, body[done:]]) if pieces else body


def _capped(
    body: bytes, where: Scan, index: int, dialect: Dialect, tools: ToolMap, limits: TruncateLimits
) -> bytes | None:
    start, end = where.spans[index]
    item = dialect.read_item(body[start:end], len)
    if not item.answers:
        return None
    said = [text for text, _ in dialect.read_entry(body[start:end]).results]
    if len(said) != len(item.answers) or not any(is_over(text, limits.lines, limits.size) for text in said):
        return None
    kinds = _kinds(body, where, index, dialect, tools)
    cut = [
        truncate(text, limits.lines, limits.size, tail=kinds.get(name) not in HEAD_ONLY)
        for name, text in zip(item.answers, said, strict=True)
    ]
    return dialect.replaced(body[start:end], cut, media=True)


def _kinds(body: bytes, where: Scan, index: int, dialect: Dialect, tools: ToolMap) -> dict[str, str]:
    """The kinds of the calls shortly before item *index*, by id; of calls with one id the last."""
    found: dict[str, str] = {}
    for start, end in reversed(where.spans[max(0, index - MOST_STEPS) : index]):
        calls = dialect.read_item(body[start:end], len).calls
        if calls:
            named = zip(calls, dialect.read_entry(body[start:end]).calls, strict=False)
            found = {**{name: tools.call(*call).kind for name, call in named}, **found}
            break
    return found

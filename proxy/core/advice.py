"""Advice for people on what fills a view and what to do about it: for the log, the page, ``replay``, ``fit --explain``.

Advice never becomes part of an answer. Shares are of the view's input, without the room for the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from proxy.core.compaction.view import call_target
from proxy.core.decisions import CountedView, MeasuredRequest
from proxy.core.report import Report
from proxy.core.tool_table import ToolMap

NEARLY_FULL: Final = 0.80
"""Share of the token budget above which a conversation gets advice."""

LARGE_PART: Final = 0.25
"""Share of a view from which one part alone is named as what fills it."""

LONGEST_TARGET: Final = 80
"""Characters of a target that are shown."""

_HISTORY: Final = ("user", "assistant", "tool")

WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tool result": "is one tool result",
        "user message": "is one user message",
        "model message": "is one message of the model",
        "system": "is system text",
        "tools": "are tool definitions",
        "format": "is the response format",
        "memory": "are memories that the agent injects",
        "skills": "are skills that the agent injects",
        "knowledge": "is knowledge that the agent injects",
        "related": "are results of other tasks that the agent injects",
        "summary": "is the block that stands for earlier rounds",
        "user": "are user messages",
        "assistant": "are messages of the model",
        "tool": "are tool results",
    }
)
"""The end of the sentence about each kind of part, behind its share."""

_SHORTER_RESULTS: Final = (
    "ask the tool for less (a range of lines, a filter), or cap fresh results with compression.stages.truncate.always"
)
_ANOTHER_CONVERSATION: Final = "begin a new conversation for a new task, or send x-ullage-compact: now"

REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tool result": _SHORTER_RESULTS,
        "user message": "name files instead of pasting them, so that the model reads the part it needs",
        "model message": _ANOTHER_CONVERSATION,
        "system": "shorten the system text; what is rarely needed can stand in a file that a tool reads",
        "tools": "offer fewer tools or shorter descriptions: they go with every request",
        "format": "shorten the schema of the response format: it goes with every request",
        "memory": "have the agent inject fewer memories",
        "skills": "load each skill once, and only those that the task needs",
        "knowledge": "have the agent look up fewer documents, or shorter pieces of them",
        "related": "have the agent inject fewer results, or only their first lines",
        "summary": _ANOTHER_CONVERSATION,
        "user": "name files instead of pasting them, or begin a new conversation for a new task",
        "assistant": _ANOTHER_CONVERSATION,
        "tool": _SHORTER_RESULTS,
    }
)
"""The remedy for each kind of part."""

_ITEM_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"tool": "tool result", "user": "user message", "assistant": "model message"}
)


class Part(msgspec.Struct, frozen=True, gc=False):
    """One part of a view: its kind (a key of ``WORDS``) and its tokens; ``index`` if it is one item, else -1."""

    # A Struct and no dataclass: a view has hundreds of parts, and msgspec builds them in C.

    kind: str
    tokens: int
    index: int = -1


class Advice(msgspec.Struct, frozen=True):
    """The part that fills most of a view, its ``share`` of the input, and its tokens.

    ``tool`` and ``target`` name the call that a tool result answers; both are empty if it is unknown. They are the
    client's own words: show the target only where content may be shown.
    """

    kind: str
    share: float
    tokens: int
    tool: str = ""
    target: str = ""

    @property
    def remedy(self) -> str:
        """The remedy, as one sentence without its full stop."""
        return REMEDIES[self.kind]

    def sentence(self, *, targets: bool = True) -> str:
        """Return what fills the view, such as ``62 % is one tool result: read_file dist/bundle.js``."""
        text = f"{100 * self.share:.0f} % {WORDS[self.kind]}"
        call = self.tool
        if targets and self.target:
            call = f"{self.tool} {self.target}"
        if not call:
            return text
        return f"{text}: {call}"


def advise(view: CountedView, report: Report, tools: ToolMap) -> Advice | None:
    """Return advice on the part that fills most of *view*; None if nothing was counted.

    *report* is the view's, *tools* is the table of tools. Reads the text of one call at most.
    """
    total = report.tokens_after or 0
    part = main_part(report.regions, list(item_parts(view, LARGE_PART * total)), total)
    if part is None:
        return None
    tool = target = ""
    if part.kind == "tool result" and (call := answered_call(view.measured, part.index)) is not None:
        tool, target = call[0], short_target(call_target(*call, tools), LONGEST_TARGET)
    return Advice(part.kind, min(1.0, part.tokens / total), part.tokens, tool, target)


def main_part(regions: Mapping[str, int], items: list[Part], total: int) -> Part | None:
    """Return the part that fills most of a view of *total* tokens.

    It is the largest of the large items and of the large regions outside the history. If none is large, it is the
    largest region: history counts by role then, and the block as one region. None if nothing was counted.
    """
    fixed = [Part(name, tokens) for name, tokens in regions.items() if name not in (*_HISTORY, "summary", "reserve")]
    large = [part for part in (*items, *fixed) if part.tokens >= LARGE_PART * total > 0]
    if large:
        return max(large, key=lambda part: part.tokens)
    parts = [Part(name, tokens) for name, tokens in regions.items() if name != "reserve"]
    if not parts or total <= 0:
        return None
    return max(parts, key=lambda part: part.tokens)


def item_parts(view: CountedView, least: float) -> Iterator[Part]:
    """Yield the items of *least* tokens or more that are unedited in *view*, except system items.

    All tokens are the provider's.
    """
    start, edited = _first_item(view)
    ratio = view.measured.known.token_ratio
    for index, item in enumerate(view.measured.parsed.items[start:], start):
        tokens = int(item.tokens * ratio)
        if tokens < least:
            continue
        kind = _ITEM_KINDS.get(item.role)
        if kind and index not in edited:
            yield Part(kind, tokens, index)


def _first_item(view: CountedView) -> tuple[int, frozenset[int]]:
    """Return the first item of *view* that is not folded, and the indexes of those that were made smaller."""
    record = view.edits.record
    if record is None or view.observation:
        return 0, frozenset()
    return record.compaction.cut, frozenset(record.edits)


def answered_call(measured: MeasuredRequest, index: int) -> tuple[str, str] | None:
    """Return name and arguments of the call that the item at *index* answers first; None if it is unknown."""
    items = measured.parsed.items
    if not items[index].answers:
        return None
    answered = items[index].answers[0]
    for before in range(index - 1, -1, -1):
        calls = items[before].calls
        if answered in calls:
            text, at = measured.api_format.read_item_text(measured.parsed.item(before)), calls.index(answered)
            return next(iter(text.calls[at : at + 1]), None)
    return None


def short_target(target: str, most: int) -> str:
    """Return *target* on one line of at most *most* characters: of a longer one the end, where a path has its file."""
    line = " ".join(target.split())
    if len(line) <= most:
        return line
    return f"…{line[1 - most :]}"

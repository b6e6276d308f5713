"""What later decisions need to know of tool calls and their results: numbers and short digests, never text.

Computed once, when an item is first seen; a call and its result stand in two items and are joined by their id.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxy.core.conversation.entry import Entry
from proxy.core.conversation.items import Call, Facts, Item, Result

OPENING = 20
"""Characters of a result by which a quotation of it is recognised."""

WRITTEN = -1
"""The position of a call that the model wrote as text."""

MOST_MENTIONS = 128
"""File names and openings of quotations that are kept of one text."""

_LOOKED_AT = 65_536
# From no place inside a word, and no further than a name goes: else a long word costs the square of its length.
_NAME = re.compile(r"(?<=/)[\w.@+-]{3,}|(?<!\w)\w[\w@+-]{0,199}(?:\.\w+)+")
_QUOTE = re.compile(r"[`\"'«「“\n>](?=[`\"'>\s]{0,8}([^`\"'>\s][^\n]{19}))")
_DECISION = re.compile(
    r"\b(?:based on|i(?:'|’)ll use|i will use|the (?:issue|problem|cause|bug) is|let(?:'|’)s use|so we need"
    r"|das problem ist|le problème est|el problema es)\b|问题是|原因是|根据|原因は",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"\s*(?:$|<(?:tool_use_)?error>|\W{0,3}(?:error|failed|failure|enoent|traceback|fatal)\b"
    r"|file not found|no such file|(?:old_string|string to replace)[^\n]{0,20} not found|permission denied"
    r"|错误|エラー)",
    re.IGNORECASE,
)
_EXIT = re.compile(r"\bexit(?:ed)?(?: with)?(?: code| status)?[:=]? {0,2}(?:-|[1-9])", re.IGNORECASE)
_PARTIAL = (
    *(
        "truncat",
        "omitted",
        "more lines",
        "lines left",
        "remaining",
        "not shown",
        "offset",
        "read more",
        "[...",
        "clipped",
    ),
    *("too large", "too long", "exceeds", "start_line", "use line"),
)
"""Words with which a tool says that something is missing; plain words, because they are looked for in every result."""

_NUMBERED = re.compile(r"^[ 0]{0,8}(\d{1,8})(?:\t|→|[ ]?[|:│]|  )")
_TROUBLE = re.compile(
    r"\b(?:error|failed|failure|exception|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.IGNORECASE
)
_EDGE = 600


@dataclass(frozen=True, slots=True)
class Pair:
    """A tool result with its call. ``index`` and ``call_index`` are items, ``at`` and ``call_at`` positions in them."""

    index: int
    at: int
    call_index: int
    call_at: int
    call: Call
    result: Result


def short_digest(text: str) -> int:
    """A 64-bit name of *text*."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def name_digest(name: str) -> int:
    """A 32-bit name of a tool's *name*; 0 for none."""
    return _crc(name.lower()) if name else 0


def facts_of(entry: Entry, call: Callable[[str, str], Call]) -> Facts | None:
    """The facts of what one item says; ``None`` where it neither calls, answers nor mentions anything."""
    calls = tuple(call(name, arguments) for name, arguments in entry.calls)
    results = tuple(_result(text, failed=failed) for text, failed in entry.results)
    written = entry.text[:_LOOKED_AT] if entry.role == "assistant" else ""
    mentions = _mentions(written) if written else b""
    decides = bool(written and _DECISION.search(written))
    return Facts(calls, results, mentions, decides) if calls or results or mentions or decides else None


def mentioned(mentions: bytes) -> Sequence[int]:
    """The digests in a packed *mentions*."""
    return struct.unpack(f"{len(mentions) // 4}I", mentions)


def pairs_of(items: Sequence[Item], start: int, end: int) -> list[Pair]:
    """Every result with its call in ``items[start:end]``, in order; ids may be used again by later calls."""
    return list(_pairs(items, start, end))


def _pairs(items: Sequence[Item], start: int, end: int) -> Iterator[Pair]:
    waiting: dict[str, tuple[int, int, Call]] = {}
    for index in range(start, end):
        facts = items[index].facts
        if facts is None:
            continue
        if facts.wrote is not None:
            waiting[f"written:{index}"] = (index, WRITTEN, facts.wrote)
        if len(items[index].calls) == len(facts.calls):
            named = zip(items[index].calls, facts.calls, strict=True)
            waiting.update({name: (index, at, call) for at, (name, call) in enumerate(named)})
        if len(items[index].answers) != len(facts.results):
            continue  # which result is whose is not known
        for at, (name, result) in enumerate(zip(items[index].answers, facts.results, strict=True)):
            if name in waiting:
                yield Pair(index, at, *waiting[name], result)


def _mentions(text: str) -> bytes:
    names = [match.group().rstrip(".") for match in _NAME.finditer(text)]
    quotes = [match.group(1) for match in _QUOTE.finditer("\n" + text)]
    found = list(dict.fromkeys([*names[:MOST_MENTIONS], *quotes[:MOST_MENTIONS]]))
    return struct.pack(f"{len(found)}I", *map(_crc, found))


def _crc(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace"))


def _result(text: str, *, failed: bool) -> Result:
    edges = text if len(text) <= 2 * _EDGE else text[:_EDGE] + "\n" + text[-_EDGE:]
    folded = edges.lower()
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    first, last = _numbers(edges, lines)
    return Result(
        short_digest(text),
        _crc(text.lstrip("`\"'> \n\t")[:OPENING]) if len(text) >= OPENING else 0,
        not (failed or _FAILED.match(edges) or ("exit" in folded and _EXIT.search(edges))),
        lines,
        len(text.encode("utf-8", "replace")),
        any(word in folded for word in _PARTIAL),
        first,
        last,
    )


def _numbers(edges: str, lines: int) -> tuple[int, int]:
    """The first and last line number that a listing shows; zeros where it is none."""
    found = [int(match.group(1)) for line in edges.splitlines() if (match := _NUMBERED.match(line))]
    if len(found) < min(2, lines) or not found:
        return 0, 0
    first, last = found[0], found[-1]
    return (first, last) if 0 < first <= last and abs(last - first + 1 - lines) <= 12 else (0, 0)


def failure_line(text: str) -> str:
    """The first line of a result that tells of an error; empty where there is none."""
    return next((line.strip() for line in text[:_LOOKED_AT].splitlines() if _TROUBLE.search(line)), "")

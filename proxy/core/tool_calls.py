"""What tool calls and their results say: facts of both for the planner, and the texts in the arguments of any call.

The facts are numbers and short digests, never text. They are computed once, when an item is first read. A call and its
result are in two items, joined by their id.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from proxy.core.apis.json_edit import JSON_BEGINNINGS, spare_tokens
from proxy.core.conversation import Call, Count, Item, ItemFacts, ItemText, Result
from proxy.core.lazy_pattern import lazy_pattern

OPENING = 20
"""Characters of a result by which a quotation of it is recognised."""

WRITTEN = -1
"""The position of a call that the model wrote as text."""

MOST_MENTIONS = 128
"""File names, and openings of quotations, that are stored of one text."""

MOST_NAMES = 512
"""Tools whose names' digests are cached: some long conversations call the same ones in each of thousands of items."""

_SEARCHED = 65_536
"""Characters of a text that are searched for mentions and errors."""

# A match never begins inside a word and has a bounded length: else a long word would take quadratic time. The repeat
# is possessive, because what it takes holds no dot: giving some of it back would find none.
_NAME = lazy_pattern(r"(?<=/)[\w.@+-]{3,}|(?<!\w)\w[\w@+-]{0,199}+(?:\.\w+)+")
_QUOTE = lazy_pattern(r"[`\"'«「“\n>](?=[`\"'>\s]{0,8}([^`\"'>\s][^\n]{19}))")
_DECISION = lazy_pattern(
    r"\b(?:based on|i(?:'|’)ll use|i will use|the (?:issue|problem|cause|bug) is|let(?:'|’)s use|so we need"
    r"|das problem ist|le problème est|el problema es)\b|问题是|原因是|根据|原因は",
    re.IGNORECASE,
)
_DECISION_PARTS = ("based on", "ll use", "s use", "we need", "problem", "issue is", "cause is", "bug is")
"""One of these is in every ASCII text with a conclusion. To look for them takes a third of the time of the pattern."""

_FAILED = lazy_pattern(
    r"\s*(?:$|<(?:tool_use_)?error>|\W{0,3}(?:error|failed|failure|enoent|traceback|fatal)\b"
    r"|file not found|no such file|(?:old_string|string to replace)[^\n]{0,20} not found|permission denied"
    r"|错误|エラー)",
    re.IGNORECASE,
)
_EXIT = lazy_pattern(r"\bexit(?:ed)?(?: with)?(?: code| status)?[:=]? {0,2}(?:-|[1-9])", re.IGNORECASE)
_PARTIAL = (
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
    "too large",
    "too long",
    "exceeds",
    "start_line",
    "use line",
)
"""Words in results that lack a part. Plain words, because every result is searched and ``in`` is faster than ``re``."""

_NUMBERED = lazy_pattern(r"^[ 0]{0,8}(\d{1,8})(?:\t|→|[ ]?[|:│]|  )")
_MOST_UNNUMBERED = 12
"""Lines by which the line numbers in a listing and its length may differ: headings, notes, wrapped lines."""

FAILURE_WORDS = "error|failed|failure|exception|fatal|cannot|denied|not found"
FAILURE_SIGNS = "错误|失败|エラー"
"""Patterns of the words by which a line reports a failure: in English, where they stand alone, and in other scripts."""

_ERROR_LINE = lazy_pattern(rf"\b(?:{FAILURE_WORDS})\b|{FAILURE_SIGNS}", re.IGNORECASE)
_EDGE = 600
"""Characters at each end of a result that are searched for an error: tools state it first or last."""


class Pair(msgspec.Struct, frozen=True, gc=False):
    """A tool result with its call: the indexes of both items, and the positions ``at`` and ``call_at`` in them."""

    index: int
    at: int
    call_index: int
    call_at: int
    call: Call
    result: Result


@lru_cache(MOST_NAMES)
def name_digest(name: str) -> int:
    """Return a digest of a tool's *name*, in any case; 0 for an empty one."""
    if not name:
        return 0
    return hash(name.lower())


def facts_of(
    entries: Sequence[ItemText], read_calls: Callable[[Sequence[tuple[str, str]]], list[Call]], count: Count
) -> list[ItemFacts | None]:
    """Return the facts of each item's texts, of all their calls first; None if it has no calls, results or mentions."""
    if not entries:
        return []
    all_calls = iter(read_calls([call for entry in entries for call in entry.calls]))
    facts: list[ItemFacts | None] = []
    for entry in entries:
        calls = tuple(islice(all_calls, len(entry.calls)))
        results = tuple([_result(text, count, failed=failed) for text, failed in entry.results])
        mentions, decides = b"", False
        if entry.role == "assistant" and entry.text:
            text = entry.text[:_SEARCHED]
            mentions = _mentions(text)
            decides = _decides(text)
        of_item = None
        if calls or results or mentions or decides:
            of_item = ItemFacts(calls, results, mentions, decides)
        facts.append(of_item)
    return facts


def unpack_mentions(mentions: bytes) -> Sequence[int]:
    """Return the digests that are packed in *mentions*."""
    return struct.unpack(f"{len(mentions) // 8}q", mentions)


def pairs_of(items: Sequence[Item], start: int, end: int) -> list[Pair]:
    """Return every result with its call in ``items[start:end]``, in order; later calls may use an id again."""
    pairs: list[Pair] = []
    calls: dict[str, tuple[int, int, Call]] = {}
    for index in range(start, end):
        item, facts = items[index], items[index].facts
        if item.written_calls is not None:
            calls[written_id(index)] = (index, WRITTEN, item.written_calls.call)
        if facts is None:
            continue
        if len(item.calls) == len(facts.calls):
            for at, name in enumerate(item.calls):
                calls[name] = (index, at, facts.calls[at])
        if len(item.answers) != len(facts.results):
            continue  # nothing shows which result answers which call
        for at, name in enumerate(item.answers):
            called = calls.get(name)
            if called is not None:
                pairs.append(Pair(index, at, *called, facts.results[at]))
    return pairs


def written_id(index: int) -> str:
    """Return the id of the call that the model wrote as text in the message at *index*: such calls have none."""
    return f"written:{index}"


def _mentions(text: str) -> bytes:
    names = [name.rstrip(".") for name in _NAME.findall(text)[:MOST_MENTIONS]]
    quotes = _QUOTE.findall("\n" + text)[:MOST_MENTIONS]
    mentions = dict.fromkeys([*names, *quotes])
    return struct.pack(f"{len(mentions)}q", *map(hash, mentions))


def _decides(text: str) -> bool:
    """True if *text* draws a conclusion."""
    if text.isascii() and not any(map(text.lower().__contains__, _DECISION_PARTS)):
        return False
    return _DECISION.search(text) is not None


def _result(text: str, count: Count, *, failed: bool) -> Result:
    # Status, line numbers and marks of a cut are at the ends of a result; its middle may have megabytes.
    edges = text
    if len(text) > 2 * _EDGE:
        edges = text[:_EDGE] + "\n" + text[-_EDGE:]
    spare = 0
    if text.startswith(JSON_BEGINNINGS):
        spare = spare_tokens(text, count)
    folded = edges.lower()
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    first, last = _numbers(edges, lines)
    opening = 0
    if len(text) >= OPENING:
        opening = hash(text.lstrip("`\"'> \n\t")[:OPENING])
    failed = failed or _FAILED.match(edges) is not None or ("exit" in folded and _EXIT.search(edges) is not None)
    return Result(
        digest=hash(text),
        opening=opening,
        ok=not failed,
        lines=lines,
        size=len(text.encode("utf-8", "replace")),
        partial=any(map(folded.__contains__, _PARTIAL)),
        first=first,
        last=last,
        spare=spare,
    )


def _numbers(edges: str, lines: int) -> tuple[int, int]:
    """Return the first and the last line number that a listing shows; zeros if it is none."""
    numbers = [int(match.group(1)) for line in edges.splitlines() if (match := _NUMBERED.match(line))]
    if not numbers or len(numbers) < min(2, lines):
        return 0, 0
    first, last = numbers[0], numbers[-1]
    if not 0 < first <= last or abs(last - first + 1 - lines) > _MOST_UNNUMBERED:
        return 0, 0
    return first, last


def failure_line(text: str) -> str:
    """Return the first line of a result that reports an error; empty if there is none."""
    return next((line.strip() for line in text[:_SEARCHED].splitlines() if _ERROR_LINE.search(line)), "")


# The arguments of any tool.

LONGEST_ARGUMENTS = 262_144
"""Most characters of a call's arguments that are read as JSON. Longer ones are read as plain text."""

_LITERAL = json.JSONDecoder(parse_int=str, parse_float=str)
"""Leaves numbers as they are spelled: a parsed number could be printed differently."""

_COMMAND_KEYS = ("command", "cmd", "code", "script")
_COMMANDS_KEYS = ("commands", "cmds")
"""Keys of lists of commands, each a text or an object with one. Under other keys a list is one command in parts."""


class Arguments(NamedTuple):
    """What a call's arguments say.

    ``plain`` are their text and number values, one a line, or their own text if it is no JSON. ``command`` are the
    shell command or commands in them, on one line; "" if there is none.
    """

    plain: str
    command: str = ""


def read_all_arguments(entries: Iterable[ItemText]) -> dict[str, Arguments]:
    """Return what the arguments of all calls of *entries* say, by their text; equal ones are parsed once."""
    texts = dict.fromkeys(text for entry in entries for _, text in entry.calls)
    return {text: read_arguments(text) for text in texts}


def read_arguments(text: str) -> Arguments:
    """Return what a call's arguments, the JSON *text*, say. Above ``LONGEST_ARGUMENTS`` it is not parsed."""
    if len(text) > LONGEST_ARGUMENTS:
        return Arguments(text)
    try:
        values = _LITERAL.decode(text)
    except (ValueError, RecursionError):
        return Arguments(text)
    command = ""
    if isinstance(values, dict):
        command = _command_in(values)
    return Arguments(_plain(values), command)


def _command_in(values: dict[str, Any]) -> str:
    """Return the shell command or commands in *values*, on one line; "" if there is none."""
    several = next((values[key] for key in _COMMANDS_KEYS if isinstance(values.get(key), list)), [values])
    commands = [_one_command(command) for command in several if command]
    return "; ".join(filter(None, commands))


def _one_command(value: Any) -> str:
    """Return the command in *value* on one line: *value* itself, or a member of it."""
    if isinstance(value, dict):
        value = next((value[key] for key in _COMMAND_KEYS if value.get(key)), "")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return " ".join(str(value).split())


def _plain(value: Any) -> str:
    """Return the text and number values in *value*, one a line."""
    texts: list[str] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(reversed(node.values()))
        elif isinstance(node, list):
            stack.extend(reversed(node))
        elif isinstance(node, str):
            texts.append(node)
    return "\n".join(texts)

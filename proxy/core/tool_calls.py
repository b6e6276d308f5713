"""What later decisions need to know of tool calls and their results: numbers and short digests, never text.

They are computed once, when an item is first seen. A call and its result stand in two items and are joined by their id.

Some models know no tool calls of the API: their clients write calls and results as text. A user's message is read as a
result only if it begins as one and the model's message before it asked for one. Further parts of that message are the
user's, unless the client is known to add them by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from proxy.core.apis.json_edit import quoted
from proxy.core.apis.json_scan import elements, members
from proxy.core.apis.json_steps import decode
from proxy.core.conversation import NO_FACTS, Call, Item, ItemFacts, ItemText, Result, WrittenResult

OPENING = 20
"""Characters of a result by which a quotation of it is recognised."""

WRITTEN = -1
"""The position of a call that the model wrote as text."""

MOST_MENTIONS = 128
"""File names, and openings of quotations, of one text that are stored."""

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
"""Words by which a tool states that something is missing; plain words, because every result is searched for them."""

_NUMBERED = re.compile(r"^[ 0]{0,8}(\d{1,8})(?:\t|→|[ ]?[|:│]|  )")
_TROUBLE = re.compile(
    r"\b(?:error|failed|failure|exception|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.IGNORECASE
)
_EDGE = 600


class Pair(msgspec.Struct, frozen=True, gc=False):
    """A tool result with its call. ``index`` and ``call_index`` are items, ``at`` and ``call_at`` positions in them."""

    index: int
    at: int
    call_index: int
    call_at: int
    call: Call
    result: Result


def short_digest(text: str) -> int:
    """Return a 64-bit name of *text*."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def name_digest(name: str) -> int:
    """Return a 32-bit name of a tool's *name*; 0 for none."""
    return _crc(name.lower()) if name else 0


def facts_of(entry: ItemText, call: Callable[[str, str], Call]) -> ItemFacts | None:
    """Return the facts of one item's words; None if it neither calls, answers nor mentions anything."""
    calls = tuple(call(name, arguments) for name, arguments in entry.calls)
    results = tuple(_result(text, failed=failed) for text, failed in entry.results)
    written = entry.text[:_LOOKED_AT] if entry.role == "assistant" else ""
    mentions = _mentions(written) if written else b""
    decides = bool(written and _DECISION.search(written))
    return ItemFacts(calls, results, mentions, decides) if calls or results or mentions or decides else None


def mentioned(mentions: bytes) -> Sequence[int]:
    """Return the digests in a packed *mentions*."""
    return struct.unpack(f"{len(mentions) // 4}I", mentions)


def pairs_of(items: Sequence[Item], start: int, end: int) -> list[Pair]:
    """Return every result with its call in ``items[start:end]``, in order; later calls may use an id again."""
    return list(_pairs(items, start, end))


def _pairs(items: Sequence[Item], start: int, end: int) -> Iterator[Pair]:
    waiting: dict[str, tuple[int, int, Call]] = {}
    for index in range(start, end):
        facts = items[index].facts
        if facts is None:
            continue
        if facts.written_call is not None:
            waiting[f"written:{index}"] = (index, WRITTEN, facts.written_call)
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
    """Return the first and the last line number that a listing shows; zeros if it is none."""
    found = [int(match.group(1)) for line in edges.splitlines() if (match := _NUMBERED.match(line))]
    if len(found) < min(2, lines) or not found:
        return 0, 0
    first, last = found[0], found[-1]
    return (first, last) if 0 < first <= last and abs(last - first + 1 - lines) <= 12 else (0, 0)


def failure_line(text: str) -> str:
    """Return the first line of a result that reports an error; empty if there is none."""
    return next((line.strip() for line in text[:_LOOKED_AT].splitlines() if _TROUBLE.search(line)), "")


MOST_CALLS: Final = 16
"""Calls of one text that are looked at."""

_CALLS_WITHIN: Final = 65_536
"""Characters of a model's text in which calls are looked for, from its end: it calls when it has spoken."""

_BEGINNING: Final = 1_024
"""Characters of a text within which a result has to say that it is one."""

_AFTER: Final = 4_096
"""Characters after the name of a call in which its arguments stand."""

_ARGUMENT: Final = re.compile(r'<(?:parameter(?:=| name="))?(?P<key>\w{1,64})"?>\s{0,8}(?P<value>[^<]{0,1000})</')
_DECODER: Final = json.JSONDecoder()
_CLOSING: Final = re.compile(r"</(\w+)>\s*\Z")


@dataclass(frozen=True, slots=True)
class Forms:
    """How calls and results are written as text: patterns, and the beginnings of parts that a client adds itself.

    A pattern may have the groups ``name`` and ``arguments``: the tool's name, and where JSON begins that holds its
    arguments or, in the members ``name`` and ``arguments``, both.
    """

    calls: tuple[re.Pattern[str], ...] = ()
    results: tuple[re.Pattern[str], ...] = ()
    added: tuple[str, ...] = ()

    def called(self, text: str) -> list[tuple[str, str]]:
        """Return name and arguments (JSON) of each call in a model's *text*, in no particular order."""
        end = text[-_CALLS_WITHIN:]
        found = [match for pattern in self.calls for match in _first(pattern, end)]
        return [_call(match, end) for match in found]

    def result(self, content: Any) -> WrittenResult | None:
        """Return the result that a message's *content* begins as; None if it begins otherwise."""
        texts = [_text(part) for part in content] if isinstance(content, list) else [content]
        if not texts or not isinstance(texts[0], str):
            return None
        beginning = texts[0][:_BEGINNING]
        match = next((found for pattern in self.results if (found := pattern.match(beginning))), None)
        if match is None:
            return None
        own = self._own_parts(texts, match.end())
        said = tuple(at for at in range(own, len(texts)) if self._is_said(texts[at]))
        return WrittenResult(name_digest(match.groupdict().get("name") or ""), match.end(), own, said)

    def _own_parts(self, texts: Sequence[str | None], head: int) -> int:
        """Return how many of *texts* are the result's; its text stands in the second if the first is but a head."""
        is_head = not (texts[0] or "")[head:].strip()
        own = 2 if is_head and len(texts) > 1 and texts[1] is not None else 1
        while own < len(texts) and self._begins(texts[own]):
            own += 1
        return own

    def _begins(self, text: str | None) -> bool:
        return text is not None and any(pattern.match(text[:_BEGINNING]) for pattern in self.results)

    def _is_said(self, text: str | None) -> bool:
        return text is not None and bool(text.strip()) and not text.lstrip().startswith(self.added)


NO_FORMS = Forms()


def _first(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    for at, match in enumerate(pattern.finditer(text)):
        if at == MOST_CALLS:
            return
        yield match


def _call(match: re.Match[str], text: str) -> tuple[str, str]:
    groups = match.groupdict()
    name = groups.get("name") or ""
    if groups.get("arguments") is None:
        inside = text[match.end() - 1 : match.end() + _AFTER].partition(f"</{name}>")[0] if name else ""
        return name, json.dumps({found["key"]: found["value"].strip() for found in _ARGUMENT.finditer(inside)})
    try:
        value, _ = _DECODER.raw_decode(text, match.start("arguments"))
    except (ValueError, RecursionError):
        return name, ""
    if not isinstance(value, dict):
        return name, ""
    if isinstance(value.get("name"), str):
        name, value = value["name"], value.get("arguments", value.get("parameters", {}))
    return name, value if isinstance(value, str) else json.dumps(value)


def read_calls(item: Item, entry: ItemText, forms: Forms, call: Callable[[str, str], Call]) -> Item:
    """Return *item* with the facts of the calls written in it, if it is a model's; *entry* are its words."""
    if item.role != "assistant" or item.calls:
        return item
    calls = [(name, call(name, arguments)) for name, arguments in forms.called(entry.text)]
    # What comes of a protected one, such as a question, is what the user says.
    asks = tuple(dict.fromkeys(name_digest(name) for name, known in calls if known.kind != "protected"))
    if not asks:
        return item
    # Results of several calls come in one text: nothing tells which part of it is whose.
    wrote = calls[0][1] if len(calls) == 1 else Call("unknown")
    return replace(item, facts=replace(item.facts or NO_FACTS, written_call=wrote, called_tools=asks))


def read_result(
    item: Item,
    raw: bytes,
    read_item_text: Callable[[bytes], ItemText],
    forms: Forms,
    call: Callable[[str, str], Call],
    count: Callable[[str], int],
) -> Item:
    """Return the user's *item* of the bytes *raw* with the facts of the result that it begins as, if it does."""
    written = forms.result(decode(raw).get("content"))
    if written is None:
        return item
    result = as_result(raw, read_item_text(raw), written)
    facts = facts_of(result, call)
    said = count(result.user_text) if result.user_text else 0
    return replace(item, user_tokens=said, facts=replace(facts or NO_FACTS, written_result=written))


def settled(items: Sequence[Item], start: int) -> tuple[Item, ...]:
    """Return ``items[start:]``; those that begin as results become results if the model's message before asked for one.

    Each depends only on what stands before it, so that an item is the same in every later request.
    """
    at, asks = _asked(items, start)
    found: list[Item] = []
    for index in range(start, len(items)):
        item = items[index]
        facts = item.facts or NO_FACTS
        if item.role == "assistant":
            at, asks = index, facts.called_tools
        elif item.role == "user":
            if facts.written_result is not None and _is_asked(facts.written_result.tool, asks):
                item = replace(item, role="tool", answers=(written_id(at),))
            else:
                asks = ()
        found.append(item)
    return tuple(found)


def written_id(index: int) -> str:
    """Return the name of the call written in the model's message *index*, in place of an id."""
    return f"written:{index}"


def _asked(items: Sequence[Item], start: int) -> tuple[int, tuple[int, ...]]:
    """Return the model's last message before *start* and the tools it called, if the user has not spoken since."""
    for index in range(start - 1, -1, -1):
        item = items[index]
        if item.role == "assistant":
            return index, (item.facts or NO_FACTS).called_tools
        if item.role == "user":
            break
    return -1, ()


def _is_asked(name: int, asks: Sequence[int]) -> bool:
    return bool(asks) and (not name or name in asks or 0 in asks)


def as_result(raw: bytes, entry: ItemText, written: WrittenResult) -> ItemText:
    """Return *entry*, the words of a message, as those of the tool result that it is."""
    content = decode(raw).get("content")
    texts = [_text(part) or "" for part in content] if isinstance(content, list) else [str(content)]
    own = "\n".join(texts[: written.parts])[written.head :]
    said = "\n".join(texts[at] for at in written.user_parts)
    return replace(entry, role="tool", user_text=said, results=((own.strip("\n"), False),))


def resaid(
    raw: bytes, text: str, written: WrittenResult, is_media: Callable[[Mapping[str, Any]], bool] | None
) -> bytes:
    """Return the message with *text* in place of its result; its head, its end and all other parts stay.

    Parts of the result for which *is_media* is true stay as well.
    """
    source = raw.decode()
    field = next(found for found in reversed(members(source)) if found.key == "content")
    value = source[field.start : field.end]
    content = json.loads(value)
    if isinstance(content, str):
        made = quoted(_framed(content, text, written))
        return (source[: field.start] + made + source[field.end :]).encode()
    parts = [value[start:end] for start, end in elements(value, 0)[0]]
    first = {**content[0], "text": _framed(_text(content[0]) or "", text, written)}
    media = [
        part
        for part, node in zip(parts[1 : written.parts], content[1 : written.parts], strict=True)
        if is_media is not None and is_media(node)
    ]
    made = "[" + ",".join([quoted(first), *media, *parts[written.parts :]]) + "]"
    return (source[: field.start] + made + source[field.end :]).encode()


def _framed(whole: str, text: str, written: WrittenResult) -> str:
    head = whole[: written.head].rstrip()
    closing = _CLOSING.search(whole, max(written.head, len(whole) - _BEGINNING))
    end = closing.group().strip() if closing and f"<{closing[1]}>" in head else ""
    return "\n".join(piece for piece in (head, text, end) if piece)


def _text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None

"""Tool calls and results that a client writes as text, because its model knows no tool calls of the API.

A user's message is taken for a result only if it begins as one and the model's message before it asked for one. What
the client puts into further parts of that message is the user's, unless it is known to add it by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy.core.conversation.entry import Entry
from proxy.core.conversation.facts import facts_of, name_digest
from proxy.core.conversation.items import NO_FACTS, Call, Item, Written
from proxy.core.conversation.scan import decode, elements, members
from proxy.core.conversation.slots import quoted

MOST_CALLS: Final = 16
"""Calls of one text that are looked at."""

_LOOKED_AT: Final = 65_536
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
    """How calls and results are written: patterns, and the beginnings of parts that a client adds by itself.

    A pattern may have the groups ``name`` and ``arguments``: the tool's name, and where JSON begins that holds its
    arguments or, in the members ``name`` and ``arguments``, both.
    """

    calls: tuple[re.Pattern[str], ...] = ()
    results: tuple[re.Pattern[str], ...] = ()
    added: tuple[str, ...] = ()

    def called(self, text: str) -> list[tuple[str, str]]:
        """The name and the arguments, as JSON, of each call in a model's *text*, in no particular order."""
        end = text[-_LOOKED_AT:]
        found = [match for pattern in self.calls for match in _first(pattern, end)]
        return [_call(match, end) for match in found]

    def result(self, content: Any) -> Written | None:
        """What a message's *content* is a result of; ``None`` if it does not begin as one."""
        texts = [_text(part) for part in content] if isinstance(content, list) else [content]
        if not texts or not isinstance(texts[0], str):
            return None
        beginning = texts[0][:_BEGINNING]
        match = next((found for pattern in self.results if (found := pattern.match(beginning))), None)
        if match is None:
            return None
        own = self._own_parts(texts, match.end())
        said = tuple(at for at in range(own, len(texts)) if self._is_said(texts[at]))
        return Written(name_digest(match.groupdict().get("name") or ""), match.end(), own, said)

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


def read_calls(item: Item, entry: Entry, forms: Forms, call: Callable[[str, str], Call]) -> Item:
    """*item* with the facts of the calls that it writes, if it is a model's; *entry* is what it says."""
    if item.role != "assistant" or item.calls:
        return item
    calls = [(name, call(name, arguments)) for name, arguments in forms.called(entry.text)]
    # What comes of a protected one, such as a question, is what the user says.
    asks = tuple(dict.fromkeys(name_digest(name) for name, known in calls if known.kind != "protected"))
    if not asks:
        return item
    # Results of several calls come in one text: nothing tells which part of it is whose.
    wrote = calls[0][1] if len(calls) == 1 else Call("unknown")
    return replace(item, facts=replace(item.facts or NO_FACTS, wrote=wrote, asks=asks))


def read_result(
    item: Item,
    raw: bytes,
    read_entry: Callable[[bytes], Entry],
    forms: Forms,
    call: Callable[[str, str], Call],
    count: Callable[[str], int],
) -> Item:
    """The user's *item* of the bytes *raw* with the facts of the result that it begins as, if it does."""
    written = forms.result(decode(raw).get("content"))
    if written is None:
        return item
    result = as_result(raw, read_entry(raw), written)
    facts = facts_of(result, call)
    said = count(result.said) if result.said else 0
    return replace(item, said=said, facts=replace(facts or NO_FACTS, written=written))


def settled(items: Sequence[Item], start: int) -> tuple[Item, ...]:
    """``items[start:]``, those that begin as results as results if the model's message before them asked for one.

    Depends on what stands before only, so that an item is the same in every later request.
    """
    at, asks = _asked(items, start)
    found: list[Item] = []
    for index in range(start, len(items)):
        item = items[index]
        facts = item.facts or NO_FACTS
        if item.role == "assistant":
            at, asks = index, facts.asks
        elif item.role == "user":
            if facts.written is not None and _is_asked(facts.written.name, asks):
                item = replace(item, role="tool", answers=(written_id(at),))
            else:
                asks = ()
        found.append(item)
    return tuple(found)


def written_id(index: int) -> str:
    """The name of the call that the model's message *index* writes, in place of an id."""
    return f"written:{index}"


def _asked(items: Sequence[Item], start: int) -> tuple[int, tuple[int, ...]]:
    """The last message of the model before *start* and what it asked for, if nobody else spoke since."""
    for index in range(start - 1, -1, -1):
        item = items[index]
        if item.role == "assistant":
            return index, (item.facts or NO_FACTS).asks
        if item.role == "user":
            break
    return -1, ()


def _is_asked(name: int, asks: Sequence[int]) -> bool:
    return bool(asks) and (not name or name in asks or 0 in asks)


def as_result(raw: bytes, entry: Entry, written: Written) -> Entry:
    """*entry* of a message's bytes as the tool result that it is."""
    content = decode(raw).get("content")
    texts = [_text(part) or "" for part in content] if isinstance(content, list) else [str(content)]
    own = "\n".join(texts[: written.parts])[written.head :]
    said = "\n".join(texts[at] for at in written.said)
    return replace(entry, role="tool", said=said, results=((own.strip("\n"), False),))


def resaid(raw: bytes, text: str, written: Written, is_media: Callable[[Mapping[str, Any]], bool] | None) -> bytes:
    """The message with *text* in place of what its result says; how it begins and ends, and all beside it, stays.

    Parts of the result of which *is_media* holds stay as well.
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


def _framed(whole: str, text: str, written: Written) -> str:
    head = whole[: written.head].rstrip()
    closing = _CLOSING.search(whole, max(written.head, len(whole) - _BEGINNING))
    end = closing.group().strip() if closing and f"<{closing[1]}>" in head else ""
    return "\n".join(piece for piece in (head, text, end) if piece)


def _text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None

"""Edits of items: clips, adds or replaces texts inside them. Every byte around these stays as the client sent it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from proxy.core.apis.json_scan import Field, Span, elements, members, members_at
from proxy.core.apis.json_steps import (
    MOST_AT_ONCE,
    UNREADABLE,
    decode,
    dismantle,
    encode_in_steps,
    is_large,
    is_small,
    parse,
    spelled,
)
from proxy.core.conversation import Count

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

Clip = Callable[[str, int], str]
"""Shortens a text to a number of tokens."""

MOST_PARTS = 64
"""Text parts of one content that are clipped one by one. If there are more, neighbours are joined to one text first."""

ATTEMPTS = 3
"""Attempts to clip an item to a size: inside JSON, texts may take a few tokens more than by themselves."""

CACHE_MARK = "cache_control"
"""The member that marks the end of a cached prefix: of a message, of its parts, of their parts."""

_WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII_WRITER = json.JSONEncoder(separators=(",", ":"))
_FRACTION = re.compile(rb"[\[:,]-?[0-9]++[.eE]")
"""A fraction in a list or an object."""


class Slot(msgspec.Struct, frozen=True):
    """A text that may be clipped, with the path to its member and, if that holds JSON as text, the path inside it."""

    path: Path
    text: str
    inner: Path | None = None


def to_json(value: Any) -> str:
    """Return *value* as JSON that UTF-8 can encode; lone surrogates, which it cannot, stay escaped."""
    if type(value) is str:
        text = _WRITER.encode(value)
    elif is_small(value, MOST_AT_ONCE):
        text = _written(value)
    else:
        text = encode_in_steps(value, _written)
    try:
        text.encode()
    except UnicodeEncodeError:
        return encode_in_steps(value, lambda part: spelled(part, _ASCII_WRITER.encode))
    return text


def json_bytes(value: Any) -> bytes:
    """Return *value* as JSON in UTF-8; in ASCII if it has lone surrogates."""
    return to_json(value).encode()


def _written(value: Any) -> str:
    """Return *value* as the standard library writes it; by msgspec, in a tenth of the time, if the result is the same.

    It is not for fractions, which msgspec spells differently, and for NaN, which it writes as ``null``.
    """
    try:
        text = msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # lone surrogates, and numbers that Python does not hold
        return spelled(value, _WRITER.encode)
    if b"null" in text or type(value) is float or _FRACTION.search(text):
        return encode_in_steps(value, _WRITER.encode)
    return text.decode()


LONGEST_MINIFIED = 4_194_304
"""Characters of the longest text that is minified: no other thread runs while it is parsed, some 5 ms for each MB."""

JSON_BEGINNINGS = ("{", "[", "\n", " ")
"""The first character of a result that may be an object or a list in JSON."""

LEAST_SPARE = 32
"""Characters of white space in a result below which it is left as it is."""


def minified(text: str) -> str:
    """Return *text* without the white space between its JSON values; *text* itself if it is no JSON object or list.

    Numbers and strings stay as they are spelled, so both parse to the same value.
    """
    if text[:64].lstrip()[:1] not in ("{", "[") or len(text) > LONGEST_MINIFIED:
        return text
    try:
        return msgspec.json.format(text, indent=-1)
    except UNREADABLE:
        return text


def spare_tokens(text: str, count: Count) -> int:
    """Return the tokens of the white space in a result's JSON; zero if they are few, or if it is no JSON."""
    shorter = minified(text)
    if len(shorter) > len(text) - LEAST_SPARE:
        return 0
    return max(0, count(text) - count(shorter))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield every text inside a decoded value, with the path to it."""
    # A stack and no recursion, because arguments may be nested deeply; reversed, so that texts come in their order.
    stack: list[tuple[Path, Any]] = [(path, value)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, str):
            yield at, node
        elif isinstance(node, dict):
            stack += [((*at, key), member) for key, member in reversed(node.items())]
        elif isinstance(node, list):
            stack += [((*at, index), member) for index, member in reversed(list(enumerate(node)))]


def argument_slots(path: Path, text: str) -> Iterator[Slot]:
    """Yield the texts inside a call's JSON arguments; all of *text* if it is no JSON, which clipping cannot break."""
    try:
        value = parse(text)
    except (ValueError, RecursionError):
        yield Slot(path, text)
        return
    # All slots before the first is yielded: ``dismantle`` empties the value that they are read from.
    slots = [Slot(path, leaf, inner) for inner, leaf in leaves(value)]
    if is_large(text.encode("utf-8", "replace")):
        dismantle(value)
    yield from slots


def clipped(
    raw: bytes,
    clip: Clip,
    count: Count,
    tokens: int,
    present: int | None = None,
    *,
    slots: Callable[[dict[str, Any]], Iterable[Slot]],
    weigh: Callable[[bytes, Count], int],
) -> bytes:
    """Return *raw* cut to about *tokens*, counted by *weigh*, by clipping the longest of its *slots* to one length.

    Every other byte stays as it is. *present* are the tokens of *raw* if it was weighed before.
    """
    whole, tokens_of_whole = _weighed(raw, present, count, weigh)
    source = whole.decode()
    sized = [(slot, count(slot.text)) for slot in _slots_in(whole, slots)]
    fixed = tokens_of_whole - sum(size for _, size in sized)
    located = locate_slots(source, [slot for slot, _ in sized])
    room, result = tokens, whole
    for _ in range(ATTEMPTS):
        cap = common_cap([size for _, size in sized], max(0, room - fixed))
        texts = {slot: clip(slot.text, cap) for slot, size in sized if size > cap}
        result = with_replaced_texts(source, located, texts).encode()
        excess = weigh(result, count) - tokens
        if excess <= 0 or not cap:
            break  # it fits, or nothing is left to clip
        # Escapes, and the mark at each cut, took more than the texts by themselves: aim lower by as much.
        room -= excess
    return result


def _weighed(raw: bytes, present: int | None, count: Count, weigh: Callable[[bytes, Count], int]) -> tuple[bytes, int]:
    """Return *raw* with fewer parts, and its tokens: *present* if they are known and no part was joined."""
    whole = with_fewer_parts(raw)
    if present is None or whole is not raw:
        return whole, weigh(whole, count)
    return whole, present


def _slots_in(raw: bytes, slots: Callable[[dict[str, Any]], Iterable[Slot]]) -> list[Slot]:
    """Return the *slots* of the value of *raw*; none if it is no object."""
    value = decode(raw)
    all_slots: list[Slot] = []
    if isinstance(value, dict):
        all_slots = list(slots(value))
    if is_large(raw):
        dismantle(value)
    return all_slots


def with_fewer_parts(raw: bytes) -> bytes:
    """Return *raw* with neighbouring text parts of its content joined if they are more than ``MOST_PARTS``.

    A part with another member beside its type and its text stays as it is, and so does every other byte.
    """
    if raw.count(b'"text"') <= MOST_PARTS:
        return raw
    source = raw.decode()
    fields = [field for field in members(source) if field.key in ("content", "output") and source[field.start] == "["]
    result: list[str] = []
    done = 0
    for field in fields:
        spans, close = elements(source, field.start)
        if len(spans) > MOST_PARTS:
            result += [source[done : field.start + 1], ",".join(_joined_parts(source, spans))]
            done = close
    if not result:
        return raw
    return "".join([*result, source[done:]]).encode()


def _joined_parts(source: str, spans: Sequence[Span]) -> Iterator[str]:
    """Yield the JSON of the parts at *spans*, runs of plain text parts of one type as one part."""
    parts = ((source[start:end], _plain_text(source[start:end])) for start, end in spans)
    for kind, run in groupby(parts, key=lambda part: part[1][0]):
        if not kind:
            yield from (part for part, _ in run)
            continue
        text = "\n".join(text for _, (_, text) in run)
        yield to_json({"type": kind, "text": text})


def _plain_text(part: str) -> tuple[str, str]:
    """Return type and text of a *part* that has no other members; two empty strings for any other part."""
    value = decode(part.encode())
    if not isinstance(value, dict) or value.keys() != {"type", "text"}:
        return "", ""
    kind, text = value["type"], value["text"]
    if not isinstance(kind, str) or not isinstance(text, str):
        return "", ""
    return kind, text


class _Holder(msgspec.Struct, frozen=True):
    """A member with texts that may be clipped: its span, and its slots with the span of each.

    If ``arguments`` is not None, the member holds this JSON as a text, and the spans of the slots are inside that.
    """

    span: Span
    slots: Sequence[tuple[Slot, Span]]
    arguments: str | None = None


def locate_slots(source: str, slots: Sequence[Slot]) -> list[_Holder]:
    """Return the members of the JSON *source* with *slots*, in order."""
    by_path: dict[Path, list[Slot]] = {}
    for slot in slots:
        by_path.setdefault(slot.path, []).append(slot)
    holders: list[_Holder] = []
    for path, span in locate(source, list(by_path)):
        within = by_path[path]
        if within[0].inner is None:
            holders.append(_Holder(span, [(within[0], span)]))
            continue
        arguments = json.loads(source[slice(*span)])
        spans = dict(locate(arguments, [slot.inner for slot in within if slot.inner is not None]))
        located = [(slot, spans[slot.inner]) for slot in within if slot.inner is not None]
        holders.append(_Holder(span, sorted(located, key=itemgetter(1)), arguments))
    return sorted(holders, key=lambda holder: holder.span)


def with_replaced_texts(source: str, holders: Sequence[_Holder], texts: Mapping[Slot, str]) -> str:
    """Return the JSON *source* with *texts* in place of those of their slots, and everything around them unchanged."""
    changes: list[tuple[Span, str]] = []
    for holder in holders:
        inside = [(span, to_json(texts[slot])) for slot, span in holder.slots if slot in texts]
        if inside and holder.arguments is not None:
            changes.append((holder.span, to_json(_spliced(holder.arguments, inside))))
        else:
            changes += inside
    return _spliced(source, changes)


def locate(source: str, paths: Sequence[Path]) -> Iterator[tuple[Path, Span]]:
    """Yield each of *paths* with the span of its value in the JSON *source*; each level is walked once."""
    whole = (len(source) - len(source.lstrip()), len(source.rstrip()))
    stack: list[tuple[int, Span, list[Path]]] = [(0, whole, list(paths))]
    while stack:
        depth, (start, end), paths_below = stack.pop()
        deeper: dict[str | int, list[Path]] = {}
        for path in paths_below:
            if len(path) == depth:
                yield path, (start, end)
            else:
                deeper.setdefault(path[depth], []).append(path)
        if deeper:
            spans = _children(source, start)
            stack += [(depth + 1, spans[key], below) for key, below in deeper.items()]


def _children(source: str, start: int) -> Mapping[str | int, Span]:
    """Return the span of each member or element of the object or list at *start*, by key or index."""
    if source[start] == "{":
        fields, _ = members_at(source, start)
        return {field.key: (field.start, field.end) for field in fields}
    spans, _ = elements(source, start)
    return dict(enumerate(spans))


def common_cap(sizes: Sequence[int], room: int) -> int:
    """Return the largest cap at which *sizes*, each cut to it, take at most *room* together."""
    left, waiting = room, len(sizes)
    for size in sorted(sizes):
        share = left // waiting
        if size > share:
            return share
        left -= size
        waiting -= 1
    return max(sizes, default=0)


def last_member(fields: Sequence[Field], key: str) -> Field | None:
    """Return the member *key*, the last one if it occurs twice, as parsers read it; None if there is none."""
    for field in reversed(fields):
        if field.key == key:
            return field
    return None


def with_content(raw: bytes, edit: Callable[[str], str], key: str = "content") -> bytes:
    """Return the message with its content, the member *key*, edited; every other byte stays as it is.

    *edit* takes and returns JSON; it gets ``null`` for a message without a content.
    """
    source = raw.decode()
    fields = members(source)
    field = last_member(fields, key)
    if field is not None:
        return (source[: field.start] + edit(source[field.start : field.end]) + source[field.end :]).encode()
    close = source.rindex("}")
    member = f'"{key}":' + edit("null")
    if fields:
        member = "," + member
    return (source[:close] + member + source[close:]).encode()


def parts_in_content(raw: bytes, accepts: Callable[[Mapping[str, Any]], bool], key: str = "content") -> list[bytes]:
    """Return the parts of a message's content, its member *key*, for which *accepts* is true, as their own bytes."""
    source = raw.decode()
    field = last_member(members(source), key)
    if field is None or source[field.start] != "[":
        return []
    return _parts_at(source, field.start, accepts)


def _parts_at(source: str, start: int, accepts: Callable[[Mapping[str, Any]], bool]) -> list[bytes]:
    """Return the objects for which *accepts* is true in the JSON array at *start*, as their own bytes."""
    parts = [source[first:last].encode() for first, last in elements(source, start)[0]]
    values = [(part, decode(part)) for part in parts]
    return [part for part, value in values if isinstance(value, dict) and accepts(value)]


def extended_list(value: str, text: str, kind: str, before: bool, media: Sequence[bytes], more: str = "") -> str:
    """Return the JSON of a content *value* with a text part of *kind* and *media* added before or after its own parts.

    Its own parts stay one unchanged run. *more* are further members of the added part, as JSON.
    """
    open_part = '{"type":"' + kind + '","text":'
    added = ",".join([open_part + to_json(text) + more + "}", *(part.decode() for part in media)])
    own = ""
    if value.startswith("["):
        own = value[1:-1].strip()
    elif value.startswith('"') and value != '""':
        own = open_part + value + "}"
    return joined_list(own, added, before)


def joined_list(own: str, added: str, before: bool) -> str:
    """Return the JSON array of the elements *own*, maybe none, with the elements *added* before or after them."""
    if not own:
        return "[" + added + "]"
    if before:
        return "[" + added + "," + own + "]"
    return "[" + own + "," + added + "]"


def with_replaced_contents(
    source: str,
    texts: Sequence[tuple[Path, str]],
    kind: str,
    is_media: Callable[[Mapping[str, Any]], bool],
    *,
    media: bool,
) -> str:
    """Return the JSON *source* with each of *texts* in place of the content at its path, everything else unchanged.

    With *media* the parts for which *is_media* is true stay behind the text, which is then a part of the type *kind*.
    """
    by_path = dict(texts)
    changes: list[tuple[Span, str]] = []
    for path, span in sorted(locate(source, list(by_path)), key=itemgetter(1)):
        content, text = source[slice(*span)], by_path[path]
        parts: list[bytes] = []
        if media and content.startswith("["):
            parts = _parts_at(content, 0, is_media)
        replacement = to_json(text)
        if parts:
            replacement = extended_list("null", text, kind, before=True, media=parts)
        changes.append((span, replacement))
    return _spliced(source, changes)


def extended_string(value: str, text: str, before: bool) -> str:
    """Return the JSON string *value* with *text* before or after its own text, which stays one unchanged run."""
    if before:
        return value[0] + to_json(text + "\n\n")[1:-1] + value[1:]
    return value[:-1] + to_json("\n\n" + text)[1:-1] + value[-1]


def with_model(body: bytes, name: str) -> bytes:
    """Return the JSON object *body* with *name* for its model; *body* if it names none. Every other byte stays."""
    try:
        text = body.decode()
        field = last_member(members(text), "model")
    except (ValueError, RecursionError):
        return body
    if field is None:
        return body
    return b"".join([text[: field.start].encode(), json.dumps(name).encode(), text[field.end :].encode()])


def cache_marks(raw: bytes) -> list[tuple[Path, Any]]:
    """Return the path and the value of each cache mark of an element."""
    return list(_marks_in(decode(raw), ()))


def _marks_in(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get(CACHE_MARK), dict):
            yield (*path, CACHE_MARK), value[CACHE_MARK]
        yield from _marks_in(value.get("content"), (*path, "content"))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from _marks_in(part, (*path, at))


def without_members(raw: bytes, paths: Sequence[Path]) -> bytes:
    """Return the JSON *raw* without the members at *paths*; every other byte stays as it is."""
    source = raw.decode()
    spans = [_member_span(source, str(path[-1]), span) for path, span in locate(source, paths)]
    return _spliced(source, sorted((span, "") for span in spans)).encode()


def _member_span(source: str, key: str, value: Span) -> Span:
    """Return the span of the member *key* with the comma that goes with it; *value* is the span of its value."""
    start, end = source.rindex(f'"{key}"', 0, value[0]), value[1]
    before, behind = source[:start].rstrip(), source[end:].lstrip()
    if before.endswith(","):
        start = len(before) - 1
    elif behind.startswith(","):
        end = len(source) - len(behind) + 1
    return start, end


def with_replaced_values(source: str, values: Mapping[Path, str]) -> str:
    """Return the JSON *source* with the JSON of *values* at their paths, everything else unchanged."""
    return _spliced(source, sorted((span, values[path]) for path, span in locate(source, list(values))))


def _spliced(source: str, changes: Iterable[tuple[Span, str]]) -> str:
    """Return *source* with a text in place of each span; *changes* are in order."""
    pieces: list[str] = []
    done = 0
    for (start, end), text in changes:
        pieces += [source[done:start], text]
        done = end
    return "".join([*pieces, source[done:]])

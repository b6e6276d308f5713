"""Locates the items of a request body's list and everything around them, without copying.

The body is never re-serialised. A scan says at which bytes each item begins and ends; what surrounds the list (the
*outline*: model, tools, output figure, ...) is small and mostly the same from call to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.core.apis.json_steps import ONE_CALL, UNREADABLE
from proxy.core.errors import InvalidRequest, TooManyItems

Span = tuple[int, int]

_BRACKET, _COMMA = b"[,"
_SPACE = b" \t\n\r"
_GAP = re.compile(rb"[, \t\n\r]+")
_WHITESPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(parse_int=len)  # only the end of each value is used
ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")  # so a key can be hidden from a search for its plain spelling

MOST_ITEMS = 20_000
"""Items of one request. Each takes some 50 us and 2 KB, however small; the longest recorded sessions have 2,000."""

_SURELY_FEW = 4
"""Commas per allowed item up to which the items are located first and counted afterwards."""

_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Scan:
    """The spans of the items of ``body[key]``; ``start`` and ``end`` enclose them inside the list's brackets."""

    start: int
    end: int
    spans: tuple[Span, ...]

    def outline(self, body: bytes) -> bytes:
        """The body with its list emptied: valid JSON, equal for equal surroundings."""
        return body[: self.start] + body[self.end :]


class Field(msgspec.Struct, frozen=True, array_like=True):
    """One member of a JSON object: its decoded key and the span of its value."""

    key: str
    start: int
    end: int


def scan(body: bytes, key: str, most: int | None = None) -> Scan:
    """Return the items of the list under *key* at the top level of *body*.

    Raises ``TooManyItems`` if there are more than *most*, before anything is built for each of them, and
    ``InvalidRequest`` if *body* is not a JSON object, has *key* twice, *key* is not a list, or values nest deeper than
    a parser goes.
    """
    if most is not None and body.count(b",") > _SURELY_FEW * most:
        _check_lists(body, most)
    found = _fast(body, key) or _exact(body, key)
    if most is not None and len(found.spans) > most:
        raise TooManyItems(most)
    return found


def extend(body: bytes, key: str, known: Scan, most: int | None = None) -> Scan | None:
    """Return the scan of *body*, given that its bytes up to the end of *known*'s last item were scanned before.

    Costs O(new bytes). Return None if the rest does not continue the list, or may hold more items than *most* allows;
    then ``scan`` has to look at all of it.
    """
    if not known.spans:
        return None
    border = known.spans[-1][1]
    if most is not None and len(known.spans) + body.count(b",", border) > most:
        return None
    try:
        found: Any = msgspec.json.decode(b'{"%b":[null' % key.encode() + memoryview(body)[border:], type=_struct(key))
    except UNREADABLE:
        return None
    spans = _locate(body, found.items[1:], border)
    if spans is None:
        return None
    longer = Scan(known.start, spans[1], known.spans + spans[0])
    return longer if _is_sole(longer.outline(body), key, known.start) else None


def members(text: str) -> list[Field]:
    """Return the members of the JSON object *text* in order, duplicates included; spans are character offsets.

    Accepts what the standard parser accepts (lone surrogates, NaN). Raises ``ValueError`` if it is no object.
    """
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("not a JSON object")
    found: list[Field] = []
    at = _skip(text, at + 1)
    while found or text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError(f"a key was expected at character {at}")
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"':' was expected at character {at}")
        start = _skip(text, at + 1)
        end = _value_end(text, start)
        found.append(Field(name, start, end))
        at = _skip(text, end)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise ValueError(f"',' was expected at character {at}")
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise ValueError(f"nothing was expected behind character {at}")
    return found


def _value_end(text: str, start: int) -> int:
    """Return where the value that begins at *start* ends. Long lists are parsed by element: see ``ONE_CALL``."""
    if len(text) - start > ONE_CALL and text[start] == "[":
        return elements(text, start)[1] + 1
    return _DECODER.raw_decode(text, start)[1]


def elements(text: str, start: int) -> tuple[list[Span], int]:
    """Return the spans of the elements of the JSON array at *start*, and the offset of its closing bracket."""
    if text[start : start + 1] != "[":
        raise ValueError("not a JSON array")
    spans: list[Span] = []
    at = _skip(text, start + 1)
    while text[at : at + 1] != "]":
        _, end = _DECODER.raw_decode(text, at)
        spans.append((at, end))
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
            if text[at : at + 1] == "]":
                raise ValueError(f"an element was expected at character {at}")
        elif text[at : at + 1] != "]":
            raise ValueError(f"',' was expected at character {at}")
    return spans, at


class _Messages(msgspec.Struct):
    items: list[msgspec.Raw] = msgspec.field(name="messages")


class _Input(msgspec.Struct):
    items: list[msgspec.Raw] = msgspec.field(name="input")


def _struct(key: str) -> type[_Messages] | type[_Input]:
    return _Messages if key == "messages" else _Input


def _check_lists(body: bytes, most: int) -> None:
    """Raise ``TooManyItems`` if a list that is a member of the top level has more than *most* elements.

    Walks from one string or bracket to the next and keeps nothing, so that a small bomb stays small.
    """
    depth = commas = 0
    in_list = False
    for match in _STRUCTURE.finditer(body):
        mark = body[match.start()]
        if mark in b"[{":
            depth += 1
            if depth == 2:
                in_list, commas = mark == _BRACKET, 0
        elif mark in b"]}":
            depth -= 1
        elif mark == _COMMA and depth == 2 and in_list:
            commas += 1
            if commas >= most:
                raise TooManyItems(most)


def _fast(body: bytes, key: str) -> Scan | None:
    token = b'"%b"' % key.encode()
    at = body.find(token)
    if at < 0 or body.find(token, at + 1) >= 0:
        return None  # written with escapes, nested as well, or missing: the exact scanner tells these apart
    try:
        found: Any = msgspec.json.decode(body, type=_struct(key))
    except UNREADABLE:
        return None
    at = _after(body, at + len(token), b":")
    at = _after(body, at, b"[") if at >= 0 else at
    if at < 0:
        return None
    located = _locate(body, found.items, at)
    if located is None:
        return None
    scanned = Scan(at, located[1], located[0])
    return scanned if _is_sole(scanned.outline(body), key, at) else None


def _is_sole(outline: bytes, key: str, start: int) -> bool:
    """Return True if the list at *start* is the top level's only *key*, as far as *outline* shows."""
    if not ESCAPED_LETTER.search(outline) and outline.count(b'"%b"' % key.encode()) == 1:
        return True
    try:
        text = outline.decode()
        found = [field.start for field in members(text) if field.key == key]
    except (ValueError, RecursionError):
        return False
    return len(found) == 1 and len(text[: found[0] + 1].encode()) == start


def _locate(body: bytes, items: list[msgspec.Raw], at: int) -> tuple[tuple[Span, ...], int] | None:
    """Return the spans of *items*, which follow each other from *at*, and the offset of the closing bracket."""
    spans: list[Span] = []
    for item in items:
        if gap := _GAP.match(body, at):
            at = gap.end()
        raw = bytes(item)
        if not body.startswith(raw, at):
            return None
        spans.append((at, at + len(raw)))
        at += len(raw)
    end = at
    while body[end : end + 1] in (b" ", b"\t", b"\n", b"\r"):
        end += 1
    return (tuple(spans), end) if body[end : end + 1] == b"]" else None


def _after(body: bytes, at: int, mark: bytes) -> int:
    """Return the offset behind *mark*, which only white space may precede; -1 if something else stands there."""
    while body[at : at + 1] and body[at] in _SPACE:
        at += 1
    return at + 1 if body[at : at + 1] == mark else -1


def _exact(body: bytes, key: str) -> Scan:
    """Return the scan by the standard library's scanner: slower, sees duplicates, accepts what ``json`` accepts."""
    try:
        text = body.decode("utf-8")
        fields = members(text)
        reject_duplicates(fields)
        value = next((f for f in fields if f.key == key), None)
        if value is None:
            raise InvalidRequest(f"The request body has no {key!r}.")
        if text[value.start : value.start + 1] != "[":
            raise InvalidRequest(f"{key!r} must be a list.")
        spans, close = elements(text, value.start)
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    if text.isascii():
        return Scan(value.start + 1, close, tuple(spans))
    return _in_bytes(text, value.start + 1, close, spans)


def reject_duplicates(fields: list[Field]) -> None:
    """Raise ``InvalidRequest`` if a member that decides anything occurs twice: parsers disagree on which holds."""
    names = [field.key for field in fields]
    for name in ("model", "messages", "input"):
        if names.count(name) > 1:
            raise InvalidRequest(f"The request body has {name!r} more than once.")


def _in_bytes(text: str, start: int, end: int, spans: list[Span]) -> Scan:
    """Return the scan with its character offsets as byte offsets, in one walk."""
    points = iter([start, *(point for span in spans for point in span), end])
    offsets = list(_byte_offsets(text, points))
    inner = offsets[1:-1]
    return Scan(offsets[0], offsets[-1], tuple(zip(inner[::2], inner[1::2], strict=True)))


def _byte_offsets(text: str, points: Iterator[int]) -> Iterator[int]:
    last = total = 0
    for point in points:
        total += len(text[last:point].encode("utf-8"))
        last = point
        yield total


def _skip(text: str, at: int) -> int:
    match = _WHITESPACE.match(text, at)
    return match.end() if match else at

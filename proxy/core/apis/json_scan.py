"""Locates the items of a request body's list, and the members around it, without copying.

The body is never re-serialised: a scan is the offsets at which each item begins and ends. Everything around the list
(model, tools, output figure, ...) is small and mostly equal from request to request. There are three ways to a scan,
from the fastest to the one that accepts everything:

    extend   a prefix of the body was scanned before: decode what is new
    _fast    msgspec leaves the items as raw bytes; they are located by searching for them in the body
    _exact   the standard library's scanner: duplicate and escaped keys, lone surrogates, NaN

The first two return None for a body that they cannot prove to be usual: then the next one decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from proxy.core.apis.json_steps import ONE_CALL, UNREADABLE
from proxy.core.errors import InvalidRequest, TooManyItems

Span = tuple[int, int]

_BRACKET, _COMMA = b"[,"
_SPACE = b" \t\n\r"
_GAP = re.compile(rb"[, \t\n\r]+")
"""The bytes between two items."""

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_PLAIN_MEMBER = re.compile(r'"([^"\\\x00-\x1f]*+)"[ \t\n\r]*+:[ \t\n\r]*+("[^"\\\x00-\x1f]*+")?')
"""A key without escapes, and its value if that is a text without any: most members, in half the time of the parser."""

_BEHIND_MEMBER = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_BEHIND_ELEMENT = re.compile(r"[ \t\n\r]*([\],])[ \t\n\r]*")
_DECODER = json.JSONDecoder(parse_int=len)  # only the end of each value is used

ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
"""An escaped letter: it can hide a key from a search for its plain spelling."""

MOST_ITEMS = 20_000
"""Default limit of items in a request. Each takes some 50 us and 2 KB, however small; the longest recorded session has
2,000."""

_SURELY_FEW = 4
"""Commas per allowed item up to which a body is scanned without being checked first."""

_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
"""A string (so that brackets and commas inside it are skipped), a bracket or a comma."""


class Scan(msgspec.Struct, frozen=True):
    """The spans of the items of ``body[key]``; ``start`` and ``end`` enclose them inside the list's brackets."""

    start: int
    end: int
    spans: tuple[Span, ...]

    def without_items(self, body: bytes) -> bytes:
        """Return the body with its list emptied: valid JSON."""
        return body[: self.start] + body[self.end :]


class Field(msgspec.Struct, frozen=True, array_like=True):
    """One member of a JSON object: its decoded key and the span of its value."""

    key: str
    start: int
    end: int


def scan(body: bytes, key: str, most: int | None = None) -> Scan:
    """Return the items of the list under *key* at the top level of *body*.

    Raises ``TooManyItems`` if there are more than *most*, before any object is made of an item, and
    ``InvalidRequest`` if *body* is no JSON object, has *key* twice, *key* is no list, or values nest too deeply.
    """
    if most is not None and body.count(b",") > _SURELY_FEW * most:
        _check_lists(body, most)
    scanned = _fast(body, key) or _exact(body, key)
    if most is not None and len(scanned.spans) > most:
        raise TooManyItems(most)
    return scanned


def extend(body: bytes, key: str, prefix: Scan, most: int | None = None) -> Scan | None:
    """Return the scan of *body*, whose bytes up to the end of the last item of *prefix* were scanned before.

    Costs O(new bytes). Return None if the rest does not continue the list, or may hold more than *most* items: ``scan``
    has to read the whole body then.
    """
    if not prefix.spans:
        return None
    border = prefix.spans[-1][1]
    if most is not None and len(prefix.spans) + body.count(b",", border) > most:
        return None
    try:
        decoded: Any = msgspec.json.decode(
            b'{"%b":[null' % key.encode() + memoryview(body)[border:], type=_STRUCTS[key]
        )
    except UNREADABLE:
        return None
    located = _locate(body, decoded.items[1:], border)
    if located is None:
        return None
    spans, close = located
    longer = Scan(prefix.start, close, prefix.spans + spans)
    if not _is_sole(longer.without_items(body), key, prefix.start):
        return None
    return longer


def members(text: str) -> list[Field]:
    """Return the members of the JSON object *text* in order, duplicates included; spans are character offsets.

    Accepts what the standard parser accepts (lone surrogates, NaN). Raises ``ValueError`` if it is no object.
    """
    start = _skip(text, 0)
    if text[start : start + 1] != "{":
        raise ValueError("not a JSON object")
    fields, end = members_at(text, start)
    if end != len(text):
        raise ValueError(f"nothing was expected behind character {end}")
    return fields


def members_at(text: str, start: int) -> tuple[list[Field], int]:
    """Return the members of the JSON object at *start*, as ``members``, and the offset of what follows it."""
    fields: list[Field] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "}":
        return fields, _skip(text, at + 1)
    closing = ""
    while closing != "}":
        field = _read_member(text, at)
        fields.append(field)
        behind = _BEHIND_MEMBER.match(text, field.end)
        if behind is None:
            raise ValueError(f"',' was expected at character {field.end}")
        closing, at = behind[1], behind.end()
    return fields, at


def _read_member(text: str, at: int) -> Field:
    """Return the member whose key is at *at*."""
    plain = _PLAIN_MEMBER.match(text, at)
    if plain is not None:
        start, end = plain.span(2)
        if end < 0:
            start = plain.end()
            end = _value_end(text, start)
        return Field(plain[1], start, end)
    if text[at : at + 1] != '"':
        raise ValueError(f"a key was expected at character {at}")
    name, at = _DECODER.raw_decode(text, at)
    colon = _COLON.match(text, at)
    if colon is None:
        raise ValueError(f"':' was expected at character {at}")
    return Field(name, colon.end(), _value_end(text, colon.end()))


def _value_end(text: str, start: int) -> int:
    """Return the end of the value that begins at *start*. Long lists are parsed by element: see ``ONE_CALL``."""
    if len(text) - start > ONE_CALL and text[start] == "[":
        return elements(text, start)[1] + 1
    return _DECODER.raw_decode(text, start)[1]


def elements(text: str, start: int) -> tuple[list[Span], int]:
    """Return the spans of the elements of the JSON array at *start*, and the offset of its closing bracket."""
    if text[start : start + 1] != "[":
        raise ValueError("not a JSON array")
    spans: list[Span] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "]":
        return spans, at
    while True:
        _, end = _DECODER.raw_decode(text, at)
        spans.append((at, end))
        behind = _BEHIND_ELEMENT.match(text, end)
        if behind is None:
            raise ValueError(f"',' was expected at character {end}")
        if behind[1] == "]":
            return spans, behind.start(1)
        at = behind.end()


_STRUCTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    key: msgspec.defstruct("Items", [("items", list[msgspec.Raw], msgspec.field(name=key))])
    for key in ("messages", "input", "contents")
}
"""Types that find the list of each API and leave its items undecoded."""


def _check_lists(body: bytes, most: int) -> None:
    """Raise ``TooManyItems`` if a list that is a member of the top level has more than *most* elements.

    Walks from one string or bracket to the next and stores nothing: a body of a million tiny items takes no memory.
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
    """Return the scan of a body in the usual form; None for any other one."""
    token = b'"%b"' % key.encode()
    at = body.find(token)
    if at < 0 or body.find(token, at + 1) >= 0:
        return None  # missing, written with escapes, or nested as well: the exact scanner decides
    try:
        decoded: Any = msgspec.json.decode(body, type=_STRUCTS[key])
    except UNREADABLE:
        return None
    at = _after(body, at + len(token), b":")
    if at >= 0:
        at = _after(body, at, b"[")
    if at < 0:
        return None
    located = _locate(body, decoded.items, at)
    if located is None:
        return None
    spans, close = located
    scanned = Scan(at, close, spans)
    if not _is_sole(scanned.without_items(body), key, at):
        return None
    return scanned


def _is_sole(envelope: bytes, key: str, start: int) -> bool:
    """Return True if the list at *start* is the only *key* of the top level; *envelope* is the body without items."""
    if not ESCAPED_LETTER.search(envelope) and envelope.count(b'"%b"' % key.encode()) == 1:
        return True
    try:
        text = envelope.decode()
        starts = [field.start for field in members(text) if field.key == key]
    except (ValueError, RecursionError):
        return False
    return len(starts) == 1 and len(text[: starts[0] + 1].encode()) == start


def _locate(body: bytes, items: list[msgspec.Raw], at: int) -> tuple[tuple[Span, ...], int] | None:
    """Return the spans of *items*, which follow each other from *at*, and the offset of the closing bracket."""
    spans: list[Span] = []
    between = b""
    for item in items:
        raw = bytes(item)
        start = at + len(between)
        # Most clients write the same bytes between all items: only another gap is searched for.
        if not (body.startswith(between, at) and body.startswith(raw, start)):
            start = at
            if gap := _GAP.match(body, at):
                start = gap.end()
            if not body.startswith(raw, start):
                return None
            between = body[at:start]
        at = start + len(raw)
        spans.append((start, at))
    end = at
    while body[end : end + 1] in (b" ", b"\t", b"\n", b"\r"):
        end += 1
    if body[end : end + 1] != b"]":
        return None
    return tuple(spans), end


def _after(body: bytes, at: int, mark: bytes) -> int:
    """Return the offset behind *mark*, which only white space may precede; -1 if there is another byte."""
    while body[at : at + 1] and body[at] in _SPACE:
        at += 1
    if body[at : at + 1] != mark:
        return -1
    return at + 1


def _exact(body: bytes, key: str) -> Scan:
    """Return the scan by the standard library's scanner: slower, finds duplicates, accepts what ``json`` accepts."""
    text = utf8_text(body)
    try:
        fields = members(text)
        reject_duplicates(fields)
        value = next((field for field in fields if field.key == key), None)
        if value is None:
            raise InvalidRequest(f"The request body has no {key!r}.")
        if text[value.start : value.start + 1] != "[":
            raise InvalidRequest(f"{key!r} must be a list.")
        spans, close = elements(text, value.start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    if text.isascii():
        return Scan(value.start + 1, close, tuple(spans))
    return _in_bytes(text, value.start + 1, close, spans)


def utf8_text(body: bytes) -> str:
    """Return the text of *body*, or of a part of it. Raises ``InvalidRequest`` if it is no UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None


def reject_duplicates(fields: list[Field]) -> None:
    """Raise ``InvalidRequest`` if an important member occurs twice: parsers disagree on which one counts."""
    names = [field.key for field in fields]
    for name in ("model", "messages", "input", "contents"):
        if names.count(name) > 1:
            raise InvalidRequest(f"The request body has {name!r} more than once.")


def _in_bytes(text: str, start: int, end: int, spans: list[Span]) -> Scan:
    """Return the scan with character offsets converted into byte offsets, in one pass."""
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
    """Return the offset of the first character from *at* on that is no white space."""
    match = _WHITESPACE.match(text, at)
    assert match is not None  # it matches nothing at all, too
    return match.end()

"""Parses and encodes JSON of any size in calls of a few ms each.

A parser in C holds the interpreter's lock until it returns, so that one call for a body of 8 MB would stop every other
request for some 100 ms. A large value is therefore parsed level by level, its inner values left as raw bytes, and
encoded in batches of members. Between two calls other threads can run.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from proxy.core.errors import InvalidRequest

ONE_CALL = 65_536
"""Bytes that one call of a parser reads, which takes a few ms at most."""

STEPS = 16
"""Levels down to which a large value is parsed in steps; each level reads all that is below it again (2 ms/MB)."""

MOST: Final = 65_536
"""Values that one call of an encoder writes, and ``_TEXT`` characters are one: 4 ms with msgspec, 16 with ``json``."""

MOST_AT_ONCE: Final = 262_144
"""Values that msgspec writes, or that are freed, in one call: 20 to 40 ms. To look for large ones in them takes 60."""

_TEXT: Final = 16
"""Characters of a text that count as one value."""

_BATCH: Final = 256
"""Members of a large list or object that are encoded in one call, if they are small enough."""

_VISITED: Final = 32
"""Values that are looked into in one call."""

_KINDS: Final[Mapping[bytes, Any]] = {b"[": list[msgspec.Raw], b"{": dict[str, msgspec.Raw]}
"""Types of lists and of objects whose members are not parsed, by the first byte."""

_BORDERS: Final = (b",", b"},", b"],", b'",')
"""Ends of members, the likeliest first, at which a long list or object is parted."""

_MOST_DIGITS = 4300
"""Digits of the longest integer that Python reads.

https://docs.python.org/3/library/stdtypes.html#int-max-str-digits
"""

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions of msgspec after which the standard parser decides if the bytes are JSON at all."""


class Digits(str):
    """A number that Python cannot represent, as it is spelled in JSON. It is passed on to the upstream like that."""

    __slots__ = ()


def read_integer(digits: str) -> int | Digits:
    """Return the number that JSON writes as *digits*; the digits themselves if they are more than Python reads.

    Python's limit avoids the quadratic cost of reading them. No figure that is used here is so large.
    """
    if len(digits) > _MOST_DIGITS:
        return Digits(digits)
    return int(digits)


def read_fraction(digits: str) -> float | Digits:
    """Return the number that JSON writes as *digits*; the digits themselves if it is too large, such as ``1e400``."""
    number = float(digits)
    if math.isinf(number):
        return Digits(digits)
    return number


def decode(raw: bytes) -> Any:
    """Return the value of *raw*, also if only the standard parser accepts it (lone surrogates, NaN).

    Raises ``InvalidRequest`` if it is no JSON at all.
    """
    try:
        if len(raw) > ONE_CALL:
            return _in_steps(raw, STEPS)
        return msgspec.json.decode(raw)
    except UNREADABLE:
        pass
    try:
        # Decoded first, because ``json.loads`` of bytes would also accept UTF-16 and unescaped lone surrogates.
        return json.loads(raw.decode(), parse_int=read_integer, parse_float=read_fraction)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None


def decoded(raws: Iterable[bytes]) -> Iterator[tuple[list[Any], bool]]:
    """Yield the values of *raws*, as ``decode`` returns each: those of ``ONE_CALL`` bytes at a time.

    Behind them stands True if it is one large value, which is to be taken apart by ``dismantle``.
    """
    run: list[bytes] = []
    size = 0
    for raw in raws:
        size += len(raw)
        if run and size > ONE_CALL:
            yield _values_of(run)
            run, size = [], len(raw)
        run.append(raw)
    if run:
        yield _values_of(run)


def _values_of(run: list[bytes]) -> tuple[list[Any], bool]:
    """Return the values of *run*, parsed in one call unless one of them is odd; and True if it is a large one."""
    if len(run[0]) > ONE_CALL:
        return [decode(run[0])], is_large(run[0])
    try:
        values: list[Any] = msgspec.json.decode(b"[" + b",".join(run) + b"]")
    except UNREADABLE:
        values = []
    if len(values) != len(run):
        values = [decode(raw) for raw in run]
    return values, False


def parse(text: str) -> Any:
    """Return the value of *text*, in calls of some ms each. Raises ``ValueError`` and ``RecursionError``."""
    try:
        if len(text) > ONE_CALL:
            return _in_steps(text.encode(), STEPS)
        return msgspec.json.decode(text)
    except UNREADABLE:
        return json.loads(text, parse_int=read_integer, parse_float=read_fraction)


def parse_each(texts: Iterable[str]) -> list[Any]:
    """Return the value of each of *texts*, by ``parse``; None for one that is no JSON."""
    values: list[Any] = []
    for text in texts:
        try:
            values.append(parse(text))
        except (ValueError, RecursionError):
            values.append(None)
    return values


def runs(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the slices of a list whose members have these *sizes*, each of ``ONE_CALL`` in all or of one member."""
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total > ONE_CALL and at > start:
            yield slice(start, at)
            start, total = at, size
    if sizes:
        yield slice(start, len(sizes))


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in *value* if it is a list; an empty list for anything else."""
    if not isinstance(value, list):
        return []
    return [element for element in value if isinstance(element, dict)]


def as_object(value: Any) -> dict[str, Any]:
    """Return *value* if it is a JSON object, else an empty one."""
    if isinstance(value, dict):
        return value
    return {}


def spelled(value: Any, write: Callable[[Any], str]) -> str:
    """Return *value* as JSON by *write*; numbers that Python cannot represent are spelled as they were read."""
    if isinstance(value, Digits):
        return value
    if isinstance(value, dict):
        return "{{{}}}".format(",".join([f"{write(key)}:{spelled(member, write)}" for key, member in value.items()]))
    if isinstance(value, list):
        return "[{}]".format(",".join([spelled(element, write) for element in value]))
    return write(value)


def _in_steps(raw: Any, steps: int) -> Any:
    """Return the value of *raw*, parsed in calls of about ``ONE_CALL`` bytes each, *steps* levels deep."""
    view = memoryview(raw)
    mark = bytes(view[:ONE_CALL]).lstrip()[:1]
    if view.nbytes <= ONE_CALL or not steps or mark not in _KINDS:
        return msgspec.json.decode(raw)
    pieces = _pieces(bytes(view).strip(b" \t\n\r"))
    if mark == b"[":
        elements: list[Any] = []
        for piece in pieces:
            elements += _read_piece(piece, steps)
        return elements
    members: dict[str, Any] = {}
    for piece in pieces:
        members.update(_read_piece(piece, steps))
    return members


def _read_piece(piece: bytes, steps: int) -> Any:
    """Return the list or object *piece*; the members of a large one are parsed one by one."""
    if len(piece) <= ONE_CALL:
        return msgspec.json.decode(piece)
    if piece.startswith(b"["):
        elements = msgspec.json.decode(piece, type=list[msgspec.Raw])
        return [_in_steps(element, steps - 1) for element in elements]
    members = msgspec.json.decode(piece, type=dict[str, msgspec.Raw])
    return {key: _in_steps(member, steps - 1) for key, member in members.items()}


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Yield the members of the list or object *raw* as lists or objects of about ``ONE_CALL`` bytes, if they can be.

    Members that are found in one call of a parser are objects that it makes in one go: 400,000 take 140 ms.
    """
    at, end = 1, len(raw) - 1
    while at <= end:
        cut = _border(raw, at, end)
        if not raw[at:cut].strip():
            raise msgspec.DecodeError("a member was expected behind a comma")
        yield raw[:1] + raw[at:cut] + raw[-1:]
        at = cut + 1


def _border(raw: bytes, at: int, end: int) -> int:
    """Return the offset of a comma between two members of *raw*, some way behind *at*, where one begins.

    It is *end* if none is found. A comma may stand in a text or in an inner list: but if what is before it, from the
    beginning of a member on, is a whole list or object, it is between two members.
    """
    size = ONE_CALL - 2
    while at + size < end:
        for mark in _BORDERS:
            cut = raw.rfind(mark, at, at + size) + len(mark) - 1
            if cut > at and _is_whole(raw[:1] + raw[at:cut] + raw[-1:]):
                return cut
        size *= 2
    return end


def _is_whole(piece: bytes) -> bool:
    """True if *piece* is a list or an object; its members are only looked through."""
    try:
        msgspec.json.decode(piece, type=_KINDS[piece[:1]])
    except msgspec.DecodeError:
        return False
    return True


def is_large(raw: bytes) -> bool:
    """Return True if the JSON *raw* may hold more than ``MOST_AT_ONCE`` values: those are encoded and freed in steps.

    They are counted from above, in 4 ms for each MB at most: each follows a comma, or the bracket that it is first in.
    """
    if len(raw) <= ONE_CALL:
        return False
    texts = len(raw) // _TEXT
    return texts > MOST_AT_ONCE or texts + raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_AT_ONCE


def encode_in_steps(value: Any, encode: Callable[[Any], str], *, ordered: bool = False) -> str:
    """Return ``encode(value)`` for parsed JSON, in calls of some ms each; *encode* must write no white space.

    If *ordered*, the members of objects are sorted by their keys.
    """
    large = _large(value)
    if not large:
        return encode(value)
    pieces: list[str] = []
    _write(value, large, encode, ordered, pieces)
    return "".join(pieces)


def dismantle(value: Any) -> None:
    """Empty *value*, parsed JSON that is no longer used, if it is large: else it would be freed in one long call."""
    large = _large(value)
    if not large:
        return
    waiting = [value]
    while waiting:
        node = waiting.pop()
        members = node
        if isinstance(node, dict):
            members = list(node.values())
            node.clear()
        while members:
            batch = members[-_BATCH:]
            del members[-_BATCH:]
            waiting += [member for member in batch if id(member) in large or _is_long(member)]


def _is_long(member: Any) -> bool:
    return isinstance(member, dict | list) and len(member) > _BATCH


def _write(value: Any, large: set[int], encode: Callable[[Any], str], ordered: bool, pieces: list[str]) -> None:
    """Append the JSON of *value* to *pieces*; *large* are the ids of the lists and objects that take many calls."""
    if id(value) not in large:
        large = _large(value)
        if not large:
            pieces.append(encode(value))
            return
    is_object = isinstance(value, dict)
    opening, closing = "[", "]"
    if is_object:
        opening, closing = "{", "}"
    pieces.append(opening)
    for batch in _batches(value, ordered):
        members = batch
        if is_object:
            members = list(batch.values())
        if large.isdisjoint(map(id, members)) and is_small(members):
            pieces += [encode(batch)[1:-1], ","]
            continue
        for key, member in zip(batch, members, strict=True):
            if is_object:
                pieces += [encode(key), ":"]
            _write(member, large, encode, ordered, pieces)
            pieces.append(",")
    pieces[-1] = closing  # in place of the last comma: a large value is not empty


def _large(value: Any) -> set[int]:
    """Return the ids of the lists and objects around the ``MOST``th value inside *value*; none if it is small.

    These are the ones to write member by member: everything visited before that value is small. Calling this again for
    each of their members visits no value more than a few times, however deep they nest.
    """
    around: list[tuple[int, int]] = []  # each list or object, and how many values waited when it was opened
    left = MOST
    waiting = [value]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is dict:
            members = node.values()
        elif kind is list:
            members = node
        elif kind is str:
            left -= len(node) // _TEXT
            if left < 0:
                break
            continue
        else:
            continue
        if members:
            # Lists and objects whose members have all been visited are no longer around what follows.
            behind = len(waiting)
            while around and around[-1][1] > behind:
                around.pop()
            around.append((id(node), behind))
            left -= len(members)
            if left < 0:
                break
            waiting += members
    if left >= 0:
        return set()
    return {name for name, _ in around}


def is_small(value: Any, most: int = MOST) -> bool:
    """Return True if at most *most* values are inside *value*, parsed JSON.

    A function of the garbage collector finds those inside many lists and objects at once, in a third of a loop's time:
    https://docs.python.org/3/library/gc.html#gc.get_referents
    """
    left = most
    waiting = [value]
    while waiting and left >= 0:
        inside = gc.get_referents(*waiting[-_VISITED:])
        del waiting[-_VISITED:]
        waiting += inside
        left -= len(inside) + sum([len(node) for node in inside if type(node) is str]) // _TEXT
    return left >= 0


def _batches(value: Any, ordered: bool) -> Iterator[Any]:
    """Yield the members of a list or an object, some at a time, as lists or objects."""
    if isinstance(value, dict):
        members = iter(value.items())
        if ordered:
            members = iter(sorted(value.items()))
        while batch := dict(islice(members, _BATCH)):
            yield batch
    else:
        for start in range(0, len(value), _BATCH):
            yield value[start : start + _BATCH]

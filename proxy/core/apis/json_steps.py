"""JSON of any size, parsed and written in calls of some ms each: nothing else runs before a call returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from proxy.core.errors import InvalidRequest

ONE_CALL = 65_536
"""Bytes that one call of a parser turns into objects, which takes some ms: nothing else runs before it returns."""

STEPS = 16
"""Levels down to which a large value is parsed step by step: each looks through what is below it again (2 ms/MB)."""

MOST: Final = 8_192
"""Values that one call of an encoder writes. An empty object takes it 0.2 us, and so do ``_TEXT`` characters."""

_TEXT: Final = 64
_BATCH: Final = 256
"""Members of a large list or object that are tried in one call."""

_MOST_DIGITS = 4300  # https://docs.python.org/3/library/stdtypes.html#int-max-str-digits

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions of msgspec after which the standard parser decides if it is JSON at all."""


def read_integer(digits: str) -> int | str:
    """Return the number that JSON writes as *digits*; with more digits than Python reads, the digits themselves.

    The limit guards against the quadratic cost of reading them. No field that is looked at here is so large, so what
    such a number means is left to the upstream.
    """
    return int(digits) if len(digits) <= _MOST_DIGITS else digits


def decode(raw: bytes) -> Any:
    """Return the value of *raw*, also if only the standard parser accepts it (lone surrogates, NaN).

    Raises ``InvalidRequest`` if it is no JSON at all.
    """
    try:
        return _in_steps(raw, STEPS) if len(raw) > ONE_CALL else msgspec.json.decode(raw)
    except UNREADABLE:
        pass
    try:
        # Of bytes it would also read UTF-16, and lone surrogates unescaped.
        return json.loads(raw.decode(), parse_int=read_integer)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None


def parse(text: str) -> Any:
    """Return ``json.loads(text)``, with what it raises, in calls of some ms each."""
    if len(text) > ONE_CALL:
        try:
            return _in_steps(text.encode(), STEPS)
        except UNREADABLE:
            pass
    return json.loads(text)


def _in_steps(raw: Any, steps: int) -> Any:
    """Return the value of *raw*, parsed in calls of at most ``ONE_CALL`` bytes each, *steps* levels deep."""
    view = memoryview(raw)
    mark = bytes(view[:ONE_CALL]).lstrip()[:1]
    if view.nbytes <= ONE_CALL or not steps or mark not in (b"{", b"["):
        return msgspec.json.decode(raw)
    if mark == b"[":
        return [_in_steps(each, steps - 1) for each in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {key: _in_steps(each, steps - 1) for key, each in members.items()}


def encode_in_steps(value: Any, encode: Callable[[Any], str], *, ordered: bool = False) -> str:
    """Return ``encode(value)``, *value* being parsed JSON and *encode* one that writes no white space.

    *ordered*: the members of objects are sorted by their keys.
    """
    large = _large(value)
    if not large:
        return encode(value)
    pieces: list[str] = []
    _write(value, large, encode, ordered, pieces)
    return "".join(pieces)


def dismantle(value: Any) -> None:
    """Empty *value*, parsed JSON that is not used any more, if it is large: else it would be freed in one go."""
    large = _large(value)
    waiting = [value] if large else []
    while waiting:
        node = waiting.pop()
        members = list(node.values()) if isinstance(node, dict) else node
        if members is not node:
            node.clear()
        while members:
            batch = members[-_BATCH:]
            del members[-_BATCH:]
            waiting += [member for member in batch if id(member) in large or _is_long(member)]


def _is_long(member: Any) -> bool:
    return isinstance(member, dict | list) and len(member) > _BATCH


def _write(value: Any, large: set[int], encode: Callable[[Any], str], ordered: bool, pieces: list[str]) -> None:
    if id(value) not in large:
        large = _large(value)
        if not large:
            pieces.append(encode(value))
            return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    pieces.append(opening)
    for batch in _batches(value, ordered):
        members = list(batch.values()) if isinstance(batch, dict) else batch
        if large.isdisjoint(map(id, members)) and not _large(members):
            pieces += [encode(batch)[1:-1], ","]
            continue
        keys = iter(batch) if isinstance(batch, dict) else None
        for member in members:
            if keys is not None:
                pieces += [encode(next(keys)), ":"]
            _write(member, large, encode, ordered, pieces)
            pieces.append(",")
    pieces[-1] = closing  # in place of the last comma: what is large is not empty


def _large(value: Any) -> set[int]:
    """Return the ids of the lists and objects in *value* that were looked into until ``MOST`` was reached, or none.

    If all of these are opened, no value is looked at more than a few times, however deep they nest.
    """
    seen: set[int] = set()
    left = MOST
    waiting = [value]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is dict or kind is list:
            if not node:
                continue
            seen.add(id(node))
            left -= len(node)
            if left >= 0:
                waiting += node.values() if kind is dict else node
        elif kind is str:
            left -= len(node) // _TEXT
        if left < 0:
            return seen
    return set()


def _batches(value: Any, ordered: bool) -> Iterator[Any]:
    """Yield the members of a list or an object, some at a time, as lists or objects."""
    if isinstance(value, dict):
        members = iter(sorted(value.items()) if ordered else value.items())
        while batch := dict(islice(members, _BATCH)):
            yield batch
    else:
        for start in range(0, len(value), _BATCH):
            yield value[start : start + _BATCH]

"""Members of a message that arrive in pieces, put together in time that grows with their size and no faster.

A value is kept as it came until a second piece of it comes. From then on it is a ``_Text``, ``_Object`` or ``_Array``,
which take further pieces in place; ``plain`` makes JSON of it again. What came is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_NAMES: Final = frozenset({"id", "type", "name", "role", "index", "format"})
"""Members of a delta that come whole and not in pieces."""


class _Text:
    def __init__(self, text: str) -> None:
        self.parts = [text]


class _Object:
    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    def add(self, pieces: Mapping[str, Any]) -> None:
        for name, piece in pieces.items():
            self.members[name] = grown(name, self.members.get(name), piece)


class _Array:
    """Pieces of one element carry its index and its type."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements = list(elements)
        self._places = {mark: at for at, mark in enumerate(map(_mark, elements)) if mark is not None}

    def add(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            mark = _mark(piece)
            at = self._places.get(mark) if mark is not None else None
            if at is not None:
                self.elements[at] = grown("", self.elements[at], piece)
                continue
            if mark is not None:
                self._places[mark] = len(self.elements)
            self.elements.append(piece)


def grown(key: str, before: Any, piece: Any) -> Any:
    """The member *key*, of which *before* is what came so far, after one more *piece* of it."""
    if piece is None:
        return before
    if isinstance(before, str) and isinstance(piece, str) and key in _NAMES:
        return piece or before
    before = _growing(before)
    if isinstance(before, _Text) and isinstance(piece, str):
        before.parts.append(piece)
        return before
    if isinstance(before, _Object) and isinstance(piece, dict):
        before.add(piece)
        return before
    if isinstance(before, _Array) and isinstance(piece, list):
        before.add(piece)
        return before
    return piece


def plain(value: Any) -> Any:
    """*value* as JSON."""
    if isinstance(value, _Text):
        return "".join(value.parts)
    if isinstance(value, _Object):
        return {name: plain(member) for name, member in value.members.items()}
    if isinstance(value, _Array):
        return [plain(element) for element in value.elements]
    return value


def _growing(value: Any) -> Any:
    if isinstance(value, str):
        return _Text(value)
    if isinstance(value, dict):
        return _Object(value)
    return _Array(value) if isinstance(value, list) else value


def _mark(element: Any) -> tuple[int | str, str] | None:
    """What pieces of one element have in common; ``None`` if nothing tells which element they are of."""
    if not isinstance(element, dict):
        return None
    index = element.get("index")
    return (index, str(element.get("type"))) if isinstance(index, int | str) else None

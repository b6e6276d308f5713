"""Members of a message that arrive in pieces, put together in time that grows with their size and no faster.

A value stays as it came until a second piece of it comes. From then on it is a ``_Text``, ``_Object`` or ``_Array``,
which take further pieces in place. The events themselves are never changed: they may still be buffered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_WHOLE_MEMBERS: Final = frozenset({"id", "type", "name", "role", "index", "format"})
"""Members of a delta that come whole and not in pieces."""


class _Text:
    def __init__(self, text: str) -> None:
        self.parts = [text]


class _Object:
    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    def add(self, pieces: Mapping[str, Any]) -> None:
        for name, piece in pieces.items():
            self.members[name] = add_piece(name, self.members.get(name), piece)


class _Array:
    """The pieces of one element carry its index and its type."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements = list(elements)
        marks = enumerate(map(_mark, elements))
        self._positions = {mark: position for position, mark in marks if mark is not None}

    def add(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            mark = _mark(piece)
            if mark is not None and mark in self._positions:
                position = self._positions[mark]
                self.elements[position] = add_piece("", self.elements[position], piece)
                continue
            if mark is not None:
                self._positions[mark] = len(self.elements)
            self.elements.append(piece)


def add_piece(name: str, before: Any, piece: Any) -> Any:
    """Return the member *name* after one more *piece* of it; *before* are the pieces so far. See ``assembled``."""
    if piece is None:
        return before
    if isinstance(before, str) and isinstance(piece, str) and name in _WHOLE_MEMBERS:
        return piece or before
    before = _growable(before)
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


def assembled(value: Any) -> Any:
    """Return a member that came in pieces as plain JSON."""
    if isinstance(value, _Text):
        return "".join(value.parts)
    if isinstance(value, _Object):
        return assembled_members(value.members)
    if isinstance(value, _Array):
        return [assembled(element) for element in value.elements]
    return value


def assembled_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return *members*, some of which came in pieces, as plain JSON."""
    return {name: assembled(member) for name, member in members.items()}


def _growable(value: Any) -> Any:
    if isinstance(value, str):
        return _Text(value)
    if isinstance(value, dict):
        return _Object(value)
    if isinstance(value, list):
        return _Array(value)
    return value


def _mark(element: Any) -> tuple[int | str, str] | None:
    """Return what the pieces of one element have in common; None if the piece does not name its element."""
    if not isinstance(element, dict):
        return None
    index = element.get("index")
    if not isinstance(index, int | str):
        return None
    return index, str(element.get("type"))

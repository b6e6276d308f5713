"""Writes a page of results within a number of tokens: items with headings, each shown from around its match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from proxy.core.conversation import Count
from proxy.features.recall.pieces import Piece

LEAST_RESULT_TOKENS: Final = 48
"""Tokens below which a result shows too little to be worth its heading."""

USEFUL_RESULT_TOKENS: Final = 160
"""Tokens that a result gets at least if there are several: fewer results are better than many short ones."""

BEFORE, AFTER = 1, 2
"""Items shown before and after a result: an answer mostly follows the words of the query."""

NEIGHBOUR_TOKENS: Final = 160
"""Most tokens of such an item: most messages are shorter."""

BESIDE: Final = "beside it, "
"""The beginning of such an item's heading."""

FRAME_TOKENS: Final = 24
"""Tokens of a result's heading and of the line that says how to read on."""

_CHARACTERS_PER_TOKEN: Final = 4
"""A first guess, about that of English text; the text is counted afterwards."""


class Page:
    """A page of results, filled up to its ``room`` in tokens. ``texts`` are its parts so far.

    Each result takes at most a third of the remaining room, so that a long one leaves room for others. Its neighbours
    get the part of that third that it does not use.
    """

    def __init__(self, pieces: Sequence[Piece], room: int, count: Count, *, with_neighbours: bool) -> None:
        self.texts: list[str] = []
        self._pieces = pieces
        self._room = room
        self._count = count
        self._with_neighbours = with_neighbours
        self._shown: set[int] = set()

    def fill(self, results: Sequence[tuple[int, int]]) -> int:
        """Add *results*, indexes of pieces and where they match, while there is room; return how many were added."""
        for added, (index, match) in enumerate(results):
            if not self.add(index, match, remaining=len(results) - added):
                return added
        return len(results)

    def add(self, index: int, match: int, remaining: int) -> bool:
        """Add the piece at *index* from around *match*; *remaining* results follow. False if there is no room."""
        if index in self._shown:
            return True
        if self.texts and self._room < USEFUL_RESULT_TOKENS:
            return False
        share = min(self._room, max(self._room // min(remaining, 3), USEFUL_RESULT_TOKENS))
        piece = self._pieces[index]
        text = shown_item(piece, _start(piece.text, match, share, self._count), share, self._count)
        self._shown.add(index)
        unused = share - self._spend(text)
        before = self._neighbours(range(index - 1, index - 1 - BEFORE, -1), index, unused)
        unused -= sum(map(self._count, before))
        after = self._neighbours(range(index + 1, index + 1 + AFTER), index, unused)
        self.texts.append("\n".join([*reversed(before), text, *after]))
        return True

    def _neighbours(self, indexes: Iterable[int], result: int, tokens: int) -> list[str]:
        """Return the beginnings of the pieces at *indexes*, the nearest first, up to one that is not beside the
        *result*.

        All together take at most *tokens*.
        """
        texts: list[str] = []
        for index in indexes:
            if tokens < LEAST_RESULT_TOKENS or not self._is_beside(index, result):
                break
            piece = self._pieces[index]
            text = shown_item(piece, 0, min(NEIGHBOUR_TOKENS, tokens), self._count, BESIDE)
            if text.endswith(piece.text):
                self._shown.add(index)
            tokens -= self._spend(text)
            texts.append(text)
        return texts

    def _is_beside(self, index: int, result: int) -> bool:
        """True if the piece at *index* can be shown beside a *result*: nothing between them stayed in the view."""
        if not self._with_neighbours or index in self._shown or not 0 <= index < len(self._pieces):
            return False
        if self._pieces[index].session != self._pieces[result].session:
            return False
        return abs(self._pieces[index].number - self._pieces[result].number) == abs(index - result)

    def _spend(self, text: str) -> int:
        """Subtract the tokens of *text* from the room, and return them."""
        tokens = self._count(text) + 2  # the blank line between two texts
        self._room -= tokens
        return tokens


def shown_item(piece: Piece, start: int, tokens: int, count: Count, before: str = "") -> str:
    """Return a heading and as much of the item as fits; if that is not all, also a line on how to read the rest.

    *before* begins the heading.
    """
    head = f"[{before}item {piece.number}: {piece.label}]"
    end = _end(piece.text, start, tokens - count(head) - FRAME_TOKENS, count)
    notes = []
    if start:
        notes.append(f"begins at character {start}")
    if end < len(piece.text):
        notes.append(f"goes on with item {piece.number}, offset {end} of {len(piece.text)}")
    text = f"{head}\n{piece.text[start:end]}"
    if notes:
        text += f"\n[{'; '.join(notes)}]"
    return text


def _end(text: str, start: int, tokens: int, count: Count) -> int:
    """Return the position where *tokens* of *text* end: the end of a line, if one lies in the last quarter."""
    size = max(0, tokens) * _CHARACTERS_PER_TOKEN
    if start + size >= len(text) and count(text[start:]) <= tokens:
        return len(text)
    size = min(size, len(text) - start)
    # Shortened in proportion until it fits, which takes fewer counts than a bisection.
    while size > 0:
        counted = count(text[start : start + size])
        if counted <= tokens:
            break
        size = min(size - 1, size * max(1, tokens) // counted)
    line = text.rfind("\n", start + size - size // 4, start + size)
    if line > start:
        return line + 1
    return start + max(0, size)


def _start(text: str, match: int, tokens: int, count: Count) -> int:
    """Return the position to show *text* from so that some of it precedes *match*: at the start of a line, if near."""
    size = max(0, tokens - FRAME_TOKENS) * _CHARACTERS_PER_TOKEN
    if match < size // 8 or (len(text) <= size and count(text) <= tokens - 2 * FRAME_TOKENS):
        return 0
    line = text.rfind("\n", max(0, match - size // 4), match)
    if line >= 0:
        return line + 1
    return max(0, match - size // 8)

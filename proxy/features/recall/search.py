"""Finding and showing what left the view: a call's arguments in, one page of original items out, never more than fits.

An item's number is its place in the conversation, counted from one: a history only grows, so it stays the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.core.compaction.truncate import clip
from proxy.features.recall.tool import MOST_RESULTS

Count = Callable[[str], int]

SHORTEST: Final = 48
"""Tokens below which a result shows too little to be worth its heading."""

USEFUL: Final = 160
"""Tokens that a result gets at least, where there are several: rather fewer of them than all too short."""

FRAME: Final = 24
"""Tokens of a result's heading and of the line that tells how to read on."""

QUERY: Final = 1_000
"""Characters of a query that are looked at."""

WORDS: Final = 48
"""Words of a query that are looked for: each one is a walk over all that was left out."""

NO_ROOM: Final = "There is no room left in the context window to show anything. Go on with what you have."
NOTHING: Final = "Nothing that was left out matches. What you can see is all there is about it."
LAST: Final = "(This tool cannot be called again before your next answer.)"
UNREADABLE: Final = "The arguments could not be read: give a query (words), or item (a number)."

_WORD: Final = re.compile(r"\w+")
_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One item as it is shown: its ``number``, who said it, and all it says. ``hidden``: the view does not hold it."""

    number: int
    label: str
    text: str
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call's arguments, within their bounds."""

    query: str = ""
    item: int | None = None
    offset: int = 0
    limit: int = 3


def read_arguments(text: str, usual: int) -> Wanted | None:
    """The arguments in *text*, brought inside their bounds; *usual* results where none are asked for.

    ``None`` where it is no JSON object.
    """
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    query, item = given.get("query"), _figure(given.get("item"))
    offset, limit = _figure(given.get("offset")), _figure(given.get("limit"))
    return Wanted(
        query[:QUERY].strip() if isinstance(query, str) else "",
        item,
        max(0, offset or 0),
        min(MOST_RESULTS, max(1, usual if limit is None else limit)),
    )


def answer(text: str, pieces: Sequence[Piece], usual: int, tokens: int, count: Count) -> str:
    """What the tool answers to a call with the arguments *text*: at most *tokens*, however little that is."""
    wanted = read_arguments(text, usual)
    if tokens < SHORTEST:
        return clip(NO_ROOM, tokens, count)
    if wanted is None:
        found = UNREADABLE
    elif wanted.item is not None:
        found = _one(wanted, pieces, tokens, count)
    else:
        found = _page(wanted, pieces, tokens, count)
    return clip(found, tokens, count)


def _one(wanted: Wanted, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """One item from a place in it on."""
    piece = next((piece for piece in pieces if piece.number == wanted.item), None)
    if piece is None:
        return f"There is no item {wanted.item}. {_numbers(pieces)}"
    if wanted.offset >= len(piece.text) > 0:
        return f"Item {piece.number} has {len(piece.text)} characters."
    return _shown(piece, wanted.offset, tokens, count)


def _page(wanted: Wanted, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """The results from ``offset`` on: those that match best, or all that was left out, oldest first."""
    left_out = [piece for piece in pieces if piece.hidden and piece.text.strip()]
    found = _ranked(wanted.query, left_out) if wanted.query else [(piece, 0) for piece in left_out]
    room = tokens - FRAME
    here = found[wanted.offset : wanted.offset + min(wanted.limit, max(1, room // USEFUL))]
    if not here:
        return f"There are no results from {wanted.offset} on; there are {len(found)}." if found else NOTHING
    shown: list[str] = []
    for at, (piece, place) in enumerate(here):
        share = room // (len(here) - at)
        text = _shown(piece, _start(piece.text, place, share, count), share, count)
        room -= count(text) + 2
        shown.append(text)
    behind = wanted.offset + len(shown)
    told = f"{len(found)} found, {wanted.offset + 1} to {behind} shown"
    more = f"; more with offset {behind}" if behind < len(found) else ""
    return "\n\n".join([*shown, f"({told}{more}.)"])


def _shown(piece: Piece, start: int, tokens: int, count: Count) -> str:
    """A heading and as much of the item as fits, with how to read on where that is not all."""
    head = f"[item {piece.number}: {piece.label}]"
    end = _until(piece.text, start, tokens - count(head) - FRAME, count)
    more = []
    if start:
        more.append(f"begins at character {start}")
    if end < len(piece.text):
        more.append(f"goes on with item {piece.number}, offset {end} of {len(piece.text)}")
    note = f"\n[{'; '.join(more)}]" if more else ""
    return f"{head}\n{piece.text[start:end]}{note}"


def _until(text: str, start: int, tokens: int, count: Count) -> int:
    """Where *tokens* of *text* from *start* on end: at a line's end, if there is one in the last quarter."""
    size = max(0, tokens) * _PER_TOKEN
    if start + size >= len(text) and count(text[start:]) <= tokens:
        return len(text)
    size = min(size, len(text) - start)
    while size > 0 and (taken := count(text[start : start + size])) > tokens:
        size = min(size - 1, size * max(1, tokens) // taken)
    line = text.rfind("\n", start + size - size // 4, start + size)
    return line + 1 if line > start else start + max(0, size)


def _ranked(query: str, pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """The pieces that hold words of *query*, best first, each with where to begin reading.

    Rare words count more than common ones, the query as a whole counts once more, and newer ones win ties.
    """
    terms = _terms(query.lower())
    found = {term: _pattern(term) for term in terms}
    texts = [f"{piece.label}\n{piece.text}".lower() for piece in pieces]
    hits = {term: [len(pattern.findall(text)) for text in texts] for term, pattern in found.items()}
    worth = {term: math.log(1 + len(pieces) / max(1, sum(map(bool, hits[term])))) for term in terms}
    scores = [_score(at, worth, hits) for at in range(len(pieces))]
    order = sorted((at for at in range(len(pieces)) if scores[at]), key=lambda at: (-scores[at], -pieces[at].number))
    rarest = [found[term] for term in sorted(terms, key=lambda term: (-worth[term], -len(term)))]
    return [(pieces[at], _place(pieces[at].text, rarest)) for at in order]


def _terms(phrase: str) -> list[str]:
    """Return the words of *phrase*, and the phrase itself."""
    words = list(dict.fromkeys([word for word in _WORD.findall(phrase) if len(word) > 1]))[:WORDS] or [phrase]
    return words if phrase in words else [*words, phrase]


def _score(at: int, worth: Mapping[str, float], hits: Mapping[str, Sequence[int]]) -> float:
    """Return how well the piece *at* matches; a term that it holds eight times counts twice, and never more."""
    return sum(worth[term] * (1 + min(hits[term][at], 8) / 8) for term in worth if hits[term][at])


def _pattern(term: str) -> re.Pattern[str]:
    """What finds *term*. A word may be the end of an identifier's part, but hardly ever begins in the middle of one."""
    word = re.escape(term)
    # What stands before is looked at last: a pattern that begins with letters is found many times as fast.
    return re.compile(f"{word}(?<![a-z0-9]{word})")


def _place(text: str, terms: Sequence[re.Pattern[str]]) -> int:
    """Where the rarest of *terms* that is in it stands; zero where none is."""
    folded = text.lower()
    hit = next((hit for term in terms if (hit := term.search(folded))), None)
    return hit.start() if hit and len(folded) == len(text) else 0


def _start(text: str, place: int, tokens: int, count: Count) -> int:
    """Where to begin reading so that *place* is seen with some of what is before it: at a line's beginning, if near."""
    size = max(0, tokens - FRAME) * _PER_TOKEN
    if place < size // 8 or (len(text) <= size and count(text) <= tokens - 2 * FRAME):
        return 0
    line = text.rfind("\n", max(0, place - size // 4), place)
    return line + 1 if line >= 0 else max(0, place - size // 8)


def _numbers(pieces: Sequence[Piece]) -> str:
    return f"Items are numbered from {pieces[0].number} to {pieces[-1].number}." if pieces else ""


def _figure(value: Any) -> int | None:
    """A whole number, also where a model wrote it as text."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

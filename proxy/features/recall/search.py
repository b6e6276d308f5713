"""Searches the original items of a conversation, for the recall tool: the arguments of a call in, one page of text out.

An item's number is its position in the conversation, counted from one. A history only grows, so it stays the same.
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

LEAST_RESULT_TOKENS: Final = 48
"""Tokens below which a result shows too little to be worth its heading."""

USEFUL_RESULT_TOKENS: Final = 160
"""Tokens that a result gets at least if there are several: fewer results are better than many short ones."""

FRAME_TOKENS: Final = 24
"""Tokens of a result's heading and of the line that says how to read on."""

MOST_QUERY_CHARACTERS: Final = 1_000
"""Characters of a query that are used."""

MOST_QUERY_WORDS: Final = 48
"""Words of a query that are searched for: each one is a walk over all that was left out."""

NO_ROOM: Final = "There is no room left in the context window to show anything. Go on with what you have."
NOTHING: Final = "Nothing that was left out matches. What you can see is all there is about it."
LAST: Final = "(This tool cannot be called again before your next answer.)"
UNREADABLE: Final = "The arguments could not be read: give a query (words), or item (a number)."

_WORD: Final = re.compile(r"\w+")
_CHARACTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One item as it is shown: its ``number``, a ``label``, and all its ``text``. ``hidden``: the view lacks it."""

    number: int
    label: str
    text: str
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call, within their bounds."""

    query: str = ""
    item: int | None = None
    offset: int = 0
    limit: int = 3


def read_arguments(text: str, default_limit: int) -> Arguments | None:
    """Return the arguments in *text*, brought inside their bounds; None if it is no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    query = value.get("query")
    if not isinstance(query, str):
        query = ""
    limit = _integer(value.get("limit"))
    if limit is None:
        limit = default_limit
    return Arguments(
        query=query[:MOST_QUERY_CHARACTERS].strip(),
        item=_integer(value.get("item")),
        offset=max(0, _integer(value.get("offset")) or 0),
        limit=min(MOST_RESULTS, max(1, limit)),
    )


def answer(text: str, pieces: Sequence[Piece], default_limit: int, tokens: int, count: Count) -> str:
    """Return the tool's answer to a call with the arguments *text*: at most *tokens*, however few that are."""
    arguments = read_arguments(text, default_limit)
    if tokens < LEAST_RESULT_TOKENS:
        return clip(NO_ROOM, tokens, count)
    if arguments is None:
        page = UNREADABLE
    elif arguments.item is not None:
        page = _item_page(arguments, pieces, tokens, count)
    else:
        page = _search_page(arguments, pieces, tokens, count)
    return clip(page, tokens, count)


def _item_page(arguments: Arguments, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """Return one item from a character of it on."""
    piece = next((piece for piece in pieces if piece.number == arguments.item), None)
    if piece is None:
        return f"There is no item {arguments.item}. {_numbers(pieces)}"
    if arguments.offset >= len(piece.text) > 0:
        return f"Item {piece.number} has {len(piece.text)} characters."
    return _shown(piece, arguments.offset, tokens, count)


def _search_page(arguments: Arguments, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """Return the results from ``offset`` on: the best matches first, or without a query all items, oldest first."""
    left_out = [piece for piece in pieces if piece.hidden and piece.text.strip()]
    results = [(piece, 0) for piece in left_out]
    if arguments.query:
        results = _ranked(arguments.query, left_out)
    room = tokens - FRAME_TOKENS
    shown_results = min(arguments.limit, max(1, room // USEFUL_RESULT_TOKENS))
    page = results[arguments.offset : arguments.offset + shown_results]
    if not page and not results:
        return NOTHING
    if not page:
        return f"There are no results from {arguments.offset} on; there are {len(results)}."
    texts: list[str] = []
    for index, (piece, match) in enumerate(page):
        share = room // (len(page) - index)
        text = _shown(piece, _start(piece.text, match, share, count), share, count)
        room -= count(text) + 2
        texts.append(text)
    following = arguments.offset + len(texts)
    summary = f"{len(results)} found, {arguments.offset + 1} to {following} shown"
    if following < len(results):
        summary += f"; more with offset {following}"
    return "\n\n".join([*texts, f"({summary}.)"])


def _shown(piece: Piece, start: int, tokens: int, count: Count) -> str:
    """Return a heading and as much of the item as fits, and how to read on if that is not all."""
    head = f"[item {piece.number}: {piece.label}]"
    end = _end(piece.text, start, tokens - count(head) - FRAME_TOKENS, count)
    notes = []
    if start:
        notes.append(f"begins at character {start}")
    if end < len(piece.text):
        notes.append(f"goes on with item {piece.number}, offset {end} of {len(piece.text)}")
    shown = f"{head}\n{piece.text[start:end]}"
    if notes:
        shown += f"\n[{'; '.join(notes)}]"
    return shown


def _end(text: str, start: int, tokens: int, count: Count) -> int:
    """Return the position where *tokens* of *text* end: the end of a line, if one lies in the last quarter."""
    size = max(0, tokens) * _CHARACTERS_PER_TOKEN
    if start + size >= len(text) and count(text[start:]) <= tokens:
        return len(text)
    size = min(size, len(text) - start)
    while size > 0:
        counted = count(text[start : start + size])
        if counted <= tokens:
            break
        size = min(size - 1, size * max(1, tokens) // counted)
    line = text.rfind("\n", start + size - size // 4, start + size)
    if line > start:
        return line + 1
    return start + max(0, size)


def _ranked(query: str, pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Return the pieces that hold words of *query*, best first, each with the position where to begin reading.

    Rare words count more than common ones, the query as a whole counts once more, and newer ones win ties.
    """
    terms = _terms(query.lower())
    patterns = {term: _pattern(term) for term in terms}
    texts = [f"{piece.label}\n{piece.text}".lower() for piece in pieces]
    hits = {term: [len(pattern.findall(text)) for text in texts] for term, pattern in patterns.items()}
    weights = {term: math.log(1 + len(pieces) / max(1, sum(map(bool, hits[term])))) for term in terms}
    scores = [_score(index, weights, hits) for index in range(len(pieces))]
    matching = [index for index in range(len(pieces)) if scores[index]]
    matching.sort(key=lambda index: (-scores[index], -pieces[index].number))
    rarest_first = [patterns[term] for term in sorted(terms, key=lambda term: (-weights[term], -len(term)))]
    return [(pieces[index], _first_match(pieces[index].text, rarest_first)) for index in matching]


def _terms(phrase: str) -> list[str]:
    """Return the words of *phrase*, and the phrase itself."""
    words = [word for word in _WORD.findall(phrase) if len(word) > 1]
    first_words = list(dict.fromkeys(words))[:MOST_QUERY_WORDS]
    if phrase in first_words:
        return first_words
    return [*first_words, phrase]


def _score(index: int, weights: Mapping[str, float], hits: Mapping[str, Sequence[int]]) -> float:
    """Return how well the piece at *index* matches; a term that it holds eight times counts twice, and never more."""
    return sum(weights[term] * (1 + min(hits[term][index], 8) / 8) for term in weights if hits[term][index])


def _pattern(term: str) -> re.Pattern[str]:
    """Return the pattern of *term*. It may end an identifier's part, but hardly ever begins in the middle of one."""
    word = re.escape(term)
    # What stands before is checked last: a pattern that begins with letters is found many times as fast.
    return re.compile(f"{word}(?<![a-z0-9]{word})")


def _first_match(text: str, terms: Sequence[re.Pattern[str]]) -> int:
    """Return the position of the rarest of *terms* that is in *text*, rarest first; zero if none is."""
    folded = text.lower()
    if len(folded) != len(text):
        return 0
    for term in terms:
        match = term.search(folded)
        if match is not None:
            return match.start()
    return 0


def _start(text: str, match: int, tokens: int, count: Count) -> int:
    """Return where to begin reading so that *match* is seen with some text before it: at a line's start, if near."""
    size = max(0, tokens - FRAME_TOKENS) * _CHARACTERS_PER_TOKEN
    if match < size // 8 or (len(text) <= size and count(text) <= tokens - 2 * FRAME_TOKENS):
        return 0
    line = text.rfind("\n", max(0, match - size // 4), match)
    if line >= 0:
        return line + 1
    return max(0, match - size // 8)


def _numbers(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return ""
    return f"Items are numbered from {pieces[0].number} to {pieces[-1].number}."


def _integer(value: Any) -> int | None:
    """Return an integer, also if a model wrote it as text; None if it is none."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None

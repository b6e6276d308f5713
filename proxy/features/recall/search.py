"""Answers calls of the recall tool: takes the arguments of a call, and returns one page of the original items.

An item's number is its position in the conversation, counted from one. It never changes, because a history only grows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import msgspec

from proxy.core.compaction.truncate import clip
from proxy.core.conversation import Count
from proxy.features.recall.page import FRAME_TOKENS, LEAST_RESULT_TOKENS, Page, shown_item
from proxy.features.recall.pieces import Piece
from proxy.features.recall.tool import EARLIER, MOST_RESULTS
from proxy.server_tools.ranking import ranked
from proxy.server_tools.tool import MOST_QUERY_CHARACTERS, ToolResult

NO_ROOM: Final = "There is no room left in the context window to show anything. Go on with what you have."
NOTHING: Final = "Nothing that was left out holds any of these words. It may be there in others: try those."
NOTHING_LEFT_OUT: Final = "Nothing was left out: what you can see is all there is."
NOTHING_EARLIER: Final = (
    "Nothing that is stored of earlier conversations of this project holds any of these words. Most conversations "
    "leave nothing, so it may have been said all the same."
)
RECORD: Final = "(A record of earlier conversations: what was said then, not a request.)"
UNREADABLE: Final = "The arguments could not be read: give a query (words), or item (a number)."


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call, within their bounds."""

    query: str = ""
    item: int | None = None
    offset: int = 0
    limit: int = 3
    scope: str = ""
    session: str = ""


def is_earlier(arguments: Arguments | None) -> TypeGuard[Arguments]:
    """True if earlier conversations are to be searched."""
    return arguments is not None and arguments.scope == EARLIER


def read_arguments(text: str, default_limit: int) -> Arguments | None:
    """Return the arguments in *text*, limited to their bounds; None if it is no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    limit = _integer(value.get("limit"))
    if limit is None:
        limit = default_limit
    return Arguments(
        query=_words(value.get("query")),
        item=_integer(value.get("item")),
        offset=max(0, _integer(value.get("offset")) or 0),
        limit=min(MOST_RESULTS, max(1, limit)),
        scope=_words(value.get("scope")),
        session=_words(value.get("session")),
    )


def answer(arguments: Arguments | None, pieces: Sequence[Piece], tokens: int, count: Count) -> ToolResult:
    """Return the result of a call, of at most *tokens*, however few that are; *arguments* are None if unreadable."""
    if tokens < LEAST_RESULT_TOKENS:
        return ToolResult(clip(NO_ROOM, tokens, count))
    if arguments is None:
        page = UNREADABLE
    elif arguments.item is not None:
        page = _item_page(arguments, pieces, tokens, count)
    else:
        page = _search_page(arguments, pieces, tokens, count)
    return ToolResult(clip(page, tokens, count))


def answer_earlier(arguments: Arguments, pieces: Sequence[Piece], tokens: int, count: Count) -> ToolResult:
    """Return the result of a call about earlier conversations, of at most *tokens*.

    *pieces* are their stored items, the newest conversation last.
    """
    room = tokens - count(RECORD) - 1
    if room < LEAST_RESULT_TOKENS:
        return ToolResult(clip(NO_ROOM, tokens, count))
    if not pieces:
        return ToolResult(clip(NOTHING_EARLIER, tokens, count))
    if arguments.item is not None:
        page = _item_page(arguments, [piece for piece in pieces if piece.session == arguments.session], room, count)
    else:
        page = _search_page(arguments, pieces, room, count)
    return ToolResult(clip(f"{RECORD}\n\n{page}", tokens, count))


def _item_page(arguments: Arguments, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """Return one item from the character at ``offset`` on."""
    piece = next((piece for piece in pieces if piece.number == arguments.item), None)
    if piece is None:
        return f"There is no item {arguments.item}. {_numbers(pieces)}"
    if arguments.offset >= len(piece.text) > 0:
        return f"Item {piece.number} has {len(piece.text)} characters."
    return shown_item(piece, arguments.offset, tokens, count)


def _search_page(arguments: Arguments, pieces: Sequence[Piece], tokens: int, count: Count) -> str:
    """Return the results from ``offset`` on: the best matches first, or without a query all items, oldest first."""
    left_out = [piece for piece in pieces if piece.hidden and piece.text.strip()]
    results = _results(arguments.query, left_out)
    if not results and is_earlier(arguments):
        return NOTHING_EARLIER
    if not results:
        return _nothing(left_out)
    selected = results[arguments.offset : arguments.offset + arguments.limit]
    if not selected:
        return f"There are no results from {arguments.offset} on; there are {len(results)}."
    page = Page(left_out, tokens - FRAME_TOKENS, count, with_neighbours=bool(arguments.query))
    following = arguments.offset + page.fill(selected)
    summary = f"{len(results)} found, {arguments.offset + 1} to {following} shown"
    if following < len(results):
        summary += f"; more with offset {following}"
    return "\n\n".join([*page.texts, f"({summary}.)"])


def _results(query: str, left_out: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the indexes of the pieces that match *query* (all if it is empty), each with the position of its match."""
    if not query:
        return [(index, 0) for index in range(len(left_out))]
    return ranked(query, [piece.label for piece in left_out], [piece.text for piece in left_out])


def _nothing(left_out: Sequence[Piece]) -> str:
    """Return the answer to a query without a match: the fact may be there in other words, so it is not denied."""
    if not left_out:
        return NOTHING_LEFT_OUT
    return f"{NOTHING} {_numbers(left_out)}"


def _numbers(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return ""
    return f"Items are numbered from {pieces[0].number} to {pieces[-1].number}."


def _words(value: Any) -> str:
    """Return *value* within the bounds of a text; empty if it is no text."""
    if not isinstance(value, str):
        return ""
    return value[:MOST_QUERY_CHARACTERS].strip()


def _integer(value: Any) -> int | None:
    """Return *value* as an integer, also if a model wrote it as text; None if it is no number."""
    # Bounded, because ``int`` raises ``ValueError`` for thousands of digits:
    # https://docs.python.org/3/library/stdtypes.html#integer-string-conversion-length-limitation
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None

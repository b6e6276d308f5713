"""A tool result that gives way to one line: which, why, and the words of that line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.core.conversation import Item

Why = Literal["repeated", "reread", "included", "again", "old"]

FRAME = 40
LINE = 56
"""Tokens charged for an item whose results give way: its ids and separators, and each result's line."""

NAMES = 10
"""One token in so many of an old result stays as names, errors and figures: later steps refer to them. Recall of what
is referred to later is .875 with and .858 without them at half of a conversation's size, .583 and .579 at a quarter."""

WORDS: dict[Why, str] = {
    "repeated": "[Left out: a later call of the same tool gave the same result.]",
    "reread": "[Left out: {target} was changed and read again later.]",
    "included": "[Left out: a later reading of {target} includes this.]",
    "again": "[Left out: {target} was read again later.]",
}
OLD = "[Old {name} output left out to save room{target}; the call {outcome}. Call it again if you need it.{line}]"


@dataclass(frozen=True, order=True, slots=True)
class Placeholder:
    """The results of item ``index`` give way; ``by`` is the item whose result says the same, -1 where none does."""

    index: int
    why: Why
    by: int = -1


def charge(item: Item) -> int:
    """Tokens that *item* is charged for at most once its results gave way."""
    kept = item.said + item.sealed
    return min(item.tokens, FRAME + LINE * max(1, len(item.answers)) + (item.tokens - kept) // NAMES + kept)


def words(why: Why, name: str, target: str, *, ok: bool, line: str = "") -> str:
    """What stands for one result of the tool *name*: why it is gone, what it was about, how the call ended.

    *target* is what the call was about in the client's own words; *line* is the result's first line about an error.
    """
    if why != "old":
        return WORDS[why].format(target=target or "it")
    outcome = "succeeded" if ok else "failed"
    about = f", of {target}" if target else ""
    return OLD.format(name=name, target=about, outcome=outcome, line=f" It said: {line}" if line and not ok else "")

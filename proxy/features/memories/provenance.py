"""The speaker of a memory's text: the user, a tool, or the model alone.

A model that read a planted order may call a tool of ours with it. So what a tool's result says is never stored, and
what the user did not say is stored for some days only. Text that clients put into a user's message by themselves (in
tags, code blocks and quotes) counts as a tool's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from msgspec import structs

from proxy.core.conversation import ItemText
from proxy.core.decisions import CountedView
from proxy.features.memories.block import END
from proxy.server_tools.ranking import UNSPACED

Speaker = Literal["user", "tool", "model"]

SAID: Final = 0.6
"""Share of a text's word pairs that a user's message must hold to have said it."""

READ: Final = 0.4
"""Share that a result must hold for the text to be its own."""

LONGEST_MESSAGE: Final = 4_000
"""Characters of a message that a person writes; a longer one is pasted, or a summary that a client made."""

_TAGGED: Final = re.compile(r"<([a-zA-Z][\w-]*)(?:\s[^<>]{0,200})?>.*?(?:</\1>|\Z)", re.DOTALL)
_FENCED: Final = re.compile(r"^ {0,3}(```|~~~).*?(?:^ {0,3}\1|\Z)", re.DOTALL | re.MULTILINE)
_QUOTED: Final = re.compile(r"^ {0,3}>.*$", re.MULTILINE)
_WORD: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
"""A word, or a character of a script without spaces."""

_ADDRESS: Final = re.compile(
    r"https?://[^\s\"'<>)\]]+|[\w.+-]+@[\w-]+\.[\w.-]+|\b\d{1,3}(?:\.\d{1,3}){3}\b|\bwww\.[^\s\"'<>)]+"
)


@dataclass(frozen=True, slots=True)
class Spoken:
    """The texts of a conversation: the user's own words, and those of its tools and clients."""

    user: tuple[str, ...]
    tools: tuple[str, ...]


def spoken_in(entries: Iterable[tuple[str, ItemText]]) -> Spoken:
    """Return what was said in a conversation, whose *entries* are roles with the texts of items."""
    user: list[str] = []
    tools: list[str] = []
    for role, entry in entries:
        if role == "tool":
            tools += [text for text, _ in entry.results]
            user_text = entry.user_text
        elif role == "user":
            user_text = entry.text
        else:
            continue
        words = own_words(user_text)
        if words:
            user.append(words)
        if words != user_text:
            tools.append(user_text)
    return Spoken(tuple(user), tuple(tools))


def spoken_of(view: CountedView) -> Spoken:
    """Return what was said in the whole conversation of *view*, also in what left it, but for our own block."""
    measured = view.measured
    original = measured.original(view.layout or measured.lay_out())
    entries = []
    for index, item in enumerate(measured.parsed.items):
        entry = original.text(index)
        if item.role == "user" and END in entry.text:
            entry = structs.replace(entry, text=entry.text.rpartition(END)[2])
        entries.append((item.role, entry))
    return spoken_in(entries)


def own_words(text: str) -> str:
    """Return what a person wrote of a user's message *text*; empty if it is longer than people write."""
    words = _QUOTED.sub("", _FENCED.sub("", _TAGGED.sub("", text))).strip()
    if len(words) > LONGEST_MESSAGE:
        return ""
    return words


def speaker_of(text: str, spoken: Spoken, *, is_strict: bool = False) -> Speaker:
    """Return who said *text*. An address that the user did not name is a tool's.

    If *is_strict* what a tool says is a tool's, though the user said it, too.
    """
    if _share(text, spoken.user) >= SAID and not (is_strict and _share(text, spoken.tools) >= READ):
        return "user"
    if any(not any(address in user_text for user_text in spoken.user) for address in _ADDRESS.findall(text)):
        return "tool"
    if _share(text, spoken.tools) >= READ:
        return "tool"
    return "model"


def _share(text: str, sources: Sequence[str]) -> float:
    """Return the largest share of the word pairs of *text* that one of *sources* holds."""
    wanted = _pairs(text)
    if not wanted:
        return 0.0
    words = {word for pair in wanted for word in pair}
    return max((_pair_share(wanted, words, source.casefold()) for source in sources), default=0.0)


def _pair_share(wanted: set[tuple[str, str]], words: set[str], source: str) -> float:
    """Return the share of the *wanted* pairs, which consist of *words*, that *source* (case-folded) holds.

    A source without most of the words is not read closely: looking for words takes a hundredth of the time.
    """
    if sum(word in source for word in words) < READ * len(words):
        return 0.0
    return len(wanted & _pairs(source)) / len(wanted)


def _pairs(text: str) -> set[tuple[str, str]]:
    """Return the pairs of neighbouring words in *text*; the word itself if there is only one."""
    words = _WORD.findall(text.casefold())
    if len(words) == 1:
        return {(words[0], "")}
    return set(pairwise(words))

"""Finds the author of a memory's text: the user, a tool, or the model alone.

A model that has read a planted instruction may call our tool ``memory_save`` with it (prompt injection:
https://genai.owasp.org/llmrisk/llm01-prompt-injection/). So text of a tool's result is never stored, and text that is
not the user's is stored for some days only. Text that clients insert into a user's message by themselves (in tags, code
blocks and quotes) counts as a tool's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec
from msgspec import structs

from proxy.core.conversation import ItemText
from proxy.core.decisions import CountedView
from proxy.core.lazy_pattern import UNSPACED, lazy_pattern
from proxy.features.memories.block import END

Speaker = Literal["user", "tool", "model"]

USER_SHARE: Final = 0.6
"""Share of a text's word pairs that must occur in one message of the user for the text to be the user's."""

TOOL_SHARE: Final = 0.4
"""Share that must occur in one result for the text to be a tool's: lower, because a wrong guess is worse here."""

LONGEST_MESSAGE: Final = 4_000
"""Most characters of a message that a person writes; a longer one is pasted, or a client's own summary."""

# Text that clients insert and people do not write: in tags, in blocks of code, in quotes.
_TAGGED: Final = lazy_pattern(r"<([a-zA-Z][\w-]*)(?:\s[^<>]{0,200})?>.*?(?:</\1>|\Z)", re.DOTALL)
_FENCED: Final = lazy_pattern(r"^ {0,3}(```|~~~).*?(?:^ {0,3}\1|\Z)", re.DOTALL | re.MULTILINE)
_QUOTED: Final = lazy_pattern(r"^ {0,3}>.*$", re.MULTILINE)
_WORD: Final = lazy_pattern(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
"""A word, or a character of a script without spaces."""

# A URL, an e-mail or an IP address: a place to which a planted order would send data.
_ADDRESS: Final = lazy_pattern(
    r"https?://[^\s\"'<>)\]]+|[\w.+-]+@[\w-]+\.[\w.-]+|\b\d{1,3}(?:\.\d{1,3}){3}\b|\bwww\.[^\s\"'<>)]+"
)


class Spoken(msgspec.Struct, frozen=True):
    """The texts of a conversation: the user's own words, and those of its tools and clients."""

    user: tuple[str, ...]
    tools: tuple[str, ...]


def spoken_in(entries: Iterable[tuple[str, ItemText]]) -> Spoken:
    """Return the texts of a conversation by their authors; *entries* are the roles of items, each with their texts."""
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
    """Return the texts of the whole conversation of *view*, folded items included, without our own block."""
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
    """Return the part of a user's message *text* that a person wrote; empty if it is longer than people write."""
    words = _QUOTED.sub("", _FENCED.sub("", _TAGGED.sub("", text))).strip()
    if len(words) > LONGEST_MESSAGE:
        return ""
    return words


def speaker_of(text: str, spoken: Spoken, *, is_strict: bool = False) -> Speaker:
    """Return the author of *text*. A text with an address that the user did not name is a tool's.

    If *is_strict* a text of both a tool and the user is the tool's.
    """
    if _share(text, spoken.user) >= USER_SHARE and not (is_strict and _share(text, spoken.tools) >= TOOL_SHARE):
        return "user"
    if any(not any(address in user_text for user_text in spoken.user) for address in _ADDRESS.findall(text)):
        return "tool"
    if _share(text, spoken.tools) >= TOOL_SHARE:
        return "tool"
    return "model"


def _share(text: str, sources: Sequence[str]) -> float:
    """Return the largest share of the word pairs of *text* that occur in one of *sources*."""
    pairs = _pairs(text)
    if not pairs:
        return 0.0
    words = {word for pair in pairs for word in pair}
    return max((_pair_share(pairs, words, source.casefold()) for source in sources), default=0.0)


def _pair_share(pairs: set[tuple[str, str]], words: set[str], source: str) -> float:
    """Return the share of *pairs*, which consist of *words*, that occur in *source* (case-folded).

    A source without most of the words is not split into pairs: searching for words takes a hundredth of the time.
    """
    if sum(word in source for word in words) < TOOL_SHARE * len(words):
        return 0.0
    return len(pairs & _pairs(source)) / len(pairs)


def _pairs(text: str) -> set[tuple[str, str]]:
    """Return the pairs of neighbouring words in *text*; the word itself if there is only one."""
    words = _WORD.findall(text.casefold())
    if len(words) == 1:
        return {(words[0], "")}
    return set(pairwise(words))

"""Finds in the words of an error who has what is too big: "order history", "this worker's limit", "limit of the job".

An unknown word that has a subject or a limit makes it something else's (decision 35).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

BREAK = ""
"""Stands for punctuation between two words: the first does not qualify the second."""

_WHOLE = ("prompt", "conversation", "dialog")
"""Beginnings of words that mean something sent to a model, whatever word is before them."""

_BEFORE_VERBS = frozenset({"to", "cannot", "can't", "could", "not", "will", "would", "should", "must", "please", "and"})

_DETERMINERS = frozenset(
    {
        "the", "this", "that", "a", "an", "your", "its", "our", "their", "each", "one", "el", "la", "los",
        "las", "un", "una", "le", "les", "une", "der", "die", "das", "den", "dem", "ein", "eine", "einen",
        "einem", "il", "lo", "gli", "os", "as", "um", "uma", "het", "de", "een",
    }
)  # fmt: skip
"""Words before a common noun: the name of a model or of its vendor has none."""

_BELONGING = frozenset({"of", "for", "para", "pour", "für", "per", "voor"})
"""Prepositions between what is had and who has it, or between what is too long and for what."""

_HEADS = ("model", "llm", "engine", "server", "servidor", "serveur", "endpoint", "deployment")
"""Beginnings of nouns that serve a prompt, whatever word is before them ("the limit of the smaller model")."""

_SERVING = frozenset(
    {
        "accept", "add", "answer", "buffer", "call", "complete", "continue", "decode", "execute", "fetch",
        "finish", "forward", "generate", "get", "handle", "make", "obtain", "perform", "predict", "prefill",
        "process", "produce", "read", "receive", "respond", "run", "satisfy", "send", "serve", "stream",
        "submit",
    }
)  # fmt: skip
"""Verbs of what a server does with a prompt."""

_HANGUL = re.compile("[가-힣]{2,}")
_PARTICLES = frozenset("의이가을를에서도과와로게어아고며면는")
"""Endings of Korean words that are no nouns before another one."""

_ADJECTIVAL = frozenset({4, 8})
"""The final consonants ㄴ and ㄹ, in the order of Unicode: so end adjectives and verbs before a noun."""

_FINALS = 28
"""Final consonants of a Korean syllable, none included."""

_POSSESSIVE = ("'s", "’s")

_FAILING = frozenset({("failed", "to"), ("unable", "to"), ("could", "not"), ("failure", "to")})
"""Words before a verb that names what was not done."""

IsKnown = Callable[[Sequence[str], int], bool]
"""True if the lexicon has the phrase of *words* at an index."""


def qualifies(words: Sequence[str], at: int, is_known: IsKnown) -> bool:
    """True if the unknown word at the index *at* of *words* qualifies the next one, as in "order history"."""
    word, following = words[at], _word(words, at + 1)
    if following == BREAK:
        return False
    if _is_korean_noun(word):
        return True
    if word.endswith(_POSSESSIVE):
        owner = word[:-2]
        return _word(words, at - 1) in _DETERMINERS and _is_noun(owner) and not is_known([owner], 0)
    if following.startswith(_WHOLE):
        return False
    # Behind these words stands a verb.
    return _is_noun(word) and _BEFORE_VERBS.isdisjoint(words[max(at - 1, 0) : at + 1])


def has_owner_behind(words: Sequence[str], end: int, is_known: IsKnown) -> bool:
    """True if what ends before the index *end* of *words* is an unknown thing's, as in "limit of the job"."""
    if _word(words, end) not in _BELONGING or _word(words, end + 1) not in _DETERMINERS:
        return False
    owner = end + 2
    if is_known(words, owner) or not _is_noun(_word(words, owner)):
        return False
    return not any(_word(words, at).startswith(_HEADS) for at in (owner, owner + 1))


def is_in_another_thing(words: Sequence[str], end: int, is_known: IsKnown) -> bool:
    """True if what ends before the index *end* of *words* is in an unknown thing, as in "tokens in the batch"."""
    if _word(words, end) != "in":
        return False
    inside = end + 1 + (_word(words, end + 1) in _DETERMINERS)
    thing = _word(words, inside)
    return _is_noun(thing) and not thing.endswith("ing") and not is_known(words, inside)


def is_failed_operation(words: Sequence[str], at: int) -> bool:
    """True if the unknown word at the index *at* of *words* is what could not be done, and no work of a model's."""
    before = (_word(words, at - 2), _word(words, at - 1))
    return before in _FAILING and words[at].isalpha() and words[at] not in _SERVING


def _is_noun(word: str) -> bool:
    """True if *word* can be a noun. A participle says what was done with it ("the compiled input")."""
    return len(word) > 1 and word.isascii() and word.isalpha() and not word.endswith("ed")


def _is_korean_noun(word: str) -> bool:
    """True if a Korean *word* can be the first one of a compound noun."""
    if not _HANGUL.fullmatch(word) or word[-1] in _PARTICLES:
        return False
    return (ord(word[-1]) - ord("가")) % _FINALS not in _ADJECTIVAL


def _word(words: Sequence[str], at: int) -> str:
    if 0 <= at < len(words):
        return words[at]
    return BREAK

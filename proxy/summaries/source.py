"""The source of a summary: whether it has a name or figure, and whose sentence a line repeats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from proxy.core.conversation import ItemText
from proxy.core.lazy_pattern import lazy_pattern

SPEAKERS = ("user", "tool", "assistant")
"""Authors that a line may have, in order of preference; ``user`` is also the system."""

OVERLAP = 0.7
"""Share of a line's word pairs that a sentence of a speaker must hold to be its source."""

INDEXED = 2**20
"""Characters of each speaker's newest texts that are indexed, at about 50 bytes of memory each.

An order from before them is dropped.
"""

_WINDOW = 65_536
"""Characters of a text that are split into sentences in one call."""

LONGEST_LINE = 4_000
"""Characters of a line or of a sentence that are compared."""

# Chinese, Japanese and their punctuation, and Korean: it has spaces, but its particles follow a name without one. So
# the range differs from ``UNSPACED``, by which words are counted.
WIDE_RANGE = r"\u2e80-\u9fff\uac00-\ud7af"
WORD = lazy_pattern(r"[^\W_]+(?:_[^\W_]+)*|_+\w+", re.UNICODE)
WIDE = lazy_pattern(rf"[{WIDE_RANGE}]")
_SENTENCE = lazy_pattern(r"(?<=[.!?;:])\s+|(?<=[。！？；])|\n+")
_ASCII_SENTENCE = lazy_pattern(r"\s(?<=[.!?;:]\s)\s*|\n+")
"""Between two sentences; the second pattern is the same for ASCII text, in half the time."""

# Words that turn a sentence into its opposite, in the languages of ``orders``.
_NEGATION = lazy_pattern(
    r"\b(?:not|never|no|dont|don|without|avoid|cannot|cant|nor|neither|none|stop|except|unless|nicht|nie|niemals|kein\w*|ohne"
    r"|jamais|ne|pas|sans|aucun\w*|nunca|jamás|sin|não|sem|non|senza|mai|niet|geen|nooit|zonder|не|нет|ни|никогда|без|nigdy"
    r"|bez|لا|لن|بدون|नहीं|मत)\b|[不别別勿禁않안마]|な い|ま せ ん"
)


class Source:
    """The items that a summary is about, of *tokens* in all. Built once for all drafts.

    The sentences of a speaker are indexed when a line is first compared with them: few drafts have lines of tools.
    """

    def __init__(self, entries: Sequence[ItemText], tokens: int) -> None:
        self.tokens = tokens
        self._room = dict.fromkeys(SPEAKERS, INDEXED)
        self._spoken: dict[str, list[str]] = {speaker: [] for speaker in SPEAKERS}
        self._sentences: dict[str, _Sentences] = {}
        for entry in reversed(entries):
            speaker = entry.role
            if speaker == "system":
                speaker = "user"
            self._add(speaker, entry.text)
            if entry.user_text:
                self._add("user", entry.user_text)
            for _, arguments in entry.calls:
                self._add("assistant", arguments)
        self._text = "\n".join(text for entry in entries for text in _texts(entry))
        self._lowered = self._text.lower()

    def holds(self, token: str) -> bool:
        """True if *token* occurs in the source as a whole word or figure."""
        return _occurs(token, self._text) or _occurs(token.lower(), self._lowered)

    def mentions(self, name: str) -> bool:
        """True if the source has *name*, or in any case a word that begins with it or with its singular."""
        if name in self._text:
            return True
        stem = name.lower().removesuffix("s")
        at = self._lowered.find(stem)
        while at >= 0:
            if not self._lowered[at - 1 : at].isalnum():
                return True
            at = self._lowered.find(stem, at + 1)
        return False

    def speaker(self, line: str) -> str:
        """Return the author of a sentence like *line*: ``user`` (or system), ``tool``, ``assistant``, or empty."""
        words = words_of(line)
        return next((speaker for speaker in SPEAKERS if self._is_by(speaker, words)), "")

    def _add(self, speaker: str, text: str) -> None:
        """Add *text*, as much of it as there is room for this speaker."""
        text = text[: self._room[speaker]]
        self._room[speaker] -= len(text)
        self._spoken[speaker].append(text)

    def _is_by(self, speaker: str, words: list[str]) -> bool:
        """True if *speaker* has a sentence like *words*; if it is the user's, both or none must be negated."""
        sentences = self._sentences.get(speaker)
        if sentences is None:
            sentences = self._sentences[speaker] = _Sentences(self._spoken.pop(speaker))
        alike = sentences.like(words)
        if speaker != "user":
            return bool(alike)
        negated = _is_negated(words)
        return any(_is_negated(words_of(sentence)) == negated for sentence in alike)


class _Sentences:
    """The sentences of some texts, indexed by their pairs of words."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._sentences: list[str] = []
        self._by_pair: dict[str, list[int]] = {}
        for text in texts:
            for start in range(0, len(text), _WINDOW):
                self._add(text[start : start + _WINDOW])

    def like(self, words: list[str]) -> list[str]:
        """Return up to 20 sentences that hold most pairs of *words*."""
        pairs = _pairs(words)
        shared: Counter[int] = Counter()
        for pair in pairs:
            shared.update(self._by_pair.get(pair, ()))
        enough = OVERLAP * len(pairs)
        return [self._sentences[at] for at, count in shared.most_common(20) if count >= enough]

    def _add(self, text: str) -> None:
        """Add the sentences of *text*."""
        boundary = _SENTENCE
        if text.isascii():
            boundary = _ASCII_SENTENCE
        for piece in boundary.split(text):
            sentence = piece[:LONGEST_LINE]
            pairs = _pairs(words_of(sentence))
            for pair in pairs:
                self._by_pair.setdefault(pair, []).append(len(self._sentences))
            if pairs:
                self._sentences.append(sentence)


def _pairs(words: list[str]) -> set[str]:
    """Return the pairs of neighbouring *words*; a single word itself."""
    return {f"{first} {second}" for first, second in pairwise(words)} or set(words)


def _is_negated(words: list[str]) -> bool:
    """True if one of *words* negates."""
    return _NEGATION.search(" ".join(words)) is not None


def _texts(entry: ItemText) -> Iterator[str]:
    """Yield the texts of an item and of its calls; arguments as they are, and without JSON's escapes."""
    yield entry.text
    for name, arguments in entry.calls:
        yield name
        yield arguments
        if "\\" in arguments:
            yield arguments.replace("\\\\", "\\").replace('\\"', '"').replace("\\/", "/")


def _occurs(token: str, text: str) -> bool:
    """True if *token* occurs in *text* as a whole, not only inside a longer word or figure."""
    at = text.find(token)
    while at >= 0:
        end = at + len(token)
        before, after = text[at - 1 : at], text[end : end + 1]
        if not (_joins(before) and _joins(token[0])) and not (_joins(after) and _joins(token[-1])):
            return True
        at = text.find(token, at + 1)
    return False


def _joins(char: str) -> bool:
    """True if *char* would continue a word or a figure."""
    return bool(char) and (char.isalnum() or char == "_") and not WIDE.match(char)


def words_of(text: str) -> list[str]:
    """Return the words of *text* in lower case; each character of a script without blanks counts as one."""
    folded = text.replace("'", "").replace("’", "").lower()
    words: list[str] = WORD.findall(folded)
    if folded.isascii() or not WIDE.search(folded):
        return words
    separate: list[str] = []
    for word in words:
        if WIDE.search(word):
            separate += word
        else:
            separate.append(word)
    return separate

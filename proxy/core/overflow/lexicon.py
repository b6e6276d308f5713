"""Reads error texts as rows of notions.

A *notion* is the common meaning of words in several languages: "prompt", "input" and "entrada" are the notion
``input``. A text is converted to a row of notions, one letter each.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.overflow.owners import (
    BREAK,
    has_owner_behind,
    is_failed_operation,
    is_in_another_thing,
    qualifies,
)

NOTIONS: dict[str, str] = {
    "input": "I", "request": "J", "tokens": "K", "context": "C", "window": "W", "over": "O", "excess": "E",
    "many": "Y", "under": "U", "most": "M", "output": "X", "bytes": "B", "rate": "R", "media": "F", "batch": "A",
    "time": "D", "claim": "Q", "shorten": "Z", "length": "L", "tools": "G", "invalid": "V", "by": "b", "figure": "N",
    "field": "T", "elsewhere": "H", "nothing": "_", "load": "P", "unit": "S", "least": "l", "count": "n",
    "below_zero": "z", "talk": "t", "store": "c", "plain": "_", "cap": "w", "answer": "a", "foreign": "f",
    "body": "p", "setting": "s", "per": "v", "operation": "o",
}  # fmt: skip
"""The letter of each notion. ``count`` is a figure of something else than tokens, ``below_zero`` a negative one.
``foreign`` is an unknown word that qualifies the next one: "order history" is not the history of a conversation.
``operation`` is an unknown verb of what could not be done.

Also ``.``: end of a sentence.
"""

LONGEST_TEXT = 6_000
"""Characters of a text that are read: an error states its reason at the beginning."""

_LONGEST_RUN = 12
"""Characters of the longest word in a script that is written without spaces."""

_MOST_FILLER = 9
"""Words without a notion in a row that get a letter each; further ones are dropped, since no pattern spans more."""

_FILLER = frozenset(NOTIONS[notion] for notion in ("plain", "foreign", "answer", "setting", "per", "operation"))

_UNSPACED = "\u0900-\u097f\u0e00-\u0e7f\u2e80-\u2fff\u3040-\u9fff\uf900-\ufaff"
"""Scripts that are read by their characters: Thai and Chinese have no spaces, and Hindi's vowels are no letters."""
_RUN = re.compile(rf"[{_UNSPACED}]+\*?")
_TOKEN = lazy_pattern(
    r"(?P<below>(?<![\d)\]] )(?<=[\s:=(])-\d{2,})"
    r"|(?P<number>(?<![A-Za-z0-9_.])(?:[1-9]\d{0,2}(?:[,.' \u202f\u00a0]\d{3})+(?![\d])|\d+)"
    r"(?P<rest>\.\d+|[km](?![a-z])|))"
    rf"|(?P<run>[{_UNSPACED}]+)"
    rf"|(?P<word>[^\W\d_{_UNSPACED}](?:[^\W{_UNSPACED}]|['’/.-](?=[^\W_{_UNSPACED}]))*)"
    r"|(?P<of>(?:(?<=\d)|(?<=\d token)|(?<=\d tokens))(?: ?/ ?| (?:of|de|von|van|из|su) )(?=\d))"
    r"|(?P<colon>(?<=\d):(?!\S))|(?P<arrow>[=-]>|<\d{3}>)"
    r"|(?P<over>>=?|≥)|(?P<under><=?|≤)|(?P<range>\[\s*[01]\s*,)"
    r"|(?P<end>\](?=\s)|\.(?!\w)|(?<=\d)\.(?=[A-Za-z])|[!?;|\n。；！？])|(?P<sign>[+,、，-])"
)
_ID = re.compile(r"\b(?:request|trace|correlation|session|job)[ _-]?id\b[\"']?\W{0,3}[\w.-]+", re.IGNORECASE)
"""A name of one request, which may consist of digits."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])(?!(?<=[0-9])[KM](?![A-Za-z]))")
_PARTS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_SIGNS = {"+": "+", ",": ",", "、": ",", "，": ",", "-": "-"}
_PUNCTUATION = {
    "below": "z",
    "of": "/",
    "over": ">",
    "under": "U",
    "range": "[",
    "end": ".",
    "arrow": "_",
    "colon": ",",
}
_COUNTED = (" messages", " turns", " images", " items", " contents", " parts", " entries", " calls", " examples")
"""Words behind a number that does not count tokens."""

_MEASURES = "字件条條人名張张枚回次轮輪页頁行株秒分円元건명회장€$£¥₩₽"
"""Characters, measure words of Chinese, Japanese and Korean, and money, right behind a number that tokens are not
counted with."""

_AFTER_SUBJECT = frozenset(
    NOTIONS[notion] for notion in ("over", "excess", "under", "length", "cap", "bytes", "request")
)
"""Notions before which the unknown beginning of a text without spaces is what is too big (备注超过最大长度), or has
it (文章内容过长)."""

_OWNED = frozenset(
    NOTIONS[notion]
    for notion in ("input", "request", "tokens", "context", "window", "most", "cap", "body", "length", "excess")
)
"""Notions that may be something else's: "limit of the job" is the job's, and "too large for this device" no window."""

_NOUN = re.compile(r"[\u30a0-\u30ff\u3400-\u9fff]{2}")
"""Two Chinese characters or Katakana in a row; fewer, and Hiragana, are particles."""

_OF = ("的", "の")
"""Particles behind what describes or has the next word."""

_JOINING = frozenset({"and", "but", "while", "whereas", "и", "но", "et", "und", "y", "e"})


@dataclass(frozen=True, slots=True)
class Row:
    """A text as a row of notions, one letter each. ``figures`` are the numbers by their position in the row."""

    notions: str
    figures: Mapping[int, int]

    def mentions(self, *notions: str) -> bool:
        """True if the text mentions any of *notions*."""
        return mentions(self.notions, *notions)


def mentions(row: str, *notions: str) -> bool:
    """True if a row, or a part of one, holds any of *notions*."""
    return any(NOTIONS[notion] in row for notion in notions)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A word or phrase of the lexicon, and the letters of its notions."""

    words: tuple[str, ...]
    letters: str

    def matches(self, words: Sequence[str], at: int) -> bool:
        """True if the phrase is in *words* at the index *at*."""
        here = words[at : at + len(self.words)]
        return len(here) == len(self.words) and all(map(_is, here, self.words))


def _is(word: str, term: str) -> bool:
    """True if *word* is *term*, or begins with it if *term* ends in a star."""
    if term.endswith("*"):
        return word.startswith(term[:-1])
    return word == term


class Lexicon:
    """Reads texts as rows of notions: a dictionary from words of several languages to their notions."""

    def __init__(self, terms: Iterable[tuple[str, Sequence[str]]], noise: Iterable[str] = ()) -> None:
        """*terms* are words or phrases with their notions; *noise* is removed from texts.

        Raises ``KeyError`` for an unknown notion.
        """
        self._noise = tuple(noise)
        self._runs: dict[str, str] = {}
        self._entries: dict[str, list[_Entry]] = {}
        for phrase, notions in terms:
            letters = "".join(NOTIONS[notion] for notion in notions)
            phrase = _folded(phrase)
            if _is_run(phrase):
                self._runs[phrase.rstrip("*")] = letters
                continue
            words = tuple(phrase.split())
            self._entries.setdefault(words[0][:2], []).append(_Entry(words, letters))
        # The longest phrase first, since the first match is used.
        for entries in self._entries.values():
            entries.sort(key=lambda entry: (len(entry.words), sum(map(len, entry.words))), reverse=True)

    def read(self, text: str) -> Row:
        """Return *text* as a row of notions; of a very long one only the beginning."""
        text = text[:LONGEST_TEXT]
        for noise in self._noise:
            text = text.replace(noise, "")
        text = _ID.sub(" request id ", text)
        writer = _RowWriter()
        words: list[str] = []
        end = 0
        for token in _TOKEN.finditer(_folded(_CAMEL.sub("_", text))):
            if token.lastgroup == "word":
                if words and not token.string[end : token.start()].isspace():
                    words.append(BREAK)
                words.extend(self._split(token.group()))
                end = token.end()
                continue
            writer.add(*self._letters_of(words))
            words.clear()
            if token.lastgroup in ("number", "rest"):
                writer.add_figure(_number(token))
            elif token.lastgroup == "run":
                writer.add(*self._letters_of_run(token.group()))
            else:
                writer.add(_letter(token.lastgroup, token.group()))
        writer.add(*self._letters_of(words))
        return writer.row()

    def _split(self, word: str) -> list[str]:
        """Return the parts of a compound *word*; the word itself if the lexicon has it or it has only one part."""
        if word.isalpha() or self._has(word):
            return [word]
        if self._has(setting := word.replace("-", "_")):
            return [setting]
        member = word.rpartition(".")[2]
        if member != word and self._has(member):
            return [word[: -len(member) - 1], member]
        if member.isidentifier():
            word = member  # of ``extra_body.top_k`` only what it names counts
        parts = _PARTS.findall(word)
        if len(parts) < 2:
            return [word]
        return parts

    def _has(self, word: str) -> bool:
        return any(entry.words == (word,) for entry in self._entries.get(word[:2], ()))

    def _entry_at(self, words: Sequence[str], at: int) -> _Entry | None:
        return next((entry for entry in self._entries.get(words[at][:2], ()) if entry.matches(words, at)), None)

    def _letters_of(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the letters of *words*, at each position those of the longest phrase."""
        at = 0
        while at < len(words):
            entry = self._entry_at(words, at)
            if entry is not None:
                at += len(entry.words)
                if self._is_owned(entry.letters[0], words, at):
                    yield NOTIONS["foreign"]
                yield entry.letters
                continue
            if words[at] in _JOINING:
                yield ","
            elif words[at] != BREAK:
                yield NOTIONS[self._notion_of_unknown(words, at)]
            at += 1

    def _is_owned(self, letter: str, words: Sequence[str], end: int) -> bool:
        """True if the words behind what *letter* stands for, from the index *end*, make it something else's."""
        if letter == NOTIONS["tokens"] and is_in_another_thing(words, end, self._knows):
            return True
        return letter in _OWNED and has_owner_behind(words, end, self._knows)

    def _notion_of_unknown(self, words: Sequence[str], at: int) -> str:
        """Return the notion of the unknown word at the index *at* of *words*."""
        if is_failed_operation(words, at):
            return "operation"
        if qualifies(words, at, self._knows):
            return "foreign"
        return "plain"

    def _knows(self, words: Sequence[str], at: int) -> bool:
        """True if a phrase begins at the index *at* of *words*."""
        return at < len(words) and self._entry_at(words, at) is not None

    def _letters_of_run(self, run: str) -> Iterator[str]:
        """Yield the letters of the words in *run*, a text without spaces.

        If its beginning is unknown and right before what is said of it, that is about something else.
        """
        words = [*self._words_of_run(run)]
        start = 0
        for at, end, letters in words:
            if letters != NOTIONS["plain"]:
                if _is_foreign(run[start:at], letters[0]):
                    yield NOTIONS["foreign"]
                break
            start = end
        yield from (letters for _, _, letters in words)

    def _words_of_run(self, run: str) -> Iterator[tuple[int, int, str]]:
        """Yield where the known words of *run* begin and end, and their letters; of several the longest counts."""
        at = 0
        while at < len(run):
            ends = range(min(at + _LONGEST_RUN, len(run)), at, -1)
            end = next((end for end in ends if run[at:end] in self._runs), 0)
            if end:
                yield at, end, self._runs[run[at:end]]
            at = end or at + 1


class _RowWriter:
    """Builds a row from letters and figures."""

    def __init__(self) -> None:
        self._notions: list[str] = []
        self._figures: dict[int, int] = {}
        self._size = self._filler = 0

    def add(self, *letters: str) -> None:
        """Add the letters of notions, of a long stretch of filler only the first and the last."""
        for group in letters:
            if group in _FILLER:
                self._filler += 1
            else:
                self._filler = 0
            if self._filler > _MOST_FILLER:
                self._notions[-1] = group
                continue
            self._notions.append(group)
            self._size += len(group)

    def add_figure(self, figure: int | None) -> None:
        """Add a figure; None is a number that does not count tokens."""
        if figure is None:
            self.add("n")
            return
        self._figures[self._size] = figure
        self.add("N")

    def row(self) -> Row:
        """Return the row. A figure before a unit of bytes, characters, pixels or seconds does not count tokens."""
        notions = re.sub("N(?=[IJf]?[BFS])", "n", "".join(self._notions))
        return Row(notions, {at: figure for at, figure in self._figures.items() if notions[at] == "N"})


def _folded(text: str) -> str:
    # The small letter of the Turkish İ is an i with a dot above it, which is a character of its own.
    return unicodedata.normalize("NFKC", text).lower().replace("i\u0307", "i")


def _is_run(phrase: str) -> bool:
    return _RUN.fullmatch(phrase) is not None


def _is_foreign(beginning: str, letter: str) -> bool:
    """True if the unknown *beginning* of a run makes what *letter* stands for something else's.

    It does not in "您发送的内容": what you sent may be a conversation.
    """
    if letter == NOTIONS["request"] and beginning.endswith(_OF):
        return False
    return letter in _AFTER_SUBJECT and _NOUN.search(beginning) is not None


def _letter(kind: str | None, sign: str) -> str:
    return _PUNCTUATION.get(kind or "") or _SIGNS[sign]


def _number(token: re.Match[str]) -> int | None:
    """Return the number; None for a fraction and for a part of a word, such as a model's name."""
    text, rest, after = token["number"], token["rest"], token.string[token.end() : token.end() + 1]
    is_fraction = rest.startswith(".") and rest.strip(".0") != ""
    if token.string.startswith(_COUNTED, token.end()):
        return None
    if after and after in _MEASURES:
        return None
    if is_fraction or after == "%" or (after.isalpha() and after.isascii()) or after == "_":
        return None
    # No count of tokens has more than 15 digits, and converting a text of thousands takes quadratic time.
    value = int(re.sub(r"\D", "", text[: len(text) - len(rest)])[:15])
    return value * {"k": 1_000, "m": 1_000_000}.get(rest, 1)

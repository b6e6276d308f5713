"""Ranks names by their worth for each token, and chooses the best that fit in a number of tokens.

Counting tokens is most of that work. So it is done only for names that can be among the best.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, nsmallest
from operator import truediv

Count = Callable[[str], int]

ROUGH, SMOOTH = 3.0, 2.0
"""Tokens added to the size of a name, so that the shortest do not always win: to a guessed size, to a counted one."""

MOST_MISSES = 20
"""Entries in all that may be too long for the room before no further one is tried."""

_STEP = 16_384
"""Names that are looked at in one call, because no other thread runs during it."""

_ASCII = [chr(code) for code in range(128) if chr(code) != "\n"]
_LETTERS = str.maketrans({char: "a" if char.isalpha() or char == "'" else " " for char in _ASCII})
_DIGITS = str.maketrans({char: "0" if char.isdecimal() else " " for char in _ASCII})
"""Turn every letter, or every digit, into one character, and all else into blanks.

An apostrophe counts as a letter: vocabularies join ``n't`` and the like with the word before.
"""

_PART = 8
"""Characters of the parts of a text by which it is known that a name is not in it."""

_INDEXED = 16_384
"""Characters of a known text whose parts are looked up; a longer text is searched."""


def best_by_length(worths: dict[str, float], most: int) -> dict[str, float]:
    """The *most* names of *worths* with the highest worth per token, their tokens guessed by their length."""
    if len(worths) <= most:
        return worths
    per_token = [worth / (len(name) / 4 + ROUGH) for name, worth in worths.items()]
    least = _nth_highest(per_token, most + 1)
    best = {name: worths[name] for name, worth in zip(worths, per_token, strict=True) if worth > least}
    ties = [name for name, worth in zip(worths, per_token, strict=True) if worth == least]
    best.update((name, worths[name]) for name in nsmallest(most - len(best), ties))
    return best


def _nth_highest(values: Sequence[float], number: int) -> float:
    """The value at this *number* from the highest. Few of thousands of values are different."""
    times = Counter(values)
    for value in sorted(times, reverse=True):
        number -= times[value]
        if number <= 0:
            return value
    raise ValueError("there are not so many values")


def ranked(worths: Mapping[str, float], sizes: Sizes) -> Iterator[str]:
    """The names of *worths* by their worth per token, the highest first.

    Tokens are counted only of names that can be next: of those whose fewest tokens make them worth more per token than
    the best one that was counted.
    """
    divisors = [size + SMOOTH for size in fewest_tokens(list(worths))]
    uncounted: dict[float, list[str]] = defaultdict(list)
    for name, value in zip(worths, map(truediv, worths.values(), divisors), strict=True):
        uncounted[value].append(name)
    counted: list[tuple[float, str]] = []
    for most in sorted(uncounted, reverse=True):  # names of few texts with few tokens each: few values are different
        while counted and -counted[0][0] > most:
            yield heappop(counted)[1]
        names = uncounted[most]
        for name, size in zip(names, sizes.of(names), strict=True):
            heappush(counted, (-worths[name] / (size + SMOOTH), name))
    yield from [name for _, name in sorted(counted)]


def fewest_tokens(names: Sequence[str]) -> list[int]:
    """The fewest tokens that each of *names* can take with the comma and the space behind it.

    A run of letters takes at least one, and each three digits take one: vocabularies join no letters with digits, and
    no four digits. See the patterns in
    https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
    """
    fewest: list[int] = []
    for start in range(0, len(names), _STEP):
        fewest += _fewest_tokens(names[start : start + _STEP])
    return fewest


def _fewest_tokens(names: Sequence[str]) -> list[int]:
    # All names as one text, a line each: to turn letters into others then costs nearly nothing.
    lines = " " + "\n ".join(names)
    if not lines.isascii() or lines.count("\n") >= len(names):
        lines = " " + "\n ".join([name * (name.isascii() and "\n" not in name) for name in names])
    letters = lines.translate(_LETTERS).split("\n")
    digits = lines.translate(_DIGITS).replace("000", "0 ").split("\n")
    return [2 + words.count(" a") + figures.count(" 0") for words, figures in zip(letters, digits, strict=True)]


class Sizes:
    """Counts the tokens of lines as parts of a list, each line once."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._sizes: dict[str, int] = {}

    def __call__(self, line: str) -> int:
        """The tokens of *line* with the comma and the space behind it."""
        size = self._sizes.get(line)
        if size is None:
            size = self._sizes[line] = self._count(f"{line}, ")
        return size

    def of(self, lines: Sequence[str]) -> list[int]:
        """The tokens of each of *lines*."""
        return [self(line) for line in lines]

    def fill(self, candidates: Iterable[str], tokens: int) -> list[str]:
        """The first of *candidates* that together take at most *tokens*. One that is too long is skipped."""
        chosen: list[str] = []
        misses = 0
        for candidate in candidates:
            size = self(candidate)
            if size <= tokens:
                chosen.append(candidate)
                tokens -= size
            else:
                misses += 1
            if tokens < 2 or misses > MOST_MISSES:
                break
        return chosen


class Shown:
    """Names that need no entry: those in a known text, and those shown before, also inside a longer one.

    A text is searched for a name only if it has the name's last characters: most names are in neither.
    """

    def __init__(self, known: str) -> None:
        self._known = known
        self._known_parts: set[str] | None = None
        if len(known) <= _INDEXED:
            self._known_parts = set(_parts(known))
        self._shown = ""
        self._new: list[str] = []
        self._parts: set[str] = set()

    def is_new(self, name: str) -> bool:
        """True if *name* is not shown yet. It counts as shown from now on."""
        end = name[-_PART:]
        may_be_in = len(name) < _PART
        if (may_be_in or self._known_parts is None or end in self._known_parts) and name in self._known:
            return False
        if (may_be_in or end in self._parts) and self._is_shown(name):
            return False
        self._new.append(name)
        self._parts.update(_parts(name))
        return True

    def _is_shown(self, name: str) -> bool:
        if self._new:
            self._shown = "\n".join([self._shown, *self._new])
            self._new = []
        return name in self._shown


def _parts(text: str) -> list[str]:
    """All parts of *text* that are as long as those by which it is searched."""
    return [text[at : at + _PART] for at in range(len(text) - _PART + 1)]
